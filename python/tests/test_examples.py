"""The examples run as they stand, on a few images drawn here."""

import gzip
import pathlib
import random

import pytest
from conftest import torchrun

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
IMAGES = {"train": 512, "t10k": 64}


@pytest.fixture(scope="module")
def images(folder):
    draw = random.Random(1)
    for kind, count in IMAGES.items():
        labels = [draw.randrange(10) for _ in range(count)]
        # Brighter by class, so that there is something to learn.
        pixels = b"".join(bytes(min(255, 20 * label + draw.randrange(40)) for _ in range(784)) for label in labels)
        (folder / f"{kind}-images-idx3-ubyte.gz").write_bytes(gzip.compress(bytes(16) + pixels))
        (folder / f"{kind}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(bytes(8) + bytes(labels)))
    return folder


#: How Gloo's threads may end a process of plain DDP at its exit (`_let_go_at_exit` in flexcomm/torch/_session.py).
TORCHS_OWN_END = "terminate called without an active exception"


def epochs(folder, name, again=0):
    done = torchrun(str(EXAMPLES / name), folder, ranks=2, EPOCHS="2", FASHION_MNIST=str(folder))
    if again and TORCHS_OWN_END in done.text:
        return epochs(folder, name, again - 1)
    assert done.code == 0, done.text
    return [line for line in done.text.splitlines() if line.startswith("epoch")]


def test_the_script_with_flexcomm_trains_as_the_one_without(images):
    plain, steered = epochs(images, "fashion_mnist_plain.py", again=3), epochs(images, "fashion_mnist.py")
    # Two ranks, without an agent: dense, to the bit.
    assert len(plain) == 2 and steered == plain
    assert len((EXAMPLES / "fashion_mnist.py").read_text().splitlines()) <= 60


@pytest.mark.parametrize("name", ["accelerate_run.py", "lightning_run.py"])
def test_other_front_ends(folder, name):
    done = torchrun(str(EXAMPLES / name), folder, ranks=2)
    assert done.code == 0, done.text
    assert "20 steps with topk(k=0.1)+ef(vanilla)/allgather" in done.text, done.text

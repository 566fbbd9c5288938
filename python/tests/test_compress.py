"""One tensor by itself: ``flexcomm.compress``, ``decompress``, ``Compressor``."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

import flexcomm
from flexcomm import _core


def gradient(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def every():
    # Without a memory that gathers, `variance` is refused: it would send next to nothing.
    memory = {"variance": "+ef(vanilla)"}
    return [f"{one.name}({a}){memory.get(one.name, '')}" for one in _core.compressors() for a in one.examples[:2]]


@pytest.mark.parametrize("spec", every())
def test_every_compressor_goes_through_bytes(spec):
    x = gradient(24, 10)
    message = flexcomm.compress(x, spec, seed=3)
    again = flexcomm.Message.from_bytes(bytes(message))
    assert (again.spec, again.shape, again.dtype, again.nbytes) == (message.spec, x.shape, "float32", message.nbytes)
    restored = flexcomm.decompress(message)
    assert restored.shape == x.shape and np.isfinite(restored).all()
    assert np.array_equal(restored, flexcomm.decompress(bytes(message)))
    assert repr(message) == f"Message({message.spec!r}, shape=(24, 10), dtype='float32', nbytes={message.nbytes})"


def test_topk_keeps_the_largest_and_says_how_much():
    x = gradient(1000)
    message = flexcomm.compress(x, "topk(0.05)")
    restored, kept = flexcomm.decompress(message), np.argsort(-np.abs(x))[:50]
    assert set(np.flatnonzero(restored)) == set(kept) and np.array_equal(restored[kept], x[kept])
    assert message.gain == pytest.approx((x[kept] ** 2).sum() / (x**2).sum(), rel=1e-5)
    assert message.nbytes < 50 * 8 + 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_torch_tensors_come_back_as_they_were(dtype):
    x = torch.from_numpy(gradient(6, 4, 5)).to(dtype).transpose(0, 2)
    restored = flexcomm.decompress(flexcomm.compress(x, "topk(k=120)"))
    assert restored.dtype == dtype and torch.equal(restored, x)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_arrays_come_back_as_they_were(dtype):
    x = gradient(7, 3).astype(dtype)[::-1]
    restored = flexcomm.decompress(flexcomm.compress(x, "topk(k=21)"))
    assert restored.dtype == dtype and np.array_equal(restored, x.astype(np.float32).astype(dtype))


def test_error_feedback_loses_nothing_and_a_warm_start_gets_nearer():
    compressor, came, went = flexcomm.Compressor("topk(0.1)+ef(vanilla)"), 0, 0
    assert compressor.residual is None
    for step in range(20):
        x = gradient(300, seed=step)
        came = came + x.astype(np.float64)
        went = went + compressor.decompress(compressor.compress(x)).astype(np.float64)
    assert np.allclose(came, went + compressor.residual, atol=1e-4)
    low_rank = np.outer(gradient(40), gradient(30, seed=1)) + np.outer(gradient(40, seed=2), gradient(30, seed=3))
    warm = flexcomm.Compressor("powersgd(1)")
    errors = [np.linalg.norm(low_rank - warm.decompress(warm.compress(low_rank))) for _ in range(6)]
    best = np.linalg.svd(low_rank, compute_uv=False)[1]
    assert errors[-1] == pytest.approx(best, rel=0.05) and errors[-1] <= errors[0]


def test_scalars_and_empty_tensors():
    assert flexcomm.decompress(flexcomm.compress(np.float32(2.5), "topk(k=1)")) == np.float32(2.5)
    assert flexcomm.decompress(flexcomm.compress(np.zeros((0, 3), np.float32), "qsgd(4)")).shape == (0, 3)


def test_bad_input_is_named():
    x = gradient(10)
    for run, kind, parts in [
        (lambda: flexcomm.compress(x, "topq(0.1)"), ValueError, ["topq", "did you mean topk?"]),
        (lambda: flexcomm.compress(x, "variance"), ValueError, ["without error feedback", "variance+ef(vanilla)"]),
        (lambda: flexcomm.compress(x, "topk(2.0)"), ValueError, ["k of topk", '"2.0"', "digits alone"]),
        (lambda: flexcomm.compress(x, 3), TypeError, ["spec is 3", "topk(0.01)"]),
        (lambda: flexcomm.compress(np.arange(3), "topk(0.1)"), ValueError, ["int64", "float32"]),
        (lambda: flexcomm.compress(torch.arange(3), "topk(0.1)"), ValueError, ["int64", "bfloat16"]),
        (lambda: flexcomm.compress("abc", "topk(0.1)"), ValueError, ["str", "float32"]),
        (lambda: flexcomm.compress(np.array([1, np.nan], np.float32), "topk(0.5)"), ValueError, ["finite"]),
        (lambda: flexcomm.compress(np.array([1e300, 1.0]), "topk(0.5)"), ValueError, ["finite"]),
        (lambda: flexcomm.compress(x, "topk(0.1)", seed=-1), ValueError, ["seed is -1"]),
        (lambda: flexcomm.Compressor("topk(0.1)").compress(x, learning_rate=0), ValueError, ["learning_rate is 0"]),
        (lambda: flexcomm.decompress(b"no message"), ValueError, ["no message of a tensor"]),
        (lambda: flexcomm.decompress(bytes(flexcomm.compress(x, "fp16"))[:-1]), ValueError, ["bytes of", "left"]),
        (lambda: flexcomm.decompress(x), TypeError, ["ndarray", "Message or its bytes"]),
    ]:
        with pytest.raises(kind) as refused:
            run()
        assert all(part in str(refused.value) for part in parts), refused.value
    compressor = flexcomm.Compressor("topk(0.1)+ef(vanilla)")
    compressor.compress(x)
    with pytest.raises(ValueError, match=r"shape \(11,\).*keeps state for \(10,\)"):
        compressor.compress(gradient(11))
    first = compressor.compress(x)
    assert compressor.decompress(first).shape == (10,)
    with pytest.raises(ValueError, match="this decompressor is of topk"):
        compressor.decompress(flexcomm.compress(x, "topk(0.2)"))


def test_a_refused_tensor_changes_nothing():
    compressor, twin = (flexcomm.Compressor("topk(0.2)+ef(vanilla)+nesterov(0.9)") for _ in range(2))
    for step in range(3):
        x = gradient(50, seed=step)
        with pytest.raises(ValueError):
            compressor.compress(np.full(50, np.inf if step else np.nan, np.float32))
        assert bytes(compressor.compress(x)) == bytes(twin.compress(x))
    assert np.array_equal(compressor.residual, twin.residual)


def test_numpy_alone_does_not_load_torch():
    code = "import sys, numpy, flexcomm; flexcomm.decompress(flexcomm.compress(numpy.ones(4, 'f4'), 'fp16')); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


def test_bytepss_map_names_a_compressor_too():
    x = gradient(1000)
    message = flexcomm.compress(x, {"byteps_compressor_type": "topk", "byteps_compressor_k": "0.05"})
    assert bytes(message) == bytes(flexcomm.compress(x, "topk(0.05)"))


def test_messages_can_be_pickled():
    message = flexcomm.compress(torch.from_numpy(gradient(100)), "topk(0.05)")
    again = pickle.loads(pickle.dumps(message))
    assert bytes(again) == bytes(message) and again.gain == message.gain
    assert torch.equal(flexcomm.decompress(again), flexcomm.decompress(message))

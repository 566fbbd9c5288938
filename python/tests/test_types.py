"""Type hints: mypy over the package, the stub of the Rust core beside the module itself, and what a user's checker sees."""

import pathlib
import subprocess
import sys

import pytest
import torch

HERE = pathlib.Path(__file__).parents[1]
# torch's own hints have changed: the package is checked against those of the torch that the tests are made with.
PINNED = next(line[7:] for line in (HERE / "requirements-test.txt").read_text().splitlines() if line.startswith("torch=="))


def release(version):
    return [int(number) for number in version.split("+")[0].split(".")[:2]]


@pytest.fixture(scope="module")
def mypy(tmp_path_factory):
    """Runs one of mypy's programs in a folder of its own, so that they find the package as it is installed."""
    folder = tmp_path_factory.mktemp("types")

    def run(program, *arguments):
        command = [sys.executable, "-P", "-m", program, *map(str, arguments)]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)

    run.folder = folder
    return run


@pytest.mark.skipif(release(torch.__version__) < release(PINNED), reason=f"torch {torch.__version__} has other hints")
def test_the_package_has_no_type_errors(mypy):
    done = mypy("mypy", "--config-file", HERE / "pyproject.toml", "--cache-dir", mypy.folder / "cache", HERE / "flexcomm")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_stub_of_the_core_says_what_the_module_is(mypy):
    done = mypy("mypy.stubtest", "flexcomm._core", "--mypy-config-file", HERE / "pyproject.toml")
    assert done.returncode == 0, done.stdout + done.stderr


USER = """
import flexcomm.torch

def train(session: flexcomm.torch.Session, loader: list[bytes]) -> None:
    reveal_type(len(session.batches(loader)))
    for batch in session.batches(loader):
        reveal_type(batch)
    session.costs.step
    session.report_los(1.0)
"""


def test_a_users_checker_sees_the_hints(mypy):
    script = mypy.folder / "user.py"
    script.write_text(USER)
    text = mypy("mypy", "--cache-dir", mypy.folder / "cache", script).stdout
    # A package without its marker would be `Any`, and without errors.
    for hint in ('type is "int"', 'type is "bytes"', '"None" of "Costs | None"', '"Session" has no attribute "report_los"'):
        assert hint in text.replace("builtins.", ""), text

"""Checkpoints that the package of the release before wrote; ../formats/README.md says how."""

import pathlib

import pytest
from conftest import folder, torchrun  # noqa: F401

SCRIPT = pathlib.Path(__file__).parent / "ranks" / "formats.py"


@pytest.fixture(scope="module")
def seen(folder):  # noqa: F811
    done = torchrun(SCRIPT, folder, ranks=2)
    assert done.code == 0, done.text
    return done.ranks()


def test_a_run_goes_on_from_a_checkpoint_of_the_release_before(seen):
    for rank in seen:
        assert len(rank) == 2 and any(found["text"] for found in rank.values()), rank
        for strategy, found in rank.items():
            assert found["held"] > 0 and found["kept"], (strategy, found)
            assert not any("anew" in line for line in found["lines"]), found["lines"]
            # As a run of that release went on, up to rounding; without the state it goes on otherwise.
            assert found["with"] < 1e-5 < 1e-3 < found["without"], (strategy, found)

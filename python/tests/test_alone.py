"""`flexcomm.torch.CommHook` on its own gives what `attach` gives."""

import pytest
from conftest import torchrun


@pytest.fixture(scope="module")
def seen(folder):
    done = torchrun("alone.py", folder, ranks=2)
    assert done.code == 0, done.text
    return done.ranks()


@pytest.mark.parametrize("name", ["alone", "wrapped", "optimizer"])
def test_it_attaches_by_itself(seen, name):
    for rank in seen:
        own = rank[name]
        assert own["equal"] and own["hash"] == rank["attached"]["hash"] and own["step"] == rank["attached"]["step"] == 20
        assert own["strategy"] == "topk(k=0.1)+ef(vanilla)/allgather" and own["residual"] == 6
        assert "first backward pass" in own["early"]


def test_forward_passes_are_watched_until_then_only(seen):
    for rank in seen:
        # "optimizer" makes a second hook, and the first is gone with its name.
        assert [rank[name]["watching"] for name in ("alone", "wrapped", "optimizer")] == [0, 0, 0]


def test_it_follows_decisions(seen):
    for rank in seen:
        assert rank["steered"] == {"equal": True, "version": 1, "strategy": "topk(k=0.1)+ef(vanilla)/allgather"}


def test_what_it_cannot_do_is_said(seen):
    for rank in seen:
        said = rank["refusals"]
        assert said["unknown"].startswith("TypeError") and "stratagem" in said["unknown"]
        assert said["register"].startswith("TypeError")
        assert "FlexcommError: failed to attach: this hook has not seen" in said["late"] and "register=False" in said["late"]
        assert "ValueError: failed to attach: rank 1: selection" in said["one rank"]
        assert "this hook is a copy" in said["copy"]

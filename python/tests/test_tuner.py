"""What the hook tells NCCL's tuner plugin, and when."""

import pytest
from conftest import torchrun

NONE, TREE, RING = -1, 0, 1


@pytest.fixture(scope="module")
def seen(folder):
    done = torchrun("tuner.py", folder)
    assert done.code == 0, done.text
    return done.ranks()


def test_allreduces_take_the_shape_that_was_agreed_on(seen):
    for rank in seen:
        out = rank["steered"]
        assert out["before"] == [NONE], "nothing is decided: the backend chooses"
        assert out["none/dense-tree"] == [TREE] and out["none/dense-ring"] == [RING]
        assert out["topk(k=0.1)+ef(vanilla)/allgather"] == [], "no allreduce at all"


def test_a_trials_candidate_takes_its_shape_and_what_follows_its_own(seen):
    for rank in seen:
        assert rank["steered"]["in the trial"] == [TREE, RING] and rank["steered"]["after"] == [RING]


def test_trees_are_offered_where_every_rank_has_the_plugin(seen):
    for rank in seen:
        assert "dense-tree" in rank["steered"]["offered"] and "dense-tree" not in rank["alone"]["offered"]
        assert rank["gloo"]


def test_a_rank_without_the_plugin_stops_all_from_using_it(seen):
    for rank in seen:
        # Nothing at all while native DDP runs in the wrapper.
        assert set(rank["alone"]["took"]) <= {NONE}
        assert any("ranks [2]" in line for line in rank["alone"]["lines"])

"""Parameters that some or all ranks leave out of a step, two ranks."""

import pytest
from conftest import torchrun

STRATEGIES = [
    "dense", "topk(k=0.1)+ef(vanilla)/allgather", "topk(k=0.1)+ef(vanilla)/art-ring:star", "topk(k=0.1)+ef(vanilla)/art-ring:var", "topk(k=0.1)+ef(vanilla)",
    "powersgd(rank=1)+ef(vanilla)",
]
HELD = [f"{use} {strategy}" for use in ("together", "apart", "never") for strategy in STRATEGIES]
VIEWS = [f"view {view} none {to_none}" for view in (False, True) for to_none in (False, True)]
DECIDED = [f"decided {use} {initial}" for use in ("together", "never") for initial in (*STRATEGIES[1:3], STRATEGIES[4])]
TRIED = [f"tried {use} {strategy}" for use in ("together", "never") for strategy in (STRATEGIES[1], "dense")]


@pytest.fixture(scope="module")
def seen(folder):
    done = torchrun("unused.py", folder, ranks=2)
    assert done.code == 0, done.text
    return done.ranks()


@pytest.mark.parametrize("name", [*HELD, *VIEWS, *DECIDED, *TRIED, "loaded never"])
def test_what_was_applied_and_the_residual_are_the_sum_of_all_gradients(seen, name):
    for rank in seen:
        assert rank[name]["equal"] and rank[name]["away"] < 1e-5, rank[name]


@pytest.mark.parametrize("name", DECIDED)
def test_no_residual_is_left_once_the_ranks_are_dense(seen, name):
    for rank in seen:
        assert rank[name]["holds"] == [] and rank[name]["strategy"] == "none/dense-ring"


@pytest.mark.parametrize("name", TRIED)
def test_dense_candidates_run_the_same_collectives_on_all_ranks(seen, name):
    for rank in seen:
        assert rank[name]["tried"] == 16 and rank[name]["steps"] == 60


def test_a_parameter_that_is_never_used_gets_no_gradient(seen):
    assert all(rank["left alone"] for rank in seen)

"""Uneven inputs with `ddp.join()`, three ranks of which the first runs out of batches."""

import pytest
from conftest import torchrun

NAMES = [
    "dense", "dense hooked", "topk(k=0.1)+ef(vanilla)/allgather", "topk(k=0.1)+ef(vanilla)/art-ring:var", "topk(k=0.1)+ef(vanilla)/art-ring:star", "qsgd(s=4,coding=gamma)",
    "powersgd(rank=1)+ef(vanilla)", "decided", "steered", "early",
]


@pytest.fixture(scope="module")
def seen(folder):
    done = torchrun("join.py", folder, ranks=3)
    assert done.code == 0, done.text
    return done.ranks()


@pytest.mark.parametrize("name", NAMES)
def test_ranks_that_have_run_out_stay_in_step(seen, name):
    first, second, third = (rank[name] for rank in seen)
    short = len(first["hashes"]) - 4
    assert short == {"early": 1, "decided": 5, "steered": 6}.get(name, 7) and len(second["hashes"]) == len(third["hashes"]) == 18
    # The same parameters on all that still train, at every step; and on all ranks after the join.
    assert second["hashes"] == third["hashes"]
    assert first["hashes"][:short] == second["hashes"][:short] and first["hashes"][-4:] == second["hashes"][-4:]
    assert len(set(second["hashes"])) == 18
    if name in ("decided", "steered"):
        assert [rank[name]["version"] for rank in seen] == [1, 1, 1]
        assert [rank[name]["hook"] for rank in seen] == [int(name == "decided")] * 3
    # DDP by itself: a rank's steps are its own.
    steps = [11, 18, 18] if name == "dense" else [18, 18, 18]
    assert [rank[name]["steps"] for rank in seen] == steps and all(rank[name]["together"] for rank in seen)
    assert [rank[name]["unused"] for rank in seen] == [[]] * 3


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith(("topk", "power", "decided"))])
def test_the_residual_is_not_lost(seen, name):
    assert all(rank[name]["residual"] > 0 for rank in seen)


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith(("topk", "qsgd", "power"))])
def test_a_nan_is_an_error_on_all_ranks_until_one_has_run_out_and_then_leaves_the_batch_out(seen, name):
    for number, rank in enumerate(seen):
        rank = rank[f"nan {name}"]
        # Batch 10 counts as zeros, on rank 0 too, which has none any more.
        assert rank == {
            "left out": [4], "partly": [True], "zeros": [] if number == 0 else [10], "steps": 16, "trained": [True] * 2,
            "warnings": 1, "unused": 0, "equal": True, "finite": True,
        }

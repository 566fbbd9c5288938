"""Methods and ways of using DDP, four ranks."""

import inspect

import pytest
from conftest import torchrun
from torch.nn.parallel import DistributedDataParallel

METHODS = [
    "dense", "fp16", "bf16", "topk(k=0.1)+ef(vanilla)/allgather", "topk(k=0.01)+ef(vanilla)/allgather", "lwtopk(k=0.1)+ef(vanilla)/allgather",
    "mstopk(k=0.1)+ef(vanilla)/allgather", "topk(k=0.1)+ef(vanilla)/art-ring:star", "topk(k=0.1)+ef(vanilla)/art-ring:var", "mstopk(k=0.1)+ef(vanilla)/art-ring:star",
]
#: Newer torch has buckets that it allocates when they are needed.
LAZY = [" lazy"] if "lazy_bucket_allocation" in inspect.signature(DistributedDataParallel).parameters else []
HOOKED = ["dense hooked" + way for way in ("", " view", *LAZY, " one bucket", " around")]
WAYS = ["auto", "view", *HOOKED, "one bucket", "static", "unused", "accumulate", "amp", "scaler"]


@pytest.fixture(scope="module")
def seen(folder):
    done = torchrun("training.py", folder)
    assert done.code == 0, done.text
    return done.ranks()


@pytest.mark.parametrize("name", METHODS + WAYS)
def test_ranks_stay_equal_and_learn(seen, name):
    for rank in seen:
        assert rank[name]["equal"], f"parameters differ between ranks under {name}"
        assert rank[name]["steps"] == 40
    # Over all ranks: one rank's first batch is a matter of luck.
    first, last = (sum(rank[name][key] for rank in seen) for key in ("first", "last"))
    # Each of the two branches of "unused" learns in every other step only; test_unused.py has its sums.
    assert last < (0.95 if name == "unused" else 0.8) * first, (first, last)


def test_dense_is_plain_ddp_bit_for_bit(seen):
    for name in ("dense", *HOOKED):
        plain = "plain one bucket" if "one bucket" in name else "plain"
        assert seen[0][name]["hash"] == seen[0][plain]["hash"], name


@pytest.mark.parametrize("name", HOOKED)
def test_dense_buckets_of_the_hook_go_the_shortest_way(seen, name):
    for rank in seen:
        # Every bucket of 40 steps: the first step has one, later ones two or more unless all fit into one.
        assert rank[name]["short"]["other"] == 0
        assert (rank[name]["short"]["short"] == 40) == ("one bucket" in name) and rank[name]["short"]["short"] >= 40


def test_ranks_may_take_the_hook_in_at_different_steps(seen):
    for rank in seen:
        late = rank["late hook"]
        assert late["hash"] == rank["plain"]["hash"] and late["steps"] == 40
        assert 0 < late["gain"] <= 1 and late["costs"] > 0


@pytest.mark.parametrize("name", METHODS[3:] + WAYS)
def test_compressing_leaves_a_residual_and_differs_from_dense(seen, name):
    if name.startswith("dense"):
        return
    parameters = 20 * 120 + 120 + 120 * 120 + 120 + 120 * 2 + 2
    expected = 2 * parameters if name == "unused" else parameters
    assert all(rank[name]["residual"] == expected for rank in seen)
    assert seen[0][name]["hash"] != seen[0]["plain"]["hash"]


def test_auto_goes_to_star_when_ranks_are_alike(seen):
    assert all(rank["auto"]["auto"] == seen[0]["auto"]["auto"] for rank in seen)
    assert seen[0]["auto"]["auto"] in ("star", "var")


def test_two_models_and_a_group(seen):
    for rank in seen:
        assert rank["two models"]["equal"]
    assert [seen[r].get("group") for r in range(4)] == [None, [True, True], None, [True, True]]

"""What is reported to the agent of DDP's buckets, two ranks."""

import pytest
from conftest import torchrun


@pytest.fixture(scope="module")
def seen(folder):
    done = torchrun("buckets.py", folder, ranks=2)
    assert done.code == 0, done.text
    return done.ranks()


@pytest.mark.parametrize("name", ["native", "hooked", "compressed", "static graph"])
def test_the_buckets_are_said_once_when_ddp_has_rebuilt_them(seen, name):
    for rank in (rank[name] for rank in seen):
        assert rank["hello"] == [None] and rank["reported"] == [rank["buckets"]], rank
        assert len(rank["buckets"]) > 2 and sum(rank["buckets"]) == rank["values"]
    assert seen[0][name]["buckets"] == seen[1][name]["buckets"]


def test_an_older_agent_is_told_by_the_next_hello(seen):
    for rank in (rank["older"] for rank in seen):
        assert rank["reported"] == [] and rank["hello"] == [None, rank["buckets"]], rank

"""Checkpoints, and their rule for another number of ranks."""

import pytest
from conftest import torchrun


@pytest.fixture(scope="module")
def seen(folder):
    done = torchrun("state.py", folder, ranks=2)
    assert done.code == 0, done.text
    return done.ranks()


@pytest.mark.parametrize("what", [
    "names", "same", "kept while buckets settle", "mean", "consolidated", "unchanged", "handed out", "dense",
])
def test_what_is_held_back_survives(seen, what):
    assert all(rank[what] for rank in seen)


def test_states_of_others_are_refused_with_the_remedy(seen):
    words = ["consolidate=True", "consolidate=True", "format", "nobody", "is not of this model", "finite"]
    for rank in seen:
        for text, word in zip(rank["refused"], words, strict=True):
            assert text is not None and word in text, (text, word)


def test_ddp_is_gone_below_only_where_the_values_of_its_buckets_are_known(seen):
    assert all(rank["fits"] == [True, True, False, False, False] for rank in seen)


def test_an_attached_model_can_be_copied_and_pickled(seen):
    assert all(rank["copies"] == [True] * 3 for rank in seen)


def test_a_model_can_be_attached_again(seen):
    assert all(rank["twice"] == [[4, 4], 1, True] for rank in seen)

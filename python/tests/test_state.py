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
def test_the_residual_survives(seen, what):
    assert all(rank[what] for rank in seen)


def test_states_of_others_are_refused_with_the_remedy(seen):
    words = [
        ["consolidate=True"], ["consolidate=True"], ["format 99"], ["nobody"],
        ["'0.bias' has a residual of 3 values", "120", "is not of this model"], ["'0.bias'", "infinite"],
    ]
    for rank in seen:
        for text, expected in zip(rank["refused"], words, strict=True):
            assert text is not None and all(word in text for word in expected), text


#: The value, or the name of what is missing, in what is said of each of the states of the script.
WRONG = [
    "it is None", "it is [{'format'", "it has no 'world'", "has '2' as 'format', expected a whole number", "has '2' as 'world'",
    "has None as 'rank'", "has None as 'held_back', expected a dict", "'0.bias' has the residual [0.0", "'0.bias' has the residual tensor([",
    "no parameter 5", "'text' is 5", "'text' has no 'strategy'", "has 5 as 'strategy', expected a text", "step -1",
    "has 5 as 'buckets', expected a list", "the bucket 5", "the bucket (['0.bias']", "no parameter 'nobody'",
]


@pytest.mark.parametrize("number, word", list(enumerate(WRONG)))
def test_what_is_no_state_is_refused_with_the_value_and_the_remedy(seen, number, word):
    for rank in seen:
        assert len(rank["wrong"]) == len(WRONG)
        text = rank["wrong"][number]
        assert text is not None and word in text and ("session.state_dict()" in text or "this very model" in text), text


def test_saving_and_loading_in_a_trial_neither_ends_nor_changes_the_run_and_is_said_once(seen):
    for rank in seen:
        with_trial, without = rank["in trials"]
        assert len(with_trial["tried"]) == with_trial["refused"] == 8 and with_trial["loaded"] == [False] * 8, with_trial
        assert [with_trial[what] for what in ("trained", "hash", "residual")] == [without[what] for what in ("trained", "hash", "residual")]
        saved, loaded = with_trial["said"]
        assert "state_dict()" in saved and "session.in_trial is False" in saved and "session.step" in saved, saved
        assert "load_state_dict()" in loaded and "session.in_trial is False" in loaded, loaded
        assert without["said"] == []


def test_a_state_of_a_trial_belongs_to_the_model_that_is_saved_with_it(seen):
    # Nothing of the gradients is lost, or sent twice.
    assert all(rank["in trials"][0]["whole"] == [True] * 8 for rank in seen)


def test_steps_are_counted_without_those_of_trials(seen):
    for rank in seen:
        found = rank["in trials"][0]
        first = found["trained"][0]
        assert found["trained"] == list(range(first, first + 30))
        assert len(set(found["tried"])) == 1


def test_a_rank_that_waits_for_the_mean_alone_says_so(seen):
    assert [len(rank["waits alone"]) for rank in seen] == [1, 0]
    assert "every rank" in seen[0]["waits alone"][0] and "0.3 s" in seen[0]["waits alone"][0]


def test_a_state_goes_to_a_model_whose_memory_has_another_order(seen):
    for rank in seen:
        assert len(rank["layouts"]) == 2 and all(all(found.values()) for found in rank["layouts"]), rank["layouts"]


def test_a_refused_state_leaves_the_model_without_the_hook(seen):
    assert all(rank["hooks after a refused state"] == 0 for rank in seen)


def test_the_group_is_wrapped_only_where_the_values_of_its_buckets_are_known(seen):
    assert all(rank["fits"] == [True, True, False, False, False] for rank in seen)


def test_an_attached_model_can_be_copied_and_pickled(seen):
    assert all(rank["copies"] == [True] * 3 for rank in seen)


def test_a_model_can_be_attached_again(seen):
    assert all(rank["twice"] == [[4, 4], 1, True] for rank in seen)

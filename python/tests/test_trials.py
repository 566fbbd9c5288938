"""Live trials are bit-identical, shadow trials come near them."""

import pytest
from conftest import torchrun


@pytest.fixture(scope="module")
def seen(folder):
    done = torchrun("trials.py", folder, ranks=2)
    assert done.code == 0, done.text
    return done.ranks()


@pytest.mark.parametrize("name", ["loop", "step"])
def test_200_steps_with_three_trials_are_200_steps_without(seen, name):
    for rank in seen:
        with_trials, without = rank[name]
        assert len(without["hashes"]) == len(with_trials["hashes"]) >= 200
        first = next((i for i, (a, b) in enumerate(zip(with_trials["hashes"], without["hashes"])) if a != b), None)
        assert first is None, f"the first step that differs: {first}"
        assert without["reports"] == [] and with_trials["equal"]
        assert [(number, counts) for number, counts, _ in with_trials["reports"]] == [(30, [4] * 5), (79, [4] * 2), (150, [4] * 2)]
        assert with_trials["sane"]
        # The loop's body saw the trials' 36 iterations, or none of them when they ran train_step.
        assert with_trials["in_trial"] == (36 if name == "loop" else 0)
    dense = seen[0][name][0]["reports"][0][2]
    assert dense[0] == 1.0 and dense[1] > dense[2]


def test_trials_that_begin_from_below_ddp_leave_no_trace(seen):
    # With a validation by one rank in the loop's body, which must take no trial away.
    for rank in seen:
        with_trials, without = rank["evaluated"]
        assert with_trials["hashes"] == without["hashes"] == seen[0]["evaluated"][1]["hashes"]
        assert [(number, counts) for number, counts, _ in with_trials["reports"]] == [(30, [4] * 5), (79, [4] * 2), (150, [4] * 2)]
        assert with_trials["in_trial"] == 36 and with_trials["equal"] and with_trials["sane"]
        # DDP has no hook as long as nothing but dense ran, and takes it in for the first trial.
        assert set(without["hooked"]) == {0} and set(with_trials["hooked"][:30]) == {0} and with_trials["hooked"][-1] == 1


def test_a_trial_goes_on_in_the_next_loop_when_its_loop_was_left(seen):
    for rank in seen:
        with_trials, without = rank["left"]
        assert with_trials["left"] and with_trials["hashes"] == without["hashes"] and with_trials["equal"]
        # All iterations ran: the third of the first trial ended outside of any loop.
        assert [(number, counts) for number, counts, _ in with_trials["reports"]] == [(30, [4] * 5), (79, [4] * 2), (150, [4] * 2)]


def test_shadow_gains_are_within_5_percent_of_live_gains(seen):
    for rank in seen:
        for live, shadow in zip(rank["gains"]["live"], rank["gains"]["shadow"], strict=True):
            assert shadow is not None and abs(shadow / live - 1) < 0.05, rank["gains"]

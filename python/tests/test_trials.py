"""Live trials are bit-identical, shadow trials come near them."""

import pytest
from conftest import torchrun


@pytest.fixture(scope="module")
def seen(folder):
    done = torchrun("trials.py", folder, ranks=3)
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


@pytest.mark.parametrize("name", ["pipeline", "pipeline step"])
def test_trials_of_pipelines_leave_no_trace(seen, name):
    for rank in seen:
        with_trials, without = rank[name]
        first = next((i for i, (a, b) in enumerate(zip(with_trials["hashes"], without["hashes"], strict=True)) if a != b), None)
        assert first is None, f"the first step that differs: {first}"
        assert [(number, counts) for number, counts, _ in with_trials["reports"]] == [(30, [4] * 5), (79, [4] * 2), (150, [4] * 2)]
        assert with_trials["equal"] and with_trials["sane"]
    # Halves lose next to nothing, and the second factor of PowerSGD keeps more than the first alone.
    gains = seen[0][name][0]["reports"][0][2]
    assert 0.999 < gains[1] <= 1.0 and gains[0] < gains[4], gains


def test_trials_that_begin_with_the_group_wrapper_leave_no_trace(seen):
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
        gains = rank["gains"]
        assert len(gains["candidates"]) == 9
        for name, live, shadow in zip(gains["candidates"], gains["live"], gains["shadow"], strict=True):
            assert shadow is not None and abs(shadow / live - 1) < 0.05, (name, live, shadow)


@pytest.fixture(scope="module")
def put_back(tmp_path_factory):
    done = torchrun("put_back.py", tmp_path_factory.mktemp("p"), ranks=2)
    assert done.code == 0, done.text
    return done.ranks()


def first_other(with_trials, without):
    assert len(with_trials["hashes"]) == len(without["hashes"])
    return next((i for i, (a, b) in enumerate(zip(with_trials["hashes"], without["hashes"])) if a != b), None)


@pytest.mark.parametrize("name", ["odd", "replacing", "zero", "pops", "writes"])
def test_what_is_unusual_is_put_back_too(put_back, name):
    """Buffers that are assigned anew, attributes, extra state, optimizers that replace or shard their state, batches that
    the loop changes."""
    for rank in put_back:
        with_trials, without = rank[name]
        assert first_other(with_trials, without) is None
        assert {(n, tuple(counts)) for n, counts, _ in with_trials["reports"]} == {(7, (4, 4, 4)), (33, (4, 4, 4))}


def test_a_loader_in_extra_is_not_put_back_and_an_average_is(put_back):
    for rank in put_back:
        for run in rank["odd"]:
            assert run["given"] == [list(range(20))] * 3


def test_a_scheduler_that_nobody_gave_is_put_back(put_back):
    for rank in put_back:
        with_trials, without = rank["forgotten"]
        assert first_other(with_trials, without) is None and len(with_trials["reports"]) == 2
        assert with_trials["rate"] == without["rate"] == pytest.approx(0.05 * 0.9**6)


def test_a_candidate_that_diverges_ends_its_trial_and_not_the_job(put_back):
    for rank in put_back:
        with_trials, without = rank["nan"]
        assert first_other(with_trials, without) is None
        assert [(n, why) for n, _, why in with_trials["reports"]] == [(n, "a candidate's loss was not a number") for n in (7, 33)]


def test_a_trial_at_the_end_of_the_data_runs_in_the_next_loop(put_back):
    for rank in put_back:
        with_trials, without = rank["end"]
        assert first_other(with_trials, without) is None
        assert with_trials["rate"] == without["rate"], "the scheduler's step between the loops is training's"
        assert [(n, counts) for n, counts, _ in with_trials["reports"]] == [(18, [4] * 3), (37, [4] * 3)]


@pytest.mark.parametrize("name", ["plain", "late", "later", "left", "atend"])
def test_an_ordinary_loop_loses_no_step_to_a_trial(put_back, name):
    for rank in put_back:
        with_trials, without = rank[name]
        # The candidates are what runs anyway: a step that ran under one is the same.
        assert first_other(with_trials, without) is None
        assert with_trials["steps"][-30:] == without["steps"][-30:] == list(range(11, 41))
        assert not any(with_trials["in_trial"]) and with_trials["equal"]
    refused = "rank 0: its training loop does not use Session.batches()"
    left = "the training loop was left for one that does not use Session.batches()"
    causes = {why for _, why in put_back[0][name][0]["reports"]}
    assert causes == ({left} if name in ("left", "atend") else {refused}), causes


def test_ranks_that_leave_a_trial_alone_end_it_for_all(put_back):
    for rank in put_back:
        with_trials, without = rank["apart"]
        assert with_trials["equal"] and not any(with_trials["in_trial"])


def test_what_a_trial_does_not_put_back_is_named(put_back):
    for rank in put_back:
        lines, _ = rank["strangers"]
        named = [line for line in lines if "do not put back" in line]
        assert any("optimizer RMSprop" in line and "scheduler ExponentialLR" in line for line in named), lines
        assert any("counter (Counter)" in line for line in named), lines
        assert not any("optimizer SGD" in line for line in named), lines
        drawn = [line for line in lines if "drawn other random numbers" in line]
        assert len(drawn) == 1 and "outside of them only" in drawn[0], lines

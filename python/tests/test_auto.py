"""`selection="auto"`: four ranks, alike for 80 steps, then one with twenty times the gradients, then alike again."""

import pytest
from conftest import torchrun

PART, LOUD, WORLD = 80, 2, 4
NAMES = ["star", "var", "trials"]


@pytest.fixture(scope="module")
def seen(folder):
    done = torchrun("auto.py", folder)
    assert done.code == 0, done.text
    return done.ranks()


@pytest.mark.parametrize("name", NAMES)
def test_the_mode_follows_the_skew_and_back_on_all_ranks_in_the_same_steps(seen, name):
    for rank in seen:
        assert rank[name]["same"], "parameters, mode or leaders differ between ranks"
    modes = seen[0][name]["modes"]
    switches = [step for step in range(1, len(modes)) if modes[step] != modes[step - 1]]
    assert modes[0] == "star" and len(switches) == 2, switches
    to_var, to_star = switches
    # The average forgets within twenty steps; the residual from before stays large for longer.
    assert PART < to_var < PART + 20 and 2 * PART < to_star <= 3 * PART - 5, switches


@pytest.mark.parametrize("name", NAMES)
def test_ranks_take_turns_while_alike_and_the_loudest_leads_while_not(seen, name):
    modes, leaders = seen[0][name]["modes"], seen[0][name]["leaders"]
    # Nothing is compressed in the first three; a mode holds from the step after the one that found it.
    turns = [(led[0], step) for step, led in enumerate(leaders) if step > 3 and modes[step - 1] == "star"]
    assert len(turns) > PART and all(leader == step % WORLD for leader, step in turns)
    loud = [led[0] for step, led in enumerate(leaders) if PART + 20 < step < 2 * PART]
    assert 0.6 < loud.count(LOUD) / len(loud) < 1.0
    # Nobody waits much longer than four rounds.
    assert set(loud) == set(range(WORLD)) and seen[0][name]["stale"] <= 4 * WORLD + WORLD


def test_the_log_tells_each_switch_once(seen):
    for rank in seen:
        assert [line.split(" from")[0].split()[-1] for line in rank["star"]["lines"]] == ["var", "star"]


@pytest.mark.parametrize("name", NAMES)
def test_each_step_is_reported_by_the_selection_that_led_it(seen, name):
    for rank in seen:
        modes, ran = rank[name]["modes"], [(step, strategy) for step, strategy in rank[name]["ran"] if step > 3]
        assert len(ran) > 2 * PART
        assert all(strategy == f"topk(k=0.1)+ef(vanilla)/art-ring:{modes[step - 1]}" for step, strategy in ran)
        assert {strategy.rsplit(":")[1] for _, strategy in ran} == {"star", "var"}


def test_a_trials_candidates_are_led_by_their_own_selections(seen):
    # The second trial runs while the loudest leads.
    by_var, gathered, by_star = (seen[0]["trials"]["tried"][start : start + 4] for start in (12, 16, 20))
    assert [led[0] for led in by_var] == [LOUD] * 4
    assert gathered == [[]] * 4
    assert {led[0] for led in by_star} == set(range(WORLD))


def test_trials_leave_no_trace_in_it(seen):
    for rank in seen:
        assert len(rank["trials"]["tried"]) == 3 * 3 * 4 and not rank["star"]["tried"]
        for key in ("hashes", "modes", "leaders", "lines", "stale"):
            assert rank["trials"][key] == rank["star"][key], key

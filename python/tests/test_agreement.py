"""All ranks change at the same step, whatever happens to agents and decisions."""

import pytest
from conftest import torchrun

ALL = ["late", "dead 2", "dead 0", "restarted", "silent", "wrapped", "wrapped large", "foreign", "shadowed", "halves", "sum text", "gather text"]


@pytest.fixture(scope="module")
def seen(folder):
    done = torchrun("agreement.py", folder)
    assert done.code == 0, done.text
    return done.ranks()


@pytest.mark.parametrize("name", ALL)
def test_parameters_version_and_strategy_are_equal_at_every_step(seen, name):
    for rank in seen:
        assert rank[name]["equal"]
        assert rank[name]["versions"] == seen[0][name]["versions"] == sorted(set(rank[name]["versions"]))


def test_a_decision_that_reaches_agents_at_different_times(seen):
    for rank in seen:
        assert rank["late"]["versions"] == [0, 1, 2, 3]
        assert rank["late"]["applied"] == [1, 2, 3]
        assert rank["late"]["sane"] and rank["late"]["records"] > 10
        # Steps before the buckets settled ran dense under any decision, and are not reported.
        assert [1, "allgather"] in rank["late"]["reported"] and [2, "art-ring"] in rank["late"]["reported"]


def test_one_ranks_agent_is_dead(seen):
    for rank in seen:
        assert rank["dead 2"]["versions"] == [0, 1]
        # Without rank 0's there is nothing to follow: training goes on as it began.
        assert rank["dead 0"]["versions"] == [0] and rank["dead 0"]["steps"] == rank["dead 0"]["asked"]


def test_the_agent_is_killed_and_restarted(seen):
    for rank in seen:
        assert rank["restarted"]["away"] == [1, "topk(k=0.1)+ef(vanilla)/allgather"]
        assert rank["restarted"]["versions"] == [0, 1, 2]
    assert 1 in seen[0]["restarted"]["received again"][1:], "a new agent receives what is in force"


def test_the_controller_is_away(seen):
    for rank in seen:
        assert rank["silent"]["versions"] == [0, 1, 2] and rank["silent"]["steps"] > 1000


@pytest.mark.parametrize("name", ["wrapped", "wrapped large"])
def test_ddp_has_no_hook_while_dense(seen, name):
    for number, rank in enumerate(seen):
        rank = rank[name]
        assert rank["bits"] and not rank["early"]
        # One rank needs it for a shadow, and the others go on without.
        assert rank["shadow"] == rank["dense"] == (number == 1)
        assert rank["late"] and rank["versions"] == [0, 1, 2] and rank["strategy"] == "topk(k=0.1)+ef(vanilla)/allgather"


def test_dense_with_an_agent_is_plain_ddp_to_the_bit(seen):
    for rank in seen[:3]:
        for run in rank["sums"]:
            assert run["equal"] and run["exact"] == list(range(40)), run


def test_unknown_compressors_forged_digests_and_other_protocols(seen):
    for rank in seen:
        assert rank["foreign"]["versions"] == [0, 4]
        refused = rank["foreign"]["refused"]
        assert refused["equal"] and refused["steps"] == 20 and not refused["connected"]
        assert any("protocol 2, this agent speaks 3" in line for line in refused["lines"])
    said = "\n".join(seen[0]["foreign"]["lines"])
    assert "digest" in said and "other" in said


def test_a_trial_that_the_loop_cannot_run(seen):
    gains = seen[0]["shadowed"]["gains"]
    assert gains["topk(k=0.1)+ef(vanilla)/allgather"] > gains["topk(k=0.01)+ef(vanilla)/allgather"] > 0
    reports = seen[0]["shadowed"]["trials"]
    assert [(r["id"], len(r["outcomes"])) for r in reports] == [(1, 0), (2, 0), (2, 2), (2, 2)]
    for report in reports:
        assert "batches()" in report["aborted"]
        for outcome in report["outcomes"]:
            assert outcome["iterations"] == 0 and 0 < outcome["shadow_gain"] == outcome["gain"] < 1
            assert 0 < outcome["shadow_energy"] == outcome["energy"]
    assert seen[0]["shadowed"]["lines"].count("cannot run live trials") == 1


def test_decisions_for_compressors_of_every_kind(seen):
    for number, rank in enumerate(seen):
        found = rank["kinds"]
        assert found["equal"] and found["versions"] == [0, *range(2, 11)], found["versions"]
        kept = [strategy for strategy in found["in_force"] if "+ef(" in strategy]
        assert len(kept) == 6 and found["in_force"][1] == "fp16/dense-ring"
        # What compresses with error feedback holds something back; what has none has sent it all.
        for strategy, residual in zip(found["in_force"], found["residual"], strict=True):
            assert (residual > 0) == ("+ef(" in strategy), (strategy, residual)
        if number == 0:
            ran = dict(map(tuple, found["ran"]))
            assert [ran[version] for version in range(2, 10)] == found["in_force"][:8], ran


def test_half_precision_before_the_first_decision(seen):
    for rank in seen:
        halves = rank["halves"]
        assert halves["versions"] == [0, 1] and halves["reported"] == [[0, "bf16/dense-ring"], [1, "topk(k=0.1)+ef(vanilla)/allgather"]]
        assert halves["comp"] > 0 and halves["before"] == list(range(3, halves["before"][-1] + 1))


@pytest.mark.parametrize("name", ["sum text", "gather text"])
def test_a_decision_takes_over_from_a_strategy_that_a_text_names(seen, name):
    for rank in seen:
        assert rank[name]["versions"] == [0, 1, 2] and rank[name]["reported"] == [0, 1, 2]
        # Dense steps of the warm-up are not reported.
        assert rank[name]["ran"] == [[0, rank[name]["named"]], [1, rank[name]["under"]], [2, "none/dense-ring"]]
        assert rank[name]["costs"] and all(all(c) for c in rank[name]["costs"])
        assert rank[name]["named"].endswith("+ef(vanilla)/" + ("dense-ring" if name == "sum text" else "allgather")) and rank[name]["under"] == "topk(k=0.1)+ef(vanilla)/allgather"
        before, after, dense = rank[name]["residual"]
        assert before > 0 and after > 0 and dense == 0 and not rank[name]["text"]

"""The jobs of tests/suite over torch.distributed. lab/tests/worker/suite.rs runs the same over the lab's TCP."""

import json
import pathlib
import signal

import pytest
from conftest import torchrun, without_torchrun

FILES = sorted((pathlib.Path(__file__).parents[2] / "tests" / "suite").glob("*.json"))

#: Jobs of which a rank is killed have processes of their own: no other job could follow.
KILLED = [path for path in FILES if path.stem.startswith("killed")]
SUITE = [path for path in FILES if path not in KILLED]


@pytest.fixture(scope="module")
def seen(folder):
    outcome = torchrun("suite.py", folder)
    assert outcome.code == 0, outcome.text
    return outcome.ranks()


def in_order(values):
    """Without those that only repeat the one before."""
    return [value for at, value in enumerate(values) if at == 0 or values[at - 1] != value]


def in_force(suite):
    """Versions one after the other, each with the first strategy that was ordered under it."""
    decisions = [order["decision"] for order in suite["orders"] if "decision" in order]
    first = {d["version"]: d["strategy"] for d in reversed(decisions) if not d.get("forged")}
    return [(version, first.get(version, suite["strategy"])) for version in suite["versions"]]


@pytest.mark.parametrize("path", SUITE, ids=lambda path: path.stem)
def test_every_job_of_the_suite(seen, path):
    suite = json.loads(path.read_text())
    jobs = [rank[path.stem] for rank in seen]
    if "fails" in suite:
        assert all(part in job["error"] for job in jobs for part in suite["fails"]["error"]), [job["error"] for job in jobs]
        return
    log = jobs[0]["log"]
    for rank, job in enumerate(jobs):
        assert job["log"] == log, f"ranks 0 and {rank} ran apart"
        if suite.get("held"):
            assert [step[0] for step in job["plain"]] == [step[0] for step in log], "a trial has left a trace"
    assert in_order([(version, strategy) for _, version, strategy in log]) == in_force(suite)
    # The first report of each; its shadow trials complete it later.
    reports = {report["id"]: report for report in reversed(jobs[0]["trials"])}
    for trial in (order["trial"] for order in suite["orders"] if "trial" in order):
        outcomes = reports[trial["id"]]["outcomes"]
        assert [(o["strategy"], o["iterations"]) for o in outcomes] == [(c, trial["iterations"]) for c in trial["candidates"]]
        assert all(0 < o["gain"] <= 1 for o in outcomes), outcomes
        if trial.get("shadows"):
            last = [report for report in jobs[0]["trials"] if report["id"] == trial["id"]][-1]["outcomes"]
            assert all(0 < o["shadow_gain"] < 1 for o in last if not o["strategy"].startswith("none")), last


@pytest.mark.parametrize("path", KILLED, ids=lambda path: path.stem)
def test_the_others_end_when_a_rank_is_killed(tmp_path_factory, path):
    folder, failure = tmp_path_factory.mktemp("k"), json.loads(path.read_text())["fails"]
    codes, others = without_torchrun("suite.py", folder, path.stem)
    assert codes == [-signal.SIGKILL if rank == failure["rank"] else 0 for rank in range(4)]
    assert len(others) == 3
    for other in others:
        assert all(part in other["error"] for part in failure["error"] + ["onnection"]), other["error"]


def test_the_suite_has_jobs():
    assert len(SUITE) > 10 and KILLED

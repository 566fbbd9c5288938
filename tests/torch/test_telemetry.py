"""What a rank measures, as the controller's API shows it: the ranks, an agent and a controller, each as users run it."""

import pathlib

import pytest
from conftest import folder, torchrun  # noqa: F401
from daemons import Daemons

SCRIPT = pathlib.Path(__file__).parent / "ranks" / "telemetry.py"


@pytest.fixture(scope="module")
def seen(folder):  # noqa: F811
    daemons = Daemons(folder)
    try:
        daemons.controller()
        daemons.agent()
        done = torchrun(SCRIPT, folder, ranks=2, CONTROLLER=daemons.url, SOCKET=str(daemons.agent_socket))
    finally:
        daemons.end()
    assert done.code == 0, done.text + daemons.log.read_text()
    return done.ranks()


def test_what_the_script_sets_for_the_job_counts(seen):
    for rank in seen:
        policy = {"kinds": ["eightbit"], "objective": {"name": "knee", "unit_s": 0.0}, "observe": True}
        assert (rank["job"]["policy"], rank["job"]["policy_source"]) == (policy, "script")
        assert rank["report"]["report"]["policy"] == "knee"
        assert any("ranks 0 and 1 set different policies" in why for why in rank["report"]["waiting"]), rank["report"]["waiting"]


def test_steps_under_a_text_are_shown_with_their_costs(seen):
    for rank in seen:
        assert rank["equal"] and rank["intervals"], rank
        for interval in rank["intervals"]:
            assert interval["strategy"] == rank["strategy"] and interval["strategy"].startswith("qsgd(s=16")
            assert interval["version"] == 0 and interval["to_step"] - interval["from_step"] >= 9
            assert 0 < interval["measured_comp_us"] < interval["measured_step_us"]
            assert 0 < interval["measured_sync_us"] < interval["measured_step_us"]
            assert 0 < interval["gain"] <= 1
            # A rank's own newest step is one of many: lengths vary with what is in the messages.
            assert 0.5 < interval["bytes_sent"] / rank["sent"] < 2
            # Nothing is expected of what a user runs.
            assert interval["predicted_sync_us"] is None
        assert rank["job"]["comp_us"] > 0 and rank["rejected"] == []

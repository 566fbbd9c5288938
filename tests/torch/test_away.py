"""The controller is away for a minute, and meanwhile the agent is killed and started again."""

import concurrent.futures
import pathlib
import time

import pytest
from conftest import folder, torchrun  # noqa: F401
from daemons import Daemons, until

SCRIPT = pathlib.Path(__file__).parent / "ranks" / "away.py"
AWAY = 60.0

#: Decides by the gain alone, so that what is decided without a pin is known: dense.
CONFIG = """
[loop]
debounce_ms = 50
tick_ms = 200
[planner]
dwell_s = 1.0
confidence = 0.5
switch_cost_s = 0.0
[planner.policy]
name = "weights"
comp = 0.0
sync = 0.0
inverse_gain_s = 1000.0
"""
#: What is in force when the controller goes away; a pin stays, whatever else these two cores have to do.
PINNED = "topk(k=0.01)+ef(vanilla)/allgather"


@pytest.fixture(scope="module")
def seen(folder):  # noqa: F811
    daemons = Daemons(folder)
    try:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            # It takes longer to start than they do.
            running = pool.submit(torchrun, SCRIPT, folder, ranks=4, SOCKET=str(daemons.agent_socket))
            controller, agent = daemons.controller(CONFIG), daemons.agent()
            until(lambda: daemons.policy("away", {"pin": {"strategy": PINNED}}) or running.done(), 90)
            until(lambda: (folder / "decided").exists() or running.done(), 90)
            controller.kill()
            controller.wait()
            began = time.monotonic()
            time.sleep(AWAY / 3)
            agent.kill()
            agent.wait()
            time.sleep(2)
            daemons.agent()
            time.sleep(max(0.0, AWAY - (time.monotonic() - began)))
            (folder / "back").touch()
            daemons.controller(CONFIG)
            assert daemons.policy("away", None), daemons.log.read_text()
            done = running.result()
    finally:
        daemons.end()
    assert done.code == 0, done.text + daemons.log.read_text()
    return done.ranks()


def test_training_goes_on_without_the_controller_and_follows_it_when_it_is_back(seen):
    for rank in seen:
        assert rank["equal"], rank
        before, away = rank["before"], rank["away"]
        assert (away["version"], away["strategy"]) == (before["version"], PINNED), rank
        assert away["seconds"] > AWAY - 5 and away["steps"] > 100 and away["longest"] < 15, rank
        assert rank["after"]["version"] > before["version"], rank
        assert rank["after"]["strategy"].startswith("none/dense"), rank
        assert any("training goes on" in line for line in rank["lines"]) and any("is back" in line for line in rank["lines"])

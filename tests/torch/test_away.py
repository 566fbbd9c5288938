"""The controller is away for a minute, and meanwhile the agent is killed and started again."""

import concurrent.futures
import pathlib
import time

import pytest
from conftest import folder, torchrun  # noqa: F401
from daemons import Daemons, until

SCRIPT = pathlib.Path(__file__).parent / "ranks" / "away.py"
AWAY = 60.0

#: Decides by one thing alone, so that what is decided is known: by the time of the collectives, or by the gain.
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
"""
#: Any gain of time counts, and what it decides first stays, whatever else these two cores have to do.
BY_TIME = CONFIG.replace("dwell_s = 1.0", "dwell_s = 600.0") + "comp = 0.0\nsync = 1.0\ninverse_gain_s = 0.0\n"
BY_GAIN = CONFIG + "comp = 0.0\nsync = 0.0\ninverse_gain_s = 1000.0\n"


@pytest.fixture(scope="module")
def seen(folder):  # noqa: F811
    daemons = Daemons(folder)
    try:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            # It takes longer to start than they do.
            running = pool.submit(torchrun, SCRIPT, folder, ranks=4, SOCKET=str(daemons.agent_socket))
            controller, agent = daemons.controller(BY_TIME), daemons.agent()
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
            daemons.controller(BY_GAIN)
            done = running.result()
    finally:
        daemons.end()
    assert done.code == 0, done.text + daemons.log.read_text()
    return done.ranks()


def test_training_goes_on_without_the_controller_and_follows_it_when_it_is_back(seen):
    for rank in seen:
        assert rank["equal"] and rank["before"]["version"] >= 1, rank
        # Compressed, as was decided before; dense is what the controller that came back decides.
        assert not rank["before"]["strategy"].startswith("none/"), rank
        away = rank["away"]
        assert (away["version"], away["strategy"]) == (rank["before"]["version"], rank["before"]["strategy"]), rank
        assert away["seconds"] > AWAY - 5 and away["steps"] > 100 and away["longest"] < 15, rank
        assert rank["after"]["version"] > rank["before"]["version"], rank
        assert rank["after"]["strategy"].startswith("none/dense"), rank
        assert any("training goes on" in line for line in rank["lines"]) and any("is back" in line for line in rank["lines"])

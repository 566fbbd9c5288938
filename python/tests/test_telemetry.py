"""What a rank measures, as the controller's API shows it: the ranks, an agent and a controller, each as users run it."""

import os
import pathlib
import signal
import socket
import subprocess
import time
import urllib.request

import pytest
from conftest import torchrun

BINARY = os.environ.get("FLEXCOMM_BINARY", str(pathlib.Path(__file__).parents[2] / "target" / "debug" / "flexcomm"))


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def until(what, limit=30.0):
    end = time.monotonic() + limit
    while not what():
        assert time.monotonic() < end, "controller or agent did not start"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def seen(folder):
    if not pathlib.Path(BINARY).exists():
        pytest.skip(f"{BINARY} is not built: cargo build -p flexcomm-cli, or name it in FLEXCOMM_BINARY")
    api, echo, throughput = free_ports(3)
    url, token = f"http://127.0.0.1:{api}", folder / "token"
    token.write_text("telemetry-0123456789abcdef")
    token.chmod(0o600)
    commands = [
        ["controller", "--listen", f"127.0.0.1:{api}", "--db", folder / "c.db", "--token-file", token],
        ["agent", "--node", "n1", "--controller", url, "--token-file", token, "--listen", "127.0.0.1",
         "--advertise", "127.0.0.1", "--echo-port", echo, "--throughput-port", throughput, "--run-dir", folder / "run",
         "--state-dir", folder / "state"],
    ]
    log = (folder / "daemons.log").open("wb")

    def up():
        try:
            return urllib.request.urlopen(f"{url}/healthz", timeout=1).status == 200
        except OSError:
            return False

    daemons, agent = [], folder / "run" / "agent.sock"
    try:
        for command, ready in zip(commands, (up, agent.exists), strict=True):
            daemons.append(subprocess.Popen([BINARY, *map(str, command)], stdout=log, stderr=log))
            until(ready)
        done = torchrun("telemetry.py", folder, ranks=2, CONTROLLER=url, SOCKET=str(agent))
    finally:
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(20)
    assert done.code == 0, done.text + (folder / "daemons.log").read_text()
    return done.ranks()


def test_steps_under_a_text_are_shown_with_their_costs(seen):
    for rank in seen:
        assert rank["equal"] and rank["intervals"], rank
        for interval in rank["intervals"]:
            assert interval["text"] == rank["strategy"] and interval["text"].startswith("qsgd(s=16")
            assert (interval["strategy"]["compressor"], interval["strategy"]["collective"]) == ("text", "allgather")
            assert interval["version"] == 0 and interval["to_step"] - interval["from_step"] >= 9
            assert 0 < interval["measured_comp_us"] < interval["measured_step_us"]
            assert 0 < interval["measured_sync_us"] < interval["measured_step_us"]
            assert 0 < interval["gain"] <= 1
            # A rank's own newest step is one of many: lengths vary with what is in the messages.
            assert 0.5 < interval["bytes_sent"] / rank["sent"] < 2
            # No model knows it.
            assert interval["predicted_sync_us"] is None and not interval["settled"]
        assert rank["job"]["comp_us"] > 0 and rank["set aside"] == []
        assert all(c["samples"] == 0 for c in rank["coefficients"]), rank["coefficients"]

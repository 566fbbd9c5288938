"""Makes `before/` with the binary of the release before (README.md): python3 make.py OLD_FLEXCOMM

A controller, two agents and two jobs of two ranks on loopback, as users run them. Job `decided` gets two decisions, the second
of which compresses; job `spooled` trains under `topk@0.01/art-ring:star` while the controller is stopped, so that its reports stay
in the agent's spool.
"""

import json
import pathlib
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
BINARY = pathlib.Path(sys.argv[1]).resolve()
#: It decides by the gain alone (dense), then by the time of the collectives alone (the sparsest).
CONFIG = """
[loop]
debounce_ms = 50
tick_ms = 200
[probes]
trace_interval_s = 0
[planner]
compressors = ["topk"]
dwell_s = 1.0
links_settle_s = 0.5
trial_interval_s = 1.0
trial_share = 1.0
guard_floor_s = 10.0
[planner.policy]
name = "weights"
comp = 0.0
"""
BY_GAIN, BY_TIME = CONFIG + "sync = 0.0\ninverse_gain_s = 1000.0\n", CONFIG + "sync = 1.0\ninverse_gain_s = 0.0\n"
#: What today's controller must still answer.
PATHS = [
    "jobs", "jobs/decided", "jobs/decided/decision", "jobs/decided/history", "jobs/decided/trials", "jobs/decided/intervals",
    "jobs/decided/progress", "jobs/decided/runs", "nodes", "links/a/b/history", "links/b/a/history",
]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def until(what, limit=60.0):
    end = time.monotonic() + limit
    while not what():
        if time.monotonic() > end:
            raise SystemExit(f"waited for {limit} s")
        time.sleep(0.1)


class Cluster:
    def __init__(self, folder):
        self.folder, self.running = folder, []
        self.url = f"http://127.0.0.1:{free_port()}"
        self.token = folder / "token"
        self.token.write_text("the-token-of-the-release-before")
        self.token.chmod(0o600)

    def start(self, *command):
        with (self.folder / "log").open("ab") as log:
            self.running.append(subprocess.Popen([BINARY, *map(str, command)], stdout=log, stderr=log))
        return self.running[-1]

    def end(self, process):
        process.send_signal(signal.SIGTERM)
        process.wait(20)

    def controller(self, config):
        (self.folder / "controller.toml").write_text(config)
        started = self.start(
            "controller", "--config", self.folder / "controller.toml", "--listen", self.url.removeprefix("http://"),
            "--db", self.folder / "controller.db", "--token-file", self.token,
        )
        until(lambda: self.ask("jobs") is not None)
        return started

    def agent(self, node):
        return self.start(
            "agent", "--node", node, "--controller", self.url, "--token-file", self.token, "--listen", "127.0.0.1",
            "--advertise", "127.0.0.1", "--echo-port", free_port(), "--throughput-port", free_port(),
            "--run-dir", self.folder / node / "run", "--state-dir", self.folder / node / "state",
        )

    def job(self, name, nodes, steps, *more):
        """Ranks that train beside the agents of these nodes."""
        peers = ",".join(f"127.0.0.1:{free_port()}" for _ in nodes)
        return [
            self.start(
                "lab", "worker", "--job", name, "--rank", rank, "--peers", peers, "--socket", self.folder / node / "run" / "agent.sock",
                "--steps", steps, "--hidden", "64", "--least-compute", "50ms", "--eval-samples", "100", *more,
            )
            for rank, node in enumerate(nodes)
        ]

    def ask(self, path):
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}", timeout=5) as answer:
                return json.load(answer)
        except OSError:
            return None

    def applied(self, compressed):
        """Whether a decision is in force on all ranks that compresses, or does not."""
        decision = self.ask("jobs/decided/decision")
        return bool(decision and decision["applied_at_step"] is not None and (decision["compressor"] != "none") == compressed)


def make(cluster):
    controller = cluster.controller(BY_GAIN)
    agents = {node: cluster.agent(node) for node in "ab"}
    until(lambda: len(cluster.ask("links") or []) == 2)
    ranks = cluster.job("decided", "ab", 350)
    until(lambda: cluster.applied(compressed=False))
    cluster.end(controller)
    controller = cluster.controller(BY_TIME)
    until(lambda: cluster.applied(compressed=True))
    until(lambda: all(rank.poll() == 0 for rank in ranks))
    until(lambda: cluster.ask("jobs/decided")["ended"])
    # Links are no longer reported, and the answers are those of the stored state.
    cluster.end(agents.pop("b"))
    time.sleep(2)
    answers = {path: cluster.ask(path) for path in PATHS}
    cluster.end(controller)
    ranks = cluster.job("spooled", "aa", 60, "--strategy", "topk@0.01/art-ring:star")
    until(lambda: all(rank.poll() == 0 for rank in ranks))
    cluster.end(agents.pop("a"))
    return answers


with tempfile.TemporaryDirectory() as folder:
    cluster = Cluster(pathlib.Path(folder))
    try:
        answers = make(cluster)
    except BaseException:
        print((cluster.folder / "log").read_text()[-5000:], file=sys.stderr)
        raise
    finally:
        for process in cluster.running:
            if process.poll() is None:
                cluster.end(process)
    db = sqlite3.connect(cluster.folder / "controller.db")
    db.execute("VACUUM")
    db.execute("PRAGMA journal_mode = DELETE")
    db.close()
    before = HERE / "before"
    shutil.rmtree(before, ignore_errors=True)
    shutil.copytree(cluster.folder / "a" / "state", before / "agent", ignore=shutil.ignore_patterns("*.lock", "reserve"))
    shutil.copy(cluster.folder / "controller.db", before)
    (before / "answers.json").write_text(json.dumps(answers, separators=(",", ":")) + "\n")
    subprocess.run(["find", before, "-type", "f", "-size", "+0", "-exec", "ls", "-l", "{}", "+"], check=True)

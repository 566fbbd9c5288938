"""The experiment that decides: one training under fixed strategies and under flexcomm while the network changes.

    python bench/experiment.py --schedule c1 --out target/experiment        # as root
    python bench/experiment.py --cell suite/reality/c1.toml --out target/reality/c1

Boots user-mode Linux (Debian: user-mode-linux, iproute2) with one network namespace per rank, real htb and netem, and
runs `experiment_rank.py` in each: every setting goes through the same schedule with the same seeds and data. Writes
results.json, table.md and accuracy.svg; with --resume it keeps what ran before with the same arguments. Settings: plain
DDP, PyTorch's fp16 and PowerSGD hooks, LWTopk over allgather and STAR-Topk at three ratios, and flexcomm with a
controller and an agent per node. The target is reached by 1,000 held-out images, the final accuracy is that of all 10,000.

Bandwidths are the paper's divided by --divisor; latencies are the paper's. All nodes share one CPU and one kernel, and so do
controller and agents in flexcomm's own runs: agents probe from the nodes' namespaces, and trainers reach them by a Unix socket.

With --cell a cell of the regret suite runs instead (suite/README.md): the suite's perceptron in a bucket per layer, and its fixed
settings, on a network that changes by the seconds since a run's start. Test losses are those of parameters that are kept every 25
steps and looked at after the run. Played are latency, bandwidth up (at the node) and down (at the bridge) and nics that differ;
`flexcomm-suite compare` says how far the suite's truth is from it. --calibrate measures what that needs (calibrate.py).
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import os
import pathlib
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE))
import calibrate  # noqa: E402

#: Where runs of cells say that they begin; of cell_rank.py, too.
CLOCK = "/run/clock"
HUB, NET, MODULES = "10.77.0.254", "10.77.0", ("bridge", "veth", "sch_htb", "sch_netem")

#: The paper's schedules: epochs, one-way delay in seconds, bits per second. C2's moderate phase is ours, and so is swing: in turns
#: a network of much and one of little bandwidth, between which it pays to change the kind of compressor. Both are limited: what a
#: link without a limit carries hangs on how busy the emulated CPU is.
GOOD, MODERATE, BAD = (0.001, 25e9), (0.010, 10e9), (0.050, 1e9)
SCHEDULES = {
    "c1": [(12, 0.001, 25e9), (12, 0.001, 1e9), (12, 0.050, 1e9), (14, 0.050, 25e9)],
    "swing": [(24, 0.0001, 50e9), (16, 0.001, 1e9), (24, 0.0001, 50e9)],
    "c2": [(12, *GOOD), (8, *MODERATE), (8, *BAD), (8, *MODERATE), (14, *GOOD)],
}
FIXED = [
    "dense", "fp16_compress_hook", "powerSGD_hook", *(f"lwtopk@{c}/allgather" for c in (0.1, 0.01, 0.001)),
    *(f"topk@{c}/art-ring:star" for c in (0.1, 0.01, 0.001)),
]

#: Of a cell, in turns of the suite's names.
SUITE = [
    "none/dense-ring", "fp16/dense-ring", "eightbit+ef(vanilla)/allgather", "qsgd(s=7,norm=max)+ef(vanilla)/allgather",
    *(f"powersgd(rank={rank})+ef(vanilla)/dense-ring" for rank in (1, 4)),
    *(f"topk(k={k})+ef(vanilla)/allgather" for k in (0.1, 0.01, 0.001)),
    "lwtopk(k=0.01)+ef(vanilla)/allgather", "topk(k=0.01)+ef(vanilla)/art-ring:star", "topk(k=0.01)+ef(dgc,mu=0.9)/allgather",
]

#: What cells may ask for that is not played.
NOT_PLAYED = {"ranks_per_nic": 1, "values_factor": 1.0, "stragglers": {"spread": 0.0, "pause_share": 0.0, "pause": 0.0}}

#: Bits per second without a limit that matters.
UNLIMITED = 1e11
#: Of --calibrate: the links, and what holds of user-mode Linux. netem's queue holds 100,000 packets: nothing is lost.
CALIBRATED = {"latency_s": 0.001, "mbit": 60.0, "buffer_bytes": 1e8, "one_processor": True}

INIT = """#!/bin/bash
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t tmpfs run /run; mkdir -p /run/netns /run/tmp /run/r/lib
export TMPDIR=/run/tmp
ln -s /usr/lib/uml/modules /run/r/lib/modules
{python} -P {script} --inside {plan} > {out}/inside.log 2>&1
poweroff -f || echo o > /proc/sysrq-trigger
"""

#: Seconds for agents to know all links before the training starts.
KNOWN_WITHIN = 180.0

#: Seconds between two records of the links.
RECORD_EVERY = 3.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--schedule", choices=SCHEDULES, default="c1")
    kind.add_argument("--cell", type=pathlib.Path, help="a cell of the suite; its world and seeds count")
    kind.add_argument("--calibrate", action="store_true", help="measure what a truth file is fitted to, measured.json, instead of training; sets compute_s of suite/reality/*.toml")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps-per-epoch", type=int, default=6)
    parser.add_argument("--divisor", type=float, default=250.0, help="of the paper's bandwidths")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--settings", nargs="*", help="default: all fixed ones, and flexcomm in schedules")
    parser.add_argument("--target", type=float, default=75.0, help="accuracy to reach, percent")
    parser.add_argument("--planner", default="", help="further lines of the controller's [planner], for example 'crs = [0.01]'")
    parser.add_argument("--binary", type=os.path.abspath, default=str(HERE.parents[1] / "target" / "release" / "flexcomm"))
    parser.add_argument("--timeout", type=float, default=4 * 3600.0, help="seconds for everything")
    parser.add_argument("--out", default="target/experiment")
    parser.add_argument("--resume", action="store_true", help="run only settings and seeds that have no result in --out")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    # Results of before, with settings of its own for controller and agents, are of another experiment.
    parser.set_defaults(control="as shipped")
    return parser.parse_args()


# Outside


def what_counts(plan: dict[str, Any]) -> dict[str, Any]:
    """What two runs must share for their results to stand in one table."""
    keys = ("phases", "ranks", "steps_per_epoch", "divisor", "planner", "cell", "control")
    return {key: plan.get(key) for key in keys}


def keep_or_drop(plan: dict[str, Any], out: pathlib.Path) -> None:
    """Earlier results: kept to go on from, when they are of the same experiment; else gone."""
    if plan["resume"] and (out / "plan.json").exists():
        before = json.loads((out / "plan.json").read_text())
        # JSON has lists where Python has tuples.
        now = json.loads(json.dumps(what_counts(plan)))
        if what_counts(before) != now:
            raise SystemExit(f"failed to resume: {out} holds another experiment: {what_counts(before)}, asked for {now}")
        return
    for old in (*out.glob("result*.json"), *out.glob("measured.json"), *out.glob("*.log")):
        old.unlink()


def result_file(out: pathlib.Path, setting: str, seed: int) -> pathlib.Path:
    return out / f"result-{setting.replace('/', '_')}-{seed}.json"


def seeds(plan: dict[str, Any]) -> list[int]:
    return plan["cell"]["seeds"] if plan.get("cell") else list(range(plan["seeds"]))


def missing(plan: dict[str, Any], settings: list[str]) -> list[tuple[str, int]]:
    """Settings and seeds that have no result yet."""
    out = pathlib.Path(plan["out"])
    return [(s, seed) for seed in seeds(plan) for s in settings if not result_file(out, s, seed).exists()]


def read_cell(path: pathlib.Path) -> dict[str, Any]:
    """A cell of the suite, if all of it can be played."""
    import tomllib

    cell: dict[str, Any] = tomllib.loads(path.read_text()) | {"name": path.stem}
    for key, value in NOT_PLAYED.items():
        if cell.get(key, value) != value:
            raise SystemExit(f"failed to use cell {path}: {key} is {cell[key]}, played is only {value}")
    if "burst_mbit" in cell:
        raise SystemExit(f"failed to use cell {path}: it has burst_mbit, token buckets are not played")
    if cell["model"] != "perceptron":
        raise SystemExit(f"failed to use cell {path}: model is {cell['model']}, played is only perceptron")
    for phase in cell["phase"]:
        nics = phase.get("nic", [])
        if any(nic.get("competitors", 0) for nic in nics) or sum(nic.get("latency_factor", 1.0) != 1.0 for nic in nics) > 1:
            raise SystemExit(f"failed to use cell {path}: competitors, and latencies of two nics in a phase, are not played")
    return cell


def shaping(phase: dict[str, Any], ranks: int) -> dict[int, list[str]]:
    """A phase as tc's lines, by node; the hub's, 0, are of the ports towards the nodes."""
    lines: dict[int, list[str]] = {0: []}

    def link(node: int, device: str, mbit: float, latency_ms: float) -> None:
        lines.setdefault(node, []).extend([
            f"class change dev {device} parent 1: classid 1:10 htb rate {mbit * 1e6:.0f}bit quantum 60000",
            f"qdisc change dev {device} parent 1:10 handle 10: netem delay {latency_ms * 1e3:.0f}us limit 100000",
        ])

    for node in range(1, ranks + 1):
        odd: dict[str, Any] = next((nic for nic in phase.get("nic", []) if nic["nic"] == node - 1), {})
        bandwidth, latency = odd.get("bandwidth_factor", 1.0), max(odd.get("latency_factor", 1.0), 1.0)
        link(node, "eth0", phase["up_mbit"] * bandwidth, phase["latency_ms"] * latency)
        # What others send here has their latency behind it.
        link(0, f"p{node}", phase["down_mbit"] * bandwidth, phase["latency_ms"] * (latency - 1.0))
    return lines


def outside(plan: dict[str, Any]) -> None:
    out = pathlib.Path(plan["out"])
    out.mkdir(parents=True, exist_ok=True)
    keep_or_drop(plan, out)
    (out / "plan.json").write_text(json.dumps(plan, indent=1))
    init = out / "init.sh"
    init.write_text(INIT.format(python=sys.executable, script=__file__, plan=out / "plan.json", out=out))
    init.chmod(0o755)
    # It says what it is for; the emulator stays on one processor from the beginning.
    preload = out / "preload.so"
    source = HERE.parents[1] / "lab" / "uml" / "preload.c"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", preload, source, "-ldl"], check=True)
    command = [
        "taskset", "--cpu-list", str(max(os.sched_getaffinity(0))),
        "setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child=KILL", "linux.uml", "mem=6G",
        "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "rw", f"init={init}", "con=null", "con0=fd:0,fd:1", "quiet",
    ]
    environment = os.environ | {"LD_PRELOAD": str(preload)} | ({"TMPDIR": "/dev/shm"} if os.path.isdir("/dev/shm") else {})
    try:
        subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, timeout=plan["timeout"], check=False)
    except subprocess.TimeoutExpired:
        print(f"stopped after {plan['timeout']:.0f} s; what has ended by then is in the table", file=sys.stderr)
    if plan["calibrate"]:
        if not (out / "measured.json").exists():
            raise SystemExit(f"nothing was measured; see {out}/inside.log and {out}/rank*.log")
        measured = json.loads((out / "measured.json").read_text())
        # Of a rank that has the processor to itself: the truth lets ranks take turns on it.
        calibrate.set_compute(HERE.parents[1] / "suite" / "reality", measured["compute_s"] / measured["world"])
        print(f"{out}/measured.json; `flexcomm-suite calibrate` makes a truth file of it")
        return
    results = [json.loads(p.read_text()) for p in sorted(out.glob("result-*.json"))]
    if not results:
        raise SystemExit(f"no setting has ended; see {out}/inside.log and {out}/rank*.log")
    lines = [json.dumps(shortened(result), separators=(",", ":")) for result in results]
    (out / "results.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")
    if plan["cell"]:
        (out / "table.md").write_text(cell_table(plan, results))
    else:
        (out / "table.md").write_text(table(plan, results))
        (out / "accuracy.svg").write_text(plot(results))
    print((out / "table.md").read_text())


def shortened(result: dict[str, Any]) -> dict[str, Any]:
    """To milliseconds and four digits, as it is kept."""
    digits = {"ends": lambda end: round(end, 3), "losses": lambda loss: float(f"{loss:.4g}")}
    return {key: [digits[key](one) for one in value] if key in digits else value for key, value in result.items()}


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def spread(values: list[float]) -> str:
    """Mean and standard deviation over the seeds."""
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{mean(values):.1f}{deviation}"


def table(plan: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """One line per setting: means over seeds, with their standard deviation where it matters."""
    phases = SCHEDULES[plan["schedule"]]
    heads = [f"phase {i + 1}, ms per step" for i in range(len(phases))]
    lines = [
        f"{plan['schedule']}, {plan['ranks']} ranks, bandwidths / {plan['divisor']:g}, {plan['steps_per_epoch']} steps per "
        f"epoch; target {plan['target']:g} %",
        "",
        "| setting | seeds | s to target | final accuracy % | s in all | MB sent per rank | " + " | ".join(heads) + " | decisions |",
        "|---" * (7 + len(phases)) + "|",
    ]
    for setting in plan["settings"]:
        runs = [r for r in results if r["setting"] == setting]
        if not runs:
            lines.append(f"| {setting} | 0 |" + " not run |" * (5 + len(phases)))
            continue
        reached = [next((t for t, a in r["accuracy"] if a >= plan["target"]), None) for r in runs]
        when = "never" if None in reached else spread(reached)
        cells = [
            str(len(runs)), when, spread([r["final"] for r in runs]), spread([r["seconds"] for r in runs]),
            f"{mean([r['bytes'] for r in runs]) / 1e6:.1f}",
            *(f"{mean([r['phase_ms'][i] for r in runs]):.0f}" for i in range(len(phases))),
            str(max(len(r["decisions"]) for r in runs)),
        ]
        lines.append(f"| {setting} | " + " | ".join(cells) + " |")
    for run in (r for r in results if r["decisions"]):
        lines += ["", f"{run['setting']}, seed {run['seed']}: " + "; ".join(f"step {s}: {d}" for s, d in run["decisions"])]
    return "\n".join(lines) + "\n"


def cell_table(plan: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """One line per setting: means over seeds. Seconds to the target are `flexcomm-suite compare`'s."""
    cell = plan["cell"]
    lines = [
        f"{cell['name']}, {cell['world']} ranks, {cell['steps']} steps", "",
        "| setting | seeds | s in all | ms per step | last loss | accuracy % | MB sent per rank | decisions |", "|---" * 8 + "|",
    ]
    for setting in plan["settings"]:
        runs = [r for r in results if r["setting"] == setting]
        if not runs:
            lines.append(f"| {setting} | 0 |" + " not run |" * 6)
            continue
        seconds = [r["seconds"] for r in runs]
        lines.append(
            f"| {setting} | {len(runs)} | {spread(seconds)} | {mean(seconds) * 1e3 / cell['steps']:.1f} | "
            f"{mean([r['losses'][-1] for r in runs]):.3f} | {spread([r['final'] for r in runs])} | "
            f"{mean([r['bytes'] for r in runs]) / 1e6:.1f} | {max(len(r['decisions']) for r in runs)} |"
        )
    return "\n".join(lines) + "\n"


def plot(results: list[dict[str, Any]]) -> str:
    """Accuracy over seconds, one line per run."""
    most = max(r["seconds"] for r in results) or 1.0
    names = list(dict.fromkeys(r["setting"] for r in results))
    colour = {n: f"hsl({360 * i // max(len(names), 1)},70%,{30 if n == 'flexcomm' else 50}%)" for i, n in enumerate(names)}
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 560" font-family="sans-serif" font-size="13">',
             '<rect width="1000" height="560" fill="white"/><path d="M60 20V500H780" fill="none" stroke="black"/>']
    for percent in range(0, 101, 20):
        parts.append(f'<text x="25" y="{504 - 4.8 * percent:.0f}">{percent} %</text>')
    for i in range(6):
        parts.append(f'<text x="{50 + 144 * i}" y="520">{most * i / 5:.0f} s</text>')
    for run in results:
        points = " ".join(f"{60 + 720 * t / most:.1f},{500 - 4.8 * a:.1f}" for t, a in run["accuracy"])
        width = 3 if run["setting"] == "flexcomm" else 1.2
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour[run["setting"]]}" stroke-width="{width}"/>')
    for i, name in enumerate(names):
        parts.append(f'<text x="795" y="{40 + 20 * i}" fill="{colour[name]}">{name}</text>')
    return "\n".join([*parts, "</svg>"])


# Inside


def sh(line: str) -> None:
    done = subprocess.run(line.split(), capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{line}: {done.stderr.strip()}")


def build(ranks: int, latency_s: float, bits_per_s: float) -> None:
    """One namespace per rank behind a bridge, each with its link as it is when the training starts."""
    for module in MODULES:
        sh(f"modprobe -d /run/r {module}")
    sh("ip link set lo up")
    sh("ip link add br0 type bridge")
    sh(f"ip addr add {HUB}/24 dev br0")
    sh("ip link set br0 up")
    for i in range(1, ranks + 1):
        sh(f"ip netns add n{i}")
        sh(f"ip link add p{i} type veth peer name eth0 netns n{i}")
        sh(f"ip link set p{i} master br0 up")
        for line in ("link set lo up", "link set eth0 gso_max_segs 4", f"addr add {NET}.{i}/24 dev eth0", "link set eth0 up"):
            sh(f"ip -n n{i} {line}")
        sh(f"tc -n n{i} qdisc add dev eth0 root handle 1: htb default 10")
        sh(f"tc -n n{i} class add dev eth0 parent 1: classid 1:10 htb rate {bits_per_s:.0f}bit quantum 60000")
        sh(f"tc -n n{i} qdisc add dev eth0 parent 1:10 handle 10: netem delay {latency_s * 1e6:.0f}us limit 100000")


def limit_ports(ranks: int) -> None:
    """The bridge's ports towards the nodes get a limit, too."""
    for i in range(1, ranks + 1):
        sh(f"tc qdisc add dev p{i} root handle 1: htb default 10")
        sh(f"tc class add dev p{i} parent 1: classid 1:10 htb rate {UNLIMITED:.0f}bit quantum 60000")
        sh(f"tc qdisc add dev p{i} parent 1:10 handle 10: netem delay 0us limit 100000")


class Links:
    """Changes links by tc's lines: by processes that wait for them, since to start one takes long beside busy ranks."""

    def __init__(self, ranks: int) -> None:
        where = {node: ["-n", f"n{node}"] if node else [] for node in range(ranks + 1)}
        self._tc = {node: subprocess.Popen(["tc", *w, "-batch", "-"], stdin=subprocess.PIPE, text=True) for node, w in where.items()}
        self._ranks = ranks

    def set(self, phase: dict[str, Any]) -> None:
        for node, lines in shaping(phase, self._ranks).items():
            pipe = self._tc[node].stdin
            assert pipe is not None
            pipe.write("\n".join(lines) + "\n")
            pipe.flush()


def change_network(cell: dict[str, Any], listener: socket.socket) -> None:
    """For each run that connects: the network as at the start, then as the cell has it by the seconds since the run says so."""
    links = Links(cell["world"])
    while True:
        run, _ = listener.accept()
        with run:
            links.set(cell["phase"][0])
            # Until it is so.
            time.sleep(0.5)
            run.sendall(b"x")
            if not run.recv(1):
                continue
            began, until = time.monotonic(), 0.0
            for now, then in itertools.pairwise(itertools.cycle(cell["phase"])):
                until += now["seconds"]
                run.settimeout(max(began + until - time.monotonic(), 1e-3))
                try:
                    # Nothing is sent any more: the run has ended.
                    run.recv(1)
                    break
                except TimeoutError:
                    links.set(then)
                    print(f"{until:.0f} s: {then}, set {time.monotonic() - began - until:.3f} s later", flush=True)


def start(name: str, command: list[str], out: pathlib.Path, node: int = 0, **environment: str) -> subprocess.Popen[bytes]:
    inside = ["ip", "netns", "exec", f"n{node}"] if node else []
    log = (out / f"{name}.log").open("ab")
    return subprocess.Popen([*inside, *command], stdout=log, stderr=log, env=os.environ | environment)


def control_plane(plan: dict[str, Any], out: pathlib.Path) -> list[subprocess.Popen[bytes]]:
    """A controller in the hub and an agent on every node."""
    run = pathlib.Path("/run/x")
    run.mkdir()
    token = run / "token"
    token.write_text("experiment-0123456789abcdef")
    token.chmod(0o600)
    (run / "controller.toml").write_text(
        f'listen = "0.0.0.0:7070"\ndb = "{run}/controller.db"\ntoken_file = "{token}"\n[planner]\n{plan["planner"]}\n'
    )
    command = [plan["binary"], "controller", "--config", f"{run}/controller.toml"]
    started = [start("controller", command, out)]
    for i in range(1, plan["ranks"] + 1):
        (run / f"n{i}.toml").write_text(
            f'node = "n{i}"\ncontroller = "http://{HUB}:7070"\ntoken_file = "{token}"\nlisten = "{NET}.{i}"\n'
            f'run_dir = "{run}/n{i}"\nstate_dir = "{run}/n{i}/state"\n'
        )
        started.append(start(f"agent{i}", [plan["binary"], "agent", "--config", f"{run}/n{i}.toml"], out, i))
    return started


def ask(what: str) -> Any:
    """What the controller answers; nothing while it is not up."""
    try:
        with urllib.request.urlopen(f"http://{HUB}:7070/api/v1/{what}", timeout=5) as answer:
            return json.load(answer)
    except (OSError, ValueError, http.client.HTTPException):
        return []


def wait_for_links(ranks: int, out: pathlib.Path, daemons: list[subprocess.Popen[bytes]]) -> None:
    """Until latency and bandwidth of every link are known: the first decision should not be made from guesses, and probes
    should not measure the ranks' start instead of the links."""
    directed, began = ranks * (ranks - 1), time.monotonic()
    while True:
        known = [link for link in ask("links") if link["bandwidth_bps"] is not None]
        waited = time.monotonic() - began
        if len(known) >= directed:
            (out / "links.json").write_text(json.dumps(known, indent=1))
            return
        if any(daemon.poll() is not None for daemon in daemons):
            raise RuntimeError(f"controller or an agent has ended; see {out}/controller.log and {out}/agent*.log")
        if waited > KNOWN_WITHIN:
            raise RuntimeError(f"agents know {len(known)} of {directed} links after {KNOWN_WITHIN:.0f} s: {known}")
        time.sleep(0.5)


def processor_seconds(daemons: list[subprocess.Popen[bytes]]) -> dict[str, float]:
    """What each has used so far, by the end of its command line."""
    used: dict[str, float] = {}
    for daemon in daemons:
        # Behind the name, which may hold anything but a closing bracket: user and system time are the 12th and 13th.
        fields = pathlib.Path(f"/proc/{daemon.pid}/stat").read_text().rpartition(")")[2].split()
        used[pathlib.Path(str(daemon.args[-1])).stem] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used


@contextlib.contextmanager
def recorded_links(out: pathlib.Path) -> Iterator[None]:
    """What the controller believes of the links meanwhile, a line every few seconds."""
    stop = threading.Event()

    def record() -> None:
        with (out / "links.jsonl").open("w") as file:
            while not stop.wait(RECORD_EVERY):
                file.write(json.dumps({"at": time.time(), "links": ask("links")}) + "\n")
                file.flush()

    recorder = threading.Thread(target=record)
    recorder.start()
    try:
        yield
    finally:
        stop.set()
        recorder.join()


def train(plan: dict[str, Any], runs: list[tuple[str, int]], out: pathlib.Path) -> None:
    """All ranks once through these settings and seeds."""
    flexcomm = any(setting == "flexcomm" for setting, _ in runs)
    (out / "runs.json").write_text(json.dumps(runs))
    ranks = start(
        "ranks", [sys.executable, "-P", str(HERE / "experiment_rank.py"), str(out)], out, WORLD_SIZE=str(plan["ranks"]),
        MASTER_ADDR=f"{NET}.1", MASTER_PORT="29500", GLOO_SOCKET_IFNAME="eth0", OMP_NUM_THREADS="1",
        FLEXCOMM_RUN="/run/x" if flexcomm else "",
        # A page that is given back and taken again costs far more here than in an ordinary kernel.
        MALLOC_MMAP_THRESHOLD_=str(1 << 30), MALLOC_TRIM_THRESHOLD_=str(1 << 30),
    )
    with recorded_links(out) if flexcomm else contextlib.nullcontext():
        failed = ranks.wait() != 0
    if failed:
        raise RuntimeError(f"the ranks have failed; see {out}/ranks.log and {out}/rank*.log")


def inside(plan: dict[str, Any]) -> None:
    out = pathlib.Path(plan["out"])
    if plan["cell"] or plan["calibrate"]:
        build(plan["ranks"], 0.0, UNLIMITED)
        limit_ports(plan["ranks"])
    else:
        _, latency, rate = plan["phases"][0]
        build(plan["ranks"], latency, rate / plan["divisor"])
    if plan["calibrate"]:
        mbit = CALIBRATED["mbit"]
        Links(plan["ranks"]).set({"latency_ms": 1e3 * CALIBRATED["latency_s"], "up_mbit": mbit, "down_mbit": mbit})
        train(plan, [], out)
        return
    if plan["cell"]:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(CLOCK)
        listener.listen()
        threading.Thread(target=change_network, args=(plan["cell"], listener), daemon=True).start()
    fixed = missing(plan, [s for s in plan["settings"] if s != "flexcomm"])
    if fixed:
        train(plan, fixed, out)
    steered = missing(plan, [s for s in plan["settings"] if s == "flexcomm"])
    if steered:
        # Only now: their probes would take bandwidth from the fixed settings.
        daemons = control_plane(plan, out)
        wait_for_links(plan["ranks"], out, daemons)
        before, began = processor_seconds(daemons), time.monotonic()
        train(plan, steered, out)
        used = {name: t - before[name] for name, t in processor_seconds(daemons).items()}
        (out / "processor.json").write_text(json.dumps({"seconds": time.monotonic() - began, **used}, indent=1))
        for seed in seeds(plan):
            for what in ("history", "intervals", "trials"):
                (out / f"{what}-{seed}.json").write_text(json.dumps(ask(f"jobs/seed-{seed}/{what}"), indent=1))
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(10)


def main() -> None:
    given = arguments()
    if given.inside:
        inside(json.loads(pathlib.Path(given.inside).read_text()))
        return
    plan = vars(given) | {"out": str(pathlib.Path(given.out).resolve()), "phases": SCHEDULES[given.schedule]}
    plan["cell"] = read_cell(given.cell) if given.cell else None
    plan["machine"] = CALIBRATED
    if plan["cell"]:
        plan |= {"ranks": plan["cell"]["world"], "phases": None}
    plan["settings"] = given.settings or (SUITE if plan["cell"] or plan["calibrate"] else [*FIXED, "flexcomm"])
    outside(plan)


if __name__ == "__main__":
    main()

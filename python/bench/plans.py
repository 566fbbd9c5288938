"""What a plan by bucket wins over Gloo where computing does not take the processor that sends, as on a GPU:

    python bench/plans.py --binary ../target/release/flexcomm

Two ranks in network namespaces of their own, made and removed here (root), behind token buckets. The job is a DistributedDataParallel of
ten layers in five buckets; what a layer computes is a wait, forward and backward, besides its own small matrix product, since two ranks,
agents and a controller share the processors of a small machine. Hook, compression, Gloo and the network are what they are in any job.

First flexcomm decides: what is in force and its time per step are printed as they change. Then what it chose last, and each setting of one
strategy for all buckets, are pinned one after the other, in rounds, each in another order: medians of the step, of its ratio to the chosen
plan's in the same round, and the share of the gradient's energy that is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from typing import Any

LAYERS, WIDTH, BATCH = 10, 640, 16
#: Of one strategy for all buckets, to compare with.
ALIKE = [
    "none/dense-ring", "fp16/dense-ring", "powersgd(rank=1)+ef(vanilla)/dense-ring", "powersgd(rank=4)+ef(vanilla)/dense-ring",
    "qsgd(s=7,norm=max)+ef(vanilla)/allgather", "topk(k=0.1)+ef(vanilla)/allgather", "topk(k=0.01)+ef(vanilla)/allgather",
    "lwtopk(k=0.01)+ef(vanilla)/allgather",
]
NODES = {"plans-a": "10.91.0.1", "plans-b": "10.91.0.2"}
CONTROLLER = f"{NODES['plans-a']}:7070"


def rank_main(rank: int, args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import flexcomm.torch

    class Wait(torch.autograd.Function):
        """Computing that takes no processor."""

        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            time.sleep(args.layer_ms / 3e3)
            return x.view_as(x)

        @staticmethod
        def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
            time.sleep(args.layer_ms / 1.5e3)
            return gradient

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.relu(self.linear(Wait.apply(x)))

    torch.set_num_threads(1)
    torch.manual_seed(0)
    host = list(NODES.values())[0]
    dist.init_process_group("gloo", init_method=f"tcp://{host}:29500", rank=rank, world_size=2)
    teacher, data = torch.randn(WIDTH, 10), torch.Generator().manual_seed(rank)

    network = torch.nn.Sequential(*(Layer() for _ in range(LAYERS)), torch.nn.Linear(WIDTH, 10))
    model = DistributedDataParallel(network, bucket_cap_mb=1.6, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    out = pathlib.Path(args.out)
    session = flexcomm.torch.attach(model, optimizer, job="plans", socket=str(out / f"{list(NODES)[rank]}/run/agent.sock"))

    def step() -> float:
        x = torch.randn(BATCH, WIDTH, generator=data)
        began = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1)).backward()
        optimizer.step()
        return time.perf_counter() - began

    def agreed(here: Any) -> Any:
        """What rank 0 has there."""
        there = [here]
        dist.broadcast_object_list(there, 0)
        return there[0]

    began, last, times = time.monotonic(), None, []
    while agreed(time.monotonic() - began < args.decide_s):
        if session.strategy != last:
            if rank == 0 and times:
                print(f"{last}: {len(times)} steps, {1e3 * statistics.median(times):.0f} ms", flush=True)
            last, times = session.strategy, []
        times.append(step())
    if rank == 0:
        print(f"{last}: {len(times)} steps, {1e3 * statistics.median(times):.0f} ms; in turns with others:", flush=True)
    chosen = agreed(last)
    settings = list(dict.fromkeys([chosen, *args.also, *ALIKE]))
    order = random.Random(1)
    took: dict[str, list[float]] = {setting: [] for setting in settings}
    gains: dict[str, list[float]] = {setting: [] for setting in settings}
    for _ in range(args.rounds):
        for setting in order.sample(settings, len(settings)):
            if rank == 0:
                pin(setting, out)
            asked = time.monotonic()
            while agreed(session.strategy) != setting:
                if time.monotonic() - asked > 60:
                    raise SystemExit(f"plans.py: {setting} is pinned and not in force after 60 s, but {session.strategy}")
                step()
            # The first few fill residuals and buffers.
            steps = [step() for _ in range(10)][4:]
            took[setting].append(statistics.median(steps))
            gains[setting].append(session.costs.gain)
    if rank == 0:
        width = max(map(len, settings)) + 10
        print(f"{'':{width}} ms/step  over the chosen plan's  gain")
        for setting in sorted(settings, key=lambda setting: statistics.median(took[setting])):
            ratio = statistics.median(a / b for a, b in zip(took[setting], took[chosen]))
            name = setting + (" (chosen)" if setting == chosen else "")
            gain = statistics.median(gains[setting])
            print(f"{name:{width}} {1e3 * statistics.median(took[setting]):7.0f} {ratio:23.2f} {gain:5.2f}")
    session.close()
    dist.destroy_process_group()


def pin(setting: str, out: pathlib.Path) -> None:
    """Has the controller decide for it."""
    request = urllib.request.Request(
        f"http://{CONTROLLER}/api/v1/jobs/plans/policy", json.dumps({"pin": {"strategy": setting}}).encode(), method="PUT",
        headers={"Authorization": f"Bearer {(out / 'token').read_text().strip()}", "Content-Type": "application/json"},
    )
    try:
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10).close()
    except urllib.error.HTTPError as error:
        raise SystemExit(f"plans.py: {setting} cannot be pinned: {error.read().decode()}") from None


def run(*words: str) -> None:
    subprocess.run(words, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="../target/release/flexcomm", help="flexcomm's")
    parser.add_argument("--rate", default="150mbit", help="of each rank's link, as tc takes it")
    parser.add_argument("--layer-ms", type=float, default=60.0, help="what a layer computes, a third of it forward")
    parser.add_argument("--decide-s", type=float, default=90.0, help="for how long flexcomm decides")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--also", action="append", default=[], metavar="PLAN", help="a plan to pin, too; may be given again")
    parser.add_argument("--out", default=None, help="for logs; a temporary folder where none is named")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        return rank_main(args.rank, args)
    if os.geteuid() != 0:
        raise SystemExit("plans.py: makes network namespaces: run it as root")
    out = pathlib.Path(args.out or tempfile.mkdtemp(prefix="flexcomm-plans-")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    running: list[subprocess.Popen[bytes]] = []

    def start(node: str, *words: str, log: str | None = None) -> subprocess.Popen[bytes]:
        to = open(out / f"{log}.log", "wb") if log else None
        running.append(subprocess.Popen(["ip", "netns", "exec", node, *words], stdout=to, stderr=to))
        return running[-1]

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for node in NODES:
            run("ip", "netns", "add", node)
        run("ip", "link", "add", "eth0", "netns", "plans-a", "type", "veth", "peer", "name", "eth0", "netns", "plans-b")
        for node, address in NODES.items():
            run("ip", "-n", node, "link", "set", "lo", "up")
            run("ip", "-n", node, "addr", "add", f"{address}/24", "dev", "eth0")
            run("ip", "-n", node, "link", "set", "eth0", "up")
            run("tc", "-n", node, "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", args.rate, "burst", "256kb", "latency", "50ms")
        token = out / "token"
        start("plans-a", args.binary, "controller", "--listen", CONTROLLER, "--db", str(out / "c.db"), "--token-file", str(token), log="controller")
        while not token.exists():
            time.sleep(0.1)
        for node, address in NODES.items():
            folder = out / node
            start(
                node, args.binary, "agent", "--node", node, "--controller", f"http://{CONTROLLER}", "--token-file", str(token),
                "--listen", address, "--run-dir", str(folder / "run"), "--state-dir", str(folder / "state"), log=node,
            )
        for node in NODES:
            while not (out / node / "run/agent.sock").exists():
                time.sleep(0.1)
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        ranks = [
            start(node, sys.executable, __file__, "--rank", str(rank), "--out", str(out), "--layer-ms", str(args.layer_ms),
                  "--decide-s", str(args.decide_s), "--rounds", str(args.rounds),
                  *(word for plan in args.also for word in ("--also", plan)))
            for rank, node in enumerate(NODES)
        ]
        codes = [rank.wait() for rank in ranks]
        answer = subprocess.run(
            ["ip", "netns", "exec", "plans-a", "curl", "-s", f"http://{CONTROLLER}/api/v1/jobs/plans/history"], capture_output=True, check=False,
        )
        (out / "history.json").write_bytes(answer.stdout)
        for entry in reversed([entry for entry in json.loads(answer.stdout or b"[]") if " is pinned " not in entry["reason"]]):
            print(f"decision {entry['version']}: {entry['reason']}")
        print(f"logs and history: {out}")
        if any(codes):
            raise SystemExit(f"plans.py: the ranks ended with {codes}")
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.wait()
        for node in NODES:
            subprocess.run(["ip", "netns", "del", node], check=False, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()

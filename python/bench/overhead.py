"""What the hook and the telemetry cost: torchrun --nproc-per-node 2 bench/overhead.py

The same network is trained by plain DDP (twice: their difference is this machine's noise), by DDP with torch's own
`allreduce_hook`, by flexcomm dense without an agent (DDP by itself), with an agent in a process of its own (control word
and telemetry below DDP; and with the hook, as it is after a decision for something else than dense), and with top-k at
0.01, in turns of a few steps. Prints medians of the step time, and the median over turns of the ratio to plain DDP's turn
beside it, in which slow drifts of the machine cancel, with its standard error; and the same of the processor's time, of all
of a rank's threads, which another user of the machine disturbs less. BUCKET_MB sets DDP's bucket_cap_mb, TURNS
the turns, JOBS some of the jobs.
"""

import multiprocessing
import os
import pathlib
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "ranks"))
sys.argv = sys.argv[:1] + [tempfile.mkdtemp()]

import torch
import torch.distributed as dist
from common import ddp, network
from fake_agent import FakeAgent
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import flexcomm.torch

TURNS, STEPS = int(os.environ.get("TURNS", "80")), int(os.environ.get("STEPS", "5"))
BUCKET_MB = float(os.environ["BUCKET_MB"]) if "BUCKET_MB" in os.environ else None

#: Values of a layer's row and layers: 2.6 million parameters.
SIZES = (512, 1024, 1024, 1024, 10)

JOBS = {
    "plain": "plain DDP",
    "again": "plain DDP again",
    "torch": "torch's allreduce_hook",
    "none": "flexcomm dense, no agent",
    "agent": "flexcomm dense, agent",
    "hook": "the same with its hook",
    "topk": "flexcomm topk 0.01",
}
if "JOBS" in os.environ:
    JOBS = {kind: JOBS[kind] for kind in ["plain", "agent", *os.environ["JOBS"].split()]}


def serve(folder, name):
    FakeAgent(folder, name).start()
    time.sleep(3600)


def agent(rank):
    """An agent in a process of its own, as it is in earnest: its socket."""
    folder = pathlib.Path(tempfile.mkdtemp())
    multiprocessing.get_context("spawn").Process(target=serve, args=(folder, f"a{rank}"), daemon=True).start()
    socket = folder / f"a{rank}.sock"
    while not socket.exists():
        time.sleep(0.01)
    return str(socket)


def job(kind, rank):
    model = ddp(network(SIZES), bucket_cap_mb=BUCKET_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = None
    if kind == "torch":
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    elif kind in ("none", "agent", "hook", "topk"):
        strategy = "topk@0.01/allgather" if kind == "topk" else None
        socket = agent(rank) if kind in ("agent", "hook") else None
        session = flexcomm.torch.attach(model, optimizer, strategy=strategy, socket=socket, register=kind != "hook")
        if kind == "hook":
            model.register_comm_hook(None, session.hook)
    x, y = torch.randn(64, SIZES[0]), torch.randint(0, SIZES[-1], (64,))

    def step():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step, session


def telemetry_alone(session):
    """Microseconds per step of what a step does besides its collectives: begin, finish, report."""
    core = session._core
    session._end_step(within_loop=False)
    began = time.perf_counter()
    for _ in range(2000):
        core.begin()
        core.launched(1 << 20, False)
        core.landed()
        core.finish(0.5)
    return (time.perf_counter() - began) / 2000 * 1e6


def paired(ours, theirs):
    """Median ratio of turns side by side, in percent above 1, with its standard error."""
    low, median, high = statistics.quantiles((a / b for a, b in zip(ours, theirs)), n=4)
    # Of a median of about normal values: 1.25 deviations over the root of their number; quartiles are 1.35 apart.
    error = 1.25 * (high - low) / 1.35 / len(ours) ** 0.5
    return f"{(median - 1) * 100:+8.2f} % +- {error * 100:4.2f}"


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    jobs = {kind: job(kind, rank) for kind in JOBS}
    steps = {kind: [] for kind in jobs}
    turns = {kind: [] for kind in jobs}
    busy = {kind: [] for kind in jobs}
    for number in range(TURNS):
        # Now forwards, now backwards: nobody always comes after the same one.
        for kind in list(jobs)[:: 1 if number % 2 else -1]:
            dist.barrier()
            times = []
            for count in range(STEPS):
                if count == 1:
                    # The first step finds another job's tensors in the caches.
                    cpu = time.process_time()
                began = time.perf_counter()
                jobs[kind][0]()
                times.append(time.perf_counter() - began)
            if number >= 2:
                busy[kind].append(time.process_time() - cpu)
                steps[kind] += times[1:]
                turns[kind].append(sum(times[1:]))
    plain = statistics.median(steps["plain"])
    if rank == 0:
        print(f"{'':26} {'ms per step':>12} {'median':>9} {'by turns':>18} {'processor':>18}")
        for kind, label in JOBS.items():
            median = statistics.median(steps[kind])
            wall, cpu = paired(turns[kind], turns["plain"]), paired(busy[kind], busy["plain"])
            print(f"{label:26} {median * 1e3:12.2f} {(median / plain - 1) * 100:+8.2f} % {wall} {cpu}")
    alone = telemetry_alone(jobs["agent"][1])
    if rank == 0:
        print(f"{'begin, finish, report':26} {alone:9.1f} us per step, {alone / plain * 1e-4:.3f} % of a plain step")
        sys.stdout.flush()
    dist.barrier()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(0)


if __name__ == "__main__":
    main()

"""What the hook and the telemetry cost: torchrun --nproc-per-node 2 bench/overhead.py

Four jobs train the same network in turns of a few steps: plain DDP, flexcomm dense without an agent, with an agent
(control word and telemetry), and top-k at 0.01. Prints medians of the step time and the differences.
"""

import pathlib
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "ranks"))
sys.argv = sys.argv[:1] + [tempfile.mkdtemp()]

import torch
import torch.distributed as dist
from common import ddp
from fake_agent import FakeAgent

import flexcomm.torch

ROUNDS, STEPS = 30, 5


def job(kind, rank):
    torch.manual_seed(0)
    sizes = (512, 1024, 1024, 1024, 10)
    layers = [m for a, b in zip(sizes, sizes[1:]) for m in (torch.nn.Linear(a, b), torch.nn.ReLU())]
    model = ddp(torch.nn.Sequential(*layers[:-1]), bucket_cap_mb=25)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    agent = None
    if kind == "agent":
        agent = FakeAgent(pathlib.Path(tempfile.mkdtemp()), f"a{rank}").start()
    session = None
    if kind != "plain":
        strategy = "topk@0.01/allgather" if kind == "topk" else None
        session = flexcomm.torch.attach(model, optimizer, strategy=strategy, socket=str(agent.path) if agent else None)
    x, y = torch.randn(64, 512), torch.randint(0, 10, (64,))

    def step():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step, session


def telemetry_alone(session):
    """Microseconds per step of what a step does besides its collectives: begin, word, finish, report."""
    core = session._core
    word = torch.empty(36)
    session._end_step(within_loop=False)
    began = time.perf_counter()
    for _ in range(2000):
        core.begin()
        core.launched(1 << 20, False)
        core.landed()
        core.finish(0.5)
    del word
    return (time.perf_counter() - began) / 2000 * 1e6


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    jobs = {kind: job(kind, rank) for kind in ("plain", "none", "agent", "topk")}
    times = {kind: [] for kind in jobs}
    for number in range(ROUNDS):
        for kind, (step, _) in jobs.items():
            dist.barrier()
            for _ in range(STEPS):
                began = time.perf_counter()
                step()
                if number >= 2:
                    times[kind].append(time.perf_counter() - began)
    if rank == 0:
        plain = statistics.median(times["plain"])
        for kind, label in [
            ("plain", "plain DDP"), ("none", "flexcomm dense, no agent"), ("agent", "flexcomm dense, agent"),
            ("topk", "flexcomm topk 0.01"),
        ]:
            median = statistics.median(times[kind])
            print(f"{label:26} {median * 1e3:7.2f} ms per step  {(median / plain - 1) * 100:+6.2f} %")
    alone = telemetry_alone(jobs["agent"][1])
    if rank == 0:
        print(f"{'begin, finish, report':26} {alone:7.1f} us per step  {alone / plain * 1e-4:6.3f} % of a plain step")
        sys.stdout.flush()
    dist.barrier()
    import os

    os._exit(0)


main()

"""What the hook and the telemetry cost: torchrun --nproc-per-node 2 bench/overhead.py

The same network is trained by plain DDP (twice: their difference is this machine's noise), by DDP with torch's own
`allreduce_hook`, by flexcomm dense without an agent (DDP by itself), with an agent in a process of its own (control
messages and telemetry below DDP; and with the hook, as it is after a decision for something else than dense), and with top-k at
0.01. In each round every job makes a few steps, in an order that is drawn anew: a shared machine's speed changes within
tenths of a second. Two more rows: the agent's job in a loop over `session.batches()`, and the same as the agent's
with nothing reported, which tells what reporting costs (`telemetry`). Prints medians of the step time, and the ratio
to plain DDP's steps in the same round: the mean of the middle four fifths of the rounds, with its standard error; and
the same of the processor's time, of all of a rank's threads.
BUCKET_MB sets DDP's bucket_cap_mb, ROUNDS the rounds, JOBS some of the jobs, PIN=1 binds each rank to a core.
"""

import itertools
import math
import multiprocessing
import os
import pathlib
import random
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "ranks"))
sys.argv = sys.argv[:1] + [tempfile.mkdtemp()]

if "PIN" in os.environ:
    # Before torch makes threads.
    os.sched_setaffinity(0, {int(os.environ["LOCAL_RANK"]) % os.cpu_count()})

import torch
import torch.distributed as dist
from common import ddp, network
from fake_agent import FakeAgent
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import flexcomm.torch

ROUNDS, STEPS = int(os.environ.get("ROUNDS", "300")), int(os.environ.get("STEPS", "2"))
BUCKET_MB = float(os.environ["BUCKET_MB"]) if "BUCKET_MB" in os.environ else None

#: Values of a layer's row and layers: 2.6 million parameters.
SIZES = (512, 1024, 1024, 1024, 10)

JOBS = {
    "plain": "plain DDP",
    "again": "plain DDP again",
    "torch": "torch's allreduce_hook",
    "none": "flexcomm dense, no agent",
    "agent": "flexcomm dense, agent",
    "silent": "the same, nothing reported",
    "batches": "dense, agent, batches()",
    "hook": "dense, agent, its hook",
    "topk": "flexcomm topk 0.01",
}
if "JOBS" in os.environ:
    JOBS = {kind: JOBS[kind] for kind in ["plain", "agent", "silent", *os.environ["JOBS"].split()]}


class Silent:
    """A core whose steps are never reported: each waits for times that never come. They are taken all the same, so what is
    missing beside a core that reports is gathering steps, writing them as JSON and sending them. What stands in for it is a
    call of Python and one of the core, some microseconds."""

    def __init__(self, core):
        self._core, self._ticket = core, 0

    def __getattr__(self, name):
        # Found at once the next time.
        found = getattr(self._core, name)
        setattr(self, name, found)
        return found

    def finish(self, loss=None, ticket=None, answers=()):
        self._ticket += 1
        answer = self._core.finish(loss, self._ticket, list(answers))
        self._core.resolve(self._ticket, None)
        return answer


def serve(folder, kinds):
    for kind in kinds:
        FakeAgent(folder, kind).start()
    time.sleep(3600)


def agents():
    """An agent for each job that has one, in a process apart, as in earnest: their sockets. One process for all, since only
    one job at a time makes steps."""
    kinds = [kind for kind in JOBS if kind in ("agent", "silent", "batches", "hook")]
    folder = pathlib.Path(tempfile.mkdtemp())
    multiprocessing.get_context("spawn").Process(target=serve, args=(folder, kinds), daemon=True).start()
    sockets = {kind: folder / f"{kind}.sock" for kind in kinds}
    while not all(socket.exists() for socket in sockets.values()):
        time.sleep(0.01)
    return {kind: str(socket) for kind, socket in sockets.items()}


def job(kind, socket):
    model = ddp(network(SIZES), bucket_cap_mb=BUCKET_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = None
    if kind == "torch":
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    elif kind in ("none", "agent", "silent", "batches", "hook", "topk"):
        strategy = "topk@0.01/allgather" if kind == "topk" else None
        session = flexcomm.torch.attach(model, optimizer, strategy=strategy, socket=socket, register=kind != "hook")
        if kind == "hook":
            model.register_comm_hook(None, session.hook)
    if kind == "silent":
        session._core = Silent(session._core)
    batches = itertools.repeat((torch.randn(64, SIZES[0]), torch.randint(0, SIZES[-1], (64,))))
    if kind == "batches":
        batches = iter(session.batches(batches))

    def step():
        x, y = next(batches)
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
        core.launched(1 << 20)
        core.landed()
        core.finish(0.5)
    return (time.perf_counter() - began) / 2000 * 1e6


def paired(ours, theirs):
    """Ratio of rounds side by side, in percent above 1, with its standard error, as text."""
    mean, error = compared(ours, theirs)
    return f"{mean:+8.2f} % +- {error:4.2f}"


def compared(ours, theirs):
    """Ratio of rounds side by side, in percent above 1, and its standard error."""
    ratios = sorted(math.log(a / b) for a, b in zip(ours, theirs))
    # Without the tenths at both ends: what another process takes in a round is not ours. Its error by the usual formula for
    # trimmed means: what was cut off counts as the last that was not.
    cut = len(ratios) // 10
    kept = ratios[cut : len(ratios) - cut]
    mean = statistics.fmean(kept)
    squares = sum((r - mean) ** 2 for r in kept) + cut * sum((end - mean) ** 2 for end in (kept[0], kept[-1]))
    error = math.sqrt(squares / (len(ratios) - 1) / len(ratios)) / (1 - 2 * cut / len(ratios))
    return math.expm1(mean) * 100, error * 100


def run_round(jobs, order):
    """Seconds, and of the processor, that so many steps of every job take; means over the ranks."""
    took = torch.zeros(len(jobs), 2, dtype=torch.float64)
    for number in order:
        dist.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(STEPS):
            jobs[number][0]()
        took[number] = torch.tensor([time.perf_counter() - began, time.process_time() - cpu])
    dist.all_reduce(took)
    return (took / dist.get_world_size() / STEPS).tolist()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sockets = agents()
    jobs = [job(kind, sockets.get(kind)) for kind in JOBS]
    # The same on all ranks.
    draw = random.Random(1)
    for _ in range(4):
        # Buckets are rebuilt, and memory is touched.
        run_round(jobs, range(len(jobs)))
    rounds = [run_round(jobs, draw.sample(range(len(jobs)), len(jobs))) for _ in range(ROUNDS)]
    # By job: what each round took, and of the processor.
    walls, cpus = ([[took[number][what] for took in rounds] for number in range(len(jobs))] for what in (0, 1))
    plain = statistics.median(walls[0])
    if rank == 0:
        print(f"{'':26} {'ms per step':>12} {'by rounds':>18} {'processor':>18}")
        for label, wall, cpu in zip(JOBS.values(), walls, cpus):
            print(f"{label:26} {statistics.median(wall) * 1e3:12.2f} {paired(wall, walls[0])} {paired(cpu, cpus[0])}")
        reported, silent = (list(JOBS).index(kind) for kind in ("agent", "silent"))
        print("telemetry: {:+.2f} % +- {:.2f} of a step (limit 1 %)".format(*compared(walls[reported], walls[silent])), end=", ")
        print("of the processor's time {:+.2f} % +- {:.2f}".format(*compared(cpus[reported], cpus[silent])))
    alone = telemetry_alone(jobs[list(JOBS).index("agent")][1])
    if rank == 0:
        print(f"{'begin, finish, report':26} {alone:9.1f} us per step, {alone / plain * 1e-4:.3f} % of a plain step")
        sys.stdout.flush()
    dist.barrier()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(0)


if __name__ == "__main__":
    main()

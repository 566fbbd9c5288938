"""What the suite's truth is fitted to: how long this machine takes for collectives, computing and steps, as JSON.

    python bench/experiment.py --calibrate --out target/calibration     # as root: ranks in user-mode Linux, links of 1 ms and 60 Mbit/s
    python bench/calibrate.py --ranks 2 > measured.json                 # ranks on this host's loopback
    flexcomm-suite calibrate measured.json --out truth.toml             # coefficients with which the truth takes as long

Measured: a round trip of one byte over TCP, Gloo's collectives of several sizes, steps of the perceptron without any exchange, and
under every setting. All ranks work at once, so where they share a processor (user-mode Linux has one) the coefficients hold that.
Links without any latency would keep that processor busy all the time, and messages take several times as long then as in any cell;
links without a limit would spare it what htb does for each packet.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import pathlib
import re
import socket
import statistics
import time
from typing import Any, Callable

SIZES = (64, 4096, 65536, 262144, 1048576)
#: Collectives in a row, and how many such rows.
ROW, ROWS = 4, 25
ECHOES, STEPS, WARM_UP, BATCH = 300, 40, 5, 16
#: That a rank has; and steps between two barriers, whose time is in theirs.
IMAGES, COMPUTED = 2000, 20
ECHO_PORT = 29_600


# What ranks do


def measure(settings: list[str], machine: dict[str, Any], rows: int = ROWS) -> dict[str, Any]:
    """On every rank of the default group. ``machine``: what is known of it and its links, for whoever fits the truth to it."""
    import torch.distributed as dist

    return machine | {
        "world": dist.get_world_size(),
        "row": ROW,
        "batch": BATCH,
        "round_trip_s": round_trip(),
        "collectives": [collective(what, size, rows) for what in ("all_reduce", "all_gather", "broadcast") for size in SIZES],
        "compute_s": computing() if settings else 0.0,
        "steps": {setting: steps(setting) for setting in settings},
    }


def round_trip() -> float:
    """One byte there and back between ranks 0 and 1: the median."""
    import torch.distributed as dist

    rank = dist.get_rank()
    listener = socket.create_server(("", ECHO_PORT)) if rank == 0 else None
    dist.barrier()
    took = []
    if rank < 2:
        peer = listener.accept()[0] if listener else socket.create_connection((os.environ["MASTER_ADDR"], ECHO_PORT))
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(ECHOES):
            began = time.perf_counter()
            if rank == 0:
                peer.send(b"x")
            peer.recv(1)
            if rank == 1:
                peer.send(b"x")
            took.append(time.perf_counter() - began)
        peer.close()
    if listener:
        listener.close()
    dist.barrier()
    return statistics.median(took) if took else 0.0


def collective(what: str, size: int, count: int) -> dict[str, Any]:
    """Seconds of one, as the hook launches it."""
    import torch
    import torch.distributed as dist

    world = dist.get_world_size()
    own, all_of_them = torch.zeros(size // 4), torch.zeros(world * size // 4)
    run: dict[str, Callable[[int], Any]] = {
        "all_reduce": lambda _: dist.all_reduce(own, async_op=True),
        "all_gather": lambda _: dist.all_gather_into_tensor(all_of_them, own, async_op=True),
        # From any rank in turn: none runs ahead.
        "broadcast": lambda number: dist.broadcast(own, src=number % world, async_op=True),
    }
    rows = []
    for _ in range(count):
        dist.barrier()
        began = time.perf_counter()
        for number in range(ROW):
            run[what](number).wait()
        rows.append((time.perf_counter() - began) / ROW)
    deciles = statistics.quantiles(rows, n=10)
    return {"what": what, "bytes": size, "seconds": deciles[4], "first_decile": deciles[0]}


class Training:
    """Of the perceptron, on other images of its own in each step, as runs take them."""

    def __init__(self) -> None:
        import torch
        from cell_rank import perceptron, wrapped

        self.model = wrapped(perceptron(0))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.pictures, self.labels = torch.rand(IMAGES, 784), torch.randint(0, 10, (IMAGES,))
        self.order = torch.randperm(IMAGES)

    def step(self) -> None:
        from torch import nn

        self.order = self.order.roll(-BATCH)
        batch = self.order[:BATCH]
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(self.pictures[batch]), self.labels[batch]).backward()
        self.optimizer.step()


def computing() -> float:
    """Seconds of a step in which nothing is exchanged, with all ranks at it."""
    import torch.distributed as dist

    training, rows = Training(), []
    training.step()
    for _ in range(ROWS):
        dist.barrier()
        began = time.perf_counter()
        with training.model.no_sync():
            for _ in range(COMPUTED):
                training.step()
        dist.barrier()
        rows.append((time.perf_counter() - began) / COMPUTED)
    return statistics.median(rows)


def steps(setting: str) -> dict[str, float]:
    """The median step."""
    from cell_rank import attached

    training, ends = Training(), []
    session = attached(setting, 0, training.model, training.optimizer)
    for _ in range(WARM_UP + STEPS):
        training.step()
        ends.append(time.perf_counter())
    session.close()
    took = [end - start for start, end in itertools.pairwise(ends[WARM_UP - 1 :])]
    return {"seconds": statistics.median(took)}


def set_compute(cells: pathlib.Path, seconds: float) -> None:
    """Cells that are played on this machine compute as long as it does."""
    for path in cells.glob("*.toml"):
        text, count = re.subn(r"^compute_s = .*$", f"compute_s = {seconds:.6f}", path.read_text(), flags=re.MULTILINE)
        if count:
            path.write_text(text)


def loopback_rank(rank: int, world: int, rows: int) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT="29599")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    measured = measure([], {"latency_s": 0.0}, rows)
    if rank == 0:
        print(json.dumps(measured, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=300, help=f"of {ROW} collectives each")
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=loopback_rank, args=(r, given.ranks, given.rows)) for r in range(given.ranks)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if any(rank.exitcode for rank in ranks):
        raise SystemExit("a rank has failed")


if __name__ == "__main__":
    main()

"""Coefficients of the suite's truth, as this machine has them: a file for `flexcomm-suite ... --truth FILE`.

    python bench/experiment.py --calibrate --out target/calibration     # as root: ranks in user-mode Linux, links of 5 ms without limits
    python bench/calibrate.py --ranks 2                                 # ranks on this host's loopback

Measured: a round trip of one byte over TCP, Gloo's collectives of several sizes, steps of the perceptron without any exchange, and
under every setting. Fitted to that: seconds to begin a collective, for each message and each byte received; what is left of a
setting's step beside that and computing is compressing and decompressing, shared out between the two as in truth.toml. All ranks
work at once, so where they share a processor (user-mode Linux has one) the coefficients hold that. Links without any latency
would keep that processor busy all the time, and messages take several times as long then as in any cell.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import pathlib
import re
import socket
import statistics
import sys
import time
from typing import Any, Callable

import numpy as np

TRUTH = pathlib.Path(__file__).resolve().parents[2] / "truth" / "src" / "truth.toml"

SIZES = (64, 4096, 65536, 262144, 1048576)
#: Collectives in a row, and how many such rows.
ROW, ROWS = 4, 25
ECHOES, STEPS, WARM_UP, BATCH = 300, 40, 5, 16
ECHO_PORT = 29_600

#: The perceptron's parameters, and DDP's buckets.
VALUES, BUCKETS = 235_146, 3
#: Of an allreduce's blocks in Gloo's ring; and collectives that it runs at once.
SEGMENTS, AT_ONCE = 2, 2


# What ranks do


def measure(settings: list[str], latency_s: float, rows: int = ROWS) -> dict[str, Any]:
    """On every rank of the default group, whose links have this latency one way."""
    import torch.distributed as dist

    return {
        "world": dist.get_world_size(),
        "latency_s": latency_s,
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
    """Of the perceptron on one batch."""

    def __init__(self) -> None:
        import torch
        from cell_rank import perceptron, wrapped

        self.model = wrapped(perceptron(0))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.x, self.y = torch.rand(BATCH, 784), torch.randint(0, 10, (BATCH,))

    def step(self) -> None:
        from torch import nn

        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(self.x), self.y).backward()
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
            for _ in range(ROW):
                training.step()
        dist.barrier()
        rows.append((time.perf_counter() - began) / ROW)
    return statistics.median(rows)


def steps(setting: str) -> dict[str, float]:
    """The median step, and the bytes that it sends."""
    from cell_rank import attached, sent_bytes

    training, ends = Training(), []
    session = attached(setting, 0, training.model, training.optimizer)
    for number in range(WARM_UP + STEPS):
        if number == WARM_UP:
            before = sent_bytes()
        training.step()
        ends.append(time.perf_counter())
    sent = (sent_bytes() - before) / STEPS
    session.close()
    took = [end - start for start, end in itertools.pairwise(ends[WARM_UP - 1 :])]
    return {"seconds": statistics.median(took), "sent_bytes": sent}


# What follows from it


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of Gloo's algorithms, which are rings and a binomial tree: what a collective costs a rank."""

    #: Messages that a rank handles one after the other, those of segments side by side counted singly.
    messages: int
    #: Latencies there and back: a message leaves when its receiver has asked for it.
    round_trips: float
    #: Bytes that a rank receives, over those of its part.
    received: float


def shape(what: str, world: int) -> Shape:
    depth = math.ceil(math.log2(world))
    return {
        "all_reduce": Shape(SEGMENTS * 2 * (world - 1), 2 * (world - 1), 2 * (world - 1) / world),
        "all_gather": Shape(world - 1, world - 1, world - 1),
        # All ask for it at once: only the first round waits for that.
        "broadcast": Shape(depth, (depth + 1) / 2, depth),
    }[what]


def software(measured: dict[str, Any], key: str = "seconds") -> dict[str, float]:
    """Least squares of relative errors, no coefficient below 0. `key`: "first_decile" where others keep the machine busy."""
    world, round_trip = measured["world"], measured["round_trip_s"]
    rows, seconds = [], []
    for one in measured["collectives"]:
        of = shape(one["what"], world)
        rows.append([1.0, of.messages, of.received * one["bytes"]])
        seconds.append(max(one[key] - of.round_trips * round_trip, 1e-6))
    scaled = np.array(rows) / np.array(seconds)[:, None]
    best, least = np.zeros(3), math.inf
    for chosen in (c for size in (1, 2, 3) for c in itertools.combinations(range(3), size)):
        found = np.zeros(3)
        found[list(chosen)] = np.linalg.lstsq(scaled[:, chosen], np.ones(len(seconds)), rcond=None)[0]
        error = float(((scaled @ found - 1) ** 2).sum())
        if (found >= 0).all() and error < least:
            best, least = found, error
    return {
        "collective_s": float(best[0]), "round_s": float(best[1]), "byte_s": float(best[2]),
        "stack_s": max(round_trip - 2 * measured["latency_s"], 0.0), "error": math.sqrt(least / len(seconds)),
    }


def collectives_of(setting: str) -> list[str]:
    """Of a bucket."""
    if setting.endswith("/allgather"):
        return ["all_gather"]
    if "/art-ring" in setting:
        return ["broadcast", "all_reduce"]
    return ["all_reduce"] * (2 if setting.startswith("powersgd") else 1)


def exchange(setting: str, measured: dict[str, Any], fitted: dict[str, float]) -> float:
    """Seconds of a step's collectives by the fit."""
    shapes = [shape(kind, measured["world"]) for kind in collectives_of(setting)]
    software = sum(fitted["collective_s"] + of.messages * fitted["round_s"] for of in shapes)
    waiting = sum(of.round_trips for of in shapes) * measured["round_trip_s"]
    received = measured["steps"][setting]["sent_bytes"]
    return float(BUCKETS * software + math.ceil(BUCKETS / AT_ONCE) * waiting + fitted["byte_s"] * received)


def codecs(measured: dict[str, Any], fitted: dict[str, float], table: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Seconds per value by compressor."""
    left = {
        setting: one["seconds"] - exchange(setting, measured, fitted) - measured["compute_s"]
        for setting, one in measured["steps"].items()
    }
    found: dict[str, list[tuple[float, float]]] = {}
    for setting, seconds in left.items():
        compressor = setting.split("/")[0].split("+")[0]
        if compressor == "none":
            continue
        name = compressor.split("(")[0]
        known = table.get(compressor) or table[name]
        kept = float((re.search(r"k=([0-9.]+)", compressor) or [0, 0])[1])
        ratio = (known["decompress_value_s"] + kept * known.get("decompress_kept_s", 0.0)) / (
            known["compress_value_s"] + kept * known.get("compress_kept_s", 0.0)
        )
        messages = measured["world"] if setting.endswith("/allgather") else 1
        compress = max(seconds, 0.0) / VALUES / (1 + messages * ratio)
        found.setdefault(compressor, []).append((compress, ratio * compress))
    means = {name: [statistics.fmean(part) for part in zip(*pairs)] for name, pairs in found.items()}
    return {n: {"compress_value_s": c, "decompress_value_s": d} for n, (c, d) in means.items()}


def as_toml(measured: dict[str, Any], fitted: dict[str, float], codec: dict[str, Any]) -> str:
    """A truth file: what was measured here, and Linux's for the rest."""
    lines = [
        "# Written by python/bench/experiment.py --calibrate: coefficients of user-mode Linux, where all ranks share one processor;",
        f"# measured with {measured['world']} ranks on links of {1e3 * measured['latency_s']:g} ms without limits. A step computes for",
        f"# {measured['compute_s']:.4f} s (`compute_s` of cells); collectives of {SIZES[0]} B to {SIZES[-1]} B are within {100 * fitted['error']:.0f} % of the fit (root mean square).",
        "", "# netem's queue holds 100,000 packets: nothing is lost.", "buffer_bytes = 1e8",
        "# Gloo gathers around a ring.", 'gather = "ring"', "",
        "[tcp]", "segment_bytes = 1448.0", "initial_segments = 10.0", "window_bytes = 6e6", "timeout_s = 0.2", "tail_loss_share = 0.3",
        f"stack_s = {fitted['stack_s']:.4g}", "",
        "[software]", *(f"{key} = {fitted[key]:.4g}" for key in ("collective_s", "round_s", "byte_s")),
        "# As seen on links of 20 ms: an allreduce of 4 ranks takes twelve latencies, two at once as long as one.",
        f"at_once = {AT_ONCE}", "rendezvous = true", f"segments = {SEGMENTS}",
    ]
    for name, seconds in codec.items():
        lines += ["", f'[codec."{name}"]', *(f"{key} = {value:.4g}" for key, value in seconds.items())]
    return "\n".join(lines) + "\n"


def written(measured: dict[str, Any]) -> str:
    """The file that follows from what was measured."""
    import tomllib

    fitted = software(measured)
    return as_toml(measured, fitted, codecs(measured, fitted, tomllib.loads(TRUTH.read_text())["codec"]))


def set_compute(cells: pathlib.Path, seconds: float) -> None:
    """Cells that are played on this machine compute as long as it does."""
    for path in cells.glob("*.toml"):
        text, count = re.subn(r"^compute_s = .*$", f"compute_s = {seconds:.4f}", path.read_text(), flags=re.MULTILINE)
        if count:
            path.write_text(text)


def loopback_rank(rank: int, world: int, rows: int) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT="29599")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    measured = measure([], 0.0, rows)
    if rank == 0:
        print(json.dumps(measured, indent=1))
        for key in ("seconds", "first_decile"):
            print(key, json.dumps(software(measured, key)), file=sys.stderr)
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

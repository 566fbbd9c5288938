"""One rank of experiment.py: goes through the settings, each on the same data, seeds and schedule."""

from __future__ import annotations

import gzip
import json
import pathlib
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import flexcomm.torch

OUT = pathlib.Path(sys.argv[1])
PLAN = json.loads((OUT / "plan.json").read_text())
DATA = pathlib.Path("/usr/share/datasets/fashion-mnist")
BATCH = 32


def pictures(name: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    with gzip.open(DATA / f"{name}-images-idx3-ubyte.gz") as file:
        pixels = np.frombuffer(file.read(16 + 784 * count), np.uint8, offset=16).reshape(count, 1, 28, 28)
    with gzip.open(DATA / f"{name}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(8 + count), np.uint8, offset=8)
    return torch.from_numpy(pixels / np.float32(255) - np.float32(0.3)), torch.from_numpy(labels.astype(np.int64))


def network(seed: int) -> nn.Module:
    """The example's: 110 thousand parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10),
    )


def weather(latency_s: float, bits_per_s: float) -> None:
    """Rank 0 sets every node's link."""
    rate = bits_per_s / PLAN["divisor"]
    for i in range(1, PLAN["ranks"] + 1):
        for line in (
            f"tc -n n{i} class change dev eth0 parent 1: classid 1:10 htb rate {rate:.0f}bit quantum 60000",
            f"tc -n n{i} qdisc change dev eth0 parent 1:10 handle 10: netem delay {latency_s * 1e6:.0f}us limit 100000",
        ):
            subprocess.run(line.split(), check=True)


def sent_bytes() -> int:
    line = next(x for x in pathlib.Path("/proc/net/dev").read_text().splitlines() if "eth0:" in x)
    return int(line.split(":")[1].split()[8])


def prepare(setting: str, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> Any:
    if setting == "fp16_compress_hook":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif setting == "powerSGD_hook":
        model.register_comm_hook(
            powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=3), powerSGD_hook.powerSGD_hook
        )
    elif setting == "flexcomm":
        return flexcomm.torch.attach(model, optimizer)
    elif setting != "dense":
        return flexcomm.torch.attach(model, optimizer, strategy=setting)
    return None


class Run:
    """One setting with one seed."""

    def __init__(self, setting: str, seed: int, data: tuple[torch.Tensor, ...]) -> None:
        self.setting, self.seed, self.rank, self.world = setting, seed, dist.get_rank(), dist.get_world_size()
        self.x, self.y, self.held_out, self.answers = data
        self.model = DistributedDataParallel(network(seed))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.1)
        self.session = prepare(setting, self.model, self.optimizer)
        self.order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(seed))
        self.number, self.seconds = 0, 0.0
        self.accuracy: list[tuple[float, float]] = []
        self.decisions: list[tuple[int, str]] = []

    def step(self, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(self.x[batch]), self.y[batch]).backward()
        self.optimizer.step()

    def batches(self, count: int) -> list[torch.Tensor]:
        start = lambda step: (step * self.world + self.rank) * BATCH % (len(self.x) - BATCH)  # noqa: E731
        return [self.order[start(s):start(s) + BATCH] for s in range(self.number, self.number + count)]

    def epoch(self, steps: int) -> None:
        batches = self.batches(steps)
        dist.barrier()
        began = time.perf_counter()
        if self.session is None:
            for batch in batches:
                self.step(batch)
        else:
            # Trials run within, and their time counts.
            for batch in self.session.batches(batches, train_step=self.step):
                self.step(batch)
                now = (self.session.version, self.session.strategy)
                if self.setting == "flexcomm" and (not self.decisions or self.decisions[-1][1] != f"{now[0]} {now[1]}"):
                    self.decisions.append((self.session.step, f"{now[0]} {now[1]}"))
        self.number += steps
        self.seconds += time.perf_counter() - began
        if self.rank == 0:
            with torch.no_grad():
                right = (self.model.module(self.held_out).argmax(1) == self.answers).float().mean().item()
            self.accuracy.append((self.seconds, 100 * right))

    def go(self) -> dict[str, Any]:
        before, phase_ms = sent_bytes(), []
        for epochs, latency, rate in PLAN["phases"]:
            dist.barrier()
            if self.rank == 0:
                weather(latency, rate)
            at = self.seconds
            for _ in range(epochs):
                self.epoch(PLAN["steps_per_epoch"])
            phase_ms.append((self.seconds - at) * 1e3 / (epochs * PLAN["steps_per_epoch"]))
        if self.session is not None:
            self.session.close()
        return {
            "setting": self.setting, "seed": self.seed, "seconds": self.seconds, "accuracy": self.accuracy,
            "bytes": sent_bytes() - before, "phase_ms": phase_ms, "decisions": self.decisions,
        }


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = (*pictures("train", 12_000), *pictures("t10k", 2_000))
    for seed in range(PLAN["seeds"]):
        for setting in json.loads((OUT / "settings.json").read_text()):
            result = Run(setting, seed, data).go()
            if dist.get_rank() == 0:
                name = f"result-{setting.replace('/', '_')}-{seed}.json"
                (OUT / name).write_text(json.dumps(result))
                print(f"{setting}, seed {seed}: {result['seconds']:.1f} s, {result['accuracy'][-1][1]:.1f} %", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()

"""The ranks of experiment.py: each goes through the settings, each on the same data, seeds and schedule.

One process reads torch and the data and then forks into a rank per network namespace: the machine has one CPU, and four
imports of torch take longer than most settings.
"""

from __future__ import annotations

import ctypes
import gzip
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import traceback
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import flexcomm.torch

# Scripts are run with -P: this folder holds no package.
sys.path.append(str(pathlib.Path(__file__).resolve().parent))
import calibrate  # noqa: E402
from cell_rank import CellRun, sent_bytes  # noqa: E402

OUT = pathlib.Path(sys.argv[1])
PLAN = json.loads((OUT / "plan.json").read_text())
DATA = pathlib.Path("/usr/share/datasets/fashion-mnist")
BATCH, EVALUATED_AT_ONCE = 32, 50
#: For all ranks: in schedules, and in cells.
PICTURES, CELL_PICTURES = 12_000, 24_000
#: Of the 10,000 test images, after each epoch; after the last one all.
HELD_OUT = 1_000


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


def set_network(latency_s: float, bits_per_s: float) -> None:
    """Rank 0 sets every node's link."""
    rate = bits_per_s / PLAN["divisor"]
    for i in range(1, PLAN["ranks"] + 1):
        for line in (
            f"tc -n n{i} class change dev eth0 parent 1: classid 1:10 htb rate {rate:.0f}bit quantum 60000",
            f"tc -n n{i} qdisc change dev eth0 parent 1:10 handle 10: netem delay {latency_s * 1e6:.0f}us limit 100000",
        ):
            subprocess.run(line.split(), check=True)


def prepare(setting: str, seed: int, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> Any:
    if setting == "fp16_compress_hook":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif setting == "powerSGD_hook":
        model.register_comm_hook(
            powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=3), powerSGD_hook.powerSGD_hook
        )
    elif setting == "flexcomm":
        # A job of its own: the controller would go on with what it knows of the seed before.
        return flexcomm.torch.attach(model, optimizer, job=f"seed-{seed}")
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
        self.session = prepare(setting, seed, self.model, self.optimizer)
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
            self.accuracy.append((self.seconds, self.measured_accuracy(HELD_OUT)))

    @torch.no_grad()
    def measured_accuracy(self, count: int) -> float:
        """Percent of so many held-out images; a few at a time, fresh memory is dear in user-mode Linux."""
        parts = zip(self.held_out[:count].split(EVALUATED_AT_ONCE), self.answers[:count].split(EVALUATED_AT_ONCE))
        right = sum((self.model.module(x).argmax(1) == y).sum().item() for x, y in parts)
        return 100 * right / count

    def go(self) -> dict[str, Any]:
        before, phase_ms = sent_bytes(), []
        for epochs, latency, rate in PLAN["phases"]:
            dist.barrier()
            if self.rank == 0:
                set_network(latency, rate)
            at = self.seconds
            for _ in range(epochs):
                self.epoch(PLAN["steps_per_epoch"])
            phase_ms.append((self.seconds - at) * 1e3 / (epochs * PLAN["steps_per_epoch"]))
            if self.rank == 0:
                print(f"{self.setting}, seed {self.seed}: {phase_ms[-1]:.0f} ms per step at {rate / 1e9:g} Gbit/s", flush=True)
        if self.session is not None:
            self.session.close()
        return {
            "setting": self.setting, "seed": self.seed, "seconds": self.seconds, "accuracy": self.accuracy,
            "final": self.measured_accuracy(len(self.answers)) if self.rank == 0 else None,
            "bytes": sent_bytes() - before, "phase_ms": phase_ms, "decisions": self.decisions,
        }


def main(data: tuple[torch.Tensor, ...]) -> None:
    """A rank."""
    dist.init_process_group("gloo")
    if PLAN.get("calibrate"):
        measured = calibrate.measure(PLAN["settings"], PLAN["machine"])
        if dist.get_rank() == 0:
            (OUT / "measured.json").write_text(json.dumps(measured, indent=1))
    for setting, seed in json.loads((OUT / "runs.json").read_text()):
        run = CellRun(PLAN["cell"], setting, seed, data) if PLAN.get("cell") else Run(setting, seed, data)
        result = run.go()
        if dist.get_rank() == 0:
            (OUT / f"result-{setting.replace('/', '_')}-{seed}.json").write_text(json.dumps(result))
            print(f"{setting}, seed {seed}: {result['seconds']:.1f} s, {result['final']:.1f} %", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def enter(node: int) -> None:
    """This process goes into a node's network."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/n{node}") as space:
        # CLONE_NEWNET.
        if libc.setns(space.fileno(), 0x40000000) != 0:
            raise OSError(ctypes.get_errno(), f"failed to enter the network of n{node}")


def fork(node: int, data: tuple[torch.Tensor, ...]) -> int:
    """A rank in a process of its own: its id."""
    child = os.fork()
    if child:
        return child
    try:
        log = os.open(OUT / f"rank{node}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        enter(node)
        os.environ["RANK"] = str(node - 1)
        if os.environ["FLEXCOMM_RUN"]:
            os.environ["FLEXCOMM_SOCKET"] = f"{os.environ['FLEXCOMM_RUN']}/n{node}/agent.sock"
        main(data)
        sys.stdout.flush()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def ranks() -> None:
    torch.set_num_threads(1)
    data = (*pictures("train", CELL_PICTURES if PLAN.get("cell") else PICTURES), *pictures("t10k", 10_000))
    living = {fork(node, data) for node in range(1, PLAN["ranks"] + 1)}
    while living:
        child, status = os.wait()
        living.discard(child)
        if status != 0:
            # The others would wait for it.
            for other in living:
                os.kill(other, signal.SIGKILL)
            raise SystemExit(f"a rank has failed; see {OUT}/rank*.log")


ranks()

"""A rank of experiment.py --cell: the suite's perceptron, trained by one setting on a network that changes by the clock."""

from __future__ import annotations

import socket
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flexcomm.torch

#: Where the process that changes the network listens.
CLOCK = "/run/clock"

#: How often parameters are kept for the test loss, in steps; as the suite.
TEST_EVERY = 25

#: At once when the test loss is taken: fresh memory is dear in user-mode Linux.
EVALUATED_AT_ONCE = 100

#: Of DDP: a layer's weights and biases, in the order of backward. Biases come first, and no layer's fit into it with its weights.
BUCKET_BYTES = 5000

def perceptron(seed: int) -> nn.Module:
    """The suite's: 784-256-128-10, weights uniform with variance 2 / inputs, biases 0."""
    torch.manual_seed(seed)
    sizes = (784, 256, 128, 10)
    layers = [nn.Linear(inputs, outputs) for inputs, outputs in zip(sizes, sizes[1:])]
    for layer in layers:
        nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
    return nn.Sequential(nn.Flatten(), layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


def rate(cell: dict[str, Any], step: int) -> float:
    """Falls linearly to a tenth."""
    return float(cell["learning_rate"] * (1 - 0.9 * min(step / cell["steps"], 1.0)))


def momentum(cell: dict[str, Any], setting: str) -> float:
    """DGC's memory has a momentum of its own, in the optimizer's place."""
    return 0.0 if "ef(dgc" in setting else cell["momentum"]


def wrapped(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=BUCKET_BYTES / 2**20)


def check_buckets(model: DistributedDataParallel) -> None:
    """A bucket for each layer, the last one first: what the suite has."""
    layers = [module for module in model.module.modules() if isinstance(module, nn.Linear)]
    wanted = [4 * (layer.weight.numel() + layer.bias.numel()) for layer in reversed(layers)]
    found = [int(size) for size in model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")]
    if found != wanted:
        raise RuntimeError(f"DDP has buckets of {found} bytes, the suite's are {wanted}")


def attached(setting: str, seed: int, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> Any:
    if setting == "flexcomm":
        # A job of its own: the controller would go on with what it knows of the seed before.
        return flexcomm.torch.attach(model, optimizer, job=f"seed-{seed}")
    return flexcomm.torch.attach(model, optimizer, strategy="dense" if setting.startswith("none/") else setting)


class CellRun:
    """One setting with one seed."""

    def __init__(self, cell: dict[str, Any], setting: str, seed: int, data: tuple[torch.Tensor, ...]) -> None:
        self.cell, self.setting, self.seed, self.held_out = cell, setting, seed, data[2:]
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.pictures, self.labels = (part[self.rank :: self.world] for part in data[:2])
        self.model = wrapped(perceptron(seed))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=rate(cell, 0), momentum=momentum(cell, setting))
        self.session = attached(setting, seed, self.model, self.optimizer)
        self.order = torch.randperm(len(self.pictures), generator=torch.Generator().manual_seed(seed * 1000 + self.rank))
        self.ends: list[float] = []
        self.decisions: list[tuple[int, str]] = []
        # Written once: no step pays for fresh memory.
        count = sum(p.numel() for p in self.model.parameters())
        self.kept = torch.zeros(1 + cell["steps"] // TEST_EVERY if self.rank == 0 else 0, count)

    def step(self, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(self.pictures[batch]), self.labels[batch]).backward()
        self.optimizer.step()

    def batches(self) -> list[torch.Tensor]:
        each = self.cell["batch"] // self.world
        return [self.order.roll(-step * each)[:each] for step in range(self.cell["steps"])]

    def keep(self, number: int) -> None:
        if self.rank == 0:
            torch.cat([p.detach().reshape(-1) for p in self.model.parameters()], out=self.kept[number])

    def train(self) -> None:
        self.keep(0)
        for number, batch in enumerate(self.session.batches(self.batches(), train_step=self.step), 1):
            for group in self.optimizer.param_groups:
                group["lr"] = rate(self.cell, number - 1)
            self.step(batch)
            self.ends.append(time.monotonic())
            if number % TEST_EVERY == 0:
                self.keep(number // TEST_EVERY)
            self.note_decision()

    def note_decision(self) -> None:
        now = f"{self.session.version} {self.session.strategy}"
        if self.setting == "flexcomm" and (not self.decisions or self.decisions[-1][1] != now):
            self.decisions.append((self.session.step, now))

    def go(self) -> dict[str, Any]:
        clock = socket.socket(socket.AF_UNIX)
        if self.rank == 0:
            clock.connect(CLOCK)
            # The network is as at the start of the cell.
            clock.recv(1)
        dist.barrier()
        before, began = sent_bytes(), time.monotonic()
        if self.rank == 0:
            clock.send(b"x")
        self.train()
        # A step has ended when it has on all ranks; they share a clock.
        ends = torch.tensor(self.ends, dtype=torch.float64)
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        sent = sent_bytes() - before
        clock.close()
        self.session.close()
        check_buckets(self.model)
        tested = self.tested() if self.rank == 0 else {}
        return {
            "setting": self.setting, "seed": self.seed, "ends": (ends - began).tolist(),
            "seconds": float(ends[-1] - began), "bytes": sent, "decisions": self.decisions, **tested,
        }

    @torch.no_grad()
    def tested(self) -> dict[str, Any]:
        """Of the parameters that were kept, after the run: nothing of it is in the run's time."""
        losses, final = [], 0.0
        for row in self.kept:
            torch.nn.utils.vector_to_parameters(row, self.model.parameters())
            parts = zip(*(part.split(EVALUATED_AT_ONCE) for part in self.held_out))
            outputs = [(self.model.module(x), y) for x, y in parts]
            total = sum(nn.functional.cross_entropy(out, y, reduction="sum").item() for out, y in outputs)
            right = sum((out.argmax(1) == y).sum().item() for out, y in outputs)
            losses.append(total / len(self.held_out[1]))
            final = 100 * right / len(self.held_out[1])
        return {"losses": losses, "final": final}


def sent_bytes() -> int:
    """Of this node's link."""
    with open("/proc/net/dev") as file:
        line = next(x for x in file if "eth0:" in x)
    return int(line.split(":")[1].split()[8])

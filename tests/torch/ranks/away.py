"""Ranks that train while the controller goes away and comes back."""

import os
import time

import torch
from common import FOLDER, Lines, batch, ddp, everywhere, network, parameters_hash, ranks, same

import flexcomm.torch

#: What is waited for comes within seconds.
MOST_SECONDS = 100


class Run:
    def __init__(self, rank):
        self.rank, self.step, self.equal, self.steps_at = rank, 0, True, []
        # Large enough that the collectives' time depends on the bytes.
        self.model = ddp(network((20, 2000, 2000, 2)), bucket_cap_mb=25)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.session = flexcomm.torch.attach(self.model, self.optimizer, socket=os.environ["SOCKET"], job="away")

    def train(self, until):
        """Until it is so on all ranks; answers what ran and how steadily."""
        began = time.monotonic()
        self.steps_at = [began]
        while time.monotonic() - began < MOST_SECONDS:
            for _ in range(10):
                x, y = batch(self.step, self.rank)
                self.optimizer.zero_grad()
                torch.nn.functional.cross_entropy(self.model(x), y).backward()
                self.optimizer.step()
                self.step += 1
                self.steps_at.append(time.monotonic())
                self.equal &= same((parameters_hash(self.model), self.session.version, self.session.strategy))
            if all(everywhere(until())):
                break
        return {
            "version": self.session.version, "strategy": self.session.strategy, "steps": len(self.steps_at) - 1,
            "longest": max(b - a for a, b in zip(self.steps_at, self.steps_at[1:])), "seconds": self.steps_at[-1] - began,
        }


with ranks() as (rank, world, seen):
    lines = Lines()
    run = Run(rank)
    # Rank 0's clock decides for all when it has ended.
    seen["before"] = run.train(lambda: run.session.version >= 1 and not run.session.strategy.startswith("none/"))
    if rank == 0:
        (FOLDER / "decided").touch()
    seen["away"] = run.train(lambda: (FOLDER / "back").exists())
    seen["after"] = run.train(lambda: run.session.strategy.startswith("none/"))
    run.train(lambda: True)
    seen |= {"equal": run.equal, "lines": lines.take()}
    run.session.close()

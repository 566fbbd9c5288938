"""The jobs of tests/suite over torch.distributed: what every rank sees of each. With a job's name behind the folder that one alone."""

from __future__ import annotations

import faulthandler
import json
import os
import pathlib
import signal
import sys
from typing import Any, Callable

import torch
import torch.distributed as dist
from common import FOLDER, Short, batch, ddp, everywhere, network, parameters_hash, ranks
from fake_agent import FakeAgent, decision, trial

import flexcomm.torch

SUITE = pathlib.Path(__file__).parents[3] / "tests" / "suite"

#: Steps after an order that changes nothing, and the most until one takes effect.
ON, MOST = 6, 400


class Job:
    """One rank of a job; ends with `steps` steps, or by `end`."""

    def __init__(self, rank: int, name: str, suite: dict[str, Any]) -> None:
        self.rank = rank
        self.agent = FakeAgent(FOLDER, name).start() if rank == 0 else None
        self.model = ddp(network())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.session = flexcomm.torch.attach(
            self.model, self.optimizer, socket=str(self.agent.path) if self.agent else None,
            **{"strategy" if suite.get("held") else "initial": suite["strategy"]},
        )
        if self.agent:
            self.agent.wait_for("hello")
        self.log: list[tuple[str, int, str]] = []
        self.batches = self.session.batches(range(1_000_000))
        #: How it fails from now on, as tests/suite/README.md has it.
        self.fails = ""

    def step(self) -> None:
        """One step of training, and the trial before it, if one has begun."""
        for number in self.batches:
            x, y = batch(number, self.rank)
            if self.fails == "not_finite":
                x[0, 0] = float("nan")
            elif self.fails == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            self.optimizer.zero_grad()
            torch.nn.functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            if not self.session.in_trial:
                break
        self.log.append((parameters_hash(self.model.module), self.session.version, self.session.strategy))

    def train(self, steps: int, until: Callable[[], bool] = lambda: False) -> None:
        """Until rank 0 sees that it holds."""
        for _ in range(steps):
            self.step()
            if everywhere(self.rank == 0 and until())[0]:
                return

    def order(self, orders: list[dict[str, Any]], versions: list[int]) -> None:
        """Publishes one order after the other, and waits for what it does."""
        self.train(4)
        left = versions[1:]
        for order in orders:
            decided, tried = order.get("decision"), order.get("trial")
            if self.agent:
                made = decided and decision(decided["version"], decided["strategy"])
                if decided and decided.get("forged"):
                    made |= {"digest": 7}
                self.agent.publish(
                    decision=made, trial=tried and trial(tried["id"], tried["candidates"], tried["iterations"])
                )
            if decided and not decided.get("forged") and left[:1] == [decided["version"]]:
                version = left.pop(0)
                self.train(MOST, lambda version=version: self.session.version == version)
            if tried:
                self.train(MOST, lambda tried=tried: tried["id"] in [t["id"] for t in self.agent.of_kind("trial")])
                self.train(MOST, lambda tried=tried: not tried.get("shadows") or self.has_shadows(tried["id"]))
            self.train(ON)

    def has_shadows(self, number: int) -> bool:
        """Whether rank 0 has reported what the shadow trials of all that compresses found."""
        outcomes = [report for report in self.agent.of_kind("trial") if report["id"] == number][-1]["outcomes"]
        return all("shadow_gain" in o for o in outcomes if not o["strategy"].startswith("none"))

    def close(self) -> list[tuple[str, int, str]]:
        self.batches.close()
        self.session.close()
        return self.log


def run(rank: int, name: str, suite: dict[str, Any]) -> dict[str, Any]:
    job = Job(rank, name, suite)
    job.order(suite["orders"], suite["versions"])
    seen: dict[str, Any] = {"trials": job.agent.of_kind("trial") if job.agent else []}
    if "fails" in suite:
        how = suite["fails"]["how"]
        if rank == suite["fails"]["rank"]:
            job.fails = how
            if how == "codec":
                job.session.hook.core = Short(job.session.hook.core)
        try:
            job.train(2)
        except RuntimeError as error:
            seen["error"] = str(error)
        # Of a rank that was killed the others end, too.
        if how != "killed":
            job.close()
        return seen
    seen["log"] = job.close()
    if suite.get("held"):
        plain = Job(rank, f"{name}0", suite)
        plain.train(len(seen["log"]))
        seen["plain"] = plain.close()
    return seen


def run_killed(name: str) -> None:
    """A job after which its process group is broken: each rank ends with what it saw."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    faulthandler.dump_traceback_later(100, exit=True)
    seen = run(rank, name, json.loads((SUITE / f"{name}.json").read_text()))
    (FOLDER / f"rank{rank:02}.json").write_text(json.dumps(seen))
    os._exit(0)


if len(sys.argv) > 2:
    run_killed(sys.argv[2])

with ranks() as (rank, world, seen):
    for number, path in enumerate(sorted(SUITE.glob("*.json"))):
        if not path.stem.startswith("killed"):
            seen[path.stem] = run(rank, f"s{number}", json.loads(path.read_text()))

"""What live trials put back, what they leave alone, and where they must not run."""

import sys

import numpy as np
import torch
from common import FOLDER, Lines, batch, ddp, network, parameters_hash, ranks, same
from fake_agent import FakeAgent, trial
from torch.distributed.optim import ZeroRedundancyOptimizer

import flexcomm.torch

HELD = "topk(k=0.1)+ef(vanilla)/allgather"
CANDIDATES = ["none/dense-ring", HELD, "topk(k=0.05)+ef(vanilla)/art-ring:var"]


class Odd(torch.nn.Module):
    """Keeps state in a buffer that is assigned anew, in attributes and lists, in an object behind `get_extra_state`, and in
    what nothing can copy."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = torch.nn.Linear(20, 30), torch.nn.Linear(30, 2)
        self.register_buffer("mean", torch.zeros(30))
        self.count, self.seen, self.noise = 0, [], np.random.default_rng(5)
        self.table = {"sums": torch.zeros(30)}
        self.counter = Counter()

    def forward(self, x):
        h = self.first(x).relu()
        if self.training:
            self.mean = self.mean * 0.9 + 0.1 * h.detach().mean(0)
            self.count += 1
            self.seen.append(float(h.detach().mean()))
            self.table["sums"] += h.detach().sum(0)
            self.counter.count += 1
        scale = 1 + 0.001 * self.count + 0.01 * sum(self.seen[-3:]) + 0.01 * self.noise.standard_normal() + 0.001 * self.counter.count
        return self.second((h - self.mean) * scale + 1e-4 * self.table["sums"])

    def get_extra_state(self):
        return {"counter": self.counter.count}

    def set_extra_state(self, state):
        self.counter.count = state["counter"]


class Counter:
    """What no one can see into."""

    __slots__ = ("count",)

    def __init__(self):
        self.count = 0


class Replacing(torch.optim.SGD):
    """Takes new tensors for its state in every step, which others refer to, and counts in an attribute."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.05)
        self.steps = 0
        self.first = {}

    def step(self, closure=None):
        self.steps += 1
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                state["mean"] = state.get("mean", torch.zeros_like(p)) * 0.9 + p.grad
                state.setdefault("history", []).append(float(p.grad.sum()))
                p -= 0.05 / (1 + 0.01 * self.steps) * state["mean"] + 1e-5 * sum(state["history"][-2:])


class Stateful:
    """As torchdata's: after load_state_dict the next iterator goes on from there."""

    def __init__(self, rank):
        self.rank, self.at, self.next = rank, None, None

    def __iter__(self):
        self.at, self.next = self.next or 0, None
        while self.at < 20:
            self.at += 1
            yield self.at - 1, *batch(self.at - 1, self.rank)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.next = state["at"]


class Average:
    """Of weights; the loop's author updates it in trials too."""

    def __init__(self, model):
        self.model, self.mean = model, [p.detach().clone() for p in model.parameters()]

    def update(self):
        for mean, p in zip(self.mean, self.model.parameters()):
            mean.lerp_(p.detach(), 0.1)

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = [m.clone() for m in state["mean"]]


def optimizers(kind, model):
    if kind == "zero":
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    return Replacing(model.parameters()) if kind == "replacing" else torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def bodies(kind, data):
    """What loops do to their batches."""
    if kind == "pops":
        return data.pop("x"), data.pop("y")
    if kind == "writes":
        data["x"].mul_(0.5)
    return data["x"], data["y"]


class Run:
    """60 steps in epochs of 20 batches; trials are ordered after steps 7 and 33, and in the middle of the epoch's end."""

    def __init__(self, rank, name, trials, *, model=None, optimizer="sgd", body="plain", orders=(7, 33), nan=False, forgotten=False):
        self.rank, self.body, self.nan, self.trials, self.orders = rank, body, nan, trials, orders
        self.agent = FakeAgent(FOLDER, f"{name}{int(trials)}{rank}").start()
        self.model = ddp(model or network(), broadcast_buffers=False)
        self.optimizer = optimizers(optimizer, self.model)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 10 if forgotten else 1, 0.9)
        #: Nobody gave it, and the loop's body steps it.
        self.forgotten = forgotten
        self.loader, self.average = Stateful(rank), Average(self.model)
        self.session = flexcomm.torch.attach(
            self.model, self.optimizer, scheduler=None if forgotten else self.scheduler, strategy=HELD, socket=str(self.agent.path),
            extra=[self.loader, self.average],
        )
        self.agent.wait_for("hello")
        torch.manual_seed(rank)
        self.hashes, self.given, self.done = [], [], 0

    def step(self, data):
        x, y = bodies(self.body, data)
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.model(x), y)
        if self.nan and self.session.in_trial and self.rank == 1:
            loss = loss * float("nan")
        loss.backward()
        self.optimizer.step()
        self.average.update()
        if self.forgotten:
            self.scheduler.step()

    def order(self):
        if self.trials and self.done in self.orders and self.rank == 0:
            self.agent.publish(trial=trial(self.done, CANDIDATES))

    def go(self):
        while self.done < 60:
            given = []
            for number, x, y in self.session.batches(self.loader):
                self.step({"x": x.clone() if self.body == "plain" else x, "y": y})
                if self.session.in_trial:
                    continue
                given.append(number)
                self.done += 1
                means = sum(m.sum().item() for m in self.average.mean)
                self.hashes.append((parameters_hash(self.model.module), means, self.session.step))
                self.order()
            self.given.append(given)
            # Also after an epoch whose last batch was followed by a trial.
            if not self.forgotten:
                self.scheduler.step()
        self.session.close()
        self.agent.wait_for("bye")
        live = {t["id"]: t for t in self.agent.of_kind("trial")}
        reports = [(n, [o["iterations"] for o in t["outcomes"]], t.get("aborted")) for n, t in live.items()]
        return {"hashes": self.hashes, "given": self.given, "reports": reports, "rate": self.optimizer.param_groups[0]["lr"]}


class Popping(Run):
    """Batches are dictionaries that the loop empties, or tensors that it writes to."""

    def go(self):
        loader, self.loader = self.loader, None
        data = lambda: ({"n": n, "x": x, "y": y} for n, x, y in loader)  # noqa: E731
        while self.done < 60:
            for item in self.session.batches(data()):
                self.step(item)
                if self.session.in_trial:
                    continue
                self.done += 1
                self.hashes.append((parameters_hash(self.model.module), 0, self.session.step))
                self.order()
        self.session.close()
        self.agent.wait_for("bye")
        reports = [(t["id"], [o["iterations"] for o in t["outcomes"]], None) for t in self.agent.of_kind("trial")]
        return {"hashes": self.hashes, "reports": reports}


def plain_loops(rank, name, trials, orders, leaves=None, apart=False):
    """Ten batches in batches(), then 30 in an ordinary loop. `leaves`: a break in so manieth iteration of a trial. `apart`:
    only rank 1 leaves."""
    agent = FakeAgent(FOLDER, f"{name}{int(trials)}{rank}").start()
    model = ddp(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session = flexcomm.torch.attach(model, optimizer, strategy=HELD, socket=str(agent.path))
    agent.wait_for("hello")
    out = {"hashes": [], "steps": [], "in_trial": []}

    def step(n):
        x, y = batch(n, rank)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if trials and rank == 0 and n in orders and not session.in_trial:
            agent.publish(trial=trial(n, [HELD, HELD], 4))

    def note():
        out["hashes"].append(parameters_hash(model.module))
        out["steps"].append(session.step)
        out["in_trial"].append(session.in_trial)

    seen, n = 0, 0
    for n in session.batches(range(10)):
        step(n)
        seen += session.in_trial
        if leaves is not None and seen == leaves and (rank == 1 or not apart):
            # The batch of the trial has not been trained on.
            n -= 1
            break
        if not session.in_trial:
            note()
    if apart and trials and rank == 1:
        # Undone on all ranks: until they know of each other rank 0 runs its trial.
        step(n)
    for n in range(len(out["hashes"]), 40):
        step(n)
        note()
    out["equal"] = same(out["hashes"][-1])
    session.close()
    agent.wait_for("bye")
    out["reports"] = [(t["id"], t.get("aborted")) for t in agent.of_kind("trial")]
    return out


def strangers(rank, lines):
    """A process with a second optimizer that was not given."""
    agent = FakeAgent(FOLDER, f"strangers{rank}").start()
    model = ddp(Odd(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    other = torch.optim.RMSprop([torch.nn.Parameter(torch.zeros(3))])
    schedule = torch.optim.lr_scheduler.ExponentialLR(other, 0.9)
    session = flexcomm.torch.attach(model, optimizer, strategy=HELD, socket=str(agent.path))
    agent.wait_for("hello")
    for n in session.batches(range(30)):
        x, y = batch(n, rank)
        if not session.in_trial:
            # As a loop that shuffles or logs by chance: the trial's own numbers are not those that training draws.
            np.random.rand()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if n == 8 and rank == 0 and not session.in_trial:
            agent.publish(trial=trial(1, [HELD]))
    session.close()
    agent.wait_for("bye")
    return lines.take(), schedule.last_epoch


CASES = {
    "odd": lambda rank, t: Run(rank, "odd", t, model=Odd()),
    "replacing": lambda rank, t: Run(rank, "repl", t, optimizer="replacing"),
    "zero": lambda rank, t: Run(rank, "zero", t, optimizer="zero"),
    "pops": lambda rank, t: Popping(rank, "pops", t, body="pops"),
    "writes": lambda rank, t: Popping(rank, "writ", t, body="writes"),
    "forgotten": lambda rank, t: Run(rank, "forg", t, forgotten=True),
    "nan": lambda rank, t: Run(rank, "nan", t, nan=True),
    # The plan takes two steps: the trials begin after an epoch's last batch, and after the last but one.
    "end": lambda rank, t: Run(rank, "end", t, orders=(18, 37)),
    "plain": lambda rank, t: lambda: plain_loops(rank, "plain", t, (14, 25)),
    "late": lambda rank, t: lambda: plain_loops(rank, "late", t, (8,)),
    "later": lambda rank, t: lambda: plain_loops(rank, "later", t, (9,)),
    "left": lambda rank, t: lambda: plain_loops(rank, "left", t, (4,), leaves=3 if t else None),
    "atend": lambda rank, t: lambda: plain_loops(rank, "atend", t, (4,), leaves=4 if t else None),
    "apart": lambda rank, t: lambda: plain_loops(rank, "apart", t, (4,), leaves=3 if t else None, apart=True),
}

with ranks() as (rank, world, seen):
    # First: other runs leave optimizers behind.
    seen["strangers"] = strangers(rank, Lines())
    for name in sys.argv[2:] or CASES:
        seen[name] = []
        for trials in (True, False):
            run = CASES[name](rank, trials)
            seen[name].append(run() if callable(run) else run.go())

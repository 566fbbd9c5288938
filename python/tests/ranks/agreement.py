"""What ranks do when decisions come late or not at all, and agents die."""

import itertools
import time

import torch
import torch.distributed as dist
from common import FOLDER, Lines, batch, ddp, everywhere, network, parameters_hash, ranks, same
from fake_agent import FakeAgent, decision, trial

import flexcomm.torch

GATHER, STAR, LW = "topk(k=0.1)+ef(vanilla)/allgather", "topk(k=0.05)+ef(vanilla)/art-ring:star", "lwtopk(k=0.1)+ef(vanilla)/allgather"


#: Layers of a model with one bucket, and of a larger one.
SMALL, LARGE = (20, 120, 120, 2), (20, 520, 600)


class Run:
    """One job on all ranks; every step compares parameters, version and strategy over the ranks."""

    def __init__(self, name, rank, agents, sizes=SMALL, **options):
        self.rank, self.step = rank, 0
        self.agent = FakeAgent(FOLDER, f"{name}{rank}") if agents(rank) else None
        if self.agent:
            self.agent.start()
        self.model = ddp(network(sizes))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        socket = str(self.agent.path) if self.agent else None
        self.session = flexcomm.torch.attach(self.model, self.optimizer, socket=socket, **options)
        self.equal, self.versions = True, [self.session.version]
        # Orders come behind the welcome.
        if self.agent:
            self.agent.wait_for("hello")

    def train(self, steps, until=None):
        for _ in range(steps):
            x, y = batch(self.step, self.rank)
            self.optimizer.zero_grad()
            torch.nn.functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            self.step += 1
            state = (parameters_hash(self.model.module), self.session.version, self.session.strategy, self.session.step)
            self.equal &= same(state)
            if not self.versions or self.versions[-1] != self.session.version:
                self.versions.append(self.session.version)
            if until is not None and all(everywhere(until())):
                return

    def end(self):
        self.session.close()
        return {
            "equal": self.equal, "versions": self.versions, "strategy": self.session.strategy, "steps": self.session.step,
            "asked": self.step,
        }


def late(rank):
    """The decision reaches the ranks' agents at different times."""
    run = Run("late", rank, lambda r: True)
    for turn in range(4):
        # Rank 0's agent hears of it third.
        if turn == (rank + 2) % 4:
            run.agent.publish(decision=decision(1, GATHER))
        run.train(4)
    run.train(200, lambda: run.session.version == 1)
    run.agent.publish(decision=decision(2, STAR))
    run.train(200, lambda: run.session.version == 2)
    run.train(5)
    run.agent.publish(decision=decision(3, "none/dense-ring"))
    run.train(200, lambda: run.session.version == 3)
    run.train(5)
    out = run.end()
    out["applied"] = [m["version"] for m in run.agent.of_kind("applied")] if run.agent.wait_for("bye") else None
    steps = [m for m in run.agent.of_kind("steps")]
    out["reported"] = sorted({(m["version"], m["strategy"].split("/")[1].split(":")[0]) for m in steps})
    records = [s for m in steps for s in m["steps"]]
    out["sane"] = all(
        s["step_us"] > 0 and 0 <= s["comp_us"] <= s["step_us"] and 0 < s["gain"] <= 1 and s["sync_us"] <= s["step_us"]
        and s["compute_us"] <= s["step_us"] and s["bytes_sent"] > 0 and (s["energy"] > 0 or s["gain"] == 1)
        for s in records
    )
    out["records"] = len(records)
    return out


def dead(rank, whose):
    """One rank has no agent at all: its socket is named and nothing listens."""
    run = Run(f"dead{whose}", rank, lambda r: r != whose)
    if run.agent is None:
        # As the environment would name it on a node whose agent has died.
        run.session._core.connect(str(FOLDER / "nobody.sock"), "torch-gloo", [])
    else:
        run.agent.publish(decision=decision(1, GATHER))
    run.train(30 if whose == 0 else 200, (lambda: run.session.version == 1) if whose else None)
    return run.end()


def restarted(rank):
    """Rank 0's agent is killed and started again; the controller is away meanwhile."""
    run = Run("again", rank, lambda r: r == 0)
    if rank == 0:
        run.agent.publish(decision=decision(1, GATHER))
    run.train(200, lambda: run.session.version == 1)
    if rank == 0:
        run.agent.kill()
    run.train(20)
    away = run.session.version, run.session.strategy
    if rank == 0:
        run.agent.start()
        run.agent.wait_for("hello", 2)
        run.agent.publish(decision=decision(2, LW))
    run.train(400, lambda: run.session.version == 2)
    out = run.end() | {"away": away}
    if rank == 0:
        run.agent.wait_for("bye")
        out["received again"] = [m["version"] for m in run.agent.of_kind("applied")]
    return out


def silent(rank):
    """The controller goes away: no orders for a thousand steps. `away.py` has a real one, and
    a minute."""
    run = Run("silent", rank, lambda r: True)
    if rank == 0:
        run.agent.publish(decision=decision(1, STAR))
    run.train(200, lambda: run.session.version == 1)
    for step in range(1000):
        x, y = batch(step, rank)
        run.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(run.model(x), y).backward()
        run.optimizer.step()
    run.train(3)
    if rank == 0:
        run.agent.publish(decision=decision(2, GATHER))
    run.train(200, lambda: run.session.version == 2)
    return run.end()


def hooked(run):
    """Whether DDP has flexcomm's hook."""
    return len(run.model._comm_hooks) == 1


def wrapped(rank, name, sizes):
    """While dense, DDP needs no hook, and gives what it gives without flexcomm; ranks may register the hook at different
    times, and leave out the optimizer's step."""
    run = Run(name, rank, lambda r: True, sizes)
    plain = ddp(network(sizes))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for step in range(20):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
    run.train(20)
    seen = {"bits": parameters_hash(plain.module) == parameters_hash(run.model.module), "early": hooked(run)}
    if rank == 1:
        run.session.shadow([GATHER])
    run.train(10)
    seen["shadow"] = hooked(run)
    run.agent.publish(decision=decision(1, "none/dense-ring"))
    run.train(200, lambda: run.session.version == 1)
    run.train(3)
    seen["dense"] = hooked(run)
    run.agent.publish(decision=decision(2, GATHER))
    # Every rank leaves out the optimizer's step at another time, so that in no step all of them say when it ends; and
    # from here on every rank has parameters of its own.
    seen["equal"] = run.equal
    for step in range(40):
        x, y = batch(run.step, rank)
        run.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(run.model(x), y).backward()
        if step % 4 != rank:
            run.optimizer.step()
        run.step += 1
    run.train(20)
    return run.end() | seen | {"late": hooked(run)}


def sums(rank, trio):
    """Three ranks, dense, with an agent, with the wrapper and with the hook, beside native DDP from the same parameters in every step:
    steps whose gradients have the same bits."""
    runs = []
    for hooked, sizes in itertools.product((False, True), ((20, 61, 2), LARGE)):
        agent = FakeAgent(FOLDER, f"sums{rank}{hooked:d}{sizes[1]}").start()
        model, plain = (ddp(network(sizes), process_group=trio) for _ in range(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        session = flexcomm.torch.attach(model, optimizer, socket=str(agent.path))
        agent.wait_for("hello")
        if hooked:
            session._registration.register()
        exact = []
        for step in range(40):
            plain.load_state_dict(model.state_dict())
            for each in (model, plain):
                each.zero_grad()
                torch.nn.functional.cross_entropy(each(batch(step, rank)[0]), batch(step, rank)[1]).backward()
            pairs = [(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters())]
            exact += [step] if all(torch.equal(a, b) for a, b in pairs) else []
            optimizer.step()
        runs.append({"exact": exact, "equal": same(parameters_hash(model), trio)})
        session.close()
    return runs


def foreign(rank, lines):
    """An agent of another protocol, and orders that are not valid: said, and nothing changes on any rank."""
    run = Run("foreign", rank, lambda r: r == 0)
    if rank == 0:
        lines.take()
        for bad in [decision(3, "sorcery@0.1/allgather"), decision(3, GATHER) | {"digest": 7}]:
            run.agent.publish(decision=bad)
            time.sleep(0.05)
        run.train(1)
    else:
        run.train(1)
    for raw in [b"not json", b'{"kind": "orders", "job": "other", "decision": null}']:
        if rank == 0:
            run.agent.publish(raw=raw)
        run.train(3)
    if rank == 0:
        run.agent.publish(decision=decision(4, "topk(k=0.1)+ef(vanilla)/art-tree:star"))
    run.train(200, lambda: run.session.version == 4)
    out = run.end() | {"lines": lines.take()}
    refused = FakeAgent(FOLDER, f"refuses{rank}", refuse="protocol 2, this agent speaks 3").start()
    model = ddp(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = flexcomm.torch.attach(model, optimizer, socket=str(refused.path))
    refused.wait_for("hello")
    for step in range(20):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    out["refused"] = {"steps": session.step, "connected": session.connected, "equal": same(parameters_hash(model))}
    end = time.monotonic() + 10
    said = []
    while not any("protocol" in line for line in said) and time.monotonic() < end:
        said += [text for _, text in flexcomm._core.take_log()] + lines.take()
        time.sleep(0.05)
    out["refused"]["lines"] = said
    return out


def shadowed(rank, lines):
    """A trial is ordered and the loop cannot run it: it is answered, and only shadows watch, and tell twice."""
    run = Run("shadow", rank, lambda r: True)
    lines.take()
    run.train(5)
    run.agent.publish(trial=trial(1, [GATHER, "topk(k=0.01)+ef(vanilla)/allgather", STAR]))
    run.train(200, lambda: rank != 0 or bool(run.agent.of_kind("trial")))
    # Asked again: shadows of the same candidates go on.
    run.agent.publish(trial=trial(2, [GATHER, "topk(k=0.01)+ef(vanilla)/allgather", STAR]))
    run.train(300, lambda: rank != 0 or len(run.agent.of_kind("trial")) == 4)
    return run.end() | {
        "gains": run.session.shadow_gains(), "trials": run.agent.of_kind("trial"), "lines": "\n".join(lines.take()),
    }


def halves(rank):
    """Half precision until the first decision; its steps are reported by its name, not as dense ones."""
    run = Run("half", rank, lambda r: True, initial="bf16")
    run.train(8)
    run.agent.publish(decision=decision(1, GATHER))
    run.train(200, lambda: run.session.version == 1)
    run.train(3)
    out = run.end()
    run.agent.wait_for("bye")
    reports = run.agent.of_kind("steps")
    before = [s for m in reports if m["version"] == 0 for s in m["steps"]]
    return out | {
        "reported": sorted({(m["version"], m["strategy"]) for m in reports}),
        "comp": min(s["comp_us"] for s in before), "before": [s["step"] for s in before],
    }


def texts(rank, name, text):
    """A strategy named by a compressor spec until the first decision, which takes over the residual."""
    run = Run(name, rank, lambda r: True, initial=text)
    run.train(8)
    named, before = run.session.strategy, run.session.state_dict()["held_back"]
    run.agent.publish(decision=decision(1, GATHER))
    run.train(200, lambda: run.session.version == 1)
    run.train(3)
    under, after = run.session.strategy, run.session.state_dict()
    run.agent.publish(decision=decision(2, "none/dense-ring"))
    run.train(200, lambda: run.session.version == 2)
    run.train(1)
    out = run.end()
    run.agent.wait_for("bye")
    reports = run.agent.of_kind("steps")
    residual = [sum(v.abs().sum().item() for v in state.values()) for state in (before, after["held_back"], run.session.state_dict()["held_back"])]
    return out | {
        "named": named, "under": under, "residual": residual, "text": "text" in after,
        "reported": sorted({m["version"] for m in reports}),
        "ran": sorted({(m["version"], m["strategy"]) for m in reports}),
        "costs": [(s["comp_us"] > 0, s["bytes_sent"] > 0, 0 < s["gain"] <= 1) for m in reports if m["version"] == 0 for s in m["steps"]],
    }


#: Compressors of every kind, one decision after the other.
KINDS = [
    "powersgd(rank=2)+ef(vanilla)/dense-ring", "fp16/dense-ring", "qsgd(s=7,norm=max)+ef(vanilla)/allgather", GATHER,
    "eightbit+ef(vanilla)/allgather", "bf16/dense-ring", STAR, "powersgd(rank=4)+ef(vanilla)/dense-ring", "none/dense-ring",
]


def kinds(rank):
    """Every decision takes over the residual of the one before; a pipeline's too."""
    run = Run("kinds", rank, lambda r: r == 0)
    residual, in_force, lines = [], [], Lines()
    if rank == 0:
        # It sends next to nothing without error feedback: said, and not followed.
        run.agent.publish(decision=decision(1, "variance/allgather"))
    run.train(5)
    for version, strategy in enumerate(KINDS, 2):
        if rank == 0:
            run.agent.publish(decision=decision(version, strategy))
        run.train(200, lambda version=version: run.session.version == version)
        run.train(4)
        in_force.append(run.session.strategy)
        residual.append(sum(v.abs().sum().item() for v in run.session.state_dict()["held_back"].values()))
    ran = sorted({(m["version"], m["strategy"]) for m in run.agent.of_kind("steps")}) if rank == 0 else []
    return run.end() | {"in_force": in_force, "residual": residual, "ran": ran}


with ranks() as (rank, world, seen):
    seen["kinds"] = kinds(rank)
    lines = Lines()
    seen["late"] = late(rank)
    seen["dead 2"] = dead(rank, 2)
    seen["dead 0"] = dead(rank, 0)
    seen["restarted"] = restarted(rank)
    seen["silent"] = silent(rank)
    for name, sizes in (("wrapped", SMALL), ("wrapped large", LARGE)):
        seen[name] = wrapped(rank, name, sizes)
    trio = dist.new_group([0, 1, 2])
    if rank < 3:
        seen["sums"] = sums(rank, trio)
    seen["foreign"] = foreign(rank, lines)
    seen["shadowed"] = shadowed(rank, lines)
    seen["halves"] = halves(rank)
    seen["sum text"] = texts(rank, "sum", "powersgd(rank=2)+ef(vanilla)")
    seen["gather text"] = texts(rank, "gat", "qsgd(s=4,coding=gamma)+ef(vanilla)")

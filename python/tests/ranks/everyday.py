"""Ordinary loops around `attach`, as scripts have them."""

import contextlib

import torch
import torch._dynamo
from common import FOLDER, Lines, batch, ddp, network, parameters_hash, ranks, same
from fake_agent import FakeAgent
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

import flexcomm.torch

GATHER, STAR, TEXT = "topk(k=0.1)+ef(vanilla)/allgather", "topk(k=0.1)+ef(vanilla)/art-ring:star", "topk(k=0.1)+ef(vanilla)"


def error_of(run):
    try:
        run()
    except Exception as error:
        return type(error).__name__, str(error)
    return None, ""


def start(strategy=GATHER, model=None, **options):
    model = ddp(network()) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return model, optimizer, flexcomm.torch.attach(model, optimizer, strategy=strategy, **options)


def lengths(rank):
    """len() of the loop's batches, as progress bars ask for it, and the loop closed early."""
    model, optimizer, session = start()
    data = torch.utils.data.TensorDataset(*batch(0, rank, 40))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    seen = []
    for x, y in session.batches(loader):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        seen.append(len(x))
    open_one = session.batches(loader)
    next(open_one)
    within = session._trials.looping
    open_one.close()
    stream = session.batches(batch for batch in loader)
    return {
        "length": len(session.batches(loader)), "seen": seen, "within": within, "closed": not session._trials.looping,
        "stream": error_of(lambda: len(stream))[0], "of stream": len(list(stream)), "steps": session.step,
    }


class Wrapping(torch.optim.Optimizer):
    """As Accelerate's: an optimizer by its class alone."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, closure=None):
        self.optimizer.step()


def wrapped(rank):
    model = ddp(network())
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer, lines = Wrapping(inner), Lines()
    session = flexcomm.torch.attach(model, optimizer, initial=GATHER)
    for n in range(5):
        inner.zero_grad()
        x, y = batch(n, rank)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {"steps": session.step, "known": session.costs is not None, "lines": lines.take()}


def adversaries(rank, strategy, apart):
    """The generator's loss goes through the discriminator, whose gradients of that pass are thrown away. `apart`: with
    no_sync(), as is right."""
    makes, judges = ddp(network((4, 32, 20))), ddp(network((20, 32, 1), 1))
    lines, equal = Lines(), True
    (makes, own, session), (judges, other, second) = start(strategy, makes), start(strategy, judges)
    loss = torch.nn.functional.binary_cross_entropy_with_logits
    for step in range(12):
        noise = torch.randn(16, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        other.zero_grad()
        shown = judges(torch.cat([batch(step, rank)[0], makes.module(noise).detach()]))
        loss(shown, torch.cat([torch.ones(16, 1), torch.zeros(16, 1)])).backward()
        other.step()
        own.zero_grad()
        with judges.no_sync() if apart else contextlib.nullcontext():
            loss(judges(makes(noise)), torch.ones(16, 1)).backward()
        own.step()
        equal &= same(parameters_hash(makes)) and same(parameters_hash(judges))
    return {"equal": equal, "steps": [session.step, second.step], "warned": sum("not used" in line for line in lines.take())}


def again(rank):
    """A second attach, and one after another hook."""
    model, optimizer, _ = start()
    hooked = ddp(network())
    hooked.register_comm_hook(None, fp16_compress_hook)
    return [error_of(lambda: start(GATHER, model)), error_of(lambda: start(TEXT, hooked))]


def named(rank):
    """What the session says that it runs, before and after steps, and shadows that there are none of."""
    strategies = ("fp16", "bf16", "fp16+ef(vanilla)", "dense", GATHER)
    sessions = {name: start(name)[2] for name in strategies}
    shadows = [error_of(lambda what=what: sessions["dense"].shadow(what)) for what in (["topkk@0.1/allgather"], 5, ["dense"])]
    return {"said": {name: session.strategy for name, session in sessions.items()}, "shadows": shadows}


def ten_steps(rank, model, optimizer):
    for step in range(10):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def compiled(rank, strategy, steered):
    """`torch.compile` of an attached model beside the same run without; with an agent that decides nothing, or without one."""
    ends = []
    for compiles in (False, True):
        agent = FakeAgent(FOLDER, f"c{compiles:d}{strategy[0]}{rank}").start() if steered else None
        # torch compiles one graph per bucket, and refuses buckets below the first one's size, which is 1 MiB.
        model = ddp(network((20, 600, 600, 2)), bucket_cap_mb=1)
        socket = str(agent.path) if agent else None
        model, optimizer, session = start(None if steered else strategy, model, initial=strategy, socket=socket)
        runs = torch.compile(model, backend="aot_eager") if compiles else model
        ten_steps(rank, runs, optimizer)
        session.close()
        ends.append((session.step, torch.cat([p.detach().flatten() for p in model.parameters()])))
        equal = same(parameters_hash(model))
    frames = torch._dynamo.utils.counters["frames"]["ok"]
    (plain, without), (steps, values) = ends
    return {"steps": [plain, steps], "close": torch.allclose(values, without, atol=1e-5), "equal": equal, "compiled": frames > 0}


with ranks() as (rank, world, seen):
    seen["lengths"] = lengths(rank)
    seen["wrapped"] = wrapped(rank)
    for name, strategy in (("gather", GATHER), ("star", STAR), ("text", TEXT)):
        seen[name] = [adversaries(rank, strategy, apart) for apart in (False, True)]
    seen["again"] = again(rank)
    seen["named"] = named(rank)
    seen["compiled"] = {
        f"{strategy}, agent {steered}": compiled(rank, strategy, steered)
        for strategy, steered in (("dense", False), ("dense", True), (GATHER, False), (STAR, True), (TEXT, False))
    }

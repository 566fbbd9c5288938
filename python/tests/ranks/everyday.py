"""Ordinary loops around `attach`, as scripts have them."""

import contextlib

import torch
from common import Lines, batch, ddp, network, parameters_hash, ranks, same
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

import flexcomm.torch

GATHER, STAR, TEXT = "topk@0.1/allgather", "topk@0.1/art-ring:star", "topk(k=0.1)+ef(vanilla)"


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
    within = session._looping
    open_one.close()
    stream = session.batches(batch for batch in loader)
    return {
        "length": len(session.batches(loader)), "seen": seen, "within": within, "closed": not session._looping,
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


with ranks() as (rank, world, seen):
    seen["lengths"] = lengths(rank)
    seen["wrapped"] = wrapped(rank)
    for name, strategy in (("gather", GATHER), ("star", STAR), ("text", TEXT)):
        seen[name] = [adversaries(rank, strategy, apart) for apart in (False, True)]
    seen["again"] = again(rank)

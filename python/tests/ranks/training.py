"""Every method, every way of using DDP: the same parameters on all ranks at every step, and a loss that falls."""

import contextlib
import inspect

import torch
import torch.distributed as dist
from common import batch, ddp, network, parameters_hash, ranks, same
from torch.nn.parallel import DistributedDataParallel

import flexcomm.torch

#: Torch allocates its buckets ahead in releases that do not know it.
LAZY = "lazy_bucket_allocation" in inspect.signature(DistributedDataParallel).parameters
STEPS = 40


def copied(hook):
    """A hook around the hook, as torch's wrappers are: what it is given is used as soon as it is there."""

    def wrapper(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return hook(state, bucket).then(lambda done: done.value().clone())

    return wrapper


def count(hook):
    """Counts the buckets that go the shortest way, and the others."""
    seen = {"short": 0, "other": 0}
    for name, method in {"short": hook._sum_in_place, "other": hook._other}.items():

        def counted(*arguments, name=name, method=method):
            seen[name] += 1
            return method(*arguments)

        setattr(hook, method.__name__, counted)
    return seen


def train(
    rank, model, strategy, *, group=None, given=None, accumulate=1, scaler=None, autocast=False, hooked=False, around=None,
    **options,
):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if strategy is not None:
        session = flexcomm.torch.attach(
            model, optimizer, strategy=strategy, group=given, scaler=scaler, register=not hooked, **options
        )
        if hooked:
            # Dense without an agent would leave DDP alone.
            model.register_comm_hook(None, around(session.hook) if around else session.hook)
            short = count(session.hook)
    losses, equal = [], True
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(accumulate):
            x, y = batch(step * accumulate + part, rank)
            last = part == accumulate - 1
            with contextlib.nullcontext() if last else model.no_sync(), torch.autocast("cpu", enabled=autocast):
                loss = torch.nn.functional.cross_entropy(model(x).float(), y)
            with contextlib.nullcontext() if last else model.no_sync():
                (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        losses.append(loss.item())
        equal &= same(parameters_hash(model.module), group)
    out = {"first": losses[0], "last": sum(losses[-5:]) / 5, "equal": equal, "hash": parameters_hash(model.module)}
    if hooked:
        out["short"] = short
    if strategy is not None:
        session._end_step(within_loop=False)
        residual = sum(len(v) // 4 for v in session._core.residuals().values())
        out |= {"steps": session.step, "strategy": session.strategy, "residual": residual, "auto": session._core.auto_leaders().mode}
    return out


class Unused(torch.nn.Module):
    """One of two branches gets no gradient, another one each step."""

    def __init__(self):
        super().__init__()
        self.branches = torch.nn.ModuleList([network(seed=1), network(seed=2)])
        self.step = 0

    def forward(self, x):
        self.step += 1
        return self.branches[self.step % 2](x)


with ranks() as (rank, world, seen):
    seen["plain"] = train(rank, ddp(network()), None)
    for strategy in [
        "dense", "fp16", "bf16", "topk(k=0.1)+ef(vanilla)/allgather", "topk(k=0.01)+ef(vanilla)/allgather", "lwtopk(k=0.1)+ef(vanilla)/allgather",
        "mstopk(k=0.1)+ef(vanilla)/allgather", "topk(k=0.1)+ef(vanilla)/art-ring:star", "topk(k=0.1)+ef(vanilla)/art-ring:var", "mstopk(k=0.1)+ef(vanilla)/art-ring:star",
    ]:
        seen[strategy] = train(rank, ddp(network()), strategy)
    star, gather = "topk(k=0.1)+ef(vanilla)/art-ring:star", "topk(k=0.1)+ef(vanilla)/allgather"
    seen["auto"] = train(rank, ddp(network()), star, selection="auto")
    seen["view"] = train(rank, ddp(network(), gradient_as_bucket_view=True), gather)
    for name, options in {
        "dense hooked": {}, "dense hooked view": {"gradient_as_bucket_view": True},
        "dense hooked one bucket": {"bucket_cap_mb": 1000}, **({"dense hooked lazy": {"lazy_bucket_allocation": True}} if LAZY else {}),
    }.items():
        seen[name] = train(rank, ddp(network(), **options), "dense", hooked=True)
    seen["dense hooked around"] = train(rank, ddp(network()), "dense", hooked=True, around=copied)
    seen["plain one bucket"] = train(rank, ddp(network(), bucket_cap_mb=1000), None)
    seen["one bucket"] = train(rank, ddp(network(), bucket_cap_mb=1000), gather)
    seen["static"] = train(rank, ddp(network(), static_graph=True), gather)
    seen["unused"] = train(rank, ddp(Unused(), find_unused_parameters=True), gather)
    seen["accumulate"] = train(rank, ddp(network()), gather, accumulate=3)
    seen["amp"] = train(rank, ddp(network()), gather, autocast=True)
    seen["scaler"] = train(rank, ddp(network()), gather, scaler=torch.amp.GradScaler("cpu", init_scale=256.0))

    # DDP by itself until somebody wants to know: ranks register the hook at different steps, and nothing changes.
    model = ddp(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = flexcomm.torch.attach(model, optimizer)
    for step in range(STEPS):
        if step == 5 + 3 * rank:
            session.shadow([gather])
        x, y = batch(step, rank)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    gains = session.shadow_gains()
    seen["late hook"] = {
        "hash": parameters_hash(model.module), "steps": session.step, "gain": gains.get(gather), "costs": session.costs.sent,
    }

    # Two models side by side, with settings of their own.
    a, b = ddp(network(seed=5)), ddp(network(seed=6))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (a, b)]
    sessions = [
        flexcomm.torch.attach(m, o, strategy=s) for m, o, s in zip((a, b), optimizers, (gather, "topk(k=0.1)+ef(vanilla)/art-ring:var"))
    ]
    equal = True
    for step in range(15):
        x, y = batch(step, rank)
        for o in optimizers:
            o.zero_grad()
        torch.nn.functional.cross_entropy(a(x) + b(x), y).backward()
        for o in optimizers:
            o.step()
        equal &= same(parameters_hash(a.module)) and same(parameters_hash(b.module))
    seen["two models"] = {"equal": equal, "steps": [s.step for s in sessions]}

    # A group of the first two ranks; the others do something else.
    pair = dist.new_group([1, 3])
    if rank in (1, 3):
        model = ddp(network(), process_group=pair)
        # The group found in the model, and the group given.
        found = train(rank, model, "topk(k=0.1)+ef(vanilla)/art-ring:var", group=pair)["equal"]
        given = train(rank, ddp(network(), process_group=pair), gather, group=pair, given=pair)["equal"]
        seen["group"] = found, given
    dist.barrier()

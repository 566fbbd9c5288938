"""Uneven inputs: ranks that have run out of batches go on under `ddp.join()`, and training goes on afterwards."""

import torch
from common import FOLDER, Lines, batch, ddp, network, parameters_hash, ranks, same
from fake_agent import FakeAgent, decision

import flexcomm.torch


def train(rank, strategy, short, hooked=False, steered=None):
    model = ddp(network((20, 48, 40, 2)), bucket_cap_mb=0.006)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    agent = FakeAgent(FOLDER, f"{short}{rank}").start() if steered and rank == 0 else None
    socket = agent and str(agent.path)
    session = flexcomm.torch.attach(model, optimizer, strategy=strategy, register=not hooked, socket=socket)
    if agent is not None:
        agent.wait_for("hello")
    lines = Lines()
    if hooked:
        model.register_comm_hook(None, session.hook)
    hashes = []

    def step(number):
        x, y = batch(number, rank)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        hashes.append(parameters_hash(model.module))
        if agent is not None and number == short - 1:
            # It comes while this rank gives zeros.
            agent.publish(decision=decision(1, steered))

    # Rank 0 runs out first, after `short` batches; the others' last batches come while it gives zeros and its residual.
    with model.join():
        for number in range(short if rank == 0 else 14):
            step(number)
    steps, together = session._core.state().steps, same(parameters_hash(model.module))
    for number in range(14, 18):
        step(number)
    residual = sum(v.abs().sum().item() for v in session.state_dict()["held_back"].values())
    # What is said of passes without an optimizer's step. Those of a rank that has run out have none.
    unused = [line for line in lines.take() if "no_sync()" in line]
    return {"hashes": hashes, "steps": session._core.state().steps, "before": steps, "together": together, "residual": residual, "unused": unused,
            "version": session.version, "hook": len(model._comm_hooks)}


def nan(rank, strategy, **options):
    """The last layer has a NaN in rank 2's batches 4 and 10, and so has one bucket of several; rank 0 runs out after 7. A
    batch whose error was caught is left out."""
    model = ddp(network((20, 48, 40, 2)), bucket_cap_mb=0.006)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = flexcomm.torch.attach(model, optimizer, strategy=strategy, **options)
    lines, out = Lines(), {"left out": [], "partly": [], "zeros": []}
    first, last, spoils = model.module[0].weight, model.module[-1].bias, False
    last.register_hook(lambda gradient: gradient * float("nan") if spoils else None)
    with model.join():
        for number in range(7 if rank == 0 else 14):
            x, y = batch(number, rank)
            spoils = rank == 2 and number in (4, 10)
            optimizer.zero_grad()
            try:
                torch.nn.functional.cross_entropy(model(x), y).backward()
            except flexcomm.torch.NotFiniteError:
                out["left out"].append(number)
                out["partly"].append(bool(last.grad.isnan().all() and first.grad.isfinite().all() and first.grad.any()))
                continue
            if not any(bool(p.grad.any()) for p in model.parameters()):
                out["zeros"].append(number)
            optimizer.step()
    trained = []
    for number in range(14, 16):
        x, y = batch(number, rank)
        before = parameters_hash(model.module)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        trained.append(parameters_hash(model.module) != before and same(parameters_hash(model.module)))
    said = lines.take()
    return out | {
        "warnings": sum("run out of batches" in line for line in said), "unused": sum("no_sync()" in line for line in said),
        "trained": trained, "equal": same(parameters_hash(model.module)),
        "finite": all(bool(p.isfinite().all()) for p in model.parameters()), "steps": session.step,
    }


with ranks() as (rank, world, seen):
    for strategy in ["topk(k=0.1)+ef(vanilla)/allgather", "topk(k=0.1)+ef(vanilla)/art-ring:var", "topk(k=0.1)+ef(vanilla)/art-ring:star", "qsgd(s=4,coding=gamma)",
                     "powersgd(rank=1)+ef(vanilla)"]:
        seen[f"nan {strategy}"] = nan(rank, strategy)
    for strategy in ["dense", "topk(k=0.1)+ef(vanilla)/allgather", "topk(k=0.1)+ef(vanilla)/art-ring:var", "topk(k=0.1)+ef(vanilla)/art-ring:star", "qsgd(s=4,coding=gamma)",
                     "powersgd(rank=1)+ef(vanilla)"]:
        seen[strategy] = train(rank, strategy, 7)
    seen["dense hooked"] = train(rank, "dense", 7, hooked=True)
    # DDP is dense by itself, and a rank that has run out registers the hook.
    seen["decided"] = train(rank, None, 5, steered="topk(k=0.1)+ef(vanilla)/allgather")
    seen["steered"] = train(rank, None, 6, steered="none/dense-ring")
    # Before DDP has rebuilt its buckets, and before anything is compressed.
    seen["early"] = train(rank, "topk(k=0.1)+ef(vanilla)/allgather", 1)

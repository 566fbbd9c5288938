"""Uneven inputs: ranks that have run out of batches go on under `ddp.join()`, and training goes on afterwards."""

import torch
from common import batch, ddp, network, parameters_hash, ranks, same

import flexcomm.torch


def train(rank, strategy, short, hooked=False):
    model = ddp(network((20, 48, 40, 2)), bucket_cap_mb=0.006)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = flexcomm.torch.attach(model, optimizer, strategy=strategy, register=not hooked)
    if hooked:
        model.register_comm_hook(None, session.hook)
    hashes = []

    def step(number):
        x, y = batch(number, rank)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        hashes.append(parameters_hash(model.module))

    # Rank 0 runs out first, after `short` batches; the others' last batches come while it gives zeros, and what it holds back.
    with model.join():
        for number in range(short if rank == 0 else 14):
            step(number)
    steps, together = session._core.state()[5], same(parameters_hash(model.module))
    for number in range(14, 18):
        step(number)
    held = sum(v.abs().sum().item() for v in session.state_dict()["held_back"].values())
    return {"hashes": hashes, "steps": session._core.state()[5], "before": steps, "together": together, "held": held}


with ranks() as (rank, world, seen):
    for strategy in ["dense", "topk@0.1/allgather", "topk@0.1/art-ring:var", "topk@0.1/art-ring:star", "qsgd(s=4,coding=gamma)",
                     "powersgd(rank=1)+ef(vanilla)"]:
        seen[strategy] = train(rank, strategy, 7)
    seen["dense hooked"] = train(rank, "dense", 7, hooked=True)
    # Before DDP has rebuilt its buckets, and before anything is compressed.
    seen["early"] = train(rank, "topk@0.1/allgather", 1)

"""Makes `before/state.pt` with the package of the release before, under torchrun with two ranks: make_state.py FILE (README.md)

Per strategy: each rank's checkpoint after 20 steps, and the parameters after 5 more steps of a run that goes on from it, with which
one of a later release can be compared.
"""

import copy
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import flexcomm.torch

STRATEGIES = ["topk@0.05/allgather", "powersgd(rank=1)+ef(vanilla)+nesterov(mu=0.9)"]
SAVED_AT, MORE = 20, 5


def start():
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(20, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def train(model, optimizer, steps):
    for step in steps:
        # Batches that no generator of a later torch has to repeat.
        x = torch.sin(torch.arange(320.0) * (step + 1) + dist.get_rank()).view(16, 20)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), (x[:, :5].sum(1) > 0).long()).backward()
        optimizer.step()


def go_on(strategy, parameters, state):
    """The parameters after some more steps of a run that begins with a checkpoint, or without its state."""
    model, optimizer = start()
    model.module.load_state_dict(parameters)
    session = flexcomm.torch.attach(model, optimizer, strategy=strategy)
    if state is not None:
        session.load_state_dict(state)
    train(model, optimizer, range(SAVED_AT, SAVED_AT + MORE))
    session.close()
    return copy.deepcopy(model.module.state_dict())


def main():
    dist.init_process_group("gloo")
    saved = {}
    for strategy in STRATEGIES:
        model, optimizer = start()
        session = flexcomm.torch.attach(model, optimizer, strategy=strategy)
        train(model, optimizer, range(SAVED_AT))
        state, parameters = session.state_dict(), copy.deepcopy(model.module.state_dict())
        session.close()
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, state)
        saved[strategy] = {"ranks": ranks, "parameters": parameters, "after": go_on(strategy, parameters, state)}
    if dist.get_rank() == 0:
        torch.save(saved, sys.argv[1])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Checkpoints of what is held back."""

import torch
from common import FOLDER, batch, ddp, everywhere, network, parameters_hash, ranks

import flexcomm.torch

GATHER = "topk@0.05/allgather"


def train(rank, steps, model, optimizer):
    for step in steps:
        x, y = batch(step, rank)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def start(strategy=GATHER):
    model = ddp(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return model, optimizer, flexcomm.torch.attach(model, optimizer, strategy=strategy)


def total(state):
    return {name: values.double().sum().item() for name, values in state["held_back"].items()}


with ranks() as (rank, world, seen):
    model, optimizer, session = start()
    train(rank, range(12), model, optimizer)
    own, mean = session.state_dict(), session.state_dict(consolidate=True)
    torch.save(own, FOLDER / f"own{rank}.pt")
    own = torch.load(FOLDER / f"own{rank}.pt")
    seen["names"] = sorted(own["held_back"]) == sorted(n for n, _ in model.module.named_parameters())

    # The same number of ranks: bit for bit, also when loaded before the buckets are known.
    fresh_model, fresh_optimizer, fresh = start()
    fresh.load_state_dict(own)
    again = fresh.state_dict()
    seen["same"] = all(torch.equal(again["held_back"][n], v) for n, v in own["held_back"].items())
    train(rank, range(2), fresh_model, fresh_optimizer)
    later = fresh.state_dict()
    seen["kept while buckets settle"] = all(torch.equal(later["held_back"][n], v) for n, v in own["held_back"].items())

    # Another number of ranks: the mean, so that the sum over ranks over their number stays.
    owns = everywhere({n: v for n, v in own["held_back"].items()})
    expected = {n: sum(o[n].double() for o in owns) / world for n in owns[0]}
    seen["mean"] = all(torch.allclose(mean["held_back"][n].double(), v, atol=1e-7) for n, v in expected.items())
    other, _, loaded = start()
    other_state = dict(mean, world=world * 2)
    loaded.load_state_dict(other_state)
    seen["consolidated"] = total(loaded.state_dict()) == total(mean)

    def refused(state):
        try:
            loaded.load_state_dict(state)
        except flexcomm.FlexcommError as error:
            return str(error)
        return None

    seen["refused"] = [
        refused(dict(own, world=world + 1)),
        refused(dict(own, rank=(rank + 1) % world)),
        refused(dict(own, format=99)),
        refused(dict(own, held_back={"nobody": torch.zeros(3)})),
        refused(dict(own, held_back={"0.bias": torch.zeros(3)})),
        refused(dict(own, held_back={"0.bias": torch.full((120,), float("nan"))})),
    ]
    seen["unchanged"] = total(loaded.state_dict()) == total(mean)

    # Going dense hands out all that was held back.
    dense_model, dense_optimizer, dense = start("dense")
    dense.load_state_dict(own)
    train(rank, range(6), dense_model, dense_optimizer)
    seen["handed out"] = dense.state_dict()["held_back"] == {}
    hashes = everywhere(parameters_hash(dense_model.module))
    plain_model = ddp(network())
    train(rank, range(6), plain_model, torch.optim.SGD(plain_model.parameters(), lr=0.05))
    seen["dense"] = len(set(hashes)) == 1 and hashes[0] != parameters_hash(plain_model.module)

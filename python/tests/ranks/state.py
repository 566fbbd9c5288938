"""Checkpoints of the residual."""

import copy
import time

import torch
from common import FOLDER, Lines, batch, ddp, everywhere, network, parameters_hash, ranks
from fake_agent import FakeAgent, trial

import flexcomm.torch
from flexcomm.torch import _state, _wrapper

GATHER = "topk(k=0.05)+ef(vanilla)/allgather"


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


def copies(rank, how):
    """Parameters of copies of an attached model are its own, and a copy trains."""
    model = ddp(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    agent = FakeAgent(FOLDER, f"{how[0]}{rank}").start()
    strategy = GATHER if how == "hooked" else None
    session = flexcomm.torch.attach(model, optimizer, strategy=strategy, socket=str(agent.path))
    if how == "taken over":
        session._registration.register()
    train(rank, range(3), model, optimizer)
    file = FOLDER / f"{how[0]}{rank}.pt"
    torch.save(model, file)
    made = [copy.deepcopy(model), torch.load(file, weights_only=False)]
    same = [parameters_hash(m.module) == parameters_hash(model.module) for m in made]
    for each in made:
        train(rank, range(3, 5), each, torch.optim.SGD(each.parameters(), lr=0.05))
    train(rank, range(3, 5), model, optimizer)
    same += [len(set(everywhere(parameters_hash(m.module)))) == 1 for m in (model, *made)]
    session.close()
    same += [attached_anew(rank, each) for each in made]
    return all(same) and len(model._comm_hooks) == int(how != "wrapped")


def attached_anew(rank, model):
    """A copy, which has a stand-in at the place of the hook, takes one of its own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = flexcomm.torch.attach(model, optimizer, strategy=GATHER)
    train(rank, range(5, 10), model, optimizer)
    compressed = any(bool(v.any()) for v in session.state_dict()["held_back"].values())
    return compressed and session.step == 5 and len(set(everywhere(parameters_hash(model.module)))) == 1


def twice(rank):
    """A model that was attached before counts its steps once."""
    model = ddp(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    steps = []
    for turn in range(2):
        agent = FakeAgent(FOLDER, f"w{turn}{rank}").start()
        session = flexcomm.torch.attach(model, optimizer, socket=str(agent.path))
        train(rank, range(4), model, optimizer)
        session.close()
        steps.append(session.step)
    return steps, len(model._forward_pre_hooks), len(set(everywhere(parameters_hash(model.module)))) == 1


def unknown_to_ddp():
    """Where DDP's process group can be wrapped."""
    class Complex(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.turn = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))

    def of_complex():
        try:
            return _wrapper.fits(ddp(Complex()))
        except RuntimeError as error:
            # Gloo of torch 2.5 sends no complex values: DDP itself refuses the model.
            if "Invalid scalar type" not in str(error):
                raise
            return False

    frozen, thawed, part = ddp(network()), network(), network()
    frozen.module[0].bias.requires_grad_(False)
    thawed[0].bias.requires_grad_(False)
    thawed = ddp(thawed)
    thawed.module[0].bias.requires_grad_(True)
    part[0].bias.requires_grad_(False)
    return [_wrapper.fits(m) for m in (ddp(network()), ddp(part), frozen, thawed)] + [of_complex()]


def to_come(session, model):
    """The parameters once all of the residual has gone out."""
    residual = session.state_dict(consolidate=True)["held_back"]
    return [p.detach() - 0.05 * residual[name].view_as(p) for name, p in model.module.named_parameters()]


def gradients(model, x, y):
    """The mean over ranks, without DDP."""
    loss = torch.nn.functional.cross_entropy(model.module(x), y)
    found = everywhere([g.tolist() for g in torch.autograd.grad(loss, list(model.module.parameters()))])
    return [sum(torch.tensor(g) for g in each) / len(found) for each in zip(*found)]


def in_trials(rank, turn, trials):
    """A script that saves and loads in every batch, of live trials too."""
    agent = FakeAgent(FOLDER, f"i{turn}{rank}").start()
    model = ddp(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = flexcomm.torch.attach(model, optimizer, strategy=GATHER, socket=str(agent.path))
    agent.wait_for("hello")
    lines, other = Lines(), None
    trained, tried, loaded, whole, refused = [], [], [], [], 0
    for x, y in session.batches([batch(step, rank) for step in range(30)]):
        if session.in_trial:
            expected = [z - 0.05 * g for z, g in zip(to_come(session, model), gradients(model, x, y))]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        state = session.state_dict()
        if session.in_trial:
            tried.append(session.step)
            whole.append(all(torch.allclose(z, e, atol=1e-6) for z, e in zip(to_come(session, model), expected)))
            session.load_state_dict(other)
            loaded.append(total(session.state_dict()) != total(state))
            try:
                session.load_state_dict({"format": 2})
            except flexcomm.FlexcommError:
                refused += 1
            continue
        trained.append(session.step)
        if len(trained) == 8:
            other = state
            if rank == 0 and trials:
                agent.publish(trial=trial(1, [GATHER, "topk(k=0.5)+ef(vanilla)/allgather"]))
    session.close()
    said = [line for line in lines.take() if "in a live trial" in line]
    return {
        "trained": trained, "tried": tried, "loaded": loaded, "refused": refused, "said": said, "whole": whole,
        "hash": parameters_hash(model.module), "residual": total(session.state_dict()),
    }


def waits_alone(rank):
    """The mean over ranks, for which the others come late."""
    _, _, session = start()
    before, _state.WARN_AFTER = _state.WARN_AFTER, 0.3
    lines = Lines()
    for late in (0, 2):
        everywhere(None)
        time.sleep(late * rank)
        session.state_dict(consolidate=True)
        time.sleep(0.5)
    _state.WARN_AFTER = before
    return [line for line in lines.take() if "consolidate=True" in line]


class Picture(torch.nn.Module):
    """With a parameter of no values, as some configurations leave them."""

    def __init__(self, memory_format):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Conv2d(3, 4, 3)
        self.none = torch.nn.Parameter(torch.zeros(0))
        self.to(memory_format=memory_format)

    def forward(self, x):
        return self.layer(x).square().mean() + self.none.sum()


def pictured(rank, memory_format, strategy, state=None):
    """After four steps: the state, and the weight's residual in the core, as it lies in memory."""
    model = ddp(Picture(memory_format))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = flexcomm.torch.attach(model, optimizer, strategy=strategy)
    if state is not None:
        session.load_state_dict(state)
    else:
        for step in range(4):
            optimizer.zero_grad()
            model(torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(10 * step + rank))).backward()
            optimizer.step()
    weight = next(i for i, (name, _) in enumerate(session._agreed.named) if name == "layer.weight")
    bits = session._core.residuals().get(weight, b"")
    return session.state_dict(), torch.frombuffer(bytearray(bits), dtype=torch.float32), session.state_dict(consolidate=True)


def laid_out_otherwise(rank, lines):
    """A state goes to a model whose weight lies in memory in another order."""
    out = []
    for strategy in (GATHER, "powersgd(rank=1)+ef(vanilla)"):
        last, rows, mean = pictured(rank, torch.channels_last, strategy)
        residual = last["held_back"]["layer.weight"]
        alike, same_order, _ = pictured(rank, torch.channels_last, strategy, last)
        quiet = not any("another order" in line for line in lines.take())
        other, in_order, _ = pictured(rank, torch.contiguous_format, strategy, last)
        said = [line for line in lines.take() if "another order" in line]
        old = dict(last, format=2, held_back=dict(last["held_back"], **{"layer.weight": rows}))
        _, older, _ = pictured(rank, torch.channels_last, strategy, old)
        by_index = residual.view(4, 3, 3, 3)
        out.append({
            "moved": bool(residual.any()) and torch.equal(in_order, residual) and not torch.equal(rows, residual),
            "kept": torch.equal(rows.view(4, 3, 3, 3).permute(0, 3, 1, 2), by_index) and torch.equal(same_order, rows),
            "older": torch.equal(older, rows),
            "again": torch.equal(other["held_back"]["layer.weight"], residual) and torch.equal(alike["held_back"]["layer.weight"], residual),
            "empty": last["held_back"]["none"].numel() == mean["held_back"]["none"].numel() == 0,
            "said": quiet and len(said) == int("text" in last),
        })
    return out


with ranks() as (rank, world, seen):
    lines = Lines()
    seen["layouts"] = laid_out_otherwise(rank, lines)
    seen["in trials"] = [in_trials(rank, turn, trials) for turn, trials in enumerate((True, False))]
    seen["waits alone"] = waits_alone(rank)
    seen["copies"] = [copies(rank, name) for name in ("wrapped", "hooked", "taken over")]
    seen["twice"] = twice(rank)
    seen["fits"] = unknown_to_ddp()
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
        except Exception as error:
            return f"{type(error).__name__} from deep inside"
        return None

    seen["refused"] = [
        refused(dict(own, world=world + 1)),
        refused(dict(own, rank=(rank + 1) % world)),
        refused(dict(own, format=99)),
        refused(dict(own, held_back={"nobody": torch.zeros(3)})),
        refused(dict(own, held_back={"0.bias": torch.zeros(3)})),
        refused(dict(own, held_back={"0.bias": torch.full((120,), float("nan"))})),
    ]
    text = {"strategy": "topk(k=0.1)", "step": 3, "buckets": []}
    wrong = [
        None, [own], {"format": 2}, dict(own, format="2"), dict(own, world="2"), dict(own, rank=None), dict(own, held_back=None),
        dict(own, held_back={"0.bias": [0.0] * 120}), dict(own, held_back={"0.bias": torch.zeros(120, dtype=torch.int64)}),
        dict(own, held_back={5: torch.zeros(120)}), dict(own, text=5), dict(own, text={}), dict(own, text=dict(text, strategy=5)),
        dict(own, text=dict(text, step=-1)), dict(own, text=dict(text, buckets=5)), dict(own, text=dict(text, buckets=[5])),
        dict(own, text=dict(text, buckets=[(["0.bias"], torch.zeros(3))])),
        dict(own, text=dict(text, buckets=[(["nobody"], torch.zeros(3, dtype=torch.uint8))])),
    ]
    seen["wrong"] = [refused(state) for state in wrong]
    plain = ddp(network())
    loaded_never = flexcomm.torch.attach(plain, torch.optim.SGD(plain.parameters(), lr=0.05))
    try:
        loaded_never.load_state_dict({"format": 2})
    except Exception:
        seen["hooks after a refused state"] = len(plain._comm_hooks)
    seen["unchanged"] = total(loaded.state_dict()) == total(mean)

    # Going dense hands out all of the residual.
    dense_model, dense_optimizer, dense = start("dense")
    dense.load_state_dict(own)
    train(rank, range(6), dense_model, dense_optimizer)
    seen["handed out"] = dense.state_dict()["held_back"] == {}
    hashes = everywhere(parameters_hash(dense_model.module))
    plain_model = ddp(network())
    train(rank, range(6), plain_model, torch.optim.SGD(plain_model.parameters(), lr=0.05))
    seen["dense"] = len(set(hashes)) == 1 and hashes[0] != parameters_hash(plain_model.module)

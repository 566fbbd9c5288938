"""Every compressor by its spec: the same parameters on all ranks at every step, NaN and checkpoints as elsewhere."""

import dataclasses
import gzip
import os
import pathlib

import numpy as np
import torch
from common import FOLDER, Lines, batch, ddp, everywhere, network, parameters_hash, ranks, same

import flexcomm.torch
from flexcomm import _core

STEPS, SIZES = 8, (20, 48, 40, 2)

#: With memories, momentum, scopes and other options around them.
AROUND = [
    "topk(k=0.05)+ef(vanilla)",
    "topk(k=0.05)+ef(vanilla,beta=0.9)+nesterov(mu=0.5)",
    "dgc(k=0.05)+ef(dgc,mu=0.5)",
    "onebit(scaling=true)+ef(efsign)",
    "qsgd(s=4)+ef(vanilla)+scope(bucket)",
    "qsgd(s=64,coding=gamma)+checksum(crc32c)+seed(3)",
    "powersgd(rank=2)+ef(vanilla)",
    "fp16+ef(vanilla)",
    "randomk(k=0.1)+ef(vanilla)",
    "threshold(v=1000000)+ef(vanilla)",
]


#: Instead of the library's examples, which are made for larger values: here they would send nothing.
INSTEAD = {"threshold": "v=0.02", "hardthreshold": "tau=0.02"}


def text(name, arguments):
    arguments = INSTEAD.get(name, arguments)
    # Without error feedback it is refused.
    if name == "variance":
        return f"variance({arguments})+ef(vanilla)"
    # The names alone of the half precisions mean DDP's own allreduce in that type.
    return f"{name}({arguments})" if arguments else f"{name}+checksum(none)"


def start(strategy, **options):
    model = ddp(network(SIZES), bucket_cap_mb=0.006)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    return model, optimizer, flexcomm.torch.attach(model, optimizer, strategy=strategy, **options)


def backward(model, optimizer, step, rank, bad=False):
    x, y = batch(step, rank)
    if bad:
        x[0, 0] = float("nan")
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()


def train(rank, strategy):
    """Without a strategy: plain DDP."""
    model, optimizer, session = start(strategy or "dense", register=strategy not in (None, "dense"))
    if strategy == "dense":
        # Without an agent it would leave DDP alone.
        model.register_comm_hook(None, session.hook)
    equal, finite = True, True
    for step in range(STEPS):
        # The learning rate changes: memories rescale their residual.
        optimizer.param_groups[0]["lr"] = 0.02 if step < 6 else 0.01
        backward(model, optimizer, step, rank)
        finite &= all(bool(p.grad.isfinite().all()) for p in model.parameters())
        optimizer.step()
        equal &= same(parameters_hash(model.module))
    costs = dataclasses.asdict(session.costs) if strategy is not None else None
    return {
        "equal": equal, "finite": finite, "strategy": session.strategy, "hash": parameters_hash(model.module), "costs": costs,
    }


def nan(rank, world, strategy, **options):
    """The last rank's gradient is NaN in step 6."""
    model, optimizer, session = start(strategy, **options)
    error, kept, all_nan = None, False, False
    for step in range(STEPS):
        bad = step == 6
        before = session._core.pipelines().buckets if bad else None
        try:
            backward(model, optimizer, step, rank, bad and rank == world - 1)
        except flexcomm.FlexcommError as raised:
            error = type(raised).__name__
        if bad:
            kept = before == session._core.pipelines().buckets
            all_nan = all(p.grad is not None and bool(p.grad.isnan().all()) for p in model.parameters())
            optimizer.zero_grad()
        # Left out, where it is an error: the next one goes on.
        if not bad or error is None:
            optimizer.step()
    return {"error": error, "kept": kept, "nan": all_nan, "equal": same(parameters_hash(model.module))}


def broken(rank, world, strategy):
    """A NaN in a step before compression begins gets into the parameters: what the first step after it says, and the next."""
    model, optimizer, session = start(strategy)
    texts = []
    for step in range(8):
        try:
            backward(model, optimizer, step, rank, step == 1 and rank == world - 1)
        except flexcomm.torch.NotFiniteError as error:
            texts.append(str(error))
            optimizer.zero_grad()
        optimizer.step()
    return texts


def resumed(rank, strategy):
    """Saved after 8 steps and loaded into another run: 3 dense steps, then as the first would have gone on."""
    model, optimizer, session = start(strategy)
    for step in range(STEPS):
        backward(model, optimizer, step, rank)
        optimizer.step()
    torch.save(session.state_dict(), FOLDER / f"text{rank}.pt")
    saved = torch.load(FOLDER / f"text{rank}.pt")
    mean = session.state_dict(consolidate=True)
    gradients = []
    other, other_optimizer, loaded = start(strategy)
    for step in range(4):
        backward(other, other_optimizer, step, rank)
    loaded.load_state_dict(saved)
    for each in (model, other):
        each.load_state_dict(model.state_dict())
    for each, each_optimizer in ((model, optimizer), (other, other_optimizer)):
        backward(each, each_optimizer, 99, rank)
        gradients.append([p.grad.clone() for p in each.parameters()])
    same_bits = all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    after = [s._core.pipelines().buckets for s in (session, loaded)]
    # On another number of ranks: only the mean of the residual.
    third, third_optimizer, third_session = start(strategy)
    third_session.load_state_dict(dict(mean, world=99))
    residual = third_session.state_dict()["held_back"]
    means = all(torch.equal(residual[n], v) for n, v in mean["held_back"].items() if bool(v.any()))
    for step in range(STEPS):
        backward(third, third_optimizer, step, rank)
        third_optimizer.step()
    broken = dict(saved, text=dict(saved["text"], buckets=[(n, b[:-3]) for n, b in saved["text"]["buckets"]]))
    try:
        loaded.load_state_dict(broken)
        refused = ""
    except flexcomm.FlexcommError as error:
        refused = str(error)
    unchanged = loaded._core.pipelines().buckets == after[1]
    return {
        "bits": same_bits, "states": after[0] == after[1], "mean": means, "refused": refused, "unchanged": unchanged,
        "equal": same(parameters_hash(third.module)),
    }


def warmed_up(rank, strategy, rates, loads=None):
    """Norm of the residual after these learning rates, one per step."""
    model, optimizer, session = start(strategy)
    if loads is not None:
        session.load_state_dict(dict(loads, world=99))
    for step, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        backward(model, optimizer, step, rank)
        optimizer.step()
    return sum(float(values.norm()) ** 2 for values in session.state_dict()["held_back"].values()) ** 0.5


def warm(rank, strategy):
    """A warm-up whose first rate, after two compressing steps at 0, is tiny; beside one that was there from the beginning.
    And both from a loaded state, whose residual came from a large rate."""
    model, optimizer, session = start(strategy)
    for step in range(STEPS):
        backward(model, optimizer, step, rank)
        optimizer.step()
    mean = session.state_dict(consolidate=True)
    runs = [[0.0] * 5 + [1e-5], [1e-5] * 6]
    return [[warmed_up(rank, strategy, rates, loads) for rates in runs] for loads in (None, mean)]


def refusal(strategy, **options):
    try:
        start(strategy, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return None, ""


def pictures(name, count):
    """The example's data set, its first `count` images as vectors."""
    folder = pathlib.Path(os.environ.get("FASHION_MNIST", "/usr/share/datasets/fashion-mnist"))
    with gzip.open(folder / f"{name}-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(16 + 784 * count), np.uint8, offset=16).reshape(count, 784)
    with gzip.open(folder / f"{name}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(8 + count), np.uint8, offset=8)
    return torch.from_numpy(images / np.float32(255) - np.float32(0.3)), torch.from_numpy(labels.astype(np.int64))


def grouped(rank, rates, swapped=False):
    """The residual of the same gradient after steps at these rates of two parameters' groups, as multiples of it. The
    parameters may swap their groups before the last step."""
    model = ddp(network(SIZES))
    first, last = model.module[0].weight, model.module[-1].weight
    others = [p for p in model.parameters() if p is not first and p is not last]
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [last]}, {"params": others}], lr=0.1)
    # Holds all back: parameters, and with them gradients, stay as they are.
    session = flexcomm.torch.attach(model, optimizer, strategy="threshold(v=1000000)+ef(vanilla)")
    residual, names = [], {id(p): name for name, p in model.module.named_parameters()}
    # The first three steps are dense.
    for step, pair in enumerate([rates[0]] * 3 + rates):
        if swapped and step == 2 + len(rates):
            one, other = optimizer.param_groups[:2]
            one["params"], other["params"] = other["params"], one["params"]
        for group, rate in zip(optimizer.param_groups, pair):
            group["lr"] = rate
        backward(model, optimizer, 0, rank)
        optimizer.step()
        state = session.state_dict()["held_back"]
        if state:
            residual.append([state[names[id(p)]].double().norm().item() for p in (first, last)])
    session.close()
    return [[after / before for after, before in zip(step, residual[0])] for step in residual]


def learn(rank, world, strategy):
    """Accuracy after 250 steps on other images, in percent."""
    (x, y), (held_out, answers) = pictures("train", 12_000), pictures("t10k", 4_000)
    model = ddp(network((784, 64, 10)), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    flexcomm.torch.attach(model, optimizer, strategy=strategy)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    for step in range(250):
        own = order[(step * world + rank) * 16 % len(x):][:16]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[own]), y[own]).backward()
        optimizer.step()
    with torch.no_grad():
        right = (model.module(held_out).argmax(1) == answers).float().mean().item()
    return {"accuracy": 100 * right, "equal": same(parameters_hash(model.module))}


def warned(text):
    """Log lines at attach that speak of error feedback."""
    lines, model = Lines(), ddp(network())
    flexcomm.torch.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=text)
    return [line for line in lines.take() if "add error feedback" in line]


with ranks() as (rank, world, seen):
    seen["warned"] = {t: warned(t) for t in ("topk(0.07)", "topk(0.07)+ef(vanilla)", "qsgd(s=4)")}
    entries = _core.compressors()
    texts = [text(one.name, arguments) for one in entries for arguments in one.examples[:1] if one.name != "none"] + AROUND
    seen["names"] = [one.name for one in entries]
    seen["ddp"], seen["plain"] = train(rank, None), train(rank, "dense")
    seen["trained"] = {t: train(rank, t) for t in texts}
    byteps = {
        "byteps_compressor_type": "topk", "byteps_compressor_k": "3", "byteps_ef_type": "vanilla",
        "byteps_momentum_type": "nesterov", "byteps_momentum_mu": "0.9",
    }
    seen["byteps"] = train(rank, byteps)
    several = ["topk(k=0.1)+ef(vanilla)+nesterov(mu=0.9)", "qsgd(s=4,coding=gamma)", "powersgd(rank=1)+ef(vanilla)", "fp16+ef(vanilla)"]
    seen["nan"] = {t: nan(rank, world, t) for t in several}
    seen["propagate"] = {t: nan(rank, world, t, on_nonfinite="propagate") for t in several}
    seen["broken"] = {t: broken(rank, world, t) for t in ("topk(k=0.1)+ef(vanilla)/allgather", several[0])}
    seen["skip"] = nan(rank, world, "topk(k=0.1)+ef(vanilla)+nonfinite(skip)")
    stateful = ["topk(k=0.1)+ef(vanilla)+nesterov(mu=0.9)", "dgc(k=0.05)+ef(dgc,mu=0.5)", "powersgd(rank=1)+ef(vanilla)",
                "gradiveq(d=2,slice=8,every=3)", "signum", "randomk(k=0.2)+ef(vanilla)"]
    seen["resumed"] = {t: resumed(rank, t) for t in stateful}
    seen["warm"] = {t: warm(rank, t) for t in ("topk(k=0.05)+ef(vanilla)", "topk(k=0.05)+ef(efsign)")}
    seen["grouped"] = {
        "together": grouped(rank, [(0.1, 0.2), (0.05, 0.1)]),
        "swapped": grouped(rank, [(0.1, 0.2), (0.1, 0.2)], swapped=True),
        "the second": grouped(rank, [(0.1, 0.2), (0.1, 0.02)]),
        "the first": grouped(rank, [(0.1, 0.2), (0.01, 0.2)]),
    }
    one = "qsgd(s=0)" if rank == 1 else "qsgd(s=4)"
    seen["refused"] = {
        "name": refusal("qsgdd(s=4)"), "key": refusal("qsgd(levels=4)"), "value": refusal("qsgd(s=0)"),
        "memory": refusal("qsgd(s=4)+ef(vanila)"), "missing": refusal("topk"), "one rank": refusal(one),
        "sum": refusal("fp16+checksum(crc32c)"), "byteps": refusal({"byteps_compressor_type": "topk", "byteps_compressor_k": "0"}),
        "no memory": refusal("variance(alpha=2)"),
        "different": refusal("qsgd(s=4)" if rank else "qsgd(s=8)"),
    }
    other = ddp(network(SIZES).to(torch.float64))
    flexcomm.torch.attach(other, strategy="qsgd(s=4)")
    for step in range(5):
        x, y = batch(step, rank)
        torch.nn.functional.cross_entropy(other(x.double()), y).backward()
    seen["float64"] = same(other.module[0].weight.grad.sum().item())
    learned = ["dense", "qsgd(s=16)", "topk(k=0.01)+ef(vanilla)", "topk(k=0.01)", "powersgd(rank=2)+ef(vanilla)",
               "onebit(scaling=true)+ef(vanilla)", "natural", "threelc+ef(vanilla)"]
    if pathlib.Path(os.environ.get("FASHION_MNIST", "/usr/share/datasets/fashion-mnist")).exists():
        seen["learned"] = {t: learn(rank, world, t) for t in learned}

"""Input that cannot be trained on: the same clear error on every rank at the same step, or a fallback on all."""

import contextlib
import datetime
import os

import torch
import torch.distributed as dist
from common import FOLDER, Lines, Short, batch, ddp, everywhere, network, parameters_hash, ranks, same
from fake_agent import FakeAgent, decision
from torch.nn.parallel import DistributedDataParallel

import flexcomm.torch
from flexcomm import _core
from flexcomm.torch import _checks

GATHER = "topk(k=0.1)+ef(vanilla)/allgather"


def error_of(run):
    """Type, text and step of what `run` raises."""
    steps = []
    try:
        run(steps)
    except Exception as error:
        return type(error).__name__, str(error), len(steps)
    return None, "", len(steps)


def nan(rank, strategy, **options):
    """Rank 2's gradient is NaN in the seventh step."""
    model = ddp(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = flexcomm.torch.attach(model, optimizer, strategy=strategy, **options)
    kept = []

    def run(steps):
        for step in range(12):
            x, y = batch(step, rank)
            if step == 7 and rank == 2:
                x[0, 0] = float("nan")
            before = {k: v for k, v in session._core.residuals().items()}
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            if step == 7:
                kept.append(before == session._core.residuals())
                kept.append(all(p.grad.isnan().all().item() for p in model.parameters()))
                # What GradScaler would do.
                optimizer.zero_grad()
            optimizer.step()
            steps.append(step)

    return error_of(run) + (kept, same(parameters_hash(model)))


def go_on(rank, strategy, looped=False, **options):
    """Rank 2's gradient is NaN in the seventh step and in the one before the last; every rank leaves such batches out."""
    model = ddp(network(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = flexcomm.torch.attach(model, optimizer, strategy=strategy)
    batches, left_out, equal = range(14), [], True
    for step in session.batches(batches) if looped else batches:
        x, y = batch(step, rank)
        if step in (7, 12) and rank == 2:
            x[0, 0] = float("nan")
        optimizer.zero_grad()
        try:
            torch.nn.functional.cross_entropy(model(x), y).backward()
        except flexcomm.torch.NotFiniteError:
            left_out.append(step)
            continue
        optimizer.step()
        equal &= same(parameters_hash(model))
    finite = all(p.isfinite().all().item() for p in model.parameters())
    return {"left out": left_out, "equal": equal, "finite": finite, "steps": session.step}


def fails_alone(rank):
    """One bucket of several is not finite, and in the same pass a bucket fails on rank 1 alone."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=20))
    model = ddp(network(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = flexcomm.torch.attach(model, optimizer, strategy=GATHER)
    own, calls, step = session.hook._pass, [], 0
    arrive = own._arrive

    def fails(exchange, last):
        calls.append(step)
        if rank == 1 and calls.count(7) == 2:
            exchange.wait()
            return RuntimeError("rank 1 alone")
        return arrive(exchange, last)

    own._arrive = fails
    model.module[-1].bias.register_hook(lambda g: g * float("nan") if step == 7 and rank == 2 else None)

    def run(steps):
        nonlocal step
        for step in range(9):
            x, y = batch(step, rank)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            steps.append(step)

    return error_of(run)


class Words(torch.nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.words = torch.nn.Embedding(50, 8, sparse=sparse)

    def forward(self, x):
        return self.words(x).sum()


def releases(rank):
    """Rank 2 is of the release before."""
    own = _core.PROTOCOL
    if rank == 2:
        _core.PROTOCOL = 1
    try:
        return error_of(lambda _: flexcomm.torch.attach(ddp(network())))
    finally:
        _core.PROTOCOL = own


def sparse(rank):
    attached = error_of(lambda _: flexcomm.torch.attach(DistributedDataParallel(Words(True))))

    def later(steps):
        # DDP goes by what the layer was when it was wrapped, flexcomm by what it is when it attaches.
        model = DistributedDataParallel(Words(True))
        model.module.words.sparse = False
        flexcomm.torch.attach(model, strategy=GATHER)
        model.module.words.sparse = True
        for step in range(6):
            model.zero_grad()
            model(torch.randint(0, 50, (4,))).backward()
            steps.append(step)

    return attached, error_of(later)


def types(rank, dtype):
    """Parameters of another element type: exchanged as they are, on all ranks, and said once."""
    lines = Lines()
    model = ddp(network().to(dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = flexcomm.torch.attach(model, optimizer, strategy=GATHER)
    equal = True
    for step in range(10):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x.to(dtype)), y).backward()
        optimizer.step()
        equal &= same(session.step)
    residual = session._core.residuals()
    return {"equal": equal, "residual": len(residual), "lines": [x for x in lines.take() if "as they are" in x]}


class Bare(torch.nn.Module):
    """Looks like a wrapped model whose ranks were not compared; DDP itself would refuse other shapes."""


def models(rank):
    def shapes(_):
        sizes = (20, 120, 120, 2) if rank != 3 else (20, 120, 119, 2)
        model = network(sizes)
        # DDP compares shapes when it is made, but not names; flexcomm is attached to what DDP lets through.
        inner = torch.nn.ModuleDict({"a" if rank == 3 else "b": network()})
        del model
        flexcomm.torch.attach(DistributedDataParallel(inner))

    def settings(_):
        flexcomm.torch.attach(ddp(network()), strategy=GATHER if rank else "dense")

    return error_of(shapes), error_of(settings)


def arguments_of_one(rank):
    """Arguments that only rank 2 was given; the others are not left waiting."""
    model, own = ddp(network()), rank == 2

    def words(_):
        wrapped = DistributedDataParallel(Words(True))
        wrapped.module.words.sparse = own
        flexcomm.torch.attach(wrapped)

    bad = {
        "strategy": {"strategy": "sorcery@0.1/allgather"}, "selection": {"selection": "best"}, "job": {"job": "no spaces"},
        "nonfinite": {"on_nonfinite": "ignore"}, "scheduler": {"scheduler": object()}, "share": {"shadow_share": 2.0},
        "seed": {"seed": -1}, "optimizer": {"optimizer": "sgd"},
    }
    attach = lambda given: error_of(lambda _: flexcomm.torch.attach(model, **(given if own else {})))  # noqa: E731
    group = dist.new_group()
    within = ddp(network(), process_group=group)
    wrong = {
        "sparse": error_of(words),
        "raw": error_of(lambda _: flexcomm.torch.attach(network() if own else model)),
        "raw in a group": error_of(lambda _: flexcomm.torch.attach(network() if own else within, group=group)),
        "compiled in a group": error_of(lambda _: flexcomm.torch.attach(torch.compile(within) if own else within)),
    }
    return {name: attach(given) for name, given in bad.items()} | wrong


class Complex(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.turn = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
        # Else the oldest torch's DDP refuses it before attach can.
        self._ddp_params_and_buffers_to_ignore = ["turn"]


def complex_values(rank):
    frozen = Complex()
    frozen.turn.requires_grad_(False)
    attach = lambda model: error_of(lambda _: flexcomm.torch.attach(DistributedDataParallel(model)))  # noqa: E731
    return attach(Complex()), attach(frozen)


def two_sessions(rank):
    """A second session of a dense model; on rank 2 alone there is a first one, and then everywhere, until it is closed or gone."""
    model = ddp(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    attach = lambda: flexcomm.torch.attach(model, optimizer)  # noqa: E731
    first = attach()
    again = error_of(lambda _: attach())
    if rank != 2:
        first.close()
    alone = error_of(lambda _: attach())
    names = [repr(first)]
    first.close()
    names.append(repr(first))
    refused = [error_of(lambda _: first.shadow([GATHER])), error_of(lambda _: first.load_state_dict(first.state_dict()))]
    # Its hook would have been the second session's.
    freed = [error_of(lambda _: attach()), len(model._comm_hooks)]
    forgotten = error_of(lambda _: attach())
    return {"again": again, "alone": alone, "names": names, "refused": refused, "freed": freed, "forgotten": forgotten}


def losses(rank):
    session = flexcomm.torch.attach(ddp(network()))
    given = {"None": None, "two": torch.ones(2), "text": "0.5", "one": torch.ones(1, 1, requires_grad=True), "whole": 1}
    return {name: error_of(lambda _, loss=loss: session.report_loss(loss)) for name, loss in given.items()}


def models_of_one_job(rank):
    """A second model at the same agent: refused under the job's name, and with a name of its own not confused."""
    agent = FakeAgent(FOLDER, f"two{rank}").start()
    models = [ddp(network(seed=seed)) for seed in (5, 6)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    socket = str(agent.path)
    sessions = [flexcomm.torch.attach(models[0], optimizers[0], socket=socket)]
    # Only rank 1 has an agent in common for both.
    other = FakeAgent(FOLDER, f"other{rank}").start()
    refused = error_of(
        lambda _: flexcomm.torch.attach(models[1], optimizers[1], socket=socket if rank == 1 else str(other.path))
    )
    sessions.append(flexcomm.torch.attach(models[1], optimizers[1], socket=socket, job="second"))
    agent.wait_for("hello", 2)
    agent.publish(decision=decision(1, GATHER))
    for step in range(60):
        x, y = batch(step, rank)
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.nn.functional.cross_entropy(models[0](x) + models[1](x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
        if all(everywhere(sessions[0].version == 1)):
            break
    versions = [session.version for session in sessions]
    for session in sessions:
        session.close()
    # After close(), and after the model is gone, the name is free.
    again = error_of(lambda _: flexcomm.torch.attach(ddp(network()), socket=socket))
    after = error_of(lambda _: flexcomm.torch.attach(ddp(network()), socket=socket))
    return {"refused": refused, "versions": versions, "again": again, "after": after}


def names(rank):
    """What a launcher tells rank 0 alone, what rank 2 alone was given, and two names."""
    if rank == 0:
        os.environ["SLURM_JOB_ID"] = "77"
    try:
        launched = _checks.job_name("", None)
    finally:
        os.environ.pop("SLURM_JOB_ID", None)
    given = _checks.job_name("mine" if rank == 2 else "", None)
    differ = error_of(lambda _: _checks.job_name({1: "one", 3: "three"}.get(rank, ""), None))
    return launched, given, differ[:2]


def arguments(rank):
    model = ddp(network())
    return {
        "compiled": error_of(lambda _: flexcomm.torch.attach(torch.compile(model))),
        "strategy": error_of(lambda _: flexcomm.torch.attach(model, strategy="sorcery@0.1/allgather")),
        "selection": error_of(lambda _: flexcomm.torch.attach(model, selection="best")),
        "nonfinite": error_of(lambda _: flexcomm.torch.attach(model, on_nonfinite="ignore")),
        "unwrapped": error_of(lambda _: flexcomm.torch.attach(network())),
        "scheduler": error_of(lambda _: flexcomm.torch.attach(model, scheduler=object())),
        "job": error_of(lambda _: flexcomm.torch.attach(model, job="no spaces")),
    }


LONG = "/tmp/" + 104 * "x"


def of_wrong_kinds(rank):
    """What is not of the kind that an argument is, by its name in the test."""
    model, other = ddp(network()), network(seed=1)
    given = {
        "number": {"strategy": 0.1}, "initial": {"initial": ["dense"]}, "negative": {"seed": -1}, "half a seed": {"seed": 0.5},
        "extra": {"extra": 5}, "one extra": {"extra": other[0]}, "extra text": {"extra": "ema"}, "group": {"group": "x"},
        "ranks": {"group": dist.new_group([0, 2])}, "long": {"socket": LONG}, "socket": {"socket": 5}, "job": {"job": 5},
        "selection": {"selection": 5}, "nonfinite": {"on_nonfinite": []}, "share": {"shadow_share": "half"},
        "generators": {"generators": [5]}, "typing error": {"strategy": "topkk@0.01/allgather"},
        "another": {"strategy": "powersdg(rank=2)"}, "None": {"initial": "None@0.1/allgather"},
        "form": {"strategy": "qsgd@0.1/allgather"}, "capitals": {"strategy": "FP16"},
        "strange": {"optimizer": torch.optim.SGD(other.parameters(), lr=0.1)},
        "class": {"optimizer": torch.optim.SGD}, "scheduler": {"scheduler": object()}, "scaler": {"scaler": 2.0},
        "scheduler class": {"scheduler": torch.optim.lr_scheduler.StepLR}, "extra class": {"extra": [torch.nn.Linear]},
        "generator class": {"generators": [torch.Generator]}, "register": {"register": "no"},
        "beside": {"strategy": GATHER, "initial": "garbage"}, "empty": {"strategy": ""}, "all": {"strategy": "topk@1/allgather"},
        "folder": {"socket": "/tmp"}, "file": {"socket": __file__},
        "no candidates": {"candidates": []}, "number of candidates": {"candidates": 5}, "one candidate": {"candidates": "topk(k=*)+ef(vanilla)"},
        "candidate number": {"candidates": ["fp16", 5]}, "candidate typing error": {"candidates": ["fp16", "topkk"]},
        "dense candidate": {"candidates": ["fp16", "dense"]}, "many candidates": {"candidates": [f"qsgd(s={s})" for s in range(1, 18)]},
        "policy": {"policy": "observe"}, "policy key": {"policy": {"kind": ["topk"]}}, "policy kinds": {"policy": {"kinds": {"topk"}}},
        "policy value": {"policy": {"least_gain": 2}}, "policy pin": {"policy": {"pin": {"strategy": "topkk/allgather"}}},
        "policy time": {"policy": {"pin": {"strategy": "fp16/dense-ring", "until": "tomorrow"}}},
        "policy pair": {"policy": {"observe": True, "pin": {"strategy": "fp16/dense-ring"}}},
    }
    everywhere = {name: error_of(lambda _, of=of: flexcomm.torch.attach(model, **of)) for name, of in given.items()}
    alone = {n: error_of(lambda _, of=of: flexcomm.torch.attach(model, **(of if rank == 2 else {}))) for n, of in given.items()}
    part = error_of(lambda _: flexcomm.torch.attach(model, torch.optim.SGD(model.module[-1].parameters(), lr=0.1)))
    return {"everywhere": everywhere, "alone": alone, "part": part}


def offered(rank):
    """What a rank's hello offers to decide about, and on request alone: by default, where the script names compressors, and where rank 2
    names others than the rest."""

    def hello_of(name, **given):
        agent = FakeAgent(FOLDER, f"{name}{rank}").start()
        session = flexcomm.torch.attach(ddp(network()), socket=str(agent.path), **given)
        agent.wait_for("hello")
        session.close()
        (hello,) = agent.of_kind("hello")
        return hello

    def hello(name, candidates):
        codecs = hello_of(name, candidates=candidates)["codecs"]
        return [[codec["compressor"] for codec in codecs if codec.get("on_request", False) == asked] for asked in (False, True)]

    named = ["topk(k=*)+ef(vanilla)", "fp16", "qsgd(s=16)", "fp16"]
    differ = error_of(lambda _: flexcomm.torch.attach(ddp(network()), candidates=["fp16", "terngrad"] if rank == 2 else ["fp16"]))
    # Ranks may differ in it.
    policy = {"kinds": ("u8bit", "fp16"), "least_gain": None, "observe": rank != 2}
    policies = [hello_of("p", policy=policy)["policy"], hello_of("o").get("policy")]
    return {"default": hello("d", None), "named": hello("n", named), "differ": differ, "policies": policies}


def after_a_failure(rank, strategy):
    """An agent that cannot be connected to, on rank 1 alone; then all is as before, and the same call succeeds."""
    agent = FakeAgent(FOLDER, f"f{strategy is None:d}{rank}").start()
    model = ddp(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    connect = flexcomm.torch.Session._connect

    def fails(session, *given):
        connect(session, *given)
        if rank == 1:
            raise OSError("no thread can be started")

    attach = lambda: flexcomm.torch.attach(model, optimizer, strategy=strategy, socket=str(agent.path))  # noqa: E731
    flexcomm.torch.Session._connect = fails
    try:
        failed = error_of(lambda _: attach())
    finally:
        flexcomm.torch.Session._connect = connect
    agent.wait_for("bye")
    clean = [len(model._comm_hooks), len(model._forward_pre_hooks), len(optimizer._optimizer_step_post_hooks)]
    return {"failed": failed, "clean": clean, "again": trained(rank, model, optimizer, attach)}


def trained(rank, model, optimizer, attach):
    """What a run of five steps comes to: its error, and its steps and whether the ranks are the same."""
    seen = []

    def run(_):
        session = attach()
        for step in range(5):
            x, y = batch(step, rank)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        session.close()
        seen.extend([session.step, same(parameters_hash(model))])

    return error_of(run), seen


def torchs_own_hook(rank):
    """A hook in C++, of which the model's list does not know."""
    model = ddp(network())
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return error_of(lambda _: flexcomm.torch.attach(model, strategy=GATHER)), len(model._comm_hooks)


def fsdp(rank):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return error_of(lambda _: flexcomm.torch.attach(FullyShardedDataParallel.__new__(FullyShardedDataParallel)))


def broken(rank):
    """The core is called with nonsense: exceptions, never a crash."""
    core = _core.Core("j", 0, 1, [(4, 1)], strategy="none/dense-ring", selection="star", seed=0, shadow_share=1.0)
    core.begin()
    out = [error_of(lambda _: core.enter(0, 4, None))]
    core.layout(0, [0])
    out.append(error_of(lambda _: core.enter(0, 4, 3)))
    out.append(error_of(lambda _: core.enter(0, 5, None)))
    out.append(error_of(lambda _: core.layout(1, [7])))
    out.append(error_of(lambda _: core.restore()))
    return out


def passed_by():
    """DDP exchanges a bucket without the hook although the ranks agreed to compress: answers until it is too late, and then."""
    core = _core.Core("j", 0, 1, [(4, 1)], strategy=GATHER, selection="star", seed=0, shadow_share=1.0)
    answers = []

    def run(_):
        while len(answers) < 10:
            core.begin()
            answers.append(core.launched_natively(0, 4, 4))
            core.finish(None)

    return error_of(run)[:2] + (len(answers),)


def codec_fails(rank, strategy):
    """The codec of one rank fails in the eighth step."""
    model = ddp(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = flexcomm.torch.attach(model, optimizer, strategy=strategy)

    def run(steps):
        for step in range(10):
            if step == 7 and rank == 2:
                session.hook.core = Short(session.hook.core)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch(step, rank)[0]), batch(step, rank)[1]).backward()
            optimizer.step()
            steps.append(step)

    return error_of(run)


def twice(rank, strategy):
    """Two synchronised backward passes in one batch of `batches()`, with the wrapper and with the hook; with no_sync() it is one."""
    agent = FakeAgent(FOLDER, f"t{strategy is None:d}{rank}").start()
    model = ddp(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = flexcomm.torch.attach(model, optimizer, strategy=strategy, socket=str(agent.path))

    def run(steps, once):
        # A pass before the loop, whose optimizer's step was left out, is none of its first batch's.
        model(batch(99, rank)[0]).sum().backward()
        for number, (x, y) in enumerate(session.batches([batch(step, rank) for step in range(6)])):
            optimizer.zero_grad()
            with model.no_sync() if once or number < 4 else contextlib.nullcontext():
                torch.nn.functional.cross_entropy(model(x), y).backward()
            torch.nn.functional.cross_entropy(model(-x), y).backward()
            optimizer.step()
            steps.append(number)

    once = error_of(lambda steps: run(steps, True)) + (session.step, same(parameters_hash(model)))
    return once, error_of(lambda steps: run(steps, False))


with ranks() as (rank, world, seen):
    seen["passed by"] = passed_by()
    for strategy in (GATHER, "topk(k=0.1)+ef(vanilla)/art-ring:star", "topk(k=0.1)+ef(vanilla)/art-ring:var"):
        seen[f"nan {strategy}"] = nan(rank, strategy)
        seen[f"propagate {strategy}"] = nan(rank, strategy, on_nonfinite="propagate")
        seen[f"go on {strategy}"] = go_on(rank, strategy)
    seen["go on qsgd"] = go_on(rank, "qsgd(s=16)+ef(vanilla)")
    seen["go on batches"] = go_on(rank, GATHER, looped=True)
    seen["go on unused"] = go_on(rank, GATHER, find_unused_parameters=True)
    seen["releases"] = releases(rank)
    seen["sparse"] = sparse(rank)
    seen["complex"] = complex_values(rank)
    seen["two sessions"] = two_sessions(rank)
    seen["losses"] = losses(rank)
    seen["names"] = names(rank)
    seen["bf16"] = types(rank, torch.bfloat16)
    seen["float64"] = types(rank, torch.float64)
    seen["models"] = models(rank)
    seen["arguments"] = arguments(rank)
    seen["wrong kinds"] = of_wrong_kinds(rank)
    seen["offered"] = offered(rank)
    seen["after a failure"] = [after_a_failure(rank, strategy) for strategy in (None, GATHER)]
    seen["torch's own hook"] = torchs_own_hook(rank)
    seen["arguments of one"] = arguments_of_one(rank)
    seen["models of one job"] = models_of_one_job(rank)
    seen["fsdp"] = fsdp(rank)
    seen["broken"] = broken(rank)
    seen["fails alone"] = fails_alone(rank)
    for strategy in (GATHER, "topk(k=0.1)+ef(vanilla)/art-ring:star", "powersgd(rank=2)+ef(vanilla)", "fp16+ef(vanilla)"):
        seen[f"codec {strategy}"] = codec_fails(rank, strategy)
    seen["twice"] = [twice(rank, strategy) for strategy in (None, GATHER)]

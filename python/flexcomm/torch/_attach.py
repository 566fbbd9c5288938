"""``attach``: from a DDP model to a session that follows decisions."""

from __future__ import annotations

import weakref
from typing import Any, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from flexcomm import _core, _repeats
from flexcomm.torch import _agree, _arguments, _checks
from flexcomm.torch._session import Session
from flexcomm.torch._snapshot import Parts


def attach(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    extra: Sequence[Any] = (),
    generators: Sequence[torch.Generator] = (),
    strategy: str | Mapping[str, str] | None = None,
    initial: str | Mapping[str, str] = "dense",
    selection: str = "decision",
    candidates: Sequence[str] | None = None,
    policy: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
    job: str | None = None,
    socket: str | None = None,
    on_nonfinite: str = "auto",
    shadow_share: float = 0.25,
    seed: int = 0,
    register: bool = True,
) -> Session:
    """Registers flexcomm's communication hook on ``model`` and connects to this node's agent.

    Call it on every rank with the same settings, after the model is wrapped and before the first backward pass; it
    compares model and settings over the ranks and raises the same error on all of them when they differ.

    Parameters
    ----------
    model:
        The wrapped model.
    optimizer, scheduler, scaler, extra, generators:
        What a live trial must put back besides the model: ``extra`` are objects with ``state_dict`` and
        ``load_state_dict`` (an average of weights, a second optimizer), ``generators`` private random generators. Data
        loaders do not belong there, stateful ones neither: batches that a trial has seen are kept for training, and a
        loader that was put back would give some twice or not at all. The optimizer also tells flexcomm when a step ends.
    strategy:
        Holds one strategy for the whole run instead of following decisions: ``"dense"``; any compressor of
        :func:`compressors` with its parameters, memory and momentum, for example ``"fp16"``, ``"qsgd(s=16)"`` or
        ``"topk(k=0.01)+ef(vanilla)+nesterov(mu=0.9)"``, and where you like its collective behind it, for example
        ``"topk(k=0.01)+ef(vanilla)/art-ring:star"``; or BytePS's map of strings. Error feedback is only where ``ef(...)``
        says so; ``"topk@0.01/allgather"`` is short for ``"topk(k=0.01)+ef(vanilla)/allgather"``.
    initial:
        What runs before the first decision, written as ``strategy``.
    selection:
        Who leads AR-Topk: ``"decision"``, ``"star"`` (round-robin), ``"var"`` (most energy) or ``"auto"`` (by measured
        skew and staleness).
    candidates:
        The compressors that decisions choose among besides dense, with or without their ratio, for example
        ``["fp16", "topk(k=*)+ef(vanilla)", "terngrad"]``; otherwise the default ones. The job's policy and the controller's
        settings may allow fewer, and name others.
    policy:
        What decisions about this job may be, as ``PUT /api/v1/jobs/JOB/policy`` takes it, for example ``{"kinds": ["topk"],
        "least_gain": 0.3}`` or ``{"observe": True}``. Every key may be left out: ``kinds`` (only these compressors),
        ``objective`` (how candidates are ranked), ``least_gain`` and ``most_overhead`` (limits), ``observe`` (only report),
        ``pin`` (``{"strategy": ..., "until": ...}``: this one until a time of RFC 3339; once that has passed, it has no effect).
        A policy that an operator sets takes its place as a whole. Where ranks set different ones, the lowest rank's counts.
    group:
        The process group of the model, if it is not the default one.
    job:
        The job's name; otherwise ``FLEXCOMM_JOB``, or the id that torchrun, Slurm or Kubernetes gave the job of rank 0, or
        ``"default"``. Models of one process at one agent need a name each.
    socket:
        The agent's Unix socket; otherwise ``FLEXCOMM_SOCKET``. Without either no decisions arrive.
    on_nonfinite:
        What a NaN or infinite gradient does when compressing: ``"raise"`` :class:`NotFiniteError` on all ranks, after
        which training may go on; ``"propagate"`` NaN to all ranks as dense DDP does, ``"auto"``: propagate when ``scaler``
        is given. That bucket's residual stays as it was. Where a rank has run out of batches under
        ``model.join()``, ``"raise"`` warns on all ranks instead, and the gradients of that pass are zeros.
    shadow_share:
        Share of the coordinates that shadow trials look at, in (0, 1].
    seed:
        Of MSTopk and of shadow trials.
    register:
        False: the caller registers ``session.hook`` itself. See also :class:`flexcomm.torch.CommHook`.
    """
    _repeats.begin()
    if not isinstance(model, DistributedDataParallel):
        _checks.refuse_model(model, group)

    def settings() -> _arguments.Settings:
        return _arguments.read(
            strategy=strategy, initial=initial, selection=selection, candidates=candidates, policy=policy, job=job,
            socket=socket, on_nonfinite=on_nonfinite, scaler=scaler, shadow_share=shadow_share, seed=seed, register=register,
        )

    def parts() -> Parts:
        _arguments.check_optimizer(optimizer, model)
        objects = _arguments.several("extra", extra, "objects with state_dict and load_state_dict")
        return Parts(weakref.ref(model), optimizer, scheduler, scaler, objects, _arguments.generators(generators))

    return Session(model, _agree.agree(model, settings, parts, group), register)


def compressors() -> dict[str, str]:
    """Every compressor that ``attach`` takes as ``strategy``: by name, what it does and which parameters it has."""
    out = {}
    for one in _core.compressors():
        lines = [f"{parameter.name}: {parameter.about} ({parameter.allowed})" for parameter in one.parameters]
        out[one.name] = "\n    ".join([one.about, *lines])
    return out

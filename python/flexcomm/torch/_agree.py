"""What the ranks compare when they attach, and what they then have in common."""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from flexcomm import _core
from flexcomm._core import Core
from flexcomm.torch import _arguments, _checks, _registry, _tuner, _wrapper
from flexcomm.torch._control import Control
from flexcomm.torch._snapshot import Parts

Named = list[tuple[str, torch.nn.Parameter]]


@dataclasses.dataclass(frozen=True)
class Agreed:
    """What a session is made of, once all ranks have found nothing to refuse."""

    settings: _arguments.Settings
    parts: Parts
    #: The model's parameters that are trained.
    named: Named
    group: dist.ProcessGroup | None
    core: Core
    control: Control
    #: Whether rank 0 has an agent.
    has_agent: bool
    tuner: _tuner.Tuner | None
    #: Whether DDP's process group can be wrapped.
    fits: bool


def agree(
    model: DistributedDataParallel, read: Callable[[], _arguments.Settings], make_parts: Callable[[], Parts],
    group: Any,
) -> Agreed:
    """Compares model and settings over the ranks; what any of them refuses is an error on all. `read` and `make_parts` check
    what the user gave."""
    models = _arguments.group_of(model)
    named = [(n, p) for n, p in model.module.named_parameters() if p.requires_grad]

    def checked() -> _arguments.Settings:
        _arguments.check_group(group, models)
        _registry.check_model(model)
        _checks.check_layers(model)
        _checks.check_values(named)
        return read()

    settings = _checks.everywhere(checked, models)
    settings = dataclasses.replace(settings, job=_checks.job_name(settings.job, models))

    def made() -> tuple[Core, Parts]:
        core = _make_core(settings, named, models)
        _registry.check_job(settings.job, settings.socket)
        return core, make_parts()

    core, parts = _checks.everywhere(made, models)
    group = models if group is None else group
    fits = _wrapper.fits(model)
    # Any rank might make the id of the run; rank 0's counts.
    mine = {"same": _same(model, settings, named, fits), "socket": settings.socket is not None, "run": secrets.token_hex(8)}
    first = _checks.compare(mine, group)[0]
    core.agree(first["run"], first["socket"], not settings.fixed)
    control = _checks.everywhere(lambda: Control(core, group, first["run"]), group)
    tuner = _find_tuner(group, named)
    return Agreed(settings, parts, named, group, core, control, first["socket"], tuner, fits)


def _make_core(settings: _arguments.Settings, named: Named, group: dist.ProcessGroup | None) -> Core:
    return Core(
        settings.job, dist.get_rank(group), dist.get_world_size(group), [(p.numel(), _columns(p)) for _, p in named],
        strategy=settings.named.strategy, selection=settings.selection, seed=settings.seed, shadow_share=settings.shadow_share,
        spec=settings.named.spec,
    )


def _columns(parameter: torch.nn.Parameter) -> int:
    """Values per row of a parameter as a matrix, as PowerSGD has it: one row per output; 1 for vectors."""
    if parameter.dim() < 2 or parameter.numel() == 0:
        return 1
    return parameter.numel() // parameter.shape[0]


def _same(
    model: DistributedDataParallel, settings: _arguments.Settings, named: Named, fits: bool
) -> dict[str, Any]:
    """What must be the same on all ranks, as errors name it."""
    compressed = ", compressed" if settings.named.spec else ""
    return {
        "the flexcomm version": f"{_core.VERSION} (protocol {_core.PROTOCOL})",
        "the model": _checks.fingerprint(named),
        "the strategy": f"{settings.named.strategy}{compressed}, {'held' if settings.fixed else 'followed'}",
        "the selection": settings.selection,
        "the candidates": settings.candidates,
        "on_nonfinite": settings.propagate,
        "the seed": settings.seed,
        "a communication hook on the model": bool(model._comm_hooks),
        "whether DDP's process group can be wrapped": fits,
    }


def _nccl_moves(group: dist.ProcessGroup | None, named: Named) -> bool:
    """Whether the gradients' allreduces are NCCL's. The same on all ranks: their models are."""
    return "nccl" in dist.get_backend_config(group) and all(p.device.type == "cuda" for _, p in named)


def _find_tuner(group: dist.ProcessGroup | None, named: Named) -> "_tuner.Tuner | None":
    """NCCL's tuner plugin, where every rank has it and NCCL asks it."""
    if not named or not _nccl_moves(group, named):
        return None
    one = torch.ones(1, device=named[0][1].device)

    def gather(mine: bool) -> list[bool]:
        answers: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(answers, mine, group=group)
        return answers

    return _tuner.agree(lambda: dist.all_reduce(one, group=group), gather)

"""What ``attach`` refuses, with the same error on every rank."""

from __future__ import annotations

import hashlib
import os
from typing import Any, Callable, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from flexcomm._core import FlexcommError
from flexcomm.torch import _arguments, _wrapper
from flexcomm.torch._hook import is_detached

_Made = TypeVar("_Made")


def refuse_model(model: Any, given: Any) -> NoReturn:
    """On all ranks: others may have the right model, and would wait for this one where they tell what they refuse."""

    def refuse() -> NoReturn:
        raise _wrong_model(model)

    if not dist.is_initialized():
        refuse()
    compiled = _compiled(model)
    group = given if isinstance(given, dist.ProcessGroup) else None
    if compiled is not None:
        group = _arguments.group_of(compiled)
    if dist.get_rank(group) < 0:
        refuse()
    everywhere(refuse, group)


def _wrong_model(model: Any) -> FlexcommError:
    name = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
    if "FullyShardedDataParallel" in name or "FSDP" in name:
        return FlexcommError(
            f"the model is {name}: FSDP reduces shards, for which flexcomm has no error feedback. "
            "Use DistributedDataParallel, or run FSDP without flexcomm"
        )
    if _compiled(model) is not None:
        return FlexcommError(f"the model is {name}: attach to the DistributedDataParallel model first, then torch.compile it")
    return FlexcommError(f"the model is {name}: wrap it in torch.nn.parallel.DistributedDataParallel first")


def _compiled(model: Any) -> DistributedDataParallel | None:
    """The model that torch.compile has wrapped, if it is one of DDP's."""
    inner = getattr(model, "__dict__", {}).get("_modules", {}).get("_orig_mod")
    return inner if isinstance(inner, DistributedDataParallel) else None


def everywhere(make: Callable[[], _Made], group: dist.ProcessGroup | None) -> _Made:
    """What ``make`` makes. What it refuses on any rank is an error on all: else the others would wait for that rank."""
    made, refusal, cause = None, None, None
    try:
        made = make()
    except Exception as refused:
        cause = refused
        refusal = isinstance(refused, FlexcommError), str(refused).removeprefix("failed to attach: ")
    refusals: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(refusals, refusal, group=group)
    for rank, other in enumerate(refusals):
        if other is not None:
            raise (FlexcommError if other[0] else ValueError)(f"failed to attach: rank {rank}: {other[1]}") from cause
    assert made is not None
    return made


def compare(mine: dict[str, Any], group: dist.ProcessGroup | None) -> list[dict[str, Any]]:
    """Every rank's settings; the same error on every rank when they differ."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    for rank, other in enumerate(everyone):
        for key, value in other["same"].items():
            first = everyone[0]["same"].get(key)
            if value != first:
                raise FlexcommError(
                    f"failed to attach: {key} differs between ranks: {first!r} on rank 0, {value!r} on rank {rank}; "
                    "start all ranks with the same script, model and flexcomm version"
                )
    return everyone


def job_name(named: str, group: dist.ProcessGroup | None) -> str:
    """The job's name, the same on every rank: as ranks name it that do, else by what launched rank 0. Launchers tell each rank
    what they know of it, and not all of them the same."""
    everyone: list[tuple[str, str]] = [("", "")] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (named, _arguments.default_job(os.environ)), group=group)
    given = [(rank, name) for rank, (name, _) in enumerate(everyone) if name]
    for rank, name in given:
        first, wanted = given[0]
        if name != wanted:
            raise FlexcommError(
                f"failed to attach: the job differs between ranks: {wanted!r} on rank {first}, {name!r} on rank {rank}; give "
                "all ranks the same attach(job=...) or FLEXCOMM_JOB"
            )
    return given[0][1] if given else everyone[0][1]


def fingerprint(named: list[tuple[str, torch.nn.Parameter]]) -> str:
    """Names, shapes, types and devices of all parameters, as a short text for people and a hash."""
    lines = "\n".join(f"{n} {tuple(p.shape)} {p.dtype} {p.device.type}" for n, p in named)
    digest = hashlib.sha256(lines.encode()).hexdigest()[:12]
    return f"{len(named)} parameters with {sum(p.numel() for _, p in named)} values ({digest})"


def check_layers(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            raise FlexcommError(
                f"{name} makes sparse gradients, which cannot be compressed; make it with sparse=False"
            )


def check_values(named: list[tuple[str, torch.nn.Parameter]]) -> None:
    for name, parameter in named:
        if parameter.is_complex():
            raise FlexcommError(
                f"the parameter {name} is {parameter.dtype}, allowed are real parameters: flexcomm knows no complex values. Keep it "
                "as a real one with a last dimension of 2 and call torch.view_as_complex in forward(), freeze it before "
                "the model is wrapped (requires_grad_(False)), or train this model without flexcomm"
            )


def check_hook(model: DistributedDataParallel) -> None:
    """Refuses a model on which no hook can be registered."""
    # A copy's reducer is made anew without the hook, of which only the list knows.
    there = [getattr(one, "__qualname__", "of another kind") for one, *_ in model._comm_hooks if not is_detached(one)]
    if not there and (builtin := _wrapper.builtin_hook(model)):
        there = [builtin]
    if there:
        raise FlexcommError(
            f"failed to register the hook: the model has one already ({there[0]}), and DDP takes one for good. Wrap the module in "
            "DistributedDataParallel anew and attach once; or attach(register=False) and call session.hook in a hook of yours"
        )

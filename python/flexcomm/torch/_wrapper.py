"""A process-group wrapper for DDP's reducer: while the ranks are dense, DDP runs natively, without a communication hook.

Without a hook DDP divides by the number of ranks while it copies a gradient into its bucket; with any hook, torch's own
included, that is a pass over memory of its own. So the reducer is given a process group that hands every allreduce on and takes
its time. To the other ranks it looks as the hook does.
The hook is registered at the end of the step after which something else than dense runs.
"""

from __future__ import annotations

import weakref
from typing import Any, Callable, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from flexcomm._core import FlexcommError
from flexcomm.torch._ddp import in_backward
from flexcomm.torch._hook import Hook

_Method = TypeVar("_Method", bound=Callable[..., Any])

#: Where the model keeps its group: a process group written in Python lives for as long as its Python object.
_KEPT = "_flexcomm_wrapper"


def fits(model: DistributedDataParallel) -> bool:
    """Whether the process group of DDP's reducer can be wrapped. One that has a hook already asks no group for allreduces."""
    own_way = model._comm_hooks or builtin_hook(model) or getattr(model, "mixed_precision", None) is not None
    return not own_way and hasattr(model.reducer, "_update_process_group") and values(model) is not None


def builtin_hook(model: DistributedDataParallel) -> str:
    """Name of a hook of torch's own in C++, of which the model's list does not know; empty: it has none."""
    return str(_logging_data(model).get("comm_hook") or "") if not model._comm_hooks else ""


def _logging_data(model: DistributedDataParallel) -> dict[str, Any]:
    """DDP's own logging data; empty where this torch has none."""
    try:
        return dict(model._get_ddp_logging_data())
    except (AttributeError, AssertionError, RuntimeError):
        return {}


def values(model: DistributedDataParallel) -> int | None:
    """Values of all of DDP's buckets together, by which the last one is known; none where they cannot be known: a
    parameter was frozen or thawed since DDP was made, or is complex, or torch does not log them."""
    try:
        parameters, _ = model._build_params_for_reducer()
        logged = _logging_data(model)
        made = logged["num_parameter_tensors"], logged["total_parameter_size_bytes"]
    except (AttributeError, AssertionError, KeyError, RuntimeError):
        return None
    now = len(parameters), sum(p.numel() * p.element_size() for p in parameters)
    if made != now or not all(p.is_floating_point() for p in parameters):
        return None
    return sum(int(p.numel()) for p in parameters)


def place(model: DistributedDataParallel, hook: Hook, end: Callable[[], None]) -> None:
    """Wraps the process group of the model's reducer, which :func:`fits`. ``end`` ends the step under way."""
    total = values(model)
    if total is None:
        raise FlexcommError("failed to wrap DDP's process group: the values of its buckets are not known")
    # An earlier session's, if the model was attached before.
    remove(model)
    wrapper = _GroupWrapper(model.process_group, hook, total, end)
    model.reducer._update_process_group(wrapper)
    # A process group written in Python lives for as long as its object, and forward passes come later.
    setattr(model, _KEPT, wrapper)
    wrapper.watch(model)


def remove(model: DistributedDataParallel) -> None:
    """Gives the reducer its own group back, between two steps."""
    wrapper = getattr(model, _KEPT, None)
    if wrapper is not None:
        model.reducer._update_process_group(model.process_group)
        wrapper.unwatch()
        delattr(model, _KEPT)


def _nothing() -> None:
    return None


# torch.compile traces what runs in a compiled model's forward pass, and fails at a process group written in Python.
_untraced: Callable[[_Method], _Method] = torch.compiler.disable


class _OnForward:
    """Before the model's forward pass. Copies of the model, pickled ones too, have no wrapper."""

    def __init__(self, wrapper: "_GroupWrapper | None" = None) -> None:
        self._wrapper = _nothing if wrapper is None else weakref.ref(wrapper)

    def __reduce__(self) -> Any:
        return _OnForward, ()

    @_untraced
    def __call__(self, model: DistributedDataParallel, *_: Any) -> None:
        wrapper = self._wrapper()
        # Validation and the like is no training pass: no backward pass that exchanges gradients comes after it.
        if wrapper is not None and torch.is_grad_enabled() and model.require_backward_grad_sync:
            wrapper.forward()


class _GroupWrapper(dist.ProcessGroup):
    """The model's group as its reducer sees it."""

    def __init__(self, group: dist.ProcessGroup, hook: Hook, values: int, end: Callable[[], None]) -> None:
        super().__init__(group.rank(), group.size())
        self._inner = group
        self._hook = hook
        self._values = values
        self._end = end
        #: Buckets and values of the pass under way.
        self._index = self._seen = 0
        self._watched: Any = None

    def __reduce__(self) -> Any:
        # A pickled model has no process group; without this it could not be pickled at all.
        return _nothing, ()

    def watch(self, model: DistributedDataParallel) -> None:
        self._watched = model.register_forward_pre_hook(_OnForward(self))

    def unwatch(self) -> None:
        self._watched.remove()

    def forward(self) -> None:
        """A pass begins."""
        # Not 0 only when the pass before ended in an exception.
        whole = self._index == 0
        self._index = self._seen = 0
        if whole and self._hook.core.awaits_control():
            # The optimizer's step was left out, perhaps on this rank only: the others may have registered the hook already.
            self._end()

    @_untraced
    def getBackendName(self) -> str:  # noqa: N802
        return self._inner.name()

    # Called by DDP's reducer alone, in one of the forms that the group has.
    @_untraced
    def allreduce(  # type: ignore[override]
        self, tensors: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        opts = dist.AllreduceOptions() if opts is None else opts
        bucket = tensors[0]
        if bucket.dtype == torch.int32 or bucket.layout != torch.strided:
            # Which parameters were used.
            return self._inner.allreduce(tensors, opts)
        index, self._index = self._index, self._index + 1
        self._seen += bucket.numel()
        last = self._seen >= self._values
        if last:
            self._index = self._seen = 0
        work = self._hook.native.all_reduce(index, bucket, last, lambda payload: self._inner.allreduce([payload], opts))
        if last and not in_backward():
            # No backward pass: under `join()`, of a rank that has run out of batches and has no optimizer's step.
            self._end()
        return work

    @_untraced
    def broadcast(  # type: ignore[override]
        self, tensors: list[torch.Tensor], opts: Any
    ) -> dist.Work:
        return self._inner.broadcast(tensors, opts)

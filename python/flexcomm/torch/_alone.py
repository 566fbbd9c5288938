"""The communication hook for those who register it themselves, before there is a model to attach to."""

import inspect
import weakref
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from flexcomm._core import FlexcommError
from flexcomm.torch._attach import attach
from flexcomm.torch._bucket import GradBucket
from flexcomm.torch._hook import Hook, detached_hook
from flexcomm.torch._session import Session


class CommHook:
    """A DDP communication hook that attaches by itself, at the first bucket of the model that it is registered on.

    ``ddp_model.register_comm_hook(None, CommHook(strategy="topk(k=0.01)+ef(vanilla)/allgather"))``, or where a front end registers hooks
    itself, Lightning's ``DDPStrategy(ddp_comm_hook=CommHook(...))``. Make it on every rank with the same settings before the
    model's first forward pass; one for each model.

    Whoever has the model at hand is better served by :func:`attach`: while the ranks are dense DDP then runs without any
    hook, and a loop over ``session.batches()`` can run live trials.

    Parameters
    ----------
    optimizer:
        Tells flexcomm when a step ends, where there is one already; else a step ends when the next begins.
    settings:
        What :func:`attach` takes besides the model and ``register``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None = None, **settings: Any) -> None:
        # Names that are none, now; values when it attaches, where all ranks see what one of them refuses.
        inspect.signature(attach).bind(None, optimizer, **settings, register=False)
        # DDP looks for these on the hook; an instance has none.
        self.__name__ = self.__qualname__ = "flexcomm_hook"
        self._settings = {"optimizer": optimizer, **settings}
        self._session: Session | None = None
        self._hook: Hook | None = None
        # A hook does not receive its model, and its buckets have parameters without names.
        self._models: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._unwatch = weakref.finalize(self, register_module_forward_pre_hook(_Watch(self._models)).remove)
        self._unwatch.atexit = False

    def __reduce__(self) -> Any:
        # With the model that it is registered on, as of the hook that `attach` registers.
        return detached_hook, ()

    def __call__(self, state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """What DDP calls for every bucket of a synchronised backward pass."""
        hook = self._hook
        if hook is None:
            hook = self._hook = self._attach(bucket)
        return hook(state, bucket)

    @property
    def session(self) -> Session:
        """What :func:`attach` would have returned; from the first backward pass on."""
        if self._session is None:
            raise FlexcommError("failed to find the session: the hook attaches in the model's first backward pass")
        return self._session

    def _attach(self, bucket: GradBucket) -> Hook:
        shown = {id(p) for p in bucket.parameters()}
        model = next((m for m in self._models if shown <= {id(p) for p in m.parameters()}), None)
        if model is None:
            raise FlexcommError(
                "failed to attach: this hook has not seen the model's forward pass; make it before that, or "
                "attach(model, register=False) and register session.hook"
            )
        self._session = attach(model, **self._settings, register=False)
        self._unwatch()
        return self._session.hook


class _Watch:
    """Before the forward pass of any module, until the hook is attached or gone."""

    def __init__(self, models: weakref.WeakSet[DistributedDataParallel]) -> None:
        self._models = models

    def __call__(self, module: torch.nn.Module, _: Any) -> None:
        if isinstance(module, DistributedDataParallel):
            self._models.add(module)

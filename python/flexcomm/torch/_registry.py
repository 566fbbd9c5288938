"""The sessions of this process: a model has one at a time, and so has a job at an agent."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

from torch.nn.parallel import DistributedDataParallel

from flexcomm._core import FlexcommError

if TYPE_CHECKING:
    from flexcomm.torch._session import Session

#: Sessions with an agent, by job and socket.
_CONNECTED: weakref.WeakValueDictionary[tuple[str, str], Session] = weakref.WeakValueDictionary()

#: Sessions that are not closed, by model.
_ATTACHED: weakref.WeakKeyDictionary[DistributedDataParallel, weakref.ref[Session]] = weakref.WeakKeyDictionary()


def add(session: Session, model: DistributedDataParallel | None, job: str, socket: str | None) -> None:
    if model is not None:
        _ATTACHED[model] = weakref.ref(session)
    if socket is not None:
        _CONNECTED[job, socket] = session


def remove(session: Session, model: DistributedDataParallel | None) -> None:
    known = None if model is None else _ATTACHED.get(model)
    if model is not None and known is not None and known() is session:
        del _ATTACHED[model]
    for key in [key for key, other in _CONNECTED.items() if other is session]:
        del _CONNECTED[key]


def check_job(job: str, socket: str | None) -> None:
    """An agent tells its trainers apart by job and rank."""
    if socket is None or (job, socket) not in _CONNECTED:
        return
    # One whose model is gone may wait for the collector.
    gc.collect()
    if (job, socket) in _CONNECTED:
        raise FlexcommError(
            f"this process has a model in job {job!r} at the agent {socket} already, and decisions and trials of one would "
            "be taken for the other's. Give each model a job of its own, attach(job=...), the same on all ranks; or "
            "close() the other model's session first"
        )


def check_model(model: DistributedDataParallel) -> None:
    """Two sessions would both count the steps, and each register the hook for itself. One that has its hook on the model is
    seen by that."""
    if model not in _ATTACHED:
        return
    # One that is not referenced any more may wait for the collector.
    gc.collect()
    session = _ATTACHED[model]() if model in _ATTACHED else None
    if session is not None and session._registration.is_native:
        raise FlexcommError(
            "the model has a session already, which counts its steps; go on with what the first attach returned, or close() "
            "that session first"
        )

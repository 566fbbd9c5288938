"""How a model's gradients reach the other ranks: by DDP alone, by DDP in a process-group wrapper, or by the hook."""

from __future__ import annotations

import enum
import weakref
from typing import Callable

from torch.nn.parallel import DistributedDataParallel

from flexcomm._core import FlexcommError
from flexcomm.torch import _checks, _wrapper
from flexcomm.torch._agree import Agreed
from flexcomm.torch._hook import Hook


class Way(enum.Enum):
    #: Dense without an agent is native DDP, with the very collectives that the hook would run, and without the hook's pass
    #: over the gradient. So each rank may register the hook whenever it needs it.
    NATIVE = enum.auto()
    #: With an agent DDP is native too, in a process-group wrapper, until something else is decided.
    WRAPPED = enum.auto()
    HOOK = enum.auto()
    #: The hook, which the caller registers.
    CALLER = enum.auto()


def way_of(agreed: Agreed, register: bool) -> Way:
    settings = agreed.settings
    if not register:
        return Way.CALLER
    if not settings.named.dense or agreed.parts.optimizer is None:
        return Way.HOOK
    if not agreed.has_agent and settings.socket is None:
        return Way.NATIVE
    return Way.WRAPPED if agreed.tuner is None and agreed.fits else Way.HOOK


class Registration:
    """Of one model. The model owns the hook, the hook owns the session, the session owns neither: a cycle through DDP's C++
    side would keep the process group's threads alive into the interpreter's end, which aborts there."""

    def __init__(self, model: Callable[[], DistributedDataParallel | None], hook: Hook, way: Way) -> None:
        self.way = way
        self._model = model
        self._hook: Callable[[], Hook | None] = lambda: hook

    @property
    def is_native(self) -> bool:
        return self.way in (Way.NATIVE, Way.WRAPPED)

    def hook(self) -> Hook | None:
        """None where the model that it was registered on is gone."""
        return self._hook()

    def place(self, end_step: Callable[[], None]) -> None:
        """Changes the model, for the first time. `end_step` ends the step under way."""
        model, hook = self._both()
        if self.way is Way.WRAPPED:
            _wrapper.place(model, hook, end_step)
            self._hook = weakref.ref(hook)
        elif self.way is Way.HOOK:
            self.register()

    def check(self) -> None:
        """Refuses what needs the hook where it cannot be registered, before anything is changed."""
        model = self._model()
        if model is not None and self.is_native:
            _checks.check_hook(model)

    def register(self) -> None:
        """Registers the hook, between two steps."""
        model, hook = self._both()
        _checks.check_hook(model)
        model.register_comm_hook(None, hook)
        _wrapper.remove(model)
        self.way = Way.HOOK
        self._hook = weakref.ref(hook)

    def register_once(self) -> None:
        if self.is_native:
            self.register()

    def _both(self) -> tuple[DistributedDataParallel, Hook]:
        model, hook = self._model(), self._hook()
        if model is None or hook is None:
            raise FlexcommError("failed to register the hook: the model is gone")
        return model, hook

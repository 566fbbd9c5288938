"""Tells NCCL's tuner plugin (``nccl-tuner/``) which shape the gradients' allreduces take, in this very step.

Only ctypes: the plugin is a library of its own, because NCCL also loads it in processes without Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from typing import Callable, Iterator

logger = logging.getLogger("flexcomm")

#: Numbers of the plugin's header, ``nccl-tuner/include/flexcomm_nccl_tuner.h``.
_THREAD, _NONE, _TREE, _RING = 0, -1, 0, 1

#: What NCCL can be asked for when the plugin is there. An allgather has one shape.
_SHAPES = {"dense-tree": _TREE, "art-tree": _TREE, "dense-ring": _RING, "art-ring": _RING}


_COUNTS = ("communicators", "asked", "asked_here", "steered", "same", "left")


class _State(ctypes.Structure):
    _fields_ = [("thread_algorithm", ctypes.c_int32), ("process_algorithm", ctypes.c_int32)] + [
        (name, ctypes.c_uint64) for name in _COUNTS
    ]


def _names() -> list[str]:
    """What NCCL tries to open, in its order."""
    named = os.environ.get("NCCL_TUNER_PLUGIN")
    if not named:
        return ["libnccl-tuner.so"]
    whole = named.startswith("lib") and named.endswith(".so")
    return [named] if "/" in named or whole else [named, f"libnccl-tuner-{named}.so"]


class Tuner:
    """The plugin as NCCL has loaded it in this process.

    Parameters
    ----------
    library:
        The loaded library; held for as long as this object, so that the plugin keeps what it received when NCCL closes
        it with its last communicator.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._prefer = library.flexcomm_tuner_prefer
        self._prefer.argtypes, self._prefer.restype = [ctypes.c_int32, ctypes.c_int32, ctypes.c_uint64], ctypes.c_int32
        self._state = library.flexcomm_tuner_state
        self._state.argtypes, self._state.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_int32
        self._library = library

    @classmethod
    def find(cls) -> "Tuner | None":
        """The plugin, when NCCL has already loaded it: call it after the group's first collective.

        A copy that NCCL has not loaded would receive it in vain, so nothing is loaded here.
        """
        for name in _names():
            try:
                return cls(ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD))
            except OSError:
                continue
            except AttributeError:
                # Somebody else's tuner.
                return None
        return None

    def counts(self) -> dict[str, int]:
        """Allreduces since the plugin was loaded, see the header."""
        state = _State()
        self._state(ctypes.byref(state), ctypes.sizeof(state))
        return {name: getattr(state, name) for name in _COUNTS}

    @contextlib.contextmanager
    def around(self, strategy: str | None, step: int) -> Iterator[None]:
        """Allreduces that this thread enqueues inside take the shape of ``strategy``.

        ``strategy`` is the one that the ranks agreed on for this step (text, ``COMPRESSOR/COLLECTIVE[:SELECTION]``),
        a trial's candidate included; none, or one without a shape, leaves the choice to NCCL.
        """
        shape = _shape(strategy)
        if shape is None:
            yield
            return
        self._prefer(_THREAD, shape, step)
        try:
            yield
        finally:
            self._prefer(_THREAD, _NONE, step)


def _shape(strategy: str | None) -> int | None:
    if strategy is None:
        return None
    return _SHAPES.get(strategy.rpartition("/")[2].partition(":")[0])


def agree(all_reduce: Callable[[], object], gather: Callable[[bool], list[bool]]) -> Tuner | None:
    """The plugin, when every rank has it and NCCL asks it where :meth:`Tuner.around` has an effect.

    Call it on every rank. NCCL prepares the collectives of a non-blocking communicator on a thread of its own, where a
    thread's preference does not count; and ranks of which only some have the plugin would wait for each other for ever.
    Either way none uses it then.

    Parameters
    ----------
    all_reduce:
        Runs a small allreduce on the gradients' group.
    gather:
        Gives all ranks' answers on every rank.
    """
    all_reduce()
    tuner = Tuner.find()
    before = 0 if tuner is None else tuner.counts()["asked_here"]
    all_reduce()
    asked = tuner is not None and tuner.counts()["asked_here"] > before
    everyone = gather(asked)
    if all(everyone):
        return tuner
    if any(everyone) or tuner is not None:
        without = [rank for rank, has in enumerate(everyone) if not has]
        logger.warning(
            "NCCL chooses between ring and tree by itself: flexcomm's tuner plugin is not asked on ranks %s "
            "(NCCL_TUNER_PLUGIN must be set on every rank before the first communicator, and communicators must be "
            "blocking: TORCH_NCCL_USE_COMM_NONBLOCKING=0)",
            without,
        )
    return None

"""The control group: a process group of its own, on Gloo whatever carries the gradients, over which the ranks agree.

Collectives of a step are launched when the step begins and taken in when one ends: by then every rank has launched them, so no
rank waits here for one that waits for it in a collective of the script. Only :meth:`Control.gather` waits on the spot.
"""

from __future__ import annotations

import datetime
import logging
import weakref
from typing import Any, Callable, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from flexcomm import _core
from flexcomm._core import Core, FlexcommError

logger = logging.getLogger("flexcomm")

_T = TypeVar("_T")

#: Longer than any pause of a script between two steps: ranks that are lost are found by the gradients' group, or by their
#: connections, which the system closes.
_TIMEOUT = datetime.timedelta(days=7)

#: How long the end of a session waits for what is under way.
_LAST_WAIT = datetime.timedelta(seconds=1)


def _gloo(group: dist.ProcessGroup | None, run: str) -> Any:
    """A Gloo group of the ranks of ``group``, in their order; ``run`` is the same on all of them, and of no other group.

    Not by `torch.distributed.new_group`: it names a group by how many others this process is in, so that ranks of which some are
    in more groups than others would look for each other under different names. The default store is none of torch's published
    interface; it has been there since torch 1.
    """
    store = distributed_c10d.PrefixStore(f"flexcomm/{run}", distributed_c10d._get_default_store())
    return dist.ProcessGroupGloo(store, dist.get_rank(group), dist.get_world_size(group), timeout=_TIMEOUT)


class Control:
    """One rank's side of the control group. Making it is a collective of the ranks of ``group``."""

    def __init__(self, core: Core, group: dist.ProcessGroup | None, run: str) -> None:
        if not dist.is_gloo_available():
            raise FlexcommError("failed to attach: this torch was built without Gloo, over which the ranks agree")
        self._core = core
        self._world = dist.get_world_size(group)
        self._group = [_gloo(group, run)]
        # Its threads must have ended when the interpreter does.
        weakref.finalize(self, self._group.clear)
        self._root = dist.BroadcastOptions()
        self._root.rootRank = 0
        self._to_rank_0 = dist.GatherOptions()
        self._to_rank_0.rootRank = 0
        self._message = torch.zeros(_core.CONTROL_BYTES, dtype=torch.uint8)
        self._broadcast: dist.Work | None = None
        self._gathering: tuple[dist.Work, torch.Tensor] | None = None
        self._samples: tuple[dist.Work, torch.Tensor] | None = None
        self._broken: Exception | None = None

    def begin(self) -> None:
        """Begins a step, before its first bucket."""
        self._unless_broken(self._begin)

    def _begin(self) -> None:
        answer = self._core.begin()
        if self._core.write_control(self._message):
            self._broadcast = self._group[0].broadcast([self._message], self._root)
        if answer is not None:
            self._gathering = self._launch(answer, True)
        sample = self._core.sample()
        if sample is not None:
            self._samples = self._launch(sample, False)

    def end(self) -> list[bytes]:
        """Ends a step: takes in what is due, before the core's. All ranks' answers, where these were gathered."""
        return self._unless_broken(self._end)

    def _end(self) -> list[bytes]:
        if self._broadcast is not None and self._core.awaits_control():
            self._broadcast.wait()
            self._broadcast = None
            self._core.take_control(self._message)
        samples, self._samples = self._samples, None
        if samples is not None and (rows := self._arrived(samples)):
            self._core.take_samples(rows)
        gathering, self._gathering = self._gathering, None
        return [] if gathering is None else self._arrived(gathering)

    def _unless_broken(self, run: Callable[[], _T]) -> _T:
        """After an error the ranks may not be in the same step any more: all that follows would be of another one."""
        if self._broken is not None:
            raise FlexcommError(f"failed to agree with the other ranks: {self._broken}; start the job anew") from self._broken
        try:
            return run()
        except Exception as error:
            self._broken = error
            raise

    def gather(self, own: bytes) -> list[bytes]:
        """The bytes of every rank, in rank order and as many as of this one: on all ranks in the same step, and waited for."""
        return self._unless_broken(lambda: self._arrived(self._launch(own, True)))

    def close(self) -> None:
        """Waits for what is under way: the process could not end in order beside it."""
        under_way = [self._broadcast, self._gathering and self._gathering[0], self._samples and self._samples[0]]
        try:
            for work in under_way:
                if work is not None:
                    work.wait(_LAST_WAIT)
        except RuntimeError as error:
            logger.info("the last control message did not arrive: %s", error)

    def _launch(self, own: bytes, to_all: bool) -> tuple[dist.Work, torch.Tensor]:
        """Gathers what every rank has, in rank order, on all ranks or on rank 0 alone."""
        group, takes = self._group[0], to_all or self._group[0].rank() == 0
        arrived = torch.empty(self._world if takes else 0, len(own), dtype=torch.uint8)
        rows, sent = [list(arrived)] if takes else [], [torch.frombuffer(bytearray(own), dtype=torch.uint8)]
        return (group.allgather(rows, sent) if to_all else group.gather(rows, sent, self._to_rank_0)), arrived

    def _arrived(self, gathering: tuple[dist.Work, torch.Tensor]) -> list[bytes]:
        work, arrived = gathering
        work.wait()
        return [part.numpy().tobytes() for part in arrived]

"""The control group: a process group of its own, on Gloo whatever carries the gradients, over which the ranks agree.

Collectives of a step are launched when the step begins and taken in when one ends: by then every rank has launched them, so no
rank waits here for one that waits for it in a collective of the script. Only :meth:`Control.gather` waits on the spot.
"""

from __future__ import annotations

import datetime
import logging
import weakref

import torch
import torch.distributed as dist

from flexcomm import _core
from flexcomm._core import Core, FlexcommError

logger = logging.getLogger("flexcomm")

#: Control groups by the default group and their ranks. One for all models on the same ranks, whose collectives have one order on all
#: of them anyway: torch names a group by the names that are taken, and so none may come and go with a session.
_GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = weakref.WeakKeyDictionary()

#: How long the end of a session waits for a broadcast under way.
_LAST_WAIT = datetime.timedelta(seconds=1)


class Control:
    """One rank's side of the control group. Making the first is a collective of the ranks of ``group``."""

    def __init__(self, core: Core, group: dist.ProcessGroup | None) -> None:
        if not dist.is_gloo_available():
            raise FlexcommError("failed to attach: this torch was built without Gloo, over which the ranks agree")
        self._core = core
        ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        self._root = ranks[0]
        self._world = len(ranks)
        self._group = _group_of(tuple(ranks))
        self._message = torch.zeros(_core.CONTROL_BYTES, dtype=torch.uint8)
        self._broadcast: dist.Work | None = None
        self._gathering: tuple[dist.Work, torch.Tensor] | None = None

    def begin(self) -> None:
        """Begins a step, before its first bucket."""
        announces, answer = self._core.begin()
        if announces:
            self._core.write_control(self._place())
            self._broadcast = dist.broadcast(self._message, self._root, group=self._group, async_op=True)
        if answer is not None:
            self._gathering = self._launch(answer)

    def end(self) -> list[bytes]:
        """Ends a step: takes in what is due, before the core's. The answers of all ranks, where they were
        gathered."""
        if self._core.awaits_control():
            broadcast, self._broadcast = self._broadcast, None
            assert broadcast is not None
            broadcast.wait()
            self._core.take_control(self._place())
        gathering, self._gathering = self._gathering, None
        return [] if gathering is None else self._arrived(gathering)

    def gather(self, own: bytes) -> list[bytes]:
        """What every rank sends, in rank order and in as many bytes as this one: on all ranks in the same step, and waited for."""
        return self._arrived(self._launch(own))

    def close(self) -> None:
        """Nothing is left under way, or the process could not end in order."""
        if self._broadcast is not None:
            try:
                self._broadcast.wait(_LAST_WAIT)
            except RuntimeError as error:
                logger.info("the last control message did not arrive: %s", error)

    def _place(self) -> tuple[int, int]:
        return self._message.data_ptr(), self._message.numel()

    def _launch(self, own: bytes) -> tuple[dist.Work, torch.Tensor]:
        arrived = torch.empty(self._world * len(own), dtype=torch.uint8)
        sent = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        work = dist.all_gather_into_tensor(arrived, sent, group=self._group, async_op=True)
        assert work is not None
        return work, arrived

    def _arrived(self, gathering: tuple[dist.Work, torch.Tensor]) -> list[bytes]:
        work, arrived = gathering
        work.wait()
        return [bytes(part.tolist()) for part in arrived.view(self._world, -1)]


def _group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    groups = _GROUPS.setdefault(world, {})
    if ranks not in groups:
        made = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
        # It is none only on ranks outside of the group.
        assert isinstance(made, dist.ProcessGroup)
        groups[ranks] = made
    return groups[ranks]

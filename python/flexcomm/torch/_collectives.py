"""The collectives of gradients: launched over the group that carries them, from wherever the tensors lie."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from flexcomm._core import Core
from flexcomm.torch._clock import Mark
from flexcomm.torch._tuner import Tuner

if TYPE_CHECKING:
    from flexcomm.torch._device import Device


class Carried:
    """A collective on copies, where the backend takes no tensors of the host."""

    def __init__(self, work: dist.Work, here: torch.Tensor, there: torch.Tensor) -> None:
        self._work, self._here, self._there = work, here, there

    def wait(self) -> None:
        self._work.wait()
        self._here.copy_(self._there)


#: A collective that is under way.
Launched = dist.Work | Carried


def wire(group: dist.ProcessGroup | None) -> torch.device | None:
    """Where tensors of the host must be copied to before they can travel; none where they travel as they are. Of a bucket's
    see :meth:`Device.wire`."""
    backends = str(dist.get_backend_config(group))
    return None if "cpu:" in backends else torch.device("cuda")


def under(work: dist.Work | None) -> dist.Work:
    """A collective that was asked for with `async_op`: torch gives none only to ranks outside of the group."""
    assert work is not None
    return work


@functools.lru_cache(maxsize=1024)
def _global_rank(group: dist.ProcessGroup | None, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)


class Collectives:
    """Launches them, each for a bucket, whose times its mark takes. A message of the host's travels in a copy where the
    bucket's backend takes none of the host's tensors."""

    def __init__(self, core: Core, group: dist.ProcessGroup | None, device: Device, tuner: Tuner | None) -> None:
        self.core = core
        self.device = device
        self.world = dist.get_world_size(group)
        self._group = group
        self._tuner = tuner
        self._wire = wire(group)

    def all_reduce(self, index: int, payload: torch.Tensor, bucket: torch.Tensor, mark: Mark | None) -> Launched:
        there = self._there(payload, bucket)
        self.device.clock.launch(mark)
        return self._launched(self._reduce(index, there), payload, there, mark)

    def all_gather(
        self, arrived: torch.Tensor, sent: torch.Tensor, bucket: torch.Tensor, mark: Mark | None
    ) -> Launched:
        there, sent = self._there(arrived, bucket), self._there(sent, bucket)
        self.device.clock.launch(mark)
        work = under(dist.all_gather_into_tensor(there, sent, group=self._group, async_op=True))
        return self._launched(work, arrived, there, mark)

    def broadcast(self, tensor: torch.Tensor, root: int, bucket: torch.Tensor, mark: Mark | None) -> Launched:
        there, source = self._there(tensor, bucket), _global_rank(self._group, root)
        self.device.clock.launch(mark)
        work = under(dist.broadcast(there, src=source, group=self._group, async_op=True))
        return self._launched(work, tensor, there, mark)

    def _there(self, tensor: torch.Tensor, bucket: torch.Tensor) -> torch.Tensor:
        via = self.device.wire(bucket, self._wire)
        return tensor if via is None or tensor.device.type != "cpu" else tensor.to(via, copy=True)

    def _reduce(self, index: int, tensor: torch.Tensor) -> dist.Work:
        """Launches its allreduce, in the shape that the ranks agreed on for the bucket at `index`."""
        if self._tuner is None:
            return under(dist.all_reduce(tensor, group=self._group, async_op=True))
        tick = self.core.tick(index)
        with self._tuner.around(tick.strategy if tick.agreed else None, tick.index):
            return under(dist.all_reduce(tensor, group=self._group, async_op=True))

    def _launched(self, work: dist.Work, here: torch.Tensor, there: torch.Tensor, mark: Mark | None) -> Launched:
        launched = work if there is here else Carried(work, here, there)
        self.device.under_way(mark, launched)
        return launched

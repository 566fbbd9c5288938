"""A bucket as DDP shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from flexcomm._core import Core
from flexcomm.torch._device import Device
from flexcomm.torch._exchange import InPlace

if TYPE_CHECKING:
    # torch.distributed has it only where torch was built with it, which its type hints tell as a perhaps.
    from torch._C._distributed_c10d import GradBucket as GradBucket
else:
    GradBucket = dist.GradBucket

#: What torch's own collectives give back too; `torch.futures.Future` is Python around it, and takes twice as long.
Future: Any = torch._C.Future

#: Element types that travel compressed from the host, see :data:`_exchange.TYPES` for CUDA's; buckets of others are exchanged
#: as they are.
_COMPRESSIBLE = (torch.float32,)


class BucketView:
    """A bucket, and what stays true of it for as long as DDP shows the very same tensor: asking torch for that again in every
    step would cost more than all else that a dense bucket needs."""

    __slots__ = (
        "index", "buffer", "parameters", "ids", "values", "bytes", "on_device", "ours", "direct", "last", "done", "in_place"
    )

    def __init__(self, core: Core, device: Device, bucket: GradBucket, buffer: torch.Tensor) -> None:
        self.index = bucket.index()
        self.buffer = buffer
        self.parameters = bucket.parameters()
        self.ids = [id(p) for p in self.parameters]
        self.values = buffer.numel()
        self.bytes = self.values * buffer.element_size()
        #: Whether it can be compressed although it is not float32 on the host.
        self.on_device = device.takes(buffer)
        on_host = buffer.device.type == "cpu" and not self.on_device
        #: Whether it can be compressed on the host.
        self.ours = on_host and buffer.dtype in _COMPRESSIBLE and buffer.is_contiguous()
        #: Whether it can go by the shortest way while the ranks are dense, see :meth:`Hook.__call__`.
        self.direct = self.ours and not device.on_gpu(buffer)
        self.in_place = InPlace(core, self)
        self.last = bucket.is_last()
        #: What DDP is given for the last bucket, exchanged in place and waited for: the same in every step.
        self.done = self.future()
        if self.last:
            self.done.set_result(buffer)

    def future(self) -> torch.futures.Future[torch.Tensor]:
        device = self.buffer.device
        future: torch.futures.Future[torch.Tensor] = Future([] if device.type == "cpu" else [device])
        return future

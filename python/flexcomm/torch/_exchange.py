"""Kinds of exchanges: how one bucket's gradient becomes the mean over the ranks. Those of messages that stay on a GPU are in
:mod:`flexcomm.torch._device`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Callable

import torch

from flexcomm._core import Core, CudaStream, Element, How, Round
from flexcomm.torch._clock import Mark
from flexcomm.torch._collectives import Collectives, Launched

if TYPE_CHECKING:
    from flexcomm.torch._bucket import BucketView

#: Of tensors that hold these elements.
DTYPES = {
    Element.Byte: torch.uint8, Element.Float32: torch.float32, Element.Float16: torch.float16, Element.Bfloat16: torch.bfloat16,
}

#: Of gradients that pipelines take.
TYPES = {dtype: element for element, dtype in DTYPES.items() if element != Element.Byte}

HOST = torch.device("cpu")


class Buffers:
    """Memory that is kept from step to step, by bucket and purpose."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, str], torch.Tensor] = {}

    def exactly(
        self, index: int, what: str, size: int, dtype: torch.dtype, device: torch.device = HOST,
        make: Callable[..., torch.Tensor] = torch.empty,
    ) -> torch.Tensor:
        """Asks `make` for it where there is none yet, or other memory."""
        known = self.kept.get((index, what))
        if known is None or known.numel() != size or known.dtype != dtype or known.device != device:
            known = self.kept[index, what] = make(size, dtype=dtype, device=device)
        return known

    def at_least(self, index: int, what: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        """For sizes that change from step to step: memory is only ever added."""
        known = self.kept.get((index, what))
        there = 0 if known is None or known.dtype != dtype else known.numel()
        if there < size:
            # An eighth more, so that slowly growing messages do not ask every step.
            there = size + size // 8
        return self.exactly(index, what, there, dtype)[:size]


class Exchange:
    """A bucket's in one pass: what :class:`flexcomm.torch._pass.Pass` asks of every kind."""

    #: Whether a compressor takes part, and with it perhaps a residual.
    compressed = False
    #: The collective under way.
    work: Launched | None = None
    #: Events, of a bucket on a GPU.
    mark: Mark | None = None
    #: What DDP was given; none where it was given one that is done.
    future: Any = None

    def __init__(self, bucket: BucketView) -> None:
        # Not the bucket, which keeps an exchange of its own.
        self.buffer = bucket.buffer
        self.parameters = bucket.parameters

    def wait(self) -> None:
        work, self.work = self.work, None
        if work is not None:
            work.wait()

    def next_round(self) -> bool:
        """Waits for the collective under way and launches the one that follows; answers whether there is one."""
        return False

    def finish(self) -> None:
        """After the last collective: the buffer becomes the mean. On a device that is launched, and not waited for."""
        raise NotImplementedError

    def judge(self) -> bool:
        """After the device: whether the mean is finite, the same on all ranks. Where it is not the buffer is NaN."""
        return True


class InPlace(Exchange):
    """Dense, without any copy: the same object in every pass."""

    def __init__(self, core: Core, bucket: BucketView) -> None:
        super().__init__(bucket)
        self._core = core
        self._index = bucket.index

    def launch(self, collectives: Collectives, mark: Mark | None) -> Exchange:
        """What :meth:`flexcomm.torch._hook.Hook.__call__` does by itself for most buckets on the host."""
        self.mark = mark
        # Multiplied first, as DDP does it: the same bits, and half the time of dividing.
        self.buffer.mul_(1.0 / collectives.world)
        self._core.launched(self.buffer.nbytes)
        self.work = collectives.all_reduce(self._index, self.buffer, self.buffer, mark)
        return self

    def finish(self) -> None:
        self._core.landed()


class Half(Exchange):
    """Dense, in float16 or bfloat16."""

    def __init__(self, collectives: Collectives, bucket: BucketView, payload: torch.Tensor, mark: Mark | None) -> None:
        super().__init__(bucket)
        self._core = core = collectives.core
        self.mark = mark
        began = time.perf_counter()
        self._payload = payload.copy_(bucket.buffer).div_(collectives.world)
        core.add_compression(time.perf_counter() - began, True)
        core.launched(payload.nbytes)
        self.work = collectives.all_reduce(bucket.index, payload, bucket.buffer, mark)

    def finish(self) -> None:
        began = time.perf_counter()
        self.buffer.copy_(self._payload)
        self._core.add_compression(time.perf_counter() - began, False)
        self._core.landed()


class Pipeline:
    """A bucket's in the core: after its beginning it goes on with what each round brought. On the host, or by kernels on a stream."""

    def __init__(
        self, core: Core, index: int, buffer: torch.Tensor, rates: list[float], *,
        source: torch.Tensor, mean: torch.Tensor, stream: CudaStream | None = None,
    ) -> None:
        """`source` is the gradient, `mean` takes what becomes of it in float32: the bucket's buffer, or copies where it is."""
        self.core, self.index, self._stream = core, index, stream
        self._buffer, self._mean = buffer, mean
        self.first = core.begin_exchange(index, source, rates, stream, TYPES[source.dtype])

    def next(self, arrived: torch.Tensor) -> Round:
        """After a round that is not the last."""
        return self.core.next_round(self.index, arrived, self._stream)

    def finish(self, arrived: torch.Tensor) -> bool:
        """The bucket becomes the mean; answers whether it is finite."""
        finite = self.core.finish_exchange(self.index, arrived, self._mean, self._stream)
        if not finite:
            self._buffer.fill_(float("nan"))
        elif self._mean is not self._buffer:
            self._buffer.copy_(self._mean)
        return finite


class Rounds(Exchange):
    """Compressed, by messages on the host: one collective per round, of which the first runs beside backward."""

    compressed = True

    def __init__(
        self, collectives: Collectives, buffers: Buffers, bucket: BucketView, pipeline: Pipeline, mark: Mark | None
    ) -> None:
        super().__init__(bucket)
        self._core = collectives.core
        self._collectives = collectives
        self._buffers = buffers
        self._index = bucket.index
        self._pipeline = pipeline
        self._finite = True
        if pipeline.first.last:
            self.mark = mark
        else:
            # Several collectives in turn, each waited for: the host's clock is right.
            collectives.device.clock.forget(mark)
        self._number = 0
        self._launch(pipeline.first)

    def next_round(self) -> bool:
        if self._round.last:
            return False
        self.wait()
        self._number += 1
        self._launch(self._pipeline.next(self._arrived))
        return True

    def finish(self) -> None:
        self._finite = self._pipeline.finish(self._arrived)

    def judge(self) -> bool:
        return self._finite

    def _launch(self, current: Round) -> None:
        """Launches a round's collective: what it brings will be in `_arrived`."""
        self._round = current
        if current.how == How.Refused:
            self._arrived = torch.empty(0)
            return
        self._arrived = sent = self._message("round", current, 1)
        self._core.write_round(self._index, sent)
        if current.how == How.Broadcast:
            self.work = self._collectives.broadcast(sent, current.root, self.buffer, self.mark)
        elif current.how == How.Sum:
            self.work = self._collectives.all_reduce(self._index, sent, self.buffer, self.mark)
        elif current.elements > 0:
            self._arrived = self._message("round of all", current, self._collectives.world)
            self.work = self._collectives.all_gather(self._arrived, sent, self.buffer, self.mark)

    def _message(self, what: str, current: Round, ranks: int) -> torch.Tensor:
        size, dtype = current.elements * ranks, DTYPES[current.element]
        return self._buffers.at_least(self._index, f"{what} {self._number}", size, dtype)

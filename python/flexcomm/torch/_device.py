"""Buckets on a GPU: compressed there by kernels where that can be, else in a copy on the host.

The bytes of a message are the same either way, so every rank chooses for itself, in every step; only the collectives must
be the same on all ranks, and these depend on the backend alone.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import os
import pathlib
from typing import TYPE_CHECKING, Any, Iterable, NamedTuple

import torch
import torch.distributed as dist

from flexcomm._core import Core, CudaStream, NotOnDeviceError, Region
from flexcomm.torch._clock import Clock, Mark
from flexcomm.torch._collectives import Carried, Launched, under
from flexcomm.torch._exchange import TYPES, Buffers, Exchange, Pipeline

if TYPE_CHECKING:
    from flexcomm.torch._bucket import BucketView

logger = logging.getLogger("flexcomm")

#: Alignment of memory that a bucket borrows.
_ALIGN = 256

#: Of a kernel's outcome, and of the word behind it: whether messages could be read.
_OUTCOME_BYTES = 52

WATCHING = "a shadow trial looks at gradients on the host"

#: Steps of shadows whose numbers have yet to come: later ones are dropped, and the shadows look at other steps instead.
_MOST_LOOKS = 16

#: Steps after which memory for a bucket that there was none for is asked for again: each time that torch has none it empties
#: its cache, which waits for the device.
_ASK_AGAIN = 100


def no_memory(error: RuntimeError) -> bool:
    """Whether there was no memory of a device, or none of the host's that could be pinned, for which torch has no type."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


class Room(NamedTuple):
    """Bytes of a device."""

    #: That this process could have if it gave back all that it has.
    free: int
    #: The most that its tensors have taken.
    peak: int
    total: int


class Cuda:
    """What is asked of torch about CUDA."""

    def __init__(self) -> None:
        self._sides: dict[torch.device, torch.cuda.Stream] = {}

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether kernels could work on it."""
        return tensor.device.type == "cuda"

    def stream(self, tensor: torch.Tensor) -> CudaStream:
        """The device, and torch's current stream there."""
        device = tensor.device.index or 0
        return CudaStream(device, torch.cuda.current_stream(device).cuda_stream)

    def wait(self, tensor: torch.Tensor) -> None:
        """Until the current stream has done what was launched."""
        torch.cuda.current_stream(tensor.device).synchronize()

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory of the device, with any content."""
        return torch.empty(size, dtype=dtype, device=device)

    def pinned(self, size: int) -> torch.Tensor:
        """Bytes of the host that copies from the device need not wait for."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def memory(self, device: torch.device) -> Room:
        free, total = torch.cuda.mem_get_info(device)
        return Room(free + torch.cuda.memory_reserved(device), torch.cuda.max_memory_allocated(device), total)

    def to_pin(self) -> int:
        """Bytes of the host that this rank may pin: its share of half of what is available, since that is not swapped."""
        return _available() // 2 // max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)

    def event(self) -> torch.cuda.Event:
        """One that tells the time."""
        return torch.cuda.Event(enable_timing=True)

    def record(self, event: torch.cuda.Event, device: torch.device) -> None:
        """It happens when the current stream has done what was launched."""
        event.record(torch.cuda.current_stream(device))

    def record_after(self, event: torch.cuda.Event, work: dist.Work, device: torch.device) -> None:
        """It happens when the collective has ended: on a stream of its own, so that the current one goes on.

        The first wait makes torch let go of the collective's tensors; all of them are kept from step to step by DDP or by
        the hook, so nothing else gets their memory before the current stream has waited too.
        """
        side = self._sides.get(device)
        if side is None:
            side = self._sides[device] = torch.cuda.Stream(device)
        with torch.cuda.stream(side):
            work.wait()
            event.record(side)


def _available() -> int:
    """Bytes of the host's memory that are available, by Linux's own estimate; 0 where it does not say."""
    found = [0]
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        found = [int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024]
    # Of a container: less, where it has a limit of its own.
    with contextlib.suppress(OSError, ValueError):
        most, now = (int(pathlib.Path("/sys/fs/cgroup", f"memory.{what}").read_text()) for what in ("max", "current"))
        found.append(max(most - now, 0))
    return min(found)


def _waits_block() -> bool:
    """Whether NCCL is set to hold the host, and not only the stream, while it waits for a collective."""
    names = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
    return any(os.environ.get(name, "0").lower() in ("1", "true", "yes", "y") for name in names)


@functools.cache
def _point_at_nvrtc() -> None:
    """The compiler that torch's wheel came with: outside of an activated environment it is found nowhere else."""
    if os.environ.get("FLEXCOMM_NVRTC"):
        return
    packages = pathlib.Path(torch.__file__).parent.parent
    for folder in ("nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"):
        if any((packages / folder).glob("libnvrtc.so.*")):
            os.environ["FLEXCOMM_NVRTC"] = str(packages / folder)
            return


class OnDevice(Pipeline):
    """A bucket's pipeline on the device, in one step. Messages that do not stay there travel from the host."""

    def __init__(self, core: Core, index: int, ready: _Ready, rates: list[float]) -> None:
        super().__init__(core, index, ready.buffer, rates, source=ready.buffer, mean=ready.mean, stream=ready.stream)
        self.ready = ready


@dataclasses.dataclass(frozen=True)
class _Message:
    """All memory that a step takes whose message stays on the device, besides the bucket's own."""

    #: Bytes of control header and message header.
    front: int
    #: On the device.
    block: torch.Tensor
    blocks: torch.Tensor
    #: Pinned: all ranks' control and message headers, and the outcome.
    headers: torch.Tensor
    outcome: torch.Tensor


@dataclasses.dataclass(frozen=True)
class _Ready:
    """A bucket for which all memory of a step is there."""

    stream: CudaStream
    buffer: torch.Tensor
    #: Where kernels write the mean, in float32.
    mean: torch.Tensor
    message: _Message | None


def _out_of_memory(buffer: torch.Tensor, error: RuntimeError, need: str, again: str) -> str:
    reason = str(error).splitlines()[0]
    return (
        f"{buffer.device} has no memory left for the kernels ({reason}); they need some {need}. Take a smaller batch, or set "
        f"FLEXCOMM_GPU_KERNELS=0 to stay on the host; {again}"
    )


def _part(memory: torch.Tensor, region: Region) -> torch.Tensor:
    return memory[region.address - memory.data_ptr() :][: region.bytes]


class Gathered(Exchange):
    """Compressed on a device, by a message that stays there: one allgather."""

    compressed = True

    def __init__(
        self, device: Device, bucket: BucketView, there: OnDevice, results: tuple[torch.Tensor, torch.Tensor],
        launched: tuple[dist.Work, Mark | None],
    ) -> None:
        super().__init__(bucket)
        assert there.ready.message is not None
        self._device, self._there, self._message = device, there, there.ready.message
        self._arrived, self._outcome = results
        self.work, self.mark = launched

    def finish(self) -> None:
        there, message, buffer, mean = self._there, self._message, self.buffer, self._there.ready.mean
        if self._arrived is not message.blocks:
            message.blocks.copy_(self._arrived)
        there.core.add_blocks_on(there.index, there.ready.stream, message.blocks, mean)
        if mean is not buffer:
            buffer.copy_(mean)
        world = message.headers.numel() // message.front
        fronts = message.blocks.view(world, -1)[:, : message.front]
        message.headers.view(world, message.front).copy_(fronts, non_blocking=True)
        message.outcome.copy_(self._outcome, non_blocking=True)
        self._device.will_wait(buffer)

    def judge(self) -> bool:
        finite = self._there.core.judge(self._there.index, self._message.headers, self._message.outcome)
        if not finite:
            self.buffer.fill_(float("nan"))
        return finite


@dataclasses.dataclass(frozen=True)
class _Look:
    """What the shadows of a bucket have on its device."""

    #: Places of the values that they look at, the values, and these as float32.
    places: torch.Tensor
    values: torch.Tensor
    floats: torch.Tensor
    #: What the core borrows.
    memory: torch.Tensor


@dataclasses.dataclass(frozen=True)
class _Seen:
    """What the shadows found in a step, by bucket, once the event has happened."""

    generation: int
    found: list[tuple[int, torch.Tensor]]
    event: Any


class Device:
    """The side of the hook that knows devices."""

    def __init__(self, core: Core, group: dist.ProcessGroup | None, cuda: Cuda | None = None) -> None:
        self._core = core
        self._group = group
        self._world = dist.get_world_size(group)
        self._cuda = cuda or Cuda()
        self._nccl = "cuda:nccl" in str(dist.get_backend_config(group))
        self._by_stream = self._nccl and not _waits_block()
        self.clock = Clock(self._cuda, core.resolve)
        self._buffers = Buffers()
        self._warned: set[str] = set()
        self._waits: torch.Tensor | None = None
        #: Steps until memory is asked for again, by bucket, and why there was none the first time.
        self._rests: dict[int, int] = {}
        self._full = ""
        #: Of shadows: by bucket, of the step under way, and of steps whose numbers are on their way to the host.
        self._looks: dict[int, _Look] = {}
        self._found: list[tuple[int, torch.Tensor]] = []
        self._generation = 0
        self._seen: collections.deque[_Seen] = collections.deque()

    def ordinal(self, parameters: Iterable[torch.Tensor]) -> int | None:
        """The number of the one device where kernels could work on all of these."""
        found = {self._cuda.stream(p).ordinal if self._cuda.has(p) else None for p in parameters}
        number = found.pop() if len(found) == 1 else None
        if number is not None:
            _point_at_nvrtc()
        return number

    def takes(self, buffer: torch.Tensor) -> bool:
        """Whether a bucket can be compressed although it is not float32 on the host: the same on all ranks."""
        return self._cuda.has(buffer) and buffer.dtype in TYPES and buffer.is_contiguous()

    def host(self, buffer: torch.Tensor, index: int) -> torch.Tensor:
        """A copy in float32 on the host, in memory that is kept."""
        return self._buffers.exactly(index, "host", buffer.numel(), torch.float32).copy_(buffer)

    def warn_once(self, warning: str) -> None:
        if warning not in self._warned:
            self._warned.add(warning)
            logger.warning("%s", warning)

    def enter(self, buffer: torch.Tensor, compresses: bool) -> Mark | None:
        """Events of a bucket on a GPU, which begins on the current stream."""
        return self.clock.enter(buffer, compresses) if self._cuda.has(buffer) else None

    def on_gpu(self, buffer: torch.Tensor) -> bool:
        """Whether the host's clock cannot tell what is done to it."""
        return self._cuda.has(buffer)

    def wire(self, buffer: torch.Tensor, wire: torch.device | None) -> torch.device | None:
        """Where the host's tensors of a bucket are copied to before they travel; none where they travel as they are.

        With a backend per device (``cpu:gloo,cuda:nccl``) a copy on the host could travel by itself, but would by another
        backend than the same message of a rank whose kernels work: the two would wait for each other for ever.
        """
        return buffer.device if self._nccl and self._cuda.has(buffer) else wire

    def under_way(self, mark: Mark | None, work: Launched | None) -> None:
        """A collective was launched. Where waiting is the streams' business its end is waited for beside them. A bucket with
        a mark is on a device, and then so are the collective's tensors (:meth:`wire`): no such wait holds the host."""
        if self._by_stream and work is not None and not isinstance(work, Carried):
            self.clock.under_way(mark, work)

    def waits(self) -> None:
        """Waits, once for all buckets of a step, for what was launched since the last time."""
        waits, self._waits = self._waits, None
        if waits is not None:
            self._cuda.wait(waits)

    def _ready(self, index: int, buffer: torch.Tensor) -> _Ready:
        """All memory of a bucket's step is asked for here, before anything of it is launched or sent: where there is too little,
        the host can still do all of it, and the other ranks see no difference."""
        rests = self._rests.get(index, 0)
        if rests > 0:
            self._rests[index] = rests - 1
            raise NotOnDeviceError(self._full)
        try:
            return self._reserved(index, buffer)
        except NotOnDeviceError:
            raise
        except RuntimeError as error:
            if not no_memory(error):
                raise
            self._rests[index] = _ASK_AGAIN
            self._release(index)
            again = f"they ask again after {_ASK_AGAIN} steps"
            need = "9 bytes per value of the gradient and two messages"
            self._full = self._full or _out_of_memory(buffer, error, need, again)
            raise NotOnDeviceError(self._full) from None

    def _release(self, index: int) -> None:
        """Returns what a bucket was given on the device. The core does the same when the host compresses it."""
        kept = self._buffers.kept
        for key in [key for key in kept if key[0] == index and key[1] != "host"]:
            del kept[key]

    def _aligned(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Bytes for the core, which keeps them too for as long as a bucket lies in them."""
        whole = self._cuda.empty(size + _ALIGN, dtype, device)
        skip = -whole.data_ptr() % _ALIGN
        return whole[skip : skip + size]

    def watch(self, index: int, buffer: torch.Tensor) -> None:
        """Shadows look at a bucket's gradient where it is, before it is exchanged: kernels on the current stream, which are not
        waited for. Where that cannot be they begin anew on the host with the next step."""
        now, has_memory = self._core.shadowing(index)
        if not has_memory:
            self._looks.pop(index, None)
        if index == 0:
            # Of a pass that ended in an exception.
            self._found.clear()
        if not now:
            return
        try:
            self._look(index, buffer)
            return
        except NotOnDeviceError as error:
            why = str(error)
        except RuntimeError as error:
            if not no_memory(error):
                raise
            why = _out_of_memory(buffer, error, "13 bytes per value that is looked at", "they ask again with the next trial")
        self._core.shadow_on_host()
        self._looks.clear()
        self._found.clear()
        self.warn_once(f"shadow trials look at copies on the host of buckets on {buffer.device.type}: {why}")

    def _look(self, index: int, buffer: torch.Tensor) -> None:
        _point_at_nvrtc()
        stream = self._cuda.stream(buffer)
        needs = self._core.shadow_ready(index, stream)
        if needs.memory:
            on = torch.frombuffer(bytearray(needs.coordinates), dtype=torch.int32).to(buffer.device)
            values = self._cuda.empty(on.numel(), buffer.dtype, buffer.device)
            own = buffer.dtype == torch.float32
            floats = values if own else self._cuda.empty(on.numel(), torch.float32, buffer.device)
            memory = self._aligned(needs.memory, torch.uint8, buffer.device)
            self._looks[index] = _Look(on, values, floats, memory)
            self._core.shadow_ready(index, stream, memory)
        look = self._looks.get(index)
        if look is None:
            return
        torch.index_select(buffer, 0, look.places, out=look.values)
        if look.floats is not look.values:
            look.floats.copy_(look.values)
        step = self._core.shadow_step(index, stream, look.floats)
        if step is not None:
            self._generation = step.generation
            found = self._cuda.pinned(step.outcomes.bytes)
            found.copy_(_part(look.memory, step.outcomes), non_blocking=True)
            self._found.append((index, found))

    def watched(self, buffer: torch.Tensor) -> None:
        """After the last bucket of a step: passes on what shadows found in steps that the device has done by now. Never waits."""
        found, self._found = self._found, []
        if found and len(self._seen) < _MOST_LOOKS:
            event = self._cuda.event()
            self._cuda.record(event, buffer.device)
            self._seen.append(_Seen(self._generation, found, event))
        while self._seen and self._seen[0].event.query():
            seen = self._seen.popleft()
            self._core.shadow_outcomes(seen.generation, seen.found)

    def begin(self, index: int, buffer: torch.Tensor, rates: list[float]) -> OnDevice:
        """Compresses a bucket on the device."""
        if self._core.watching():
            raise NotOnDeviceError(WATCHING)
        return OnDevice(self._core, index, self._ready(index, buffer), rates)

    def _reserved(self, index: int, buffer: torch.Tensor) -> _Ready:
        _point_at_nvrtc()
        stream, device, kept = self._cuda.stream(buffer), buffer.device, self._buffers.exactly
        needs = self._core.device_ready(index, stream)
        if needs.memory:
            given = kept(index, "given", needs.memory, torch.uint8, device, self._aligned)
            needs = self._core.device_ready(index, stream, given)
        own = buffer.dtype == torch.float32
        mean = buffer if own else kept(index, "mean", buffer.numel(), torch.float32, device, self._cuda.empty)
        if not needs.block:
            return _Ready(stream, buffer, mean, None)

        def pinned(size: int, **_: Any) -> torch.Tensor:
            return self._cuda.pinned(size)

        return _Ready(stream, buffer, mean, _Message(
            needs.headers,
            kept(index, "block", needs.block, torch.uint8, device, self._cuda.empty),
            kept(index, "blocks", needs.block * self._world, torch.uint8, device, self._cuda.empty),
            kept(index, "headers", needs.headers * self._world, torch.uint8, make=pinned),
            kept(index, "outcome", _OUTCOME_BYTES, torch.uint8, make=pinned),
        ))

    def gather(self, bucket: BucketView, there: OnDevice, outcome: Region, mark: Mark | None) -> Gathered:
        """Launches the allgather of a message that stays on the device, whose outcome lies there."""
        index, message, size = bucket.index, there.ready.message, there.first.elements
        assert message is not None
        self._core.write_round(index, message.block, there.ready.stream)
        block, arrived = message.block, message.blocks
        if not self._nccl:
            # Waits for the kernels: this backend reads memory of the host.
            block = self._buffers.exactly(index, "sent", size, torch.uint8).copy_(block)
            arrived = self._buffers.exactly(index, "arrived", size * self._world, torch.uint8)
        self.clock.launch(mark)
        work = under(dist.all_gather_into_tensor(arrived, block, group=self._group, async_op=True))
        self.under_way(mark, work)
        return Gathered(self, bucket, there, (arrived, _part(self._buffers.kept[index, "given"], outcome)), (work, mark))

    def will_wait(self, buffer: torch.Tensor) -> None:
        """:meth:`waits` is to wait for what was launched for a bucket."""
        self._waits = buffer

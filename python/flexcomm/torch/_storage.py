"""Where a snapshot's copies of tensors on GPUs lie: in memory of the device as far as it has some to spare, the rest in pinned
memory of the host. Copies are queued on torch's current stream in both directions, bit for bit; nothing waits."""

from __future__ import annotations

import collections
import logging
import torch

from flexcomm.torch._device import Cuda, no_memory

logger = logging.getLogger("flexcomm")

#: One part in so many of a device stays free, beside what training took at its peak: for what a candidate's kernels, the
#: backend and torch's own rounding take.
_RESERVE = 16

#: Copies begin at multiples of this, at which they are fastest.
_ALIGN = 256

#: Torch rounds what it pins up to a power of two, so pieces are powers of two, from this on.
_LEAST_PIECE = 1 << 20


def whole(tensor: torch.Tensor) -> bool:
    """Whether its values lie side by side, so that copying its bytes copies it."""
    ordinary = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if not ordinary or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return False
    # What torch makes like it has its strides only then.
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def pieces(size: int) -> list[int]:
    """Powers of two that hold so many bytes together, the largest first."""
    units = -(-size // _LEAST_PIECE)
    return [_LEAST_PIECE << bit for bit in reversed(range(units.bit_length())) if units >> bit & 1]


class Copy:
    """Of one tensor, in memory that may be in pieces."""

    def __init__(self, tensor: torch.Tensor, at: int, memory: list[torch.Tensor]) -> None:
        self._tensor = tensor
        self._like = torch.empty_like(tensor, device="meta")
        self._device = tensor.device
        self._parts: list[tuple[int, torch.Tensor]] = []
        begin, end = at, at + _size(tensor)
        for piece in memory:
            low, high = max(begin, 0), min(end, piece.numel())
            if low < high:
                self._parts.append((low - begin, piece[low:high]))
            begin, end = begin - piece.numel(), end - piece.numel()
        own = _bytes(tensor)
        for first, part in self._parts:
            part.copy_(own[first : first + part.numel()], non_blocking=True)

    def restore(self) -> None:
        """The tensor is what it was, where it is."""
        tensor = self._tensor
        is_, was = tensor, self._like
        same = (is_.shape, is_.stride(), is_.dtype, is_.device) == (was.shape, was.stride(), was.dtype, self._device)
        to = tensor if same else torch.empty_like(was, device=self._device)
        own = _bytes(to)
        for first, part in self._parts:
            own[first : first + part.numel()].copy_(part, non_blocking=True)
        if to is not tensor and tensor.shape == to.shape:
            tensor.detach().copy_(to)
        elif to is not tensor:
            tensor.data = to


class SnapshotStorage:
    """Memory for a snapshot: asked for before a trial is agreed on, so that a rank that has none can report it, and given to
    it."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        #: By device: its own piece, then the host's.
        self._memory: dict[torch.device, list[torch.Tensor]] = {}
        #: By device, what training takes at most, as far as it was seen; and what the newest snapshot took there.
        self._peaks: dict[torch.device, int] = {}
        self._ours: dict[torch.device, int] = {}
        #: Bytes of the newest snapshot that lie in memory of GPUs, and in pinned memory.
        self.taken = (0, 0)

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether copies of this tensor are kept here."""
        return self._cuda.has(tensor) and whole(tensor)

    def has_gpu(self, tensor: torch.Tensor) -> bool:
        """Whether it lies on a GPU."""
        return self._cuda.has(tensor)

    def release(self) -> None:
        """Frees what was reserved and not used."""
        self._memory = {}

    def reserve(self, tensors: list[torch.Tensor]) -> str:
        """Takes memory for copies of these; why there is too little (else empty), and then nothing is taken."""
        self.release()
        needs: dict[torch.device, int] = collections.Counter()
        for tensor in tensors:
            needs[tensor.device] += _padded(_size(tensor))
        memory: dict[torch.device, list[torch.Tensor]] = {}
        to_pin, pinned = self._cuda.to_pin(), 0
        for device, need in needs.items():
            spare = self._spare(device)
            there = min(need, spare // _ALIGN * _ALIGN)
            own = self._on(device, there)
            rest = need - own.numel()
            sizes = pieces(rest)
            if sum(sizes) > to_pin - pinned:
                return _too_little(device, need, (spare, to_pin - pinned))
            pinned += sum(sizes)
            try:
                memory[device] = [own, *map(self._cuda.pinned, sizes)]
            except RuntimeError as error:
                if not no_memory(error):
                    raise
                return _too_little(device, need, (spare, 0)) + f" ({str(error).splitlines()[0]})"
        self._memory = memory
        return ""

    def _spare(self, device: torch.device) -> int:
        free, peak, total = self._cuda.memory(device)
        peak = max(self._peaks.get(device, 0), peak - self._ours.get(device, 0))
        self._peaks[device] = peak
        return max(free - peak - total // _RESERVE, 0)

    def _on(self, device: torch.device, size: int) -> torch.Tensor:
        try:
            return self._cuda.empty(size, torch.uint8, device)
        except RuntimeError as error:
            if not no_memory(error):
                raise
            # It is in pieces: the host then.
            return self._cuda.empty(0, torch.uint8, device)

    def keep(self, tensors: list[torch.Tensor]) -> list[Copy]:
        """Copies these, in what was reserved. What does not fit any more, because they have grown since, goes to memory of the
        host that is not pinned: all ranks are in the trial by now."""
        if not self._memory and tensors and (why := self.reserve(tensors)):
            logger.warning("a live trial's snapshot is kept in memory of the host that is not pinned: %s", why)
        memory, self._memory = self._memory, {}
        ends: dict[torch.device, int] = collections.Counter()
        for tensor in tensors:
            ends[tensor.device] += _padded(_size(tensor))
        for device, end in ends.items():
            given = memory.setdefault(device, [])
            lacking = end - sum(piece.numel() for piece in given)
            if lacking > 0:
                given.append(torch.empty(lacking, dtype=torch.uint8))
        self._ours = {device: given[0].numel() if given[0].device == device else 0 for device, given in memory.items()}
        on_gpus = sum(self._ours.values())
        self.taken = on_gpus, sum(piece.numel() for given in memory.values() for piece in given) - on_gpus
        copies, at = [], dict.fromkeys(ends, 0)
        for tensor in tensors:
            copies.append(Copy(tensor, at[tensor.device], memory[tensor.device]))
            at[tensor.device] += _padded(_size(tensor))
        return copies


def _too_little(device: torch.device, need: int, spare: tuple[int, int]) -> str:
    lack = need - sum(spare)
    return (
        f"a snapshot of {need} bytes does not fit: {spare[0]} of {device} are free (beside what training takes at its peak, "
        f"and 1/{_RESERVE} of the device) and {spare[1]} of the host can be pinned (half of what is available, shared by the "
        f"ranks here), {max(lack, 0)} bytes too few. Take a smaller batch or fewer processes per host, or give the host more "
        "memory; until then candidates have shadow gains, which need no snapshot"
    )

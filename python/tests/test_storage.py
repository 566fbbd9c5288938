"""Where snapshots of what lies on a GPU are kept, over a stand-in: a device that is the host, with as much memory as the test says."""

import pytest
import torch

from flexcomm.torch._device import Cuda
from flexcomm.torch._snapshot import Memory
from flexcomm.torch._storage import SnapshotStorage, pieces

MIB = 1 << 20


class Gpu(Cuda):
    """All tensors lie on it. `given` has what was taken of it and of the host."""

    def __init__(self, free=64 * MIB, peak=0, total=64 * MIB, host=64 * MIB):
        super().__init__()
        self.free, self.peak, self.total, self.host = free, peak, total, host
        self.given, self.holes, self.pins = [], False, True

    def has(self, tensor):
        return True

    def memory(self, device):
        return self.free, self.peak, self.total

    def to_pin(self):
        return self.host

    def empty(self, size, dtype, device):
        if self.holes and size:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 MiB.\nMore of it")
        self.given.append(("device", size))
        return torch.full((size,), 0xAB, dtype=dtype, device=device)

    def pinned(self, size):
        if not self.pins:
            raise RuntimeError("CUDA error: out of memory\nMore of it")
        self.given.append(("pinned", size))
        return torch.full((size,), 0xAB, dtype=torch.uint8)


def bits(tensor):
    return bytes(tensor.detach().clone().contiguous().view(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def tensors():
    """Of many kinds; NaN that a calculation would change among them."""
    torch.manual_seed(0)
    nans = torch.tensor([0x7F800001, 0xFFC12345 - 2**32, 0x7FC00000, 1], dtype=torch.int32).view(torch.float32)
    return {
        "parameter": torch.nn.Parameter(torch.randn(100, 7)), "nan": nans, "scalar": torch.tensor(3.5), "none": torch.empty(0, 4),
        "half": torch.randn(33).half(), "bf16": torch.randn(2, 3, 5).bfloat16(), "bool": torch.rand(77) > 0.5,
        "complex": torch.randn(5, dtype=torch.complex64), "long": torch.arange(9), "transposed": torch.randn(6, 4).t(),
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), "odd": torch.randn(8, 8)[::2, 1:5],
        "part": torch.randn(20)[3:11], "large": torch.randn(3 * MIB // 4),
    }  # fmt: skip


@pytest.mark.parametrize("gpu", [
    Gpu(), Gpu(free=0, total=0), Gpu(free=MIB + 12345, total=0), Gpu(free=700, total=0),
], ids=["device", "host", "both", "hardly any"])  # fmt: skip
def test_every_bit_comes_back_wherever_it_was(gpu):
    memory, own = Memory(SnapshotStorage(gpu)), tensors()
    before = {name: (bits(t), t.stride(), t.data_ptr()) for name, t in own.items()}
    for name, tensor in own.items():
        memory.visit(tensor, name)
    # What has holes between its values is copied where it is.
    assert len(memory.on_gpus) == len(own) - 1
    memory.copy()
    for _ in range(2):
        for name, tensor in own.items():
            tensor.data.view(-1)[:1].zero_() if tensor.is_contiguous() and tensor.numel() else tensor.data.zero_()
        own["large"].zero_()
        own["long"].data = torch.arange(4)
        own["channels"].data = torch.zeros(2, 3, 4, 5)
        changed = {name for name, tensor in own.items() if bits(tensor) != before[name][0]}
        assert changed >= {"parameter", "nan", "scalar", "half", "bf16", "channels", "long", "large"}
        memory.restore()
        for name, tensor in own.items():
            then, stride, address = before[name]
            assert bits(tensor) == then, name
            if name not in ("long", "channels"):
                assert (tensor.stride(), tensor.data_ptr()) == (stride, address), name


def test_it_takes_the_device_first_and_no_more_than_training_leaves():
    own = [torch.zeros(MIB), torch.zeros(3)]
    need = 4 * MIB + 256
    # 16 MiB, of which training takes 9 at its peak and one stays free.
    gpu = Gpu(free=16 * MIB, peak=9 * MIB, total=16 * MIB)
    storage = SnapshotStorage(gpu)
    assert storage.reserve(own) == "" and gpu.given == [("device", need)]
    storage.keep(own)
    assert storage.taken == (need, 0)
    # What the snapshot took is not training's, and a trial after the first finds as much as that did.
    gpu.peak += need
    gpu.given.clear()
    assert storage.reserve(own) == "" and gpu.given == [("device", need)]
    # Training needs 3 MiB more: the rest goes to the host, in powers of two.
    gpu.peak += 3 * MIB
    gpu.given.clear()
    assert storage.reserve(own) == "" and gpu.given == [("device", 3 * MIB), ("pinned", 2 * MIB)]
    storage.keep(own)
    assert storage.taken == (3 * MIB, 2 * MIB)


def test_pieces_are_powers_of_two():
    for size in (0, 1, MIB, MIB + 1, 7 * MIB, 1000 * MIB + 3):
        found = pieces(size)
        assert size <= sum(found) < size + MIB and all(piece & (piece - 1) == 0 for piece in found)


def test_what_does_not_fit_is_refused_with_bytes_and_remedy():
    own = [torch.zeros(MIB), torch.zeros(3)]
    gpu = Gpu(free=2 * MIB, total=0, host=2 * MIB)
    storage = SnapshotStorage(gpu)
    why = storage.reserve(own)
    for part in ("4194560 bytes does not fit", "2097152 of cpu", "2097152 of the host", "256 bytes too few", "smaller batch"):
        assert part in why, why
    # Nothing is kept of it.
    gpu.host = 3 * MIB
    assert storage.reserve(own) == ""
    storage.release()
    # No piece of the device is that large: all of it to the host, if that can pin as much.
    gpu.holes, gpu.host = True, 8 * MIB
    gpu.given.clear()
    assert storage.reserve(own) == "" and gpu.given == [("device", 0), ("pinned", 4 * MIB), ("pinned", MIB)]
    gpu.pins = False
    assert "CUDA error: out of memory" in (why := storage.reserve(own)) and "\n" not in why


def test_a_snapshot_that_has_grown_since_goes_where_there_is_memory(caplog):
    gpu = Gpu(free=MIB, total=0, host=0)
    storage = SnapshotStorage(gpu)
    own = [torch.arange(1000)]
    assert storage.reserve(own) == ""
    own.append(torch.arange(MIB))
    copies = storage.keep(own)
    wanted = [t.clone() for t in own]
    [t.zero_() for t in own]
    [copy.restore() for copy in copies]
    assert all(map(torch.equal, own, wanted)) and gpu.given == [("device", 8192)]
    # Without any reservation too, said in a line.
    assert storage.taken[1] >= 8 * MIB and not caplog.records
    storage.keep(own)
    (line,) = caplog.messages
    assert "not pinned" in line and "bytes too few" in line


def test_an_error_that_is_none_of_memory_is_one():
    gpu = Gpu(free=0, total=0)
    gpu.pinned = lambda size: torch.empty(-1)
    with pytest.raises(RuntimeError, match="negative"):
        SnapshotStorage(gpu).reserve([torch.zeros(3)])

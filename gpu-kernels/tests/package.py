"""The Python package on a real GPU: two ranks share it, over Gloo, and every strategy trains with kernels and without; their
parameters must have the same bits. So must tensors that a trial's snapshot puts back, from memory of the device and of the host.
And rank 0 says in its hello what compressing takes here.
One line each; exit 1 if any differs.

    python3 -m torch.distributed.run --nproc-per-node 2 package.py [cuda|cpu]

`cpu` only shows that this script runs: no kernels work there.
"""

import json
import logging
import os
import socket
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import flexcomm.torch
from flexcomm.torch._device import Cuda
from flexcomm.torch._snapshot import Memory
from flexcomm.torch._storage import SnapshotStorage

STRATEGIES = (
    "topk@0.05/allgather", "mstopk@0.05/allgather", "topk@0.05/art-ring:star", "topk@0.05/art-ring:var",
    "topk(k=0.05)+ef(vanilla)", "lwtopk(k=0.05)+ef(vanilla)", "dgc(k=0.05)+ef(vanilla)", "threshold(v=0.001)+ef(vanilla)",
    "randomk(k=0.05)+ef(vanilla)", "randomk(k=0.05,shared=false)+ef(vanilla)", "qsparse(k=0.05)+ef(vanilla)",
    "hardthreshold(tau=0.01)+ef(vanilla)", "threelc(s=1)+ef(vanilla)", "threelc(s=1.5)+ef(vanilla)+scope(bucket)",
    "signsgd", "efsignsgd+ef(vanilla)", "qsgd(s=4)+ef(vanilla)", "terngrad", "natural", "dithering(k=4)+ef(vanilla)",
    "eightbit+ef(vanilla)", "minmax8", "inceptionn+ef(vanilla)", "onebitsgd+ef(vanilla)", "fp16+ef(vanilla)",
    "powersgd(rank=2)+ef(vanilla)",
)
SHADOWS = ("topk@0.1/allgather", "topk@0.01/allgather", "lwtopk@0.05/allgather")
STEPS = 12
#: Random numbers of these are each side's own, or norms are sums in another order: ranks must agree, the sides need not.
LOOSE = ("mstopk@", "qsgd", "terngrad", "efsignsgd", "onebitsgd", "natural", "dithering", "dgc", "qsparse")


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def network(device: torch.device) -> DistributedDataParallel:
    torch.manual_seed(3)
    layers = [torch.nn.Linear(40, 301), torch.nn.Tanh(), torch.nn.Linear(301, 77), torch.nn.Tanh(), torch.nn.Linear(77, 10)]
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(torch.nn.Sequential(*layers).to(device), device_ids=ids)


def train(
    strategy: str, device: torch.device, kernels: bool, shadows: tuple[str, ...] = ()
) -> tuple[torch.Tensor, list[str], list[float]]:
    os.environ["FLEXCOMM_GPU_KERNELS"] = "1" if kernels else "0"
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    lines = Lines()
    logging.getLogger("flexcomm").addHandler(lines)
    # Subsets as small as they may be: host and device draw the same.
    session = flexcomm.torch.attach(model, optimizer, strategy=strategy, shadow_share=0.001)
    if shadows:
        session.shadow(shadows)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(32, 40, generator=generator).to(device)
        y = torch.randint(0, 10, (32,), generator=generator).to(device)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    session.close()
    logging.getLogger("flexcomm").removeHandler(lines)
    values = torch.cat([p.detach().flatten().cpu() for p in model.parameters()])
    return values, lines.lines, list(session.shadow_gains().values())


def measured(device: torch.device) -> tuple[float, dict[str, dict[str, float]]]:
    """Seconds to attach, and by compressor what the hello says that it takes here."""
    model = network(device)
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as agent:
        agent.bind(f"{folder}/agent")
        agent.listen()
        began = time.perf_counter()
        session = flexcomm.torch.attach(model, torch.optim.SGD(model.parameters(), lr=0.05), socket=f"{folder}/agent")
        seconds = time.perf_counter() - began
        hello = json.loads(agent.accept()[0].makefile().readline())
        session.close()
    return seconds, {codec["compressor"]: codec["times"] for codec in hello["codecs"] if "times" in codec}


def same_on_all(values: torch.Tensor) -> bool:
    everybody = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, values)
    return all(torch.equal(values.view(torch.int32), other.view(torch.int32)) for other in everybody)


class Spare(Cuda):
    """A device that has so many bytes to spare, whatever it has."""

    def __init__(self, spare: int, gpu: bool):
        super().__init__()
        self.spare, self.gpu = spare, gpu

    def has(self, tensor):
        return True

    def memory(self, device):
        return self.spare, 0, 0

    def pinned(self, size):
        return super().pinned(size) if self.gpu else torch.empty(size, dtype=torch.uint8)


def put_back(device: torch.device, spare: int | None) -> tuple[bool, tuple[int, int]]:
    """Whether tensors come back bit for bit over what a trial wrote, and where they were meanwhile."""
    torch.manual_seed(5)
    own = [torch.randn(n, device=device) for n in (0, 1, 1000, 3_000_001)] + [torch.randn(7, 5, device=device).bfloat16().t()]
    storage = SnapshotStorage(Cuda() if spare is None else Spare(spare, device.type == "cuda"))
    memory = Memory(storage)
    for number, tensor in enumerate(own):
        memory.visit(tensor, str(number))
    before = [tensor.cpu().clone() for tensor in own]
    memory.copy()
    good = True
    for _ in range(2):
        # At once, on the stream that copies: nothing has waited.
        for tensor in own:
            tensor.fill_(float("nan"))
        memory.restore()
        good = good and all(torch.equal(tensor.cpu(), then) for tensor, then in zip(own, before))
    return good, storage.taken


def main() -> int:
    dist.init_process_group("gloo")
    kind = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        # Deterministic products: the two runs are compared bit by bit.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    failed = 0
    for strategy in STRATEGIES:
        host, *_ = train(strategy, device, False)
        got, lines, _ = train(strategy, device, True)
        equal = torch.equal(host.view(torch.int32), got.view(torch.int32))
        near = float((host - got).norm() / host.norm())
        good = same_on_all(got) and (equal or strategy.startswith(LOOSE) and near < 0.05) and bool(got.isfinite().all())
        failed += not good
        if dist.get_rank() == 0:
            why = next((line for line in lines if "on the host" in line), "")
            word = "ok" if good else "FAILED"
            print(f"{word:6} {strategy:48} {'same bits' if equal else f'differs by {near:.2e}'} {why}", flush=True)
    for strategy in ("dense", "topk@0.05/allgather"):
        # The device's numbers come a step or two later.
        *_, host = train(strategy, device, False, SHADOWS)
        _, lines, got = train(strategy, device, True, SHADOWS)
        good = len(host) == len(got) == len(SHADOWS) and all(abs(a / b - 1) < 0.1 for a, b in zip(host, got))
        failed += not good
        if dist.get_rank() == 0:
            why = next((line for line in lines if "on the host" in line), "")
            print(f"{'ok' if good else 'FAILED':6} shadows under {strategy}: {got}, on the host {host} {why}", flush=True)
    seconds, times = measured(device)
    # All default compressors but PowerSGD.
    good = len(times) == (7 if kind == "cuda" and dist.get_rank() == 0 else 0) and seconds < 3
    failed += not good
    if dist.get_rank() == 0:
        print(f"{'ok' if good else 'FAILED':6} attached in {seconds:.2f} s, in which compressing was measured: {times}", flush=True)
    for what, spare in (("device", None), ("device and host", 1 << 20), ("host", 0)):
        good, (on_device, on_host) = put_back(device, spare)
        failed += not good
        if dist.get_rank() == 0:
            print(f"{'ok' if good else 'FAILED':6} a snapshot in {what}: {on_device} bytes there, {on_host} of the host", flush=True)
    dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

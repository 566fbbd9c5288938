"""Ring and tree switched live by the plugin between two ranks that share one GPU: real NCCL, real communicator.

Arguments: the plugin, a folder for NCCL's logs. Needs a GPU, torch with CUDA, and NCCL 2.30 or newer for two ranks on one
GPU. Exit 0: all as it must be; 1: not; 3: this machine lacks something, which the last line names.
"""

import ctypes
import importlib.util
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

STEPS, VALUES = 60, 1 << 20
# Ten steps by each shape, so that both are asked for more than once.
SHAPES = ["none@1/dense-ring", "none@1/dense-tree"]


def lacks(what: str) -> None:
    print(f"lacks: {what}")
    sys.exit(3)


def load():
    """`_tuner.py`: what FLEXCOMM_TUNER_MODULE names, or that of this repository."""
    named = os.environ.get("FLEXCOMM_TUNER_MODULE")
    path = named or Path(__file__).resolve().parents[3] / "python/flexcomm/torch/_tuner.py"
    spec = importlib.util.spec_from_file_location("_tuner", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def join(rank: int, world: int, port: str):
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE=str(world))
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=rank, world_size=world)
    return torch, dist


def work(rank: int, world: int, port: str) -> None:
    """One rank."""
    torch, dist = join(rank, world, port)
    tensor = torch.empty(VALUES, device="cuda")

    def sum_is_right(step: int) -> None:
        tensor.fill_(float(rank + 1 + step))
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
        want = sum(r + 1 + step for r in range(world))
        assert bool((tensor == want).all()), f"step {step}: {tensor[:4].tolist()} is not {want}"

    if world == 1:
        sum_is_right(0)
        found = load().Tuner.find()
        assert found is not None, "NCCL has not loaded the plugin"
        print("one rank:", found.counts())
        dist.destroy_process_group()
        return

    def gather(mine: bool) -> list[bool]:
        answers = [None] * world
        dist.all_gather_object(answers, mine)
        return answers

    tuner = load().agree(lambda: sum_is_right(-1), gather)
    assert tuner is not None, "NCCL does not ask the plugin on this thread"
    slowest = {}
    for step in range(STEPS):
        shape = SHAPES[step // 10 % 2]
        start = time.perf_counter()
        with tuner.around(shape, step):
            sum_is_right(step)
        first = f"{shape}, first" if step < 20 and step % 10 == 0 else shape
        slowest[first] = max(slowest.get(first, 0.0), time.perf_counter() - start)
    counts = tuner.counts()
    print(f"rank {rank}: {counts}, longest " + ", ".join(f"{name}: {s * 1e3:.2f} ms" for name, s in slowest.items()))
    assert counts["asked_here"] >= STEPS and counts["left"] == 0, counts
    assert counts["steered"] + counts["same"] >= STEPS and counts["steered"] >= STEPS // 2 - 1, counts
    dist.destroy_process_group()


def ranks(world: int, plugin: str, log: Path) -> tuple[list[int], list[str], list[str]]:
    """Exit statuses, outputs, and NCCL's logs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    started, logs = [], []
    for rank in range(world):
        logs.append(log / f"nccl-{world}-{rank}.log")
        said = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,TUNING", "NCCL_DEBUG_FILE": str(logs[-1])}
        env = {**os.environ, **said, "NCCL_TUNER_PLUGIN": plugin, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        env.pop("NCCL_ALGO", None)
        env.pop("NCCL_PROTO", None)
        command = [sys.executable, __file__, "rank", str(rank), str(world), port]
        started.append(subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    said = []
    for process in started:
        try:
            said.append(process.communicate(timeout=180)[0])
        except subprocess.TimeoutExpired:
            process.kill()
            said.append(process.communicate()[0] + "\n(killed: it did not end within 180 s)")
    texts = [log.read_text(errors="replace") if log.exists() else "" for log in logs]
    return [process.returncode for process in started], said, texts


def algorithms(log: str) -> set[str]:
    """Those that NCCL's own lines about collectives name, as "Algo RING", "Algo Ring" or, in older ones, by number."""
    return {{"0": "TREE", "1": "RING"}.get(name, name.upper()) for name in re.findall(r"-> Algo (\w+)", log)}


def fail(why: str, texts: list[str]) -> None:
    print("\n".join(text[-6000:] for text in texts))
    print(f"failed: {why}")
    sys.exit(1)


def main(plugin: str, folder: str) -> None:
    try:
        import torch
    except ImportError:
        lacks("torch")
    if not torch.cuda.is_available():
        lacks("a GPU that torch can use")
    log = Path(folder)
    log.mkdir(parents=True, exist_ok=True)
    statuses, said, texts = ranks(1, plugin, log)
    print(said[0].strip())
    if statuses != [0] or "flexcomm: tuner" not in texts[0]:
        fail("a communicator of one rank has not loaded the plugin", said + texts)
    version = ctypes.c_int()
    with open("/proc/self/maps") as maps:
        library = next((line.split()[-1] for line in maps if "libnccl.so" in line), "libnccl.so.2")
    ctypes.CDLL(library).ncclGetVersion(ctypes.byref(version))
    if version.value < 23000:
        lacks(f"NCCL 2.30 or newer for two ranks on one GPU (this is {version.value}); one rank loaded the plugin")
    statuses, said, texts = ranks(2, plugin, log)
    print("\n".join(text.strip() for text in said))
    if statuses != [0, 0]:
        fail(f"two ranks ended with {statuses}", said + texts)
    # Rank 0 alone says what a collective takes.
    used = algorithms(texts[0])
    if not {"RING", "TREE"} <= used:
        fail(f"NCCL names {sorted(used)}, not both RING and TREE", texts)
    for rank, text in enumerate(texts):
        for line in ("allreduce by tree from step 10 on", "allreduce by ring from step 20 on"):
            if line not in text and line.replace("allreduce by ", "") not in text:
                fail(f"rank {rank}'s log lacks {line!r}", texts)
    print("both shapes in one run, sums right in either")


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        work(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        main(*sys.argv[1:])

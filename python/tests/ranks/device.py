"""Buckets that lie on a GPU as far as the hook can tell: tensors of the host beside a stand-in for the driver, whose device
has the host's memory. Without the stand-in: what the hook does where there is no driver."""

import contextlib
import ctypes
import datetime
import functools
import os
import time

import torch
from common import FOLDER, Lines, batch, ddp, network, parameters_hash, ranks, same
from fake_agent import FakeAgent, decision, trial

import flexcomm.torch
from flexcomm._core import CudaStream
from flexcomm.torch import _collectives, _device
from flexcomm.torch._storage import SnapshotStorage

STEPS, STREAM = 12, 0x5EED
TOPK = "topk(k=0.05)+ef(vanilla)/allgather"
LINES = Lines()


class Event:
    """Has happened when so many more were recorded as the device lags behind."""

    synchronised = 0

    def __init__(self, cuda):
        self.cuda, self.at, self.number = cuda, None, None

    def query(self):
        return self.number + self.cuda.lag <= self.cuda.recorded

    def elapsed_time(self, other):
        if not (self.query() and other.query()):
            raise RuntimeError("device not ready")
        return (other.at - self.at) * 1e3 * self.cuda.SLOWER

    def synchronize(self):
        Event.synchronised += 1

    wait = synchronize


class Pretended(_device.Cuda):
    """Every tensor is on the device, whose current stream is STREAM; its clock is derived from the host's."""

    SLOWER = 100
    waited = recorded = made = lag = 0
    #: How often it gives memory before it is full; whether the host pins any.
    grants, pins = None, True

    #: Bytes that a snapshot may take of it and of the host.
    spare, host = 1 << 30, 1 << 30

    def memory(self, device):
        return self.spare, 0, 0

    def to_pin(self):
        return self.host

    def event(self):
        self.made += 1
        return Event(self)

    def record(self, event, device):
        self.recorded += 1
        event.at, event.number = time.perf_counter(), self.recorded

    def record_after(self, event, work, device):
        raise AssertionError("this backend's waits hold the host")

    def has(self, tensor):
        return True

    def stream(self, tensor):
        return CudaStream(0, STREAM)

    def wait(self, tensor):
        self.waited += 1

    def empty(self, size, dtype, device):
        if self.grants == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nGPU 0 has a total capacity of 1 GiB")
        self.grants = None if self.grants is None else self.grants - 1
        return torch.empty(size, dtype=dtype, device=device)

    def pinned(self, size):
        if not self.pins:
            raise RuntimeError("CUDA error: out of memory")
        return torch.empty(size, dtype=torch.uint8)


def pretend_on(session, cuda):
    """Before the first bucket."""
    device = session.hook.device
    device._cuda = device.clock._cuda = cuda


def bits(model):
    return parameters_hash(model.module.float())


def train(rank, strategy, *, pretend=True, dtype=torch.float32, events={}, grants=None, pins=True, **options):
    """`events` happen before the step that they are named by. The device has memory `grants` times, and any amount from step 8
    on."""
    model = ddp(network((20, 48, 40, 2)).to(dtype), bucket_cap_mb=0.006)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = flexcomm.torch.attach(model, optimizer, strategy=strategy, **options)
    cuda = Pretended()
    cuda.grants, cuda.pins = grants, pins
    if pretend:
        pretend_on(session, cuda)
    before, LINES.lines = launches(STREAM), []
    error, kept = None, False
    for step in range(STEPS):
        if step in events:
            events[step](session)
        if step == 8:
            cuda.grants, cuda.pins, full = None, True, launches(STREAM) - before
        x, y = batch(step, rank)
        if step == options.get("bad", 9) and "on_nonfinite" in options and rank == 1:
            x[0, 0] = float("nan")
        optimizer.zero_grad()
        residual = session.state_dict()["held_back"] if "on_nonfinite" in options and step == 9 else None
        try:
            torch.nn.functional.cross_entropy(model(x.to(dtype)).float(), y).backward()
        except flexcomm.FlexcommError as raised:
            error = type(raised).__name__
        if residual is not None:
            after = session.state_dict()["held_back"]
            kept = all(torch.equal(after[name], values) for name, values in residual.items()) and after.keys() == residual.keys()
            nan = all(bool(p.grad.isnan().all()) for p in model.parameters())
            return {"error": error, "kept": kept, "nan": nan, "launched": launches(STREAM) - before}
        optimizer.step()
    costs = session.costs
    return {
        "hash": bits(model), "equal": same(bits(model)), "launched": launches(STREAM) - before, "waited": cuda.waited,
        "lines": LINES.take(), "gain": costs.gain, "sent": costs.sent, "full": full,
    }


class Network:
    """A backend per device: what lies in the hook's own memory of the host travels by one group, all else by another, and each
    of them waits for all ranks."""

    COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "broadcast")

    def __init__(self):
        limit = datetime.timedelta(seconds=20)
        self.host, self.device = (torch.distributed.new_group(timeout=limit) for _ in range(2))
        self.real = {name: getattr(torch.distributed, name) for name in self.COLLECTIVES}
        self.hook, self.by_host, self.works = None, 0, []

    def carry(self, name, tensor, *rest, group=None, **options):
        kept = {t.data_ptr() for (_, what), t in self.hook._buffers.kept.items() if what != "dense"}
        on_host = tensor.data_ptr() in kept
        work = self.real[name](tensor, *rest, group=self.host if on_host else self.device, **options)
        self.by_host += on_host
        if on_host:
            self.works.append(work)
        return work

    @contextlib.contextmanager
    def of(self, session):
        self.hook = session.hook
        session.hook.device._nccl = session.hook.device._by_stream = True
        for name in self.COLLECTIVES:
            setattr(torch.distributed, name, functools.partial(self.carry, name))
        try:
            yield
        finally:
            for name, real in self.real.items():
                setattr(torch.distributed, name, real)


class Streams(Pretended):
    """Waits for collectives on a stream of its own."""

    def __init__(self, network):
        self.network, self.beside = network, 0

    def record_after(self, event, work, device):
        assert all(work is not known for known in self.network.works), "this wait would hold the host"
        self.beside += 1
        self.record(event, device)


def two_backends(rank, strategy, events):
    """Under `cpu:gloo,cuda:nccl`, and how often the host's backend had to carry a bucket."""
    wires = Network()
    cuda = Streams(wires)
    model = ddp(network((20, 48, 40, 2)), bucket_cap_mb=0.006)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = flexcomm.torch.attach(model, optimizer, strategy=strategy)
    pretend_on(session, cuda)
    with wires.of(session):
        for step in range(STEPS):
            if step in events:
                events[step](session)
            x, y = batch(step, rank)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return {"hash": bits(model), "by host": wires.by_host, "beside": cuda.beside, "lines": LINES.take()}


def reported(rank, name, *, options={}, steps=60, decide=None, pretend=True):
    """What an agent hears of a run whose times come late."""
    agent = FakeAgent(FOLDER, f"{name}{rank}").start()
    model = ddp(network((20, 48, 40, 2)), bucket_cap_mb=0.006)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = flexcomm.torch.attach(model, optimizer, socket=str(agent.path), **options)
    cuda = Pretended()
    cuda.lag = 40
    if pretend:
        pretend_on(session, cuda)
    agent.wait_for("hello")
    began = time.perf_counter()
    for step in range(steps):
        if step == 20 and decide and rank == 0:
            agent.publish(decision=decision(1, decide))
        x, y = batch(step, rank)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    wall = time.perf_counter() - began
    costs = session.costs
    session.close()
    agent.wait_for("bye")
    order = [(m["kind"], m["version"]) for m in agent.received if m["kind"] in ("steps", "applied")]
    records = [(m["version"], m["strategy"].split("/")[0].split("(")[0], r) for m in agent.of_kind("steps") for r in m["steps"]]
    sane = all(
        0 < r["sync_us"] <= r["step_us"] and 0 < r["compute_us"] <= r["step_us"] and r["step_us"] < 600e6
        and r["bytes_sent"] > 0 and 0 < r["gain"] <= 1 and (r["comp_us"] > 0) == (compressor == "topk")
        for _, compressor, r in records
    )
    return {
        "order": order, "steps": [(version, compressor, r["step"]) for version, compressor, r in records], "sane": sane,
        "synchronised": Event.synchronised, "made": cuda.made, "recorded": cuda.recorded,
        "costs": [costs.compute, costs.compress, costs.sync, costs.step, costs.sent],
        "lines": LINES.take(), "equal": same(parameters_hash(model.module)), "at": session.step,
        "slower": sum(r["step_us"] for _, _, r in records) * 1e-6 / wall,
    }


def measured(rank, name, before=lambda: None, after=lambda: None, pretend=True):
    """What the hello says of the device's codecs, and what the log says of it."""
    agent = FakeAgent(FOLDER, f"{name}{rank}").start()
    model = ddp(network((20, 12, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    LINES.take()
    before()
    real, _device.Cuda = _device.Cuda, Pretended if pretend else _device.Cuda
    session = flexcomm.torch.attach(model, optimizer, socket=str(agent.path))
    _device.Cuda = real
    after()
    agent.wait_for("hello")
    x, y = batch(0, rank)
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    session.close()
    (hello,) = agent.of_kind("hello")
    # Those that are offered on request alone are not measured.
    codecs = [codec for codec in hello["codecs"] if not codec.get("on_request")]
    return {"times": {codec["compressor"]: codec.get("times") for codec in codecs}, "lines": LINES.take()}


def tried(rank):
    """A live trial, begun with the wrapper, whose iterations' times come after it has ended."""
    agent = FakeAgent(FOLDER, f"tr{rank}").start()
    model = ddp(network((20, 48, 40, 2)), bucket_cap_mb=0.006)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = flexcomm.torch.attach(model, optimizer, socket=str(agent.path))
    cuda = Pretended()
    cuda.lag = 60
    pretend_on(session, cuda)
    agent.wait_for("hello")
    done, reports, early = 0, [], None
    for x, y in session.batches([batch(step, rank) for step in range(60)]):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        reports.append((session.in_trial, len(agent.of_kind("trial"))))
        if not session.in_trial:
            done += 1
            if done == 16 and rank == 0:
                agent.publish(trial=trial(1, ["none/dense-ring", TOPK, "topk(k=0.05)+ef(vanilla)/art-ring:star"]))
    session.close()
    agent.wait_for("bye")
    received = [(m["kind"], [s["step"] for s in m.get("steps", [])]) for m in agent.received if m["kind"] in ("steps", "trial")]
    return {
        "received": received, "trials": agent.of_kind("trial"), "in trial": sum(inside for inside, _ in reports),
        "at its end": [count for inside, count in reports if inside][-1], "equal": same(parameters_hash(model)),
    }


class Greedy:
    """Of `extra`: on rank 1 there is no memory for a copy of its state while the device is full."""

    cuda = None

    def state_dict(self):
        if self.cuda is not None and self.cuda.spare == -1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5.00 GiB.\nMore of it")
        return {}

    def load_state_dict(self, state):
        pass


def snapped(rank, name, trials):
    """Live trials whose snapshots lie on the device, where there is memory on all ranks: not for the first, nor for the fourth in
    another way, on rank 1."""
    agent = FakeAgent(FOLDER, f"{name}{rank}").start()
    model = ddp(network((20, 48, 40, 2)), bucket_cap_mb=0.006)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    greedy = Greedy()
    session = flexcomm.torch.attach(model, optimizer, socket=str(agent.path), extra=[greedy])
    cuda = greedy.cuda = Pretended()
    pretend_on(session, cuda)
    session._trials.storage = SnapshotStorage(cuda)
    agent.wait_for("hello")
    done, hashes, inside, taken, bytes_of = 0, [], 0, [], []
    # Loops of eleven batches: plans come in the middle of one, and between two.
    while done < 77:
        for x, y in session.batches([batch(step, rank) for step in range(done, done + 11)]):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            inside += session.in_trial
            bytes_of.append(sum(piece.numel() for own in session._trials.storage._memory.values() for piece in own))
            if session.in_trial:
                taken.append(session.snapshot_bytes)
                continue
            done += 1
            hashes.append(bits(model))
            if trials and done in trials:
                full = {1: (0, 5000), 4: (-1, 0)}.get(trials[done]) if rank == 1 else None
                cuda.spare, cuda.host = full or (10_000, 1 << 30)
                if rank == 0:
                    agent.publish(trial=trial(trials[done], ["none/dense-ring", TOPK]))
    session.close()
    agent.wait_for("bye")
    reports = {t["id"]: t for t in reversed(agent.of_kind("trial"))}
    return {
        "hashes": hashes, "inside": inside, "taken": taken, "left": bytes_of[-1], "lines": LINES.take(),
        "reports": {n: (t.get("aborted"), [o["iterations"] for o in t["outcomes"]]) for n, t in reports.items()},
        "parameters": sum(p.numel() for p in model.parameters()),
    }


CANDIDATES = ["topk(k=0.1)+ef(vanilla)/allgather", "topk(k=0.01)+ef(vanilla)/allgather", "lwtopk(k=0.05)+ef(vanilla)/allgather", "mstopk(k=0.02)+ef(vanilla)/allgather"]


def shadowed(rank, strategy, *, pretend=True, dtype=torch.float32, grants=None, lag=0, events={}):
    """Gains of shadows from step 10 to 40; subsets are as small as they may be, so that host and device draw the same."""
    model = ddp(network((20, 300, 200, 2)).to(dtype), bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = flexcomm.torch.attach(model, optimizer, strategy=strategy, shadow_share=0.001)
    cuda = Pretended()
    cuda.lag, Event.synchronised = lag, 0
    if pretend:
        pretend_on(session, cuda)
    LINES.take()
    for step in range(40):
        if step == 10:
            session.shadow(CANDIDATES)
            before, cuda.grants = launches(STREAM), grants
        if step in events:
            events[step](session)
        x, y = batch(step, rank)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x.to(dtype)).float(), y).backward()
        optimizer.step()
    return {
        "gains": [one.gain for one in session._core.shadow_gains()], "steps": session._core.shadow_gains()[0].steps,
        "launched": launches(STREAM) - before, "waited": cuda.waited + Event.synchronised, "lines": LINES.take(), "hash": bits(model),
    }


def driver():
    """The stand-in, if this process has it."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


DRIVER = driver()


def launches(stream):
    if DRIVER is None:
        return 0
    DRIVER.standin_launches.restype = ctypes.c_uint64
    return DRIVER.standin_launches(ctypes.c_uint64(stream))


def refuse(kernel):
    return lambda session: DRIVER.standin_refuse(kernel.encode())


def checkpoint(session):
    session.load_state_dict(session.state_dict())


with ranks() as (rank, world, seen):
    seen["host"] = train(rank, TOPK, pretend=False)
    seen["device"] = train(rank, TOPK)
    # The wrapper until a decision, without any driver; and then by whatever compresses here.
    seen["reported wrapped"] = reported(rank, "rb")
    seen["reported"] = reported(rank, "rd", decide=TOPK)
    seen["tried"] = tried(rank)
    seen["snapped"] = [snapped(rank, "sa", {13: 1, 31: 2, 53: 3, 64: 4}), snapped(rank, "sb", {})]
    seen["reported host"] = reported(rank, "rh", decide=TOPK, pretend=False)
    seen["measured"] = measured(rank, "ma")
    seen["measured host"] = measured(rank, "mb", pretend=False)
    if DRIVER is not None:
        switch = functools.partial(os.environ.__setitem__, "FLEXCOMM_GPU_KERNELS")
        seen["measured off"] = measured(rank, "mc", lambda: switch("0"), lambda: switch("1"))
        seen["measured fails"] = measured(rank, "md", lambda: refuse("cut_third")(None), lambda: refuse("")(None))
        for strategy in ("dense", TOPK):
            seen[f"shadows {strategy}"] = {
                "host": shadowed(rank, strategy, pretend=False), "device": shadowed(rank, strategy),
                "late": shadowed(rank, strategy, lag=8), "full": shadowed(rank, strategy, grants=1),
                "halves": shadowed(rank, strategy, dtype=torch.bfloat16),
                "fails": shadowed(rank, strategy, events={20: refuse("cut_third"), 21: refuse("")}),
            }
        seen["mixed"] = train(rank, TOPK, pretend=rank != 0)
        seen["checkpoint"] = train(rank, TOPK, events={6: checkpoint, 9: checkpoint})
        seen["shadow"] = train(rank, TOPK, events={7: lambda session: session.shadow(["topk(k=0.01)+ef(vanilla)/allgather"])})
        failing = {6: refuse("cut_third"), 9: refuse("")} if rank == 1 else {}
        seen["refused"] = train(rank, TOPK, events=failing)
        for dtype in (torch.bfloat16, torch.float16):
            name = str(dtype).removeprefix("torch.")
            seen[f"{name} device"] = train(rank, TOPK, dtype=dtype)
            seen[f"{name} host"] = train(rank, TOPK, dtype=dtype, events={0: refuse("cut_second"), 11: refuse("")})
            refuse("")(None)
        seen["mstopk"] = train(rank, "mstopk(k=0.05)+ef(vanilla)/allgather")
        seen["raise"] = train(rank, TOPK, on_nonfinite="raise")
        seen["propagate"] = train(rank, TOPK, on_nonfinite="propagate")
    # Rank 1's kernels fail on the way.
    failing = {6: refuse("cut_third")} if DRIVER is not None and rank == 1 else {}
    LINES.take()
    seen["two backends"] = {text: two_backends(rank, text, failing) for text in (TOPK, "topk(k=0.05)+ef(vanilla)/art-ring:var", "qsgd(s=4)")}
    if DRIVER is not None:
        refuse("")(None)
    others = (
        "lwtopk(k=0.05)+ef(vanilla)/allgather", "topk(k=0.05)+ef(vanilla)/art-ring:var", "topk(k=0.05)+ef(vanilla)/art-ring:star", "qsgd(s=64)+ef(vanilla)",
        "topk(k=0.05)+ef(vanilla)", "randomk(k=0.05)+ef(vanilla)", "threelc(s=1)+ef(vanilla)", "signum",
    )
    seen["others"] = {text: (train(rank, text, pretend=False), train(rank, text)) for text in others}
    text = "qsgd(s=64)+ef(vanilla)"
    seen["text checkpoint"] = train(rank, text, events={6: checkpoint, 9: checkpoint})
    seen["text mixed"] = train(rank, text, pretend=rank != 0)
    for dtype in (torch.bfloat16, torch.float16):
        seen[f"text {dtype}"] = [train(rank, what, dtype=dtype) for what in (text, "topk(k=0.05)+ef(vanilla)/art-ring:var")]
    # Rank 1's device is full: at once, after the bucket's own memory, and only of what the host could pin. It asks again.
    _device._ASK_AGAIN = 2
    full = {"at once": {"grants": 0}, "later": {"grants": 1}, "pinned": {"pins": False}}
    texts = {TOPK: full, "topk(k=0.05)+ef(vanilla)/art-ring:var": ("at once", "later"), text: ("at once", "later")}
    seen["full"], seen["roomy"] = {}, {}
    for dtype in (torch.float32, torch.bfloat16):
        for what, kinds in texts.items():
            seen["roomy"][f"{what}, {dtype}"] = train(rank, what, dtype=dtype)["hash"]
            for kind in kinds:
                options = full[kind] if rank == 1 else {}
                seen["full"][f"{what}, {dtype}, {kind}"] = train(rank, what, dtype=dtype, **options)
    # As under NCCL alone: what lies on the host travels as a copy.
    wire, _collectives.wire = _collectives.wire, lambda group: torch.device("cpu")
    seen["carried"] = {text: train(rank, text, pretend=False) for text in others}
    _collectives.wire = wire
    seen["driver"] = DRIVER is not None
    seen["nvrtc"] = os.environ.get("FLEXCOMM_NVRTC", "")

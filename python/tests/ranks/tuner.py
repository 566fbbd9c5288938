"""NCCL's tuner plugin in the hook, without NCCL: a library that keeps what it receives stands in for the plugin, and Gloo's
allreduces ask it as NCCL's would. What the real plugin makes of it is tested in `nccl-tuner/`."""

import torch
import torch.distributed as dist
from common import FOLDER, Lines, batch, ddp, everywhere, network, parameters_hash, ranks, same
from fake_agent import FakeAgent, decision, trial

import flexcomm.torch
from flexcomm.torch import _agree, _tuner

NONE, TREE, RING = -1, 0, 1


class Exported:
    """A function of a library, as ctypes shows it."""

    def __init__(self, run):
        self.run, self.argtypes, self.restype = run, None, None

    def __call__(self, *arguments):
        return self.run(*arguments)


class Plugin:
    """What `_tuner.Tuner` calls, and what NCCL would see of it."""

    def __init__(self):
        self.preferred, self.asked, self.received = NONE, 0, []
        self.flexcomm_tuner_prefer = Exported(self.prefer)
        self.flexcomm_tuner_state = Exported(self.state)

    def prefer(self, scope, algorithm, step):
        assert scope == 0 and algorithm in (NONE, TREE, RING) and step >= 0
        self.preferred = algorithm
        return 0

    def state(self, out, size):
        out._obj.asked_here = self.asked
        return size


def start(name, rank, there):
    """A job whose allreduces ask the plugin, on the ranks that have it."""
    plugin = Plugin()
    _tuner.Tuner.find = classmethod(lambda cls: cls(plugin) if there else None)
    real = dist.all_reduce

    def all_reduce(*arguments, **options):
        plugin.asked += 1
        plugin.received.append(plugin.preferred)
        return real(*arguments, **options)

    dist.all_reduce = all_reduce
    agent = FakeAgent(FOLDER, f"{name}{rank}").start()
    model = ddp(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = flexcomm.torch.attach(model, optimizer, socket=str(agent.path))
    agent.wait_for("hello")
    at = [0]

    def step(_=None):
        x, y = batch(at[0], rank)
        at[0] += 1
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    def took(steps):
        """Shapes of the allreduces of so many steps; parameters stay equal."""
        plugin.received.clear()
        for _ in range(steps):
            step()
        return sorted(set(plugin.received)) if same(tuple(plugin.received)) and same(parameters_hash(model)) else None

    return plugin, agent, session, step, took, real


def follow(agent, session, step, order):
    """Until all ranks follow."""
    agent.publish(decision=order)
    for _ in range(100):
        step()
        if all(everywhere(session.version == order["version"])):
            return
    raise RuntimeError(f"decision {order['version']} is not followed")


def steered(rank):
    plugin, agent, session, step, took, real = start("steered", rank, True)
    out = {"offered": agent.of_kind("hello")[0]["collectives"], "before": took(6)}
    for version, strategy in enumerate(["none/dense-tree", "none/dense-ring", "topk(k=0.1)+ef(vanilla)/allgather"], 1):
        follow(agent, session, step, decision(version, strategy))
        out[strategy] = took(6)
    follow(agent, session, step, decision(4, "none/dense-ring"))
    # Residuals have gone out.
    took(2)
    plugin.received.clear()
    for number, _ in enumerate(session.batches(range(100), train_step=step)):
        step()
        if number == 20:
            # By now all ranks have said that they can run trials.
            candidates = ["none/dense-tree", "none/dense-ring"]
            agent.publish(decision=decision(4, "none/dense-ring"), trial=trial(1, candidates))
        if number % 10 == 9 and all(everywhere(bool(agent.of_kind("trial")) or rank != 0)):
            break
    out["in the trial"], out["after"] = sorted(set(plugin.received)), took(6)
    dist.all_reduce = real
    session.close()
    return out


def alone(rank):
    """Rank 2 has no plugin: no rank uses it."""
    lines = Lines()
    plugin, agent, session, step, took, real = start("alone", rank, rank != 2)
    follow(agent, session, step, decision(1, "none/dense-tree"))
    out = {"offered": agent.of_kind("hello")[0]["collectives"], "took": took(6), "lines": lines.take()}
    dist.all_reduce = real
    session.close()
    return out


with ranks() as (rank, world, seen):
    # Gloo moves it; the session takes it for NCCL.
    seen["gloo"] = _agree._find_tuner(None, [("w", torch.nn.Parameter(torch.zeros(1)))]) is None
    _agree._nccl_moves = lambda group, named: True
    seen["steered"] = steered(rank)
    seen["alone"] = alone(rank)

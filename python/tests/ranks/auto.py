"""Who leads AR-Topk under `selection="auto"`, while ranks are alike, then one has far larger gradients, then alike again."""

import torch
import torch.distributed as dist
from common import FOLDER, Lines, batch, ddp, network, parameters_hash, ranks, same
from fake_agent import FakeAgent, trial

import flexcomm.torch

#: Steps of each of the three parts.
PART = 80

#: The rank with larger gradients.
LOUD = 2

#: Of each trial.
CANDIDATES = [
    "topk(k=0.1)+ef(vanilla)/art-ring:var", "topk(k=0.05)+ef(vanilla)/allgather", "topk(k=0.1)+ef(vanilla)/art-ring:star",
]

#: Ranks whose indices all get, bucket by bucket.
LEADERS = []


def watch_broadcasts():
    broadcast = dist.broadcast

    def watched(tensor, src, **options):
        # Not those of the control group.
        if tensor.numel() != flexcomm._core.CONTROL_BYTES:
            LEADERS.append(src)
        return broadcast(tensor, src=src, **options)

    dist.broadcast = watched


def train(rank, strategy, name, trials):
    """`trials`: live ones are ordered after these steps."""
    agent = FakeAgent(FOLDER, f"{name}{rank}").start()
    model = ddp(network((20, 48, 40, 2)), bucket_cap_mb=0.006)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = flexcomm.torch.attach(model, optimizer, strategy=strategy, selection="auto", socket=str(agent.path))
    agent.wait_for("hello")
    out, lines = {"modes": [], "leaders": [], "same": True, "hashes": [], "stale": 0, "tried": []}, Lines()
    for step in session.batches(range(3 * PART)):
        LEADERS.clear()
        x, y = batch(step, rank)
        weight = 20.0 if rank == LOUD and PART <= step < 2 * PART else 1.0
        optimizer.zero_grad()
        (weight * torch.nn.functional.cross_entropy(model(x), y)).backward()
        optimizer.step()
        auto = session._core.auto_leaders()
        mode, skew, stale = auto.mode, auto.skew, auto.staleness
        out["same"] &= same((parameters_hash(model.module), mode, skew, stale, tuple(LEADERS)))
        if session.in_trial:
            out["tried"].append(list(LEADERS))
            continue
        out["modes"].append(mode)
        out["leaders"].append(list(LEADERS))
        out["hashes"].append(parameters_hash(model.module))
        out["stale"] = max(out["stale"], stale)
        if step in trials and rank == 0:
            agent.publish(trial=trial(1 + trials.index(step), CANDIDATES))
    session.close()
    agent.wait_for("bye")
    ran = {step["step"]: report["strategy"] for report in agent.of_kind("steps") for step in report["steps"]}
    return out | {"lines": [line for line in lines.take() if "leaders" in line], "ran": list(ran.items())}


with ranks() as (rank, world, seen):
    watch_broadcasts()
    for selection in ("star", "var"):
        seen[selection] = train(rank, f"topk(k=0.1)+ef(vanilla)/art-ring:{selection}", selection, [])
    # Around both switches.
    seen["trials"] = train(rank, "topk(k=0.1)+ef(vanilla)/art-ring:star", "t", [75, 150, 215])

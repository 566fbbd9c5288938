"""What is reported to the agent of DDP's buckets."""

import time

import torch
from common import FOLDER, batch, ddp, network, ranks
from fake_agent import FakeAgent

import flexcomm.torch


def train(rank, name, *, strategy=None, hooked=False, takes_buckets=True, **options):
    model = ddp(network((20, 48, 48, 48, 2)), bucket_cap_mb=0.006, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    agent = FakeAgent(FOLDER, f"{name}{rank}", takes_buckets=takes_buckets).start()
    session = flexcomm.torch.attach(model, optimizer, strategy=strategy, register=not hooked, socket=str(agent.path))
    agent.wait_for("hello")
    if hooked:
        model.register_comm_hook(None, session.hook)

    def steps(numbers):
        for step in numbers:
            x, y = batch(step, rank)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    steps(range(8))
    if not takes_buckets:
        agent.kill()
        agent.start()
        agent.wait_for("hello", 2)
        while not session._core.state().connected:
            time.sleep(0.01)
    else:
        agent.wait_for("buckets")
    steps(range(8, 12))
    session.close()
    agent.wait_for("bye")
    return {
        "hello": [m.get("buckets") for m in agent.of_kind("hello")], "reported": [m["values"] for m in agent.of_kind("buckets")],
        # As torch has them.
        "buckets": [bucket.buffer().numel() for bucket in model.reducer._get_zeros_like_grad_buckets()],
        "values": agent.of_kind("hello")[0]["gradient_values"],
    }


with ranks() as (rank, world, seen):
    topk = "topk(k=0.1)+ef(vanilla)/allgather"
    seen["native"] = train(rank, "native")
    seen["hooked"] = train(rank, "hooked", hooked=True)
    seen["compressed"] = train(rank, "compressed", strategy=topk)
    seen["static graph"] = train(rank, "static", strategy=topk, static_graph=True)
    seen["older"] = train(rank, "older", takes_buckets=False)

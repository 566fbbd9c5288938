"""Two ranks under a strategy that a compressor spec names, beside an agent and a controller in earnest."""

import json
import os
import time
import urllib.request

import torch
from common import batch, ddp, everywhere, network, parameters_hash, ranks, same

import flexcomm.torch

TEXT = "qsgd(s=16)+ef(vanilla)"

#: A hang ends by itself; an interval is full after about a second of training.
MOST_SECONDS = 60


def ask(what):
    with urllib.request.urlopen(f"{os.environ['CONTROLLER']}/api/v1/{what}", timeout=5) as answer:
        return json.load(answer)


def intervals():
    try:
        return ask("jobs/default/intervals")
    except urllib.error.HTTPError:
        # The agent has not announced the job yet.
        return []


with ranks() as (rank, world, seen):
    model = ddp(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    policy = {"kinds": ["u8bit"], "objective": "knee", "observe": rank == 0}
    session = flexcomm.torch.attach(model, optimizer, strategy=TEXT, policy=policy, socket=os.environ["SOCKET"])
    began, found, step = time.monotonic(), [], 0
    while not all(everywhere(bool(found))) and time.monotonic() - began < MOST_SECONDS:
        for _ in range(20):
            x, y = batch(step, rank)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            step += 1
        found = intervals()
    costs = session.costs
    seen |= {
        "intervals": found, "strategy": session.strategy, "equal": same(parameters_hash(model.module)), "sent": costs.sent,
        "job": ask("jobs/default"), "rejected": ask("rejected-reports"),
        "report": ask("jobs/default/report"),
    }
    session.close()

"""Two ranks that go on from checkpoints of the release before."""

import pathlib
import sys

import torch
from common import Lines, ranks

import flexcomm.torch

FORMATS = pathlib.Path(__file__).parents[2] / "formats"
sys.path.insert(0, str(FORMATS))
import make_state  # noqa: E402


def restored(strategy, state):
    """Whether what is loaded is there bit for bit; what is logged."""
    lines = Lines()
    model, optimizer = make_state.start()
    session = flexcomm.torch.attach(model, optimizer, strategy=strategy)
    session.load_state_dict(state)
    now = session.state_dict()["held_back"]
    session.close()
    return {"kept": all(torch.equal(now[name], values) for name, values in state["held_back"].items()), "lines": lines.take()}


def far(saved, now):
    return max((now[name] - after).abs().max().item() for name, after in saved["after"].items())


with ranks() as (rank, world, seen):
    before = torch.load(FORMATS / "before" / "state.pt", weights_only=True)
    for strategy, saved in before.items():
        state = saved["ranks"][rank]
        runs = {how: make_state.go_on(strategy, saved["parameters"], given) for how, given in (("with", state), ("without", None))}
        seen[strategy] = restored(strategy, state) | {how: far(saved, now) for how, now in runs.items()} | {
            "held": sum(values.abs().sum().item() for values in state["held_back"].values()), "text": "text" in state,
        }

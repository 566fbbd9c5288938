"""Checkpoints of what is held back, keyed by parameter name."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

from flexcomm._core import Core, FlexcommError
from flexcomm.torch import _device

logger = logging.getLogger("flexcomm")

#: Version of the checkpoint's layout. 1 had no "text".
FORMAT = 2
_READ = (1, 2)

Named = list[tuple[str, torch.nn.Parameter]]


def save(core: Core, named: Named, who: tuple[int, int, Any], consolidate: bool) -> dict[str, Any]:
    """The state of this rank, or the mean over all ranks."""
    rank, world, group = who
    held = {
        named[number][0]: torch.frombuffer(bytearray(values), dtype=torch.float32)
        for number, values in core.held_back().items()
    }
    if consolidate:
        # Every rank goes through all parameters: another rank may hold back what this one does not.
        wire = _device.wire(group)
        for name, parameter in named:
            total = held.get(name, torch.zeros(parameter.numel()))
            there = total if wire is None else total.to(wire)
            dist.all_reduce(there, group=group)
            held[name] = there.div_(world).cpu()
    state = {"format": FORMAT, "world": world, "rank": -1 if consolidate else rank, "held_back": held}
    text = None if consolidate else core.text_state()
    if text is not None:
        buckets = [
            ([named[i][0] for i in ids], torch.frombuffer(bytearray(saved), dtype=torch.uint8)) for ids, saved in text[2]
        ]
        state["text"] = {"strategy": text[0], "step": text[1], "buckets": buckets}
    return state


def load(core: Core, named: Named, who: tuple[int, int], state: dict[str, Any]) -> None:
    """Checks all of it, then replaces what is held back."""
    rank, world = who
    if state.get("format") not in _READ:
        raise FlexcommError(
            f"failed to load flexcomm's state: format {state.get('format')!r}, this version reads 1 and {FORMAT}"
        )
    if state["rank"] >= 0 and (state["world"], state["rank"]) != (world, rank):
        raise FlexcommError(
            f"failed to load flexcomm's state: it is of rank {state['rank']} of {state['world']}, this is rank {rank} "
            f"of {world}; load each rank's own, or save with state_dict(consolidate=True) to change the number of ranks"
        )
    numbers = {name: i for i, (name, _) in enumerate(named)}
    text = state.get("text")
    unknown = [name for name in state["held_back"] if name not in numbers]
    unknown += [name for names, _ in text["buckets"] for name in names if name not in numbers] if text else []
    if unknown:
        raise FlexcommError(f"failed to load flexcomm's state: the model has no parameter {unknown[0]!r}")
    tensors = [(numbers[n], t.detach().to("cpu", torch.float32).contiguous()) for n, t in state["held_back"].items()]
    saved = None
    if text:
        buckets = [([numbers[n] for n in names], bits.numpy().tobytes()) for names, bits in text["buckets"]]
        saved = text["strategy"], text["step"], buckets
    goes_on = core.hold_back([(i, t.data_ptr(), t.numel()) for i, t in tensors], saved)
    if saved and not goes_on:
        logger.warning(
            "the state is of strategy %s, another is in force: what was held back goes on, momenta and warm starts begin "
            "anew", saved[0]
        )

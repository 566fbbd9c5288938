"""Checkpoints of the residuals, keyed by parameter name."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any, Iterator, Mapping

import torch
import torch.distributed as dist

from flexcomm._core import Core, FlexcommError, Pipelines
from flexcomm.torch import _collectives, _layout
from flexcomm.torch._arguments import shown

logger = logging.getLogger("flexcomm")

#: Version of the checkpoint's layout. 1 had no "text"; up to 2 values were in the order of a parameter's memory, which another
#: run's model may not share.
FORMAT = 3
_READ = (1, 2, FORMAT)
_BY_INDEX = 3

Named = list[tuple[str, torch.nn.Parameter]]

#: Seconds after which a rank logs what it is waiting for.
WARN_AFTER = 10.0


@contextlib.contextmanager
def _logs_waiting() -> Iterator[None]:
    line = (
        "state_dict(consolidate=True) has waited %g s for the other ranks: it is the mean over all of them, so call it on "
        "every rank, not on one alone; without consolidate it is rank-local"
    )
    timer = threading.Timer(WARN_AFTER, logger.warning, (line, WARN_AFTER))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Checkpoints:
    """Of one session. Warns once of each thing that is done in a live trial."""

    def __init__(self, core: Core, named: Named, group: dist.ProcessGroup | None) -> None:
        self._core = core
        self._named = named
        self._group = group
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)
        self._warned_of_saving = self._warned_of_loading = False

    def save(self, consolidate: bool, in_trial: bool) -> dict[str, Any]:
        """The state of this rank, or the mean over all ranks."""
        if in_trial and not self._warned_of_saving:
            self._warned_of_saving = True
            logger.warning(
                "state_dict() in a live trial: this state, the model's and the optimizer's are those of the trial's candidate, which "
                "training does not go on from. Save checkpoints where session.in_trial is False, at every so many of session.step"
            )
        named = self._named
        residuals = {named[i][0]: _saved(values, named[i][1]) for i, values in self._core.residuals().items()}
        if consolidate:
            residuals = self._mean(residuals)
        state = {"format": FORMAT, "world": self._world, "rank": -1 if consolidate else self._rank, "held_back": residuals}
        pipelines = None if consolidate else self._core.pipelines()
        if pipelines is not None:
            buckets = [
                ([named[i][0] for i in ids], torch.frombuffer(bytearray(saved), dtype=torch.uint8))
                for ids, saved in pipelines.buckets
            ]
            strides = {name: list(p.stride()) for name, p in named if not p.is_contiguous()}
            state["text"] = {"strategy": pipelines.compressor, "step": pipelines.step, "buckets": buckets, "strides": strides}
        return state

    def _mean(self, residuals: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Over the ranks, of all parameters: another rank may have a residual where this one has none."""
        wire, mean = _collectives.wire(self._group), {}
        for number, (name, parameter) in enumerate(self._named):
            total = residuals.get(name, torch.zeros(parameter.numel()))
            there = total if wire is None else total.to(wire)
            with contextlib.nullcontext() if number else _logs_waiting():
                dist.all_reduce(there, group=self._group)
                mean[name] = there.div_(self._world).cpu()
        return mean

    def check(self, state: Any) -> None:
        """Refuses a state that is not this rank's of this model."""
        _check(state, {name: parameter.numel() for name, parameter in self._named})
        if state["rank"] >= 0 and (state["world"], state["rank"]) != (self._world, self._rank):
            raise _refused(
                f"it is of rank {state['rank']} of {state['world']}, this is rank {self._rank} of {self._world}; load each rank's "
                "own, or save with state_dict(consolidate=True) to change the number of ranks"
            )

    def check_in_trial(self, state: Any) -> None:
        """In place of loading: the trial would put back what was loaded."""
        self.check(state)
        if not self._warned_of_loading:
            self._warned_of_loading = True
            logger.warning(
                "load_state_dict() in a live trial has loaded nothing: the trial puts back all that the script loads in it, the "
                "model's and the optimizer's state too. Load where session.in_trial is False"
            )

    def load(self, state: Any) -> None:
        """Checks all of it, then replaces the residuals."""
        self.check(state)
        numbers = {name: i for i, (name, _) in enumerate(self._named)}
        own = {numbers[n]: t.detach().to("cpu", torch.float32).contiguous() for n, t in state["held_back"].items()}
        if state["format"] >= _BY_INDEX:
            own = {i: _layout.flat(t, self._named[i][1]) for i, t in own.items()}
        saved, text = None, state.get("text")
        if text and (other := _laid_out_otherwise(self._named, text.get("strides"))):
            logger.warning(
                "the state was saved where parameter %s lay in memory in another order: the residuals go on, momenta and "
                "warm starts begin anew", other
            )
        elif text:
            buckets = [([numbers[n] for n in names], bits.cpu().numpy().tobytes()) for names, bits in text["buckets"]]
            saved = Pipelines(text["strategy"], text["step"], buckets)
        if not self._core.set_residuals(own, saved) and saved:
            logger.warning(
                "the state is of strategy %s, another is in force: the residuals go on, momenta and warm starts begin "
                "anew", saved.compressor
            )


def _saved(values: bytes, parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's residual, in the order of its indices."""
    if not values:
        # Which torch makes no tensor of.
        return torch.zeros(0)
    return _layout.shaped(torch.frombuffer(bytearray(values), dtype=torch.float32), parameter).reshape(-1)


def _laid_out_otherwise(named: Named, strides: Mapping[str, Any] | None) -> str | None:
    """A parameter whose memory has another order than the saved one's; none was saved before format 3."""
    if strides is None:
        return None
    own = ((name, None if p.is_contiguous() else list(p.stride())) for name, p in named)
    return next((name for name, now in own if strides.get(name) != now), None)


def _refused(why: str) -> FlexcommError:
    return FlexcommError(f"failed to load flexcomm's state: {why}")


def _check(state: Any, sizes: dict[str, int]) -> None:
    """Refuses what :func:`save` cannot have made for a model with parameters of these sizes."""
    if not isinstance(state, Mapping):
        raise _refused(f"it is {shown(state)}; give what session.state_dict() returned")
    if _field(state, "format", int, None) not in _READ:
        raise _refused(f"format {state['format']!r}, this version reads 1 to {FORMAT}; give what session.state_dict() returned")
    _field(state, "world", int, None)
    _field(state, "rank", int, None)
    for name, values in _field(state, "held_back", Mapping, None).items():
        _check_held(name, values, sizes)
    text = state.get("text")
    if text is None:
        return
    if not isinstance(text, Mapping):
        raise _refused(f"its 'text' is {shown(text)}, expected a dict; give what session.state_dict() returned")
    _field(text, "strategy", str, "text")
    if not 0 <= _field(text, "step", int, "text") < 2**64:
        raise _refused(f"its 'text' has the step {text['step']}, expected 0 or more; give what session.state_dict() returned")
    for bucket in _field(text, "buckets", (list, tuple), "text"):
        _check_bucket(bucket, sizes)
    if state["format"] >= _BY_INDEX:
        _field(text, "strides", Mapping, "text")


def _field(of: Mapping[str, Any], key: str, kind: Any, within: str | None) -> Any:
    whose = f"its {within!r}" if within else "it"
    if key not in of:
        raise _refused(f"{whose} has no {key!r}; give what session.state_dict() returned")
    if not isinstance(of[key], kind) or isinstance(of[key], bool):
        names = {int: "a whole number", str: "a text", Mapping: "a dict"}
        raise _refused(
            f"{whose} has {shown(of[key])} as {key!r}, expected {names.get(kind, 'a list')}; give what session.state_dict() "
            "returned"
        )
    return of[key]


def _check_held(name: Any, values: Any, sizes: dict[str, int]) -> None:
    """One parameter's residual."""
    if name not in sizes:
        raise _refused(f"the model has no parameter {name!r}; load the state of this very model")
    if not (torch.is_tensor(values) and values.is_floating_point() and values.layout == torch.strided):
        raise _refused(
            f"parameter {name!r} has the residual {shown(values)}, expected a tensor of float32; give what session.state_dict() returned"
        )
    if values.numel() != sizes[name]:
        raise _refused(
            f"parameter {name!r} has a residual of {values.numel()} values, but has {sizes[name]} in this model: the state is not of "
            "this model; load the state of this very model"
        )
    if not bool(values.isfinite().all()):
        raise _refused(f"parameter {name!r} has a residual with NaN or infinite values; load an earlier state, whose values are finite")


def _check_bucket(bucket: Any, sizes: dict[str, int]) -> None:
    """Names of parameters, and the bytes of their pipeline."""
    pair = isinstance(bucket, (list, tuple)) and len(bucket) == 2
    if not (pair and isinstance(bucket[0], (list, tuple)) and torch.is_tensor(bucket[1]) and bucket[1].dtype == torch.uint8):
        raise _refused(
            f"its 'text' has the bucket {shown(bucket)}, expected names and a tensor of uint8; give what session.state_dict() "
            "returned"
        )
    unknown = [name for name in bucket[0] if not isinstance(name, str) or name not in sizes]
    if unknown:
        raise _refused(f"the model has no parameter {unknown[0]!r}; load the state of this very model")

"""Live trials: a snapshot in memory, candidates on the batches that come next, and everything put back."""

from __future__ import annotations

import collections
import copy
import dataclasses
import logging
import random
import sys
from typing import TYPE_CHECKING, Any, Callable, Iterator

import torch

from flexcomm._core import Core, FlexcommError

if TYPE_CHECKING:
    from flexcomm.torch._session import Session

logger = logging.getLogger("flexcomm")

_TRIAL_STARTS, _CANDIDATE, _TRIAL_ENDS = 2, 3, 4


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a snapshot copies."""

    model: Callable[[], torch.nn.Module | None]
    optimizer: torch.optim.Optimizer | None
    scheduler: Any
    scaler: Any
    extra: tuple[Any, ...]
    generators: tuple[torch.Generator, ...]

    def __post_init__(self) -> None:
        for name, part in [("scheduler", self.scheduler), ("scaler", self.scaler), *(("extra", e) for e in self.extra)]:
            if part is not None and not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise FlexcommError(
                    f"failed to attach: {name} {type(part).__name__} has no state_dict and load_state_dict, "
                    "so a trial could not put it back"
                )

    def missing(self) -> list[str]:
        """What was not given, and a trial would not put back if the script has it."""
        given = {"optimizer": self.optimizer, "scheduler": self.scheduler, "scaler": self.scaler}
        return [name for name, part in given.items() if part is None]


class Random:
    """The state of the process's random generators."""

    def __init__(self, generators: tuple[torch.Generator, ...]) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None
        self._own = [(g, g.get_state()) for g in generators]

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        for generator, state in self._own:
            generator.set_state(state)

    def same(self, other: "Random") -> bool:
        """Whether torch and Python stand at the same place."""
        return torch.equal(self._cpu, other._cpu) and self._python == other._python


class Snapshot:
    """A copy of everything that training depends on. ``restore`` writes into the live tensors, whose addresses
    stay: DDP's buckets and fused optimizers hold them."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        model = parts.model()
        if model is None:
            raise FlexcommError("failed to take a snapshot: the model is gone")
        self._tensors = [(t, t.detach().clone()) for t in (*model.parameters(), *model.buffers())]
        self._grads = [(p, None if p.grad is None else p.grad.detach().clone()) for p in model.parameters()]
        self._training = [(m, m.training) for m in model.modules()]
        self._optimizer = None if parts.optimizer is None else _OptimizerCopy(parts.optimizer)
        states = [p for p in (parts.scheduler, parts.scaler, *parts.extra) if p is not None]
        self._states = [(part, copy.deepcopy(part.state_dict())) for part in states]
        self._random = Random(parts.generators)

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back, bit for bit; may be called again."""
        for tensor, saved in self._tensors:
            tensor.copy_(saved)
        for parameter, grad in self._grads:
            if grad is None:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = grad.clone()
            else:
                parameter.grad.copy_(grad)
        for module, training in self._training:
            module.training = training
        for part, state in self._states:
            part.load_state_dict(copy.deepcopy(state))
        # After the scheduler, which may write learning rates into the optimizer's groups.
        if self._optimizer is not None:
            self._optimizer.restore()
        self._random.restore()


class _OptimizerCopy:
    """An optimizer's state tensors and settings."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state = {
            p: {k: v.detach().clone() if torch.is_tensor(v) else copy.deepcopy(v) for k, v in s.items()}
            for p, s in optimizer.state.items()
        }
        self._groups = [
            {k: v.clone() if torch.is_tensor(v) else copy.deepcopy(v) for k, v in g.items() if k != "params"}
            for g in optimizer.param_groups
        ]

    def restore(self) -> None:
        live = self._optimizer.state
        # Momenta that the trial made did not exist before.
        for parameter in [p for p in live if p not in self._state]:
            del live[parameter]
        for parameter, saved in self._state.items():
            now = live[parameter]
            for key in [k for k in now if k not in saved]:
                del now[key]
            for key, value in saved.items():
                old = now.get(key)
                if torch.is_tensor(value) and torch.is_tensor(old) and old.shape == value.shape:
                    old.copy_(value)
                else:
                    now[key] = value.clone() if torch.is_tensor(value) else copy.deepcopy(value)
        for group, saved in zip(self._optimizer.param_groups, self._groups):
            for key, value in saved.items():
                group[key] = value.clone() if torch.is_tensor(value) else copy.deepcopy(value)


class Trial:
    """The snapshot of one trial."""

    def __init__(self, parts: Parts, core: Core) -> None:
        self._core = core
        core.save()
        self._snapshot = Snapshot(parts)

    def restore(self) -> None:
        self._core.restore()
        self._snapshot.restore()


class _Held:
    """Batches that were fetched ahead by a trial, each with the generators before and after it was fetched: training
    goes through them later, and finds the generators where it would have left them."""

    def __init__(self, source: Iterator[Any], generators: tuple[torch.Generator, ...]) -> None:
        self._source = source
        self._generators = generators
        self._batches: collections.deque[tuple[Any, Random, Random]] = collections.deque()
        self._exhausted = False
        self._told = False

    def _fetch(self) -> bool:
        if self._exhausted:
            return False
        before = Random(self._generators)
        try:
            batch = next(self._source)
        except StopIteration:
            self._exhausted = True
            return False
        self._batches.append((batch, before, Random(self._generators)))
        return True

    def any(self) -> bool:
        """Whether there is a batch for a trial that has none to fall back on."""
        return bool(self._batches) or self._fetch()

    def next(self) -> tuple[bool, Any]:
        """The next batch for training, and whether there is one."""
        if not self._batches:
            if self._exhausted:
                return False, None
            try:
                return True, next(self._source)
            except StopIteration:
                self._exhausted = True
                return False, None
        batch, before, after = self._batches.popleft()
        if not self._told and not before.same(Random(self._generators)):
            self._told = True
            logger.warning(
                "random numbers are drawn by values, not by counts, in this training: after a live trial it is "
                "statistically the same, not bit for bit"
            )
        after.restore()
        return True, batch

    def at(self, position: int, last: Any) -> Any:
        """A batch for a trial: the same for every candidate. At the end of the data those that there are go round."""
        while position >= len(self._batches) and self._fetch():
            pass
        if not self._batches:
            return last
        batch, _, after = self._batches[position % len(self._batches)]
        if position < len(self._batches):
            after.restore()
        return batch


def replay(
    session: "Session", parts: Parts, core: Core, source: Iterator[Any], train_step: Callable[[Any], Any] | None
) -> Iterator[Any]:
    """Yields training batches; runs a trial where the agreement says so."""
    held = _Held(source, parts.generators)
    if session.in_trial and held.any():
        # The loop before was left in the middle of it.
        yield from _run(session, (parts, core), held, (None, train_step))
    while True:
        there, batch = held.next()
        if not there:
            return
        yield batch
        if session._end_step(within_loop=True) == _TRIAL_STARTS:
            yield from _run(session, (parts, core), held, (batch, train_step))


def _run(
    session: "Session", what: tuple[Parts, Core], held: _Held, step: tuple[Any, Callable[[Any], Any] | None]
) -> Iterator[Any]:
    parts, core = what
    last, train_step = step
    if parts.missing():
        logger.info("a live trial does not put back what was not given to attach: %s", ", ".join(parts.missing()))
    session._trial = trial = session._trial or Trial(parts, core)
    position = 0
    try:
        while True:
            batch = held.at(position, last)
            position += 1
            if train_step is None:
                yield batch
            else:
                train_step(batch)
            change = session._end_step(within_loop=True)
            if change in (_CANDIDATE, _TRIAL_ENDS):
                trial.restore()
                position = 0
            if change == _TRIAL_ENDS:
                return
    finally:
        # Also when the loop is left in the middle: training must not go on from a candidate's parameters.
        if core.state()[3] < 0:
            session._trial = None
        else:
            trial.restore()

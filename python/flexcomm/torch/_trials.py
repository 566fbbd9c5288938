"""Live trials: a snapshot in memory, candidates on the batches that come next, and everything put back."""

from __future__ import annotations

import collections
import copy
import logging
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator

import torch

from flexcomm._core import Core
from flexcomm.torch._snapshot import Parts, Random, Snapshot
from flexcomm.torch._storage import SnapshotStorage

if TYPE_CHECKING:
    from flexcomm.torch._session import Session

__all__ = ["Parts", "Random", "Snapshot", "Trial", "replay"]

logger = logging.getLogger("flexcomm")

_TRIAL_STARTS, _CANDIDATE, _TRIAL_ENDS, _TRIAL_LEFT = 2, 3, 4, 5

#: So many names in one line of the log.
_NAMES = 10


class Trial:
    """The snapshot of one trial."""

    def __init__(self, parts: Parts, core: Core, storage: SnapshotStorage, source: Any = None) -> None:
        self._core = core
        core.save()
        self.snapshot = Snapshot(parts, source, storage)

    def restore(self) -> None:
        self._core.restore()
        self.snapshot.restore()


def _log_limits(parts: Parts, snapshot: Snapshot) -> None:
    """Logs what a trial does not put back."""
    if parts.missing():
        logger.info("a live trial does not put back what was not given to attach: %s", ", ".join(parts.missing()))
    if snapshot.replayed:
        names = ", ".join(snapshot.replayed)
        logger.info("live trials do not put back %s of extra: batches() gives training what they have given", names)
    if snapshot.missed:
        logger.info("live trials do not put back what they cannot copy: %s", _some(snapshot.missed))
    strangers = snapshot.strangers()
    if strangers:
        logger.warning(
            "live trials do not put back what was not given to attach: this process also has %s. If a batch of the loop "
            "changes it, give it as optimizer, scheduler, scaler or in extra, or leave it alone while session.in_trial",
            _some(strangers),
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return ", ".join(names[:_NAMES]) + more


def _copied(batch: Any) -> tuple[Any, list[str]]:
    """A batch for a trial, whose loop may change it, and kinds of what in it has no copy."""
    try:
        return copy.deepcopy(batch), []
    except Exception:  # noqa: BLE001 - whatever it is that one object of the script's says
        return _piecewise(batch)


def _piecewise(batch: Any) -> tuple[Any, list[str]]:
    if torch.is_tensor(batch):
        return batch.detach().clone().requires_grad_(batch.requires_grad), []
    if type(batch) in (dict, list, tuple):
        pieces = [_copied(piece) for piece in (batch.values() if isinstance(batch, dict) else batch)]
        values = [piece for piece, _ in pieces]
        out = dict(zip(batch, values)) if isinstance(batch, dict) else type(batch)(values)
        return out, [name for _, names in pieces for name in names]
    return batch, [type(batch).__name__]


class _Prefetched:
    """Batches that were fetched ahead by a trial, each with the generators before and after it was fetched: training
    goes through them later, and finds the generators where it would have left them."""

    def __init__(self, source: Iterator[Any], generators: tuple[torch.Generator, ...]) -> None:
        self._source = source
        self._generators = generators
        self._batches: collections.deque[tuple[Any, Random, Random]] = collections.deque()
        self._exhausted = False
        self._warned_of_random = False
        self._shared = False

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
        """Whether there is a batch for a trial. Generators stay where they are: the snapshot comes next."""
        if not self._batches and self._fetch():
            self._batches[0][1].restore()
        return bool(self._batches)

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
        if not self._warned_of_random and not before.same(Random(self._generators)):
            self._warned_of_random = True
            logger.warning(
                "training has drawn other random numbers than the live trial before it: how many are drawn depends on values, "
                "or the loop draws some in trials only or outside of them only (session.in_trial, train_step). Training "
                "goes on with the trial's generators: statistically the same as without the trial, not bit for bit"
            )
        after.restore()
        return True, batch

    def at(self, position: int) -> Any:
        """A copy of a batch for a trial: the same for every candidate. At the end of the data those that there are go
        round."""
        while position >= len(self._batches) and self._fetch():
            pass
        batch, _, after = self._batches[position % len(self._batches)]
        batch, shared = _copied(batch)
        if shared and not self._shared:
            self._shared = True
            logger.warning("live trials use batches' own %s, of which there is no copy: do not change them", _some(shared))
        if position < len(self._batches):
            after.restore()
        return batch


def replay(
    session: "Session", parts: Parts, core: Core, loader: Iterable[Any], train_step: Callable[[Any], Any] | None
) -> Iterator[Any]:
    """Yields training batches; runs a trial where the agreement says so."""
    prefetched = _Prefetched(iter(loader), parts.generators)
    if session.in_trial and prefetched.any():
        # The loop before was left in the middle of it, or had no batch for it.
        yield from _run(session, (parts, core), (prefetched, loader), train_step)
    while True:
        there, batch = prefetched.next()
        if not there:
            return
        yield batch
        if session._end_step(within_loop=True) != _TRIAL_STARTS:
            continue
        if prefetched.any():
            yield from _run(session, (parts, core), (prefetched, loader), train_step)
        else:
            # Nothing is left to replay, and the batch before has been changed by the loop as like as not. The trial runs
            # in the next loop.
            session._trial = Trial(parts, core, session._storage, loader)
            return


def _run(
    session: "Session", what: tuple[Parts, Core], data: tuple[_Prefetched, Any], train_step: Callable[[Any], Any] | None
) -> Iterator[Any]:
    parts, core = what
    prefetched, loader = data
    # Anew in a trial that goes on: what the script did between the loops is training's. The one before gives its memory back.
    session._trial = None
    session._trial = trial = Trial(parts, core, session._storage, loader)
    if not session._warned_of_trials:
        session._warned_of_trials = True
        _log_limits(parts, trial.snapshot)
        if trial.snapshot.on_gpus:
            line = "a live trial's snapshot takes %d bytes of GPUs' memory and %d of the host's, while the trial runs"
            logger.info(line, *session._storage.taken)
    position = 0
    try:
        while True:
            batch = prefetched.at(position)
            position += 1
            if train_step is None:
                yield batch
            else:
                train_step(batch)
            change = session._end_step(within_loop=True)
            if change in (_CANDIDATE, _TRIAL_ENDS):
                trial.restore()
                position = 0
            if change in (_TRIAL_ENDS, _TRIAL_LEFT):
                return
    finally:
        # Also when the loop is left in the middle: training must not go on from a candidate's parameters.
        if core.state()[3] < 0:
            session._trial = None
        else:
            trial.restore()

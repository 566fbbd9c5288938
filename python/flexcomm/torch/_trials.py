"""Live trials: a snapshot in memory, candidates on the batches that come next, and everything put back."""

from __future__ import annotations

import collections
import copy
import logging
from typing import Any, Callable, Generator, Generic, Iterable, Iterator, NamedTuple, Sized, TypeVar, cast

import torch

from flexcomm._core import Core, Next
from flexcomm.torch._device import Cuda, no_memory
from flexcomm.torch._snapshot import Parts, Random, Snapshot
from flexcomm.torch._storage import SnapshotStorage

logger = logging.getLogger("flexcomm")

#: Why a rank runs no live trials outside of the loop.
_NO_LOOP = "its training loop does not use Session.batches()"

_Batch = TypeVar("_Batch")

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


class _Fetched(NamedTuple):
    """A batch, with the generators before and after it was fetched."""

    batch: Any
    before: Random
    after: Random


class _Prefetched:
    """Batches that were fetched ahead by a trial, each with the generators before and after it was fetched: training
    goes through them later, and finds the generators where it would have left them."""

    def __init__(self, source: Iterator[Any], generators: tuple[torch.Generator, ...]) -> None:
        self._source = source
        self._generators = generators
        self._batches: collections.deque[_Fetched] = collections.deque()
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
        self._batches.append(_Fetched(batch, before, Random(self._generators)))
        return True

    def any(self) -> bool:
        """Whether there is a batch for a trial. Generators stay where they are: the snapshot comes next."""
        if not self._batches and self._fetch():
            self._batches[0].before.restore()
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
        fetched = self._batches[position % len(self._batches)]
        batch, shared = _copied(fetched.batch)
        if shared and not self._shared:
            self._shared = True
            logger.warning("live trials use batches' own %s, of which there is no copy: do not change them", _some(shared))
        if position < len(self._batches):
            fetched.after.restore()
        return batch


class Batches(Generic[_Batch]):
    """What :meth:`Session.batches` returns. Open from its first batch until it is at its end, closed or forgotten."""

    def __init__(self, batches: Generator[_Batch, None, None], loader: Iterable[_Batch]) -> None:
        self._batches = batches
        self._loader = loader

    def __iter__(self) -> Iterator[_Batch]:
        return self

    def __next__(self) -> _Batch:
        return next(self._batches)

    def __len__(self) -> int:
        """The loader's; a ``TypeError`` where it has none."""
        return len(cast(Sized, self._loader))

    def close(self) -> None:
        """Ends the loop before its end; a trial that is open ends with it."""
        self._batches.close()


#: Ends a step, within the loop or not; answers what it changes.
EndStep = Callable[[bool], Next]


class Trials:
    """The loop over a session's batches, and the live trials in it."""

    def __init__(self, core: Core, parts: Parts) -> None:
        self._core = core
        self._parts = parts
        core.refuse_trials(_NO_LOOP)
        #: Memory for its copies of what lies on GPUs, and whether there was none for the plan of the step under way.
        self.storage = SnapshotStorage(Cuda())
        self._out_of_memory = False
        self.looping = False
        self._trial: Trial | None = None
        #: Whether the log names what trials do not put back.
        self._warned = False

    @property
    def under_way(self) -> bool:
        """Whether the step under way is a trial's and will be undone."""
        return self._trial is not None and self.looping

    def batches(
        self, loader: Iterable[_Batch], train_step: Callable[[_Batch], Any] | None, end_step: EndStep
    ) -> Generator[_Batch, None, None]:
        # Of a pass before the loop: its batches begin with steps of their own.
        end_step(False)
        self._core.refuse_trials(None)
        self.looping = True
        # A plan may come with the loop's first step.
        self.reserve(Next.Train)
        try:
            yield from self._replay(loader, train_step, end_step)
        finally:
            end_step(False)
            self.looping = False
            self.storage.release()
            # What comes next may be another loop: no trial begins in it, and one that is open ends, on all ranks alike.
            self._core.refuse_trials(_NO_LOOP)

    def reserve(self, change: Next) -> None:
        """Between the step that announced a trial and the one in which the ranks answer whether they can run it: takes memory for a
        snapshot of what lies on GPUs. Where a rank has none, no rank goes into the trial."""
        if change != Next.TrialStarts:
            self.storage.release()
        if self._out_of_memory:
            self._out_of_memory = False
            self._core.refuse_trials(None if self.looping else _NO_LOOP)
        model = self._parts.model()
        if not self.looping or self._trial is not None or model is None or not self._core.trial_asked():
            return
        if any(map(self.storage.has_gpu, model.parameters())) and (why := self._reserve()):
            self._out_of_memory = True
            self._core.refuse_trials(why)

    def _reserve(self) -> str:
        """Takes the memory; why there is none, else nothing."""
        try:
            return self.storage.reserve(Snapshot(self._parts, None, self.storage, look=True).on_gpus)
        except RuntimeError as error:
            if not no_memory(error):
                raise
            # Of what is in `extra`, which makes its own copies.
            return f"there is no memory for copies of state dictionaries: {str(error).splitlines()[0]}; take a smaller batch"

    def leave(self, change: Next) -> None:
        """At the end of a step outside of the loop: it was left in the middle of a trial, or in the very step before one."""
        if change == Next.TrialStarts:
            self._trial = Trial(self._parts, self._core, self.storage)
        elif change == Next.TrialLeft:
            # A loop that cannot replay batches: this step ran a candidate, but it trained, on all ranks.
            self._trial = None
        elif change in (Next.Candidate, Next.TrialEnds) and self._trial is not None:
            self._trial.restore()
            if change == Next.TrialEnds:
                self._trial = None

    def _replay(
        self, loader: Iterable[_Batch], train_step: Callable[[_Batch], Any] | None, end_step: EndStep
    ) -> Iterator[_Batch]:
        """Yields training batches; runs a trial where the agreement says so."""
        prefetched = _Prefetched(iter(loader), self._parts.generators)
        if self.under_way and prefetched.any():
            # The loop before was left in the middle of it, or had no batch for it.
            yield from self._run(prefetched, loader, train_step, end_step)
        while True:
            there, batch = prefetched.next()
            if not there:
                return
            yield batch
            if end_step(True) != Next.TrialStarts:
                continue
            if prefetched.any():
                yield from self._run(prefetched, loader, train_step, end_step)
            else:
                # Nothing is left to replay, and the batch before has been changed by the loop as like as not. The trial runs
                # in the next loop.
                self._trial = Trial(self._parts, self._core, self.storage, loader)
                return

    def _run(
        self, prefetched: _Prefetched, loader: Any, train_step: Callable[[_Batch], Any] | None, end_step: EndStep
    ) -> Iterator[_Batch]:
        """A trial: its candidates, each on the batches that come next."""
        # Anew in a trial that goes on: what the script did between the loops is training's. The one before gives its memory back.
        self._trial = None
        self._trial = trial = Trial(self._parts, self._core, self.storage, loader)
        self._log_limits_once(trial.snapshot)
        position = 0
        try:
            while True:
                batch = prefetched.at(position)
                position += 1
                if train_step is None:
                    yield batch
                else:
                    train_step(batch)
                change = end_step(True)
                if change in (Next.Candidate, Next.TrialEnds):
                    trial.restore()
                    position = 0
                if change in (Next.TrialEnds, Next.TrialLeft):
                    return
        finally:
            # Also when the loop is left in the middle: training must not go on from a candidate's parameters.
            if self._core.state().in_trial:
                trial.restore()
            else:
                self._trial = None

    def _log_limits_once(self, snapshot: Snapshot) -> None:
        if self._warned:
            return
        self._warned = True
        _log_limits(self._parts, snapshot)
        if snapshot.on_gpus:
            line = "a live trial's snapshot takes %d bytes of GPUs' memory and %d of the host's, while the trial runs"
            logger.info(line, *self.storage.taken)

"""The times of steps whose work a GPU does: by CUDA events, read when they have happened and never waited for.

The host's clock only sees how such work is launched. So events are recorded on the streams where it runs, and a step's are
read at the end of a later step, a step or two late; the core reports nothing that comes after it before that.
"""

from __future__ import annotations

import collections
import itertools
import logging
from typing import Any, Callable, NamedTuple

import torch

logger = logging.getLogger("flexcomm")

#: Steps whose events have not happened yet. Beyond that the oldest goes unreported.
MOST_WAITING = 16


class Times(NamedTuple):
    """Seconds of a step."""

    compute: float
    compress: float
    sync: float
    step: float


class Mark:
    """A bucket's events: when the work before its collective began, when the collective was launched and when it had
    ended, and when the bucket's result was there."""

    __slots__ = ("entered", "launched", "landed", "done")

    def __init__(self) -> None:
        #: None where nothing is compressed: what is done to a dense bucket counts as computing, as on the host.
        self.entered: Any = None
        self.launched: Any = None
        self.landed: Any = None
        self.done: Any = None

    def events(self) -> list[Any]:
        return [e for e in (self.entered, self.launched, self.landed, self.done) if e is not None]


class _Step:
    __slots__ = ("began", "marks", "ended", "whole", "ticket")

    def __init__(self, began: Any, ticket: int) -> None:
        self.began = began
        self.marks: list[Mark] = []
        self.ended: Any = None
        #: Whether its times can be known at all.
        self.whole = began is not None
        self.ticket = ticket


class Clock:
    """Bookkeeping of events. ``cuda`` makes and records them, see ``_device.Cuda``; ``resolve`` takes a step's ticket and its
    times, none when they will never be known. Steps are resolved in order."""

    def __init__(self, cuda: Any, resolve: Callable[[int, Times | None], None], most: int = MOST_WAITING) -> None:
        self._cuda = cuda
        self._resolve = resolve
        self._most = most
        self._free: list[Any] = []
        self._waiting: collections.deque[_Step] = collections.deque()
        self._tickets = itertools.count()
        self._now = _Step(None, next(self._tickets))
        self._device: torch.device | None = None
        self._broken = False
        self._behind = False

    # A step

    def enter(self, buffer: torch.Tensor, compresses: bool) -> Mark:
        """A bucket on a GPU begins, on the current stream."""
        mark, step = Mark(), self._now
        if self._device is None:
            self._device = buffer.device
        # Events of two devices cannot be compared.
        step.whole = step.whole and buffer.device == self._device
        step.marks.append(mark)
        if compresses:
            mark.entered = self._record()
        return mark

    def forget(self, mark: Mark | None) -> None:
        """The host's clock has the bucket's times after all."""
        if mark is not None:
            self._now.marks.remove(mark)
            self._give_back(list(mark.events()))

    def launch(self, mark: Mark | None) -> None:
        """The collective follows on the current stream."""
        if mark is not None:
            mark.launched = self._record()

    def under_way(self, mark: Mark | None, work: Any) -> None:
        """The collective was launched; ``work`` is one that the device runs, and a wait for it is the stream's alone."""
        if mark is not None and not self._broken:
            event = self._event()
            try:
                self._cuda.record_after(event, work, self._device)
            except RuntimeError as error:
                self._break(error)
            mark.landed = event

    def arrived(self, mark: Mark | None) -> None:
        """The current stream, or the host, has waited for the collective."""
        if mark is not None and mark.landed is None:
            mark.landed = self._record()

    def done(self, mark: Mark | None, last: bool) -> None:
        """The bucket's result was launched on the current stream; ``last``: and all others' before it."""
        if mark is not None and (last or mark.entered is not None):
            mark.done = self._record()

    def end(self) -> int | None:
        """Ends the step; its ticket, if a device has its times. Follow it with :meth:`poll`."""
        if self._device is None:
            return None
        step, ended = self._now, self._record()
        self._now = _Step(ended, next(self._tickets))
        if not step.marks:
            # The host did all of it.
            self._give_back([step.began])
            return None
        step.ended = ended
        self._waiting.append(step)
        return step.ticket

    # Later

    def poll(self) -> None:
        """Resolves the times of all steps whose events have happened. Never waits."""
        while self._waiting and (not self._whole(self._waiting[0]) or self._happened(self._waiting[0])):
            self._resolve_step(self._waiting.popleft())
        while len(self._waiting) > self._most:
            if not self._behind:
                self._behind = True
                logger.warning(
                    "the GPU is more than %d steps behind: some steps are not reported to the agent", self._most
                )
            self._drop(self._waiting.popleft())

    def _whole(self, step: _Step) -> bool:
        """Whether it has all events that its times need; an exception may have come in between."""
        return step.whole and not self._broken and step.marks[-1].done is not None and all(
            mark.launched is not None and mark.landed is not None and (mark.entered is None or mark.done is not None)
            for mark in step.marks
        )

    def _happened(self, step: _Step) -> bool:
        """The last one first: it is seldom that it has and another has not."""
        try:
            return step.ended.query() and all(mark.landed.query() for mark in step.marks)
        except RuntimeError as error:
            self._break(error)
            return True

    def _resolve_step(self, step: _Step) -> None:
        times = None
        if self._whole(step):
            try:
                times = _times(step)
            except RuntimeError as error:
                self._break(error)
        self._resolve(step.ticket, times)
        self._clear(step)

    def _drop(self, step: _Step) -> None:
        self._resolve(step.ticket, None)
        self._clear(step)

    def _clear(self, step: _Step) -> None:
        # Its end is the next one's beginning.
        self._give_back([step.began, *itertools.chain.from_iterable(mark.events() for mark in step.marks)])
        step.marks.clear()

    # Events

    def _record(self) -> Any:
        if self._broken:
            return None
        event = self._event()
        try:
            self._cuda.record(event, self._device)
        except RuntimeError as error:
            self._break(error)
            return None
        return event

    def _event(self) -> Any:
        return self._free.pop() if self._free else self._cuda.event()

    def _give_back(self, events: list[Any]) -> None:
        self._free += [event for event in events if event is not None]

    def _break(self, error: RuntimeError) -> None:
        """Telemetry is not training's business: without it training goes on."""
        if not self._broken:
            self._broken = True
            logger.warning("steps on the GPU are not reported any more: its events cannot be used: %s", error)


def _times(step: _Step) -> Times:
    """From events that have happened, as the core has it from the host's clock."""

    def at(event: Any) -> float:
        return 1e-3 * float(step.began.elapsed_time(event))

    windows = [(at(mark.launched), at(mark.landed)) for mark in step.marks]
    before = sum(launched - at(mark.entered) for mark, (launched, _) in zip(step.marks, windows) if mark.entered is not None)
    # The stream waits for one collective after the other, and works on each one's result in between.
    last = resumed = max(launched for launched, _ in windows)
    after = worked = 0.0
    for mark, (_, landed) in zip(step.marks, windows):
        begins = max(resumed, landed)
        resumed = begins if mark.done is None else max(begins, at(mark.done))
        worked += resumed - begins
        # Where nothing is compressed it is computing.
        after += resumed - begins if mark.entered is not None else 0.0
    whole = at(step.ended)
    sync = resumed - last - worked
    compute = whole - before - after - sync
    return Times(max(compute, 0.0), max(before + after, 0.0), max(sync, 0.0), max(whole, 0.0))

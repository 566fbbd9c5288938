"""Warnings and errors of one cause, once in an interval: a fault that lasts does not fill a training's log."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping

#: A cause is written once in this time, in seconds.
INTERVAL_S = 60.0
#: A count is kept for so much longer, in seconds, for the next line of its cause.
KEPT_S = 600.0
#: Causes that are distinguished in an interval, such as ranks or layers; more of them share a count.
MAX_CAUSES = 256

_DIGITS = re.compile(r"\d+")


def _cause(record: logging.LogRecord) -> str:
    """The format string and its arguments, but for numbers: those differ from line to line of one cause, as do those in the
    text of an error. A text names what the line is about, a rank or a layer, and counts with its digits."""
    given = record.args or ()
    arguments = given.values() if isinstance(given, Mapping) else given
    parts = [str(record.msg)]
    for one in arguments:
        if isinstance(one, BaseException):
            parts.append(_DIGITS.sub("", str(one)))
        elif not isinstance(one, (int, float)):
            parts.append(str(one))
    return "\0".join(parts)


class Repeats(logging.Filter):
    """Lets a warning pass once in an interval, with the number of those like it that were suppressed since.

    What is no warning passes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        #: By cause: since when, and how many were suppressed.
        self._causes: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        # Both may run code of the arguments, which may log: before the lock.
        text, cause = record.getMessage(), _cause(record)
        with self._lock:
            suppressed = self._admit(cause)
        if suppressed:
            record.msg = f"{text} ({suppressed} more like this were suppressed since the last one)"
            record.args = ()
        return suppressed is not None

    def _admit(self, cause: str) -> int | None:
        """How many were suppressed since the last line of the cause; none where this one is suppressed too."""
        now = self._clock()
        if cause not in self._causes and len(self._causes) >= MAX_CAUSES:
            cause = ""
        since, suppressed = self._causes.get(cause, (now - INTERVAL_S, 0))
        if now - since < INTERVAL_S:
            self._causes[cause] = (since, suppressed + 1)
            return None
        self._causes[cause] = (now, 0)
        self._forget(now)
        return suppressed

    def _forget(self, now: float) -> None:
        ages = {cause: now - since - (KEPT_S if suppressed else 0) for cause, (since, suppressed) in self._causes.items()}
        for cause in [cause for cause, age in ages.items() if age >= INTERVAL_S]:
            del self._causes[cause]


def begin() -> None:
    """Filters flexcomm's logger, with nothing counted yet: what a new session warns of is news."""
    logger = logging.getLogger("flexcomm")
    for known in [known for known in logger.filters if isinstance(known, Repeats)]:
        logger.removeFilter(known)
    logger.addFilter(Repeats())

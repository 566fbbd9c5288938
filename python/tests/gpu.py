"""A stand-in for a GPU as far as events go: it does what it was given when the test says so, on a clock of its own."""

from __future__ import annotations


class Event:
    """As ``torch.cuda.Event(enable_timing=True)``: refuses what that refuses."""

    def __init__(self, gpu):
        self.gpu, self.at, self.recorded = gpu, None, 0

    def query(self):
        return self.at is not None and self.at <= self.gpu.done

    def elapsed_time(self, other):
        if self.gpu.broken or not (self.query() and other.query()):
            raise RuntimeError("device not ready")
        return other.at - self.at

    def synchronize(self):
        self.gpu.synchronised += 1

    wait = synchronize


class Work:
    """A collective that the device runs from ``begins`` to ``ends``."""

    def __init__(self, ends):
        self.ends = ends


class Gpu:
    """Takes the place of ``_device.Cuda``; times in milliseconds."""

    def __init__(self):
        #: When the current stream will have done what was launched, and up to when the device has come.
        self.stream, self.done = 0.0, -1.0
        self.made, self.synchronised, self.broken = [], 0, False

    def event(self):
        self.made.append(Event(self))
        return self.made[-1]

    def record(self, event, device):
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        event.at, event.recorded = self.stream, event.recorded + 1

    def record_after(self, event, work, device):
        self.record(event, device)
        event.at = work.ends

    # What the test does

    def works(self, milliseconds):
        """A kernel on the current stream."""
        self.stream += milliseconds

    def waits(self, work):
        """The current stream waits for a collective."""
        self.stream = max(self.stream, work.ends)

    def catches_up(self, until=None):
        """The device has done all that was launched, or what comes before ``until``."""
        self.done = self.stream if until is None else until

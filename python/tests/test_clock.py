"""Times of steps that a GPU does, by a stand-in for its events: nothing here has run on a GPU."""

import logging

import pytest
import torch
from gpu import Gpu, Work

from flexcomm.torch import _collectives, _device
from flexcomm.torch._clock import MOST_WAITING, Clock

#: Where a bucket lies; there is nothing behind it.
HERE, THERE = (torch.empty(4, device="meta") for _ in range(2))


class Run:
    def __init__(self, most=MOST_WAITING):
        self.gpu, self.resolved = Gpu(), []
        self.clock = Clock(self.gpu, lambda ticket, times: self.resolved.append((ticket, times)), most)
        # The events of a step's beginning are those of the end before it.
        self.step()
        self.gpu.catches_up()
        self.clock.poll()
        assert self.resolved == [(0, None)]
        self.resolved.clear()

    def step(self, buckets=((1.0, 2.0),), compresses=True, by_stream=True, fails=False):
        """Forward 10 ms; each bucket: backward 5 ms, compression and a collective of so many ms, then 0.5 ms of
        decompression; update 3 ms. Answers the ticket."""
        gpu, clock, pending = self.gpu, self.clock, []
        gpu.works(10)
        free = 0.0
        for comp, sync in buckets:
            gpu.works(5)
            mark = clock.enter(HERE, compresses)
            gpu.works(comp)
            clock.launch(mark)
            # One collective after the other.
            free = max(free, gpu.stream) + sync
            work = Work(free)
            if by_stream:
                clock.under_way(mark, work)
            pending.append((mark, work))
        for number, (mark, work) in enumerate(pending):
            gpu.waits(work)
            clock.arrived(mark)
            gpu.works(0.5)
            if not fails:
                clock.done(mark, number + 1 == len(pending))
        gpu.works(3)
        ticket = clock.end()
        clock.poll()
        return ticket


def times(run):
    ((_, got),) = run.resolved
    run.resolved.clear()
    return [round(part * 1e3, 6) for part in got]


@pytest.mark.parametrize("by_stream", [True, False])
def test_the_parts_of_a_step(by_stream):
    run = Run()
    run.step([(1.0, 2.0)], by_stream=by_stream)
    run.gpu.catches_up()
    run.clock.poll()
    # 10 + 5 + 3 of the model, 1 + 0.5 compressing, 2 on the wire, one after the other.
    assert times(run) == [18.0, 1.5, 2.0, 21.5]
    # What was compressed away is computing where nothing is compressed.
    run.step([(1.0, 2.0)], compresses=False, by_stream=by_stream)
    run.gpu.catches_up()
    run.clock.poll()
    assert times(run) == [19.5, 0.0, 2.0, 21.5]


def test_collectives_beside_backward_and_beside_each_other():
    run = Run()
    # Launched at 16, 22 and 28: the first until 19; the second, 20 long, holds the third back until 42.5.
    run.step([(1.0, 3.0), (1.0, 20.0), (1.0, 0.5)])
    run.gpu.catches_up()
    run.clock.poll()
    # The stream: 28, first bucket 0.5, then until 42 for the second and 42.5 for the third, whose collective has ended
    # by then; 3 for the update.
    # The stream has nothing to do from 28 to 42 but for that 0.5.
    assert times(run) == [28.0, 4.5, 13.5, 46.0]
    # Also where only the current stream has seen the waits.
    run.step([(1.0, 3.0), (1.0, 20.0), (1.0, 0.5)], by_stream=False)
    run.gpu.catches_up()
    run.clock.poll()
    assert times(run) == [28.0, 4.5, 13.5, 46.0]


def test_steps_are_told_late_in_order_and_once():
    run = Run()
    ends = []
    for _ in range(5):
        run.step()
        ends.append(run.gpu.stream)
    assert run.resolved == [], "nothing has happened yet"
    # The third has ended but for a hair.
    run.gpu.catches_up(ends[2] - 0.01)
    run.clock.poll()
    assert [ticket for ticket, _ in run.resolved] == [1, 2] and all(times for _, times in run.resolved)
    run.gpu.catches_up()
    run.step()
    assert [ticket for ticket, _ in run.resolved] == [1, 2, 3, 4, 5]
    run.gpu.catches_up()
    run.clock.poll()
    run.clock.poll()
    assert [ticket for ticket, _ in run.resolved] == [1, 2, 3, 4, 5, 6]
    assert run.gpu.synchronised == 0


def test_a_collective_whose_end_was_not_seen_yet_holds_its_step_back():
    run = Run()
    run.gpu.works(1)
    mark = run.clock.enter(HERE, True)
    run.clock.launch(mark)
    late = Work(run.gpu.stream + 100)
    run.clock.under_way(mark, late)
    run.clock.arrived(mark)
    run.clock.done(mark, True)
    run.clock.end()
    run.gpu.catches_up()
    run.clock.poll()
    assert run.resolved == []
    run.gpu.catches_up(late.ends)
    run.clock.poll()
    assert [ticket for ticket, _ in run.resolved] == [1]


def test_too_many_that_wait_are_dropped_from_the_oldest_and_said_once(caplog):
    run = Run(most=3)
    with caplog.at_level(logging.WARNING, "flexcomm"):
        for _ in range(7):
            run.step()
    assert run.resolved == [(1, None), (2, None), (3, None), (4, None)]
    assert len(caplog.records) == 1 and "more than 3 steps behind" in caplog.text
    run.gpu.catches_up()
    run.clock.poll()
    assert [(ticket, times is not None) for ticket, times in run.resolved[4:]] == [(5, True), (6, True), (7, True)]
    assert run.gpu.synchronised == 0


def test_events_are_used_again():
    run = Run()
    for _ in range(50):
        run.step([(1.0, 2.0)] * 4)
        run.gpu.catches_up()
    # Two steps of four events a bucket, and their ends.
    assert len(run.gpu.made) <= 2 * (4 * 4 + 1) + 1, len(run.gpu.made)
    assert max(event.recorded for event in run.gpu.made) > 10 and len(run.resolved) >= 49
    # 10 + 4 * 5 + 3 of the model, the last collective waited for, and one bucket after the other decompressed.
    assert {tuple(round(part * 1e3, 6) for part in times) for _, times in run.resolved} == {(33.0, 6.0, 0.5, 39.5)}
    # Dropped ones come back too.
    behind = Run(most=3)
    for _ in range(50):
        behind.step()
    assert len(behind.gpu.made) <= 5 * 5 + 1, len(behind.gpu.made)


def test_a_step_that_the_host_did_has_no_ticket():
    gpu, resolved = Gpu(), []
    clock = Clock(gpu, lambda *what: resolved.append(what))
    assert clock.end() is None and gpu.made == [], "no GPU, no events"
    run = Run()
    run.gpu.works(5)
    assert run.clock.end() is None
    # The next one begins where that one ended.
    assert run.step() == 2
    run.gpu.catches_up()
    run.clock.poll()
    assert times(run) == [18.0, 1.5, 2.0, 21.5]


def test_a_step_with_an_exception_in_it_is_never_told_and_holds_nobody_back():
    run = Run()
    assert run.step(fails=True) == 1
    run.clock.enter(HERE, True)
    assert run.clock.end() == 2
    assert run.step(compresses=False, fails=True) == 3
    run.gpu.catches_up()
    run.clock.poll()
    assert run.resolved == [(1, None), (2, None), (3, None)]
    run.step()
    run.gpu.catches_up()
    run.clock.poll()
    assert run.resolved[3][0] == 4 and run.resolved[3][1] is not None


def test_buckets_on_two_devices_are_never_timed():
    run = Run()
    clock = run.clock
    marks = [clock.enter(HERE, True), clock.enter(torch.empty(4), True)]
    for mark in marks:
        clock.launch(mark)
        clock.arrived(mark)
        clock.done(mark, True)
    clock.end()
    run.gpu.catches_up()
    clock.poll()
    assert run.resolved == [(1, None)]


@pytest.mark.parametrize("when", ["record", "read"])
def test_events_that_cannot_be_used_end_the_reports_and_not_the_training(when, caplog):
    run = Run()
    with caplog.at_level(logging.WARNING, "flexcomm"):
        if when == "read":
            run.step()
            run.gpu.catches_up()
        run.gpu.broken = True
        for _ in range(4):
            assert run.step() is not None
    assert run.resolved and all(times is None for _, times in run.resolved)
    assert [ticket for ticket, _ in run.resolved] == list(range(1, len(run.resolved) + 1)) and len(run.resolved) >= 4
    assert len(caplog.records) == 1 and "not reported any more" in caplog.text


def test_a_sum_of_the_hosts_that_travels_by_the_devices_backend_is_a_copy(monkeypatch):
    gpu, waited = Gpu(), []

    class Sum:
        def __init__(self, tensor):
            self.tensor = tensor.mul_(2)

        def wait(self):
            waited.append(len(self.tensor))

    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group, async_op: Sum(tensor))
    device = object.__new__(_device.Device)
    device._cuda, device._nccl, device._by_stream, device.clock = gpu, False, True, Clock(gpu, lambda *_: None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    # A copy, as to a GPU.
    monkeypatch.setattr(_collectives, "wire", lambda group: torch.device("cpu"))
    collectives = _collectives.Collectives(None, None, device, None)
    mark = device.clock.enter(HERE, False)
    payload = torch.arange(5.0)
    work = collectives.all_reduce(0, payload, HERE, mark)
    assert len(gpu.made) == 1 and mark.launched is gpu.made[0]
    # A wait for it holds the host, so it is none of a stream's.
    assert mark.landed is None and waited == [] and payload.tolist() == [0, 1, 2, 3, 4]
    work.wait()
    assert waited == [5] and payload.tolist() == [0, 2, 4, 6, 8]

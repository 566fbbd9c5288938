"""What is of one backward pass: its buckets' exchanges, and how it ends."""

from __future__ import annotations

import contextlib
import functools
from typing import Callable

import torch
import torch.distributed as dist

from flexcomm._core import Core
from flexcomm.torch import _ddp
from flexcomm.torch._clock import Mark
from flexcomm.torch._device import Device
from flexcomm.torch._exchange import Exchange
from flexcomm.torch._failures import Failures
from flexcomm.torch._unused import Unused


class Pass:
    """Exchanges under way, in the order of their buckets, which is the same on all ranks."""

    def __init__(self, device: Device, failures: Failures, unused: Unused | None) -> None:
        self.exchanges: list[Exchange] = []
        self._device = device
        self._failures = failures
        self._unused = unused

    def end(self) -> None:
        """Waits for all buckets of this pass, in order, and hands their results to DDP.

        Here rather than in callbacks of the collectives: those run on the backend's threads, which cannot take the
        interpreter lock any more when the script ends (the process aborts then), and lose the type of an exception.
        Collectives of earlier buckets still run while backward computes later ones.
        """
        exchanges, self.exchanges = self.exchanges, []
        _launch_later_rounds(exchanges)
        last = exchanges[-1].mark
        errors = [self._arrive(exchange, last) for exchange in exchanges]
        self._device.waits()
        good, done, failed = True, [], None
        for exchange, error in zip(exchanges, errors):
            try:
                if error is not None:
                    raise error
                good &= exchange.judge()
                done.append(exchange.buffer)
                if exchange.future is not None:
                    exchange.future.set_result(exchange.buffer)
            except Exception as raised:
                # The other buckets end too: their residuals must be restored, and none is left under way.
                failed = failed or raised
        if not good:
            # Also where this rank alone has failed: the others ask why, and would wait for it.
            parameters = (p for exchange in exchanges for p in exchange.parameters)
            self._failures.explain(done, parameters, failed is None)
        if failed is not None:
            raise failed
        if self._unused is not None and good:
            self._give_unused(self._unused, exchanges)

    def _arrive(self, exchange: Exchange, last: Mark | None) -> Exception | None:
        """Waits for a bucket's last collective, and launches or does what comes after it. Answers what went wrong."""
        mark = exchange.mark
        try:
            exchange.wait()
            if mark is not None:
                self._device.clock.arrived(mark)
            exchange.finish()
            if mark is not None:
                self._device.clock.done(mark, mark is last)
        except Exception as error:
            return error
        return None

    def _give_unused(self, unused: Unused, exchanges: list[Exchange]) -> None:
        compressed = [(exchange.parameters, exchange.buffer) for exchange in exchanges if exchange.compressed]
        if compressed and _ddp.in_backward():
            _ddp.after_pass(functools.partial(unused.give, compressed))


def _launch_later_rounds(exchanges: list[Exchange]) -> None:
    """Round by round, each in the order of the buckets: which collectives come in which order depends on what the ranks run and
    on nothing that has arrived. In the hook's calls for the buckets each would be waited for, and backward would stand still."""
    try:
        under_way = exchanges
        while under_way:
            under_way = [exchange for exchange in under_way if exchange.next_round()]
    except Exception:
        # Whoever left out one collective would meet the other ranks in the wrong ones from then on: none follows. Those that
        # are under way were launched by all ranks.
        for exchange in exchanges:
            with contextlib.suppress(Exception):
                exchange.wait()
        raise


class NativePass:
    """A pass in which DDP exchanges dense buckets by itself, without the hook."""

    def __init__(self, core: Core, device: Device, began: Callable[[], None]) -> None:
        self._core = core
        self._device = device
        self._began = began
        #: What the buckets' times are taken by is beside their collectives.
        self._works: list[tuple[dist.Work, Mark | None]] = []

    def all_reduce(
        self, index: int, buffer: torch.Tensor, last: bool, launch: Callable[[torch.Tensor], dist.Work]
    ) -> dist.Work:
        """A bucket, divided by the number of ranks already.

        Sends what the hook would send in a dense step: ranks with and without the hook go together.
        """
        if index == 0:
            # Of a pass that ended in an exception.
            self._works.clear()
            self._began()
        mark = self._device.enter(buffer, False)
        self._core.launched_natively(index, buffer.numel(), buffer.element_size())
        self._device.clock.launch(mark)
        work = launch(buffer)
        self._device.under_way(mark, work)
        self._works.append((work, mark))
        if last:
            self._end(mark)
        return work

    def _end(self, last: Mark | None) -> None:
        works, self._works = self._works, []
        for work, mark in works:
            work.wait()
            self._device.clock.arrived(mark)
        self._core.landed(len(works))
        self._device.clock.done(last, True)

"""What is asked of torch about DDP's backward pass under way."""

from __future__ import annotations

from typing import Callable

import torch


def in_backward() -> bool:
    """Not so of a rank that has run out of batches, under `join()`."""
    return bool(torch._C._current_graph_task_id() >= 0)


def after_pass(then: Callable[[], None]) -> None:
    """Calls it when DDP has ended its pass, inside ``backward()``."""
    engine = torch.autograd.Variable._execution_engine
    # DDP queues the end of its pass after the hook's return: before what is queued by what was queued here.
    engine.queue_callback(lambda: engine.queue_callback(then))


def raise_after_pass(error: Exception) -> None:
    """Raises it out of ``backward()``. Raised by the hook itself it would end DDP's pass halfway, and the next one would
    fail."""

    def throw() -> None:
        raise error

    after_pass(throw)

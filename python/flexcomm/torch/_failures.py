"""Passes that the ranks refused: why, which error or warning that is, and what becomes of the gradients."""

from __future__ import annotations

import logging
from typing import Callable, Iterable

import torch

from flexcomm._core import Core, FlexcommError, Status
from flexcomm.torch import _ddp
from flexcomm.torch._control import Control

logger = logging.getLogger("flexcomm")

#: Of a rank's part in a pass that was refused: its status, flags, and the reason, cut where it is longer.
_FAULT_BYTES = 512

#: Flags of a rank in a pass that was refused: its gradient stays not finite, since no trial undoes it; it has run out of batches.
_STAYS, _IDLE = 1, 2


_NOT_FINITE = (
    "failed to exchange gradients: %s has NaN or infinite values, and so have all ranks' gradients now. Leave out the "
    "optimizer's step and call zero_grad() to go on with the next batch; lower the learning rate, clip gradients, or attach "
    "with on_nonfinite='propagate' when a GradScaler handles them"
)


_OVERFLOWED = (
    "failed to exchange gradients: %s has overflowed, though the gradients are finite; all ranks' gradients are NaN now, and the "
    "residuals are as before this step, so that the next one may end the same way. Take a compressor that keeps more of the gradient, "
    "lower the learning rate, or clip gradients; a checkpoint from before has smaller residuals"
)


_BROKEN = (
    "failed to exchange gradients: parameters of the model have NaN or infinite values already, since an optimizer's step before "
    "this one, and so has every gradient from now on. Go back to the last good checkpoint, and lower the learning rate or clip "
    "gradients from there on; steps before compression begins, and dense ones, are not looked at"
)


_LEFT_OUT = (
    "some rank's gradient has NaN or infinite values, and %d of the ranks have run out of batches under join(): an error would "
    "take those out of it, and the others would wait for them. All gradients of this pass are zeros instead, on all ranks"
)


class NotFiniteError(FlexcommError):
    """A gradient, or a rank's residual, has NaN or infinite values: the text says which. Raised on every rank at the same step, out of
    ``backward()``, after which all ranks' gradients are NaN where it was: a script that catches it leaves out the optimizer's step,
    and may go on.

    Not raised under ``ddp_model.join()`` once a rank has run out of batches: then the gradients are zeros on all ranks, and a
    warning says so."""


class Failures:
    """See :class:`flexcomm.torch._hook.Hook` for its arguments."""

    def __init__(self, core: Core, control: Control, *, propagate: bool, not_finite: Callable[[], bool]) -> None:
        self._core = core
        self._control = control
        self._propagate = propagate
        self._not_finite = not_finite

    def explain(self, gradients: list[torch.Tensor], parameters: Iterable[torch.Tensor], raises: bool) -> None:
        """What comes of a pass that was refused, after all its buckets have arrived: the same on all ranks, which all refused it.
        Without `raises` no error for gradients that are not finite, since another one comes."""
        # A trial's candidate may diverge: that is reported, and everything is put back.
        undone = self._not_finite()
        faults = self._gather((0 if undone else _STAYS) | (0 if _ddp.in_backward() else _IDLE))
        if self._propagate or not any(flags & _STAYS for _, flags in faults):
            return
        idle = sum(bool(flags & _IDLE) for _, flags in faults)
        if idle:
            logger.warning(_LEFT_OUT, idle)
            for gradient in gradients:
                gradient.zero_()
        elif raises:
            # No gradient can be finite any more, on any rank, where parameters are not: the ranks hold the same.
            broken = not all(bool(p.detach().isfinite().all()) for p in parameters)
            overflowed = not broken and not any(status == int(Status.NotFinite) for status, _ in faults)
            overflowed &= any(status == int(Status.Overflowed) for status, _ in faults)
            text = _OVERFLOWED if overflowed else _NOT_FINITE
            _ddp.raise_after_pass(NotFiniteError(_BROKEN if broken else text % _whose(faults)))

    def _gather(self, flags: int) -> list[tuple[int, int]]:
        """All ranks' status and flags; an error where one of them could not do its part."""
        own = self._core.fault()
        status, why = (Status.Ready, "") if own is None else (own.status, own.why)
        sent = bytes([int(status), flags]) + why.encode()
        faults = self._control.gather(sent[:_FAULT_BYTES].ljust(_FAULT_BYTES, b"\0"))
        for rank, fault in enumerate(faults):
            if fault[0] == int(Status.Failed):
                reason = fault[2:].rstrip(b"\0").decode(errors="ignore")
                raise FlexcommError(f"failed to exchange gradients: rank {rank} could not do its part: {reason}")
        return [(fault[0], fault[1]) for fault in faults]


def _whose(faults: list[tuple[int, int]]) -> str:
    """What of which ranks is not finite: a gradient, or a residual that has overflowed."""
    named = []
    for status, what in (Status.NotFinite, "the gradient"), (Status.Overflowed, "the residual"):
        ranks = [str(rank) for rank, (own, _) in enumerate(faults) if own == int(status)]
        if ranks:
            named.append(f"{what} of rank {', '.join(ranks)}")
    return " and ".join(named) or "the sum of the ranks' gradients"

"""Passes that the ranks refused: why, which error or warning that is, and what becomes of the gradients."""

from __future__ import annotations

import logging
from typing import Callable, Iterable

import torch

from flexcomm._core import Core, FlexcommError
from flexcomm.torch import _ddp
from flexcomm.torch._control import Control

logger = logging.getLogger("flexcomm")

#: :meth:`Core.fault`'s codes for a rank's part in the pass.
_FAILED, _NOT_FINITE_HERE = 1, 2

#: Of a rank's status in a pass that was refused: that number, flags, and the reason, cut where it is longer.
_FAULT_BYTES = 512

#: Flags of a rank in a pass that was refused: its gradient stays not finite, since no trial undoes it; it has run out of batches.
_STAYS, _IDLE = 1, 2


_NOT_FINITE = (
    "failed to exchange gradients: %s has NaN or infinite values, and so have all ranks' gradients now. Leave out the "
    "optimizer's step and call zero_grad() to go on with the next batch; lower the learning rate, clip gradients, or attach "
    "with on_nonfinite='propagate' when a GradScaler handles them"
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
    """A gradient, or a rank's residual, has NaN or infinite values: the text says which. Raised on every rank at the same step, out of ``backward()``, after which all
    ranks' gradients are NaN where it was: a script that catches it leaves out the optimizer's step, and may go on.

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
        if self._propagate or not any(flags & _STAYS for _, flags, _ in faults):
            return
        idle = sum(bool(flags & _IDLE) for _, flags, _ in faults)
        if idle:
            logger.warning(_LEFT_OUT, idle)
            for gradient in gradients:
                gradient.zero_()
        elif raises:
            # No gradient can be finite any more, on any rank, where parameters are not: the ranks hold the same.
            broken = not all(bool(p.detach().isfinite().all()) for p in parameters)
            _ddp.raise_after_pass(NotFiniteError(_BROKEN if broken else _NOT_FINITE % _whose(faults)))

    def _gather(self, flags: int) -> list[tuple[int, int, str]]:
        """All ranks' codes, flags and reasons; an error where one of them could not do its part."""
        code, why = self._core.fault()
        faults = self._control.gather((bytes([code, flags]) + why.encode())[:_FAULT_BYTES].ljust(_FAULT_BYTES, b"\0"))
        read = [(fault[0], fault[1], fault[2:].rstrip(b"\0").decode(errors="ignore")) for fault in faults]
        for rank, (code, _, reason) in enumerate(read):
            if code == _FAILED:
                raise FlexcommError(f"failed to exchange gradients: rank {rank} could not do its part: {reason}")
        return read


def _whose(faults: list[tuple[int, int, str]]) -> str:
    """What of which ranks is not finite: a gradient, or a residual that has overflowed, which the reason names."""
    found: dict[str, list[str]] = {}
    for rank, (code, _, reason) in enumerate(faults):
        if code == _NOT_FINITE_HERE:
            what = "the residual" if "the residual has overflowed" in reason else "the gradient"
            found.setdefault(what, []).append(str(rank))
    named = [f"{what} of rank {', '.join(ranks)}" for what, ranks in found.items()]
    return " and ".join(named) or "the sum of the ranks' gradients"

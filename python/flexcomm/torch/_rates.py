"""What the optimizer's groups say: learning rates, for memories that rescale their residual when these change, and momentum."""

from __future__ import annotations

from typing import Any


class Rates:
    """Those of the step under way, read when the first bucket asks: one that lies on a GPU is waited for."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._known = False
        self._first = 0.0
        #: By a parameter's id; none with a single group.
        self._each: dict[int, float] | None = None

    def begin(self) -> None:
        """Another step: a scheduler may have changed them, and a script the groups."""
        self._known = False

    def of(self, parameters: list[int]) -> list[float]:
        """That of the first group, 0 where there is none; with several groups also that of each of these parameters' groups, 0
        for one that the optimizer does not have. While a rate is 0 (a warm-up's start, a frozen group) the core rescales
        nothing, and the first rate above 0 is what later ones are compared with."""
        if not self._known:
            self._read()
        if self._each is None:
            return [self._first]
        return [self._first, *(self._each.get(parameter, 0.0) for parameter in parameters)]

    def momentum(self) -> float | None:
        """The largest of any group: SGD's, or the decay of Adam's first moment; 0 for an optimizer that has neither. None where there
        are no groups, or what they have is not at least 0 and below 1."""
        found = [_momentum(group) for group in getattr(self._optimizer, "param_groups", [])]
        return max((momentum for momentum in found if 0.0 <= momentum < 1.0), default=None)

    def _read(self) -> None:
        # A wrapper may show none: residuals are then not rescaled.
        groups = getattr(self._optimizer, "param_groups", [])
        rates = [float(group.get("lr", 0.0)) for group in groups]
        self._first = rates[0] if rates else 0.0
        several = len(rates) > 1
        self._each = {id(p): rate for group, rate in zip(groups, rates) for p in group["params"]} if several else None
        self._known = True


def _momentum(group: dict[str, Any]) -> float:
    try:
        return float(group.get("momentum", group.get("betas", (0.0,))[0]))
    except (IndexError, TypeError, ValueError):
        # Something else by these names.
        return -1.0

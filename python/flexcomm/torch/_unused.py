"""Parameters that no rank used in a backward pass.

With ``find_unused_parameters`` DDP throws a bucket's result away where no rank used the parameter, and leaves the gradient as
it was. The parameter's residual of earlier steps may be in that result, and has left the memory: so the result
becomes the gradient, as it does for every other parameter.
"""

from __future__ import annotations

import weakref
from typing import Iterable

import torch
from torch.nn.parallel import DistributedDataParallel

from flexcomm.torch import _layout

#: Parameters of a bucket in its order, and the bucket's result.
Exchanged = tuple[list[torch.Tensor], torch.Tensor]


class Unused:
    """Of a model with ``find_unused_parameters``."""

    def __init__(self, model: DistributedDataParallel) -> None:
        # Weak: DDP owns the hook, which owns this.
        self._model = weakref.ref(model)
        parameters, _ = model._build_params_for_reducer()
        self._places = {id(parameter): place for place, parameter in enumerate(parameters)}

    def give(self, exchanged: Iterable[Exchanged]) -> None:
        """After DDP has ended its pass: gives the parameters that no rank used their part of the results. Where that is
        zero and there is no gradient, there is none afterwards either, and the optimizer leaves the parameter alone."""
        model = self._model()
        if model is None:
            return
        # Summed over the ranks by DDP.
        used = model.reducer._get_local_used_map().tolist()
        for parameters, result in exchanged:
            for parameter, values in zip(parameters, result.split([p.numel() for p in parameters])):
                if self._is_unused(parameter, used):
                    _give(parameter, values)

    def _is_unused(self, parameter: torch.Tensor, used: list[int]) -> bool:
        if len(used) != len(self._places):
            # Parameters were frozen or thawed since DDP was made, and have other places in its map.
            return parameter.grad is None
        return used[self._places[id(parameter)]] == 0


def _give(parameter: torch.Tensor, values: torch.Tensor) -> None:
    if parameter.grad is None:
        if not values.any():
            return
        parameter.grad = torch.empty_like(parameter, requires_grad=False)
    parameter.grad.copy_(_layout.shaped(values, parameter))

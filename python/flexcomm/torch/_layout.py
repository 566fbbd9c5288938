"""Parameters in DDP's buckets, and so in their residuals: in the order of their memory where it has no gaps, which
need not be that of their indices (``channels_last``, a transposed weight)."""

from __future__ import annotations

import torch


def shaped(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A bucket's values of a parameter, seen with the parameter's indices."""
    # What `empty_like` keeps is what DDP keeps: strides of memory without gaps.
    without_gaps = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
    return values.as_strided(parameter.size(), parameter.stride()) if without_gaps else values.view(parameter.size())


def flat(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The other way: values in the order of the parameter's indices, as a bucket holds them."""
    if parameter.is_contiguous():
        return values
    out = torch.empty(parameter.numel(), dtype=values.dtype)
    shaped(out, parameter).copy_(values.view(parameter.size()))
    return out

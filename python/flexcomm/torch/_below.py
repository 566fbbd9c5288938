"""The names by which models that earlier releases pickled refer to :mod:`flexcomm.torch._wrapper`."""

from flexcomm.torch._wrapper import _nothing, _OnForward

__all__ = ["_OnForward", "_nothing"]

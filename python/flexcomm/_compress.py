"""Compressing one tensor by itself, without DistributedDataParallel: for looking at a compressor, or for another framework."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, final

import numpy as np

from flexcomm import _core

__all__ = ["Compressor", "Message", "compress", "decompress"]

_NUMPY = ("float32", "float16", "float64")


@final
class Message:
    """A compressed tensor: ``bytes(message)`` says everything that :func:`decompress` needs, on any machine.

    Made by :func:`compress` and :meth:`Compressor.compress`, or by :meth:`from_bytes`.
    """

    def __init__(self, message: _core.Message, gain: float | None, library: str) -> None:
        self._message = message
        self._library = library
        #: With error feedback the share of the energy that left the residual, 1 - |e - T|^2 / |e|^2; without it |C(x)|^2 / |x|^2,
        #: and its inverse where that is above 1 (an unbiased compressor's 1 / (1 + omega)). None where it was read from bytes.
        self.gain = gain

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Message:
        """Reads ``bytes(message)``; ValueError for anything else."""
        return cls(_core.Message.from_bytes(bytes(data)), None, "numpy")

    def __bytes__(self) -> bytes:
        return self._message.to_bytes()

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (bytes(self), self.gain, self._library)

    @property
    def spec(self) -> str:
        """The compressor's canonical text."""
        return self._message.spec()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        return tuple(self._message.shape())

    @property
    def dtype(self) -> str:
        """Of the tensor, for example ``"float32"``."""
        return self._message.dtype()

    @property
    def nbytes(self) -> int:
        """Bytes that ranks of a job would exchange for this tensor: all rounds, headers included."""
        return self._message.wire_bytes()

    def __repr__(self) -> str:
        return f"Message({self.spec!r}, shape={self.shape}, dtype={self.dtype!r}, nbytes={self.nbytes})"


@final
class Compressor:
    """A compressor with its memory, momentum and warm start, for tensors of one shape.

    The first tensor sets shape and type. ``spec`` is a text as :func:`flexcomm.torch.attach` takes it, for example
    ``"topk(0.01)+ef(vanilla)"``; ``seed`` is of what the compressor draws at random.
    """

    def __init__(self, spec: str | Mapping[str, str], *, seed: int = 0) -> None:
        if isinstance(spec, Mapping):
            spec = _core.parse_byteps({str(key): str(value) for key, value in spec.items()})
        if not isinstance(spec, str):
            raise TypeError(f"spec is {spec!r}, it must be a text such as 'topk(0.01)+ef(vanilla)', or BytePS's map of strings")
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed is {seed}, allowed is 0 to 2**64 - 1")
        self.spec, self._seed = _core.parse_compressor(spec), seed
        self._encoder: _core.TensorEncoder | None = None
        self._of: tuple[tuple[int, ...], str] | None = None
        self._decoder: _core.TensorDecoder | None = None
        self._library = "numpy"

    def compress(self, tensor: Any, *, learning_rate: float = 1.0) -> Message:
        """Compresses a NumPy array or torch tensor of floats; what it leaves out goes into the residual, if the spec has one.

        ``learning_rate`` is the optimizer's at this step: memories rescale the residual when it changes. ValueError for NaN
        and infinity, other shapes than the first tensor's, and types that are no floats.
        """
        if not (math.isfinite(learning_rate) and learning_rate > 0):
            raise ValueError(f"learning_rate is {learning_rate}, it must be finite and above 0")
        values, dtype, self._library = _values(tensor)
        of = (values.shape, dtype)
        if self._encoder is None or self._of is None:
            self._encoder, self._of = _core.TensorEncoder(self.spec, list(values.shape), dtype, self._seed), of
        if self._of != of:
            raise ValueError(
                f"the tensor has shape {of[0]} and type {of[1]}, this compressor keeps state for {self._of[0]} and {self._of[1]}: "
                "make one for each"
            )
        message, gain = self._encoder.encode(values.ctypes.data, learning_rate)
        return Message(message, gain, self._library)

    def decompress(self, message: Message | bytes) -> Any:
        """What a message means, as an array or tensor of the type that was compressed.

        Give it the messages of one :class:`Compressor` in order: one that learns from what was exchanged (``gradiveq``) needs
        them all.
        """
        message = _message(message)
        if self._decoder is None:
            self._decoder = _core.TensorDecoder(message._message)
        return _restored(self._decoder, message)

    @property
    def residual(self) -> Any:
        """What error feedback keeps for the next tensor, as float32; None without a memory, and before the first tensor."""
        if self._encoder is None or self._of is None:
            return None
        out = np.empty(self._of[0], np.float32)
        return _as(self._library, out, "float32") if self._encoder.residual(out.ctypes.data) else None


def compress(tensor: Any, spec: str | Mapping[str, str], *, seed: int = 0) -> Message:
    """Compresses one NumPy array or torch tensor of floats, for example ``compress(gradient, "topk(0.01)")``.

    ``spec`` names any compressor of :func:`flexcomm.torch.compressors` with its parameters, or is BytePS's map of strings. For a sequence of gradients with
    error feedback use a :class:`Compressor`.
    """
    return Compressor(spec, seed=seed).compress(tensor)


def decompress(message: Message | bytes) -> Any:
    """The array or tensor that a message means; from bytes a NumPy array (bfloat16: as float32)."""
    message = _message(message)
    return _restored(_core.TensorDecoder(message._message), message)


def _unpickled(data: bytes, gain: float | None, library: str) -> Message:
    return Message(_core.Message.from_bytes(data), gain, library)


def _message(message: Message | bytes) -> Message:
    if isinstance(message, (bytes, bytearray, memoryview)):
        return Message.from_bytes(message)
    if not isinstance(message, Message):
        raise TypeError(f"message is {type(message).__name__}, it must be a Message or its bytes")
    return message


def _restored(decoder: _core.TensorDecoder, message: Message) -> Any:
    out = np.empty(message.shape, np.float32)
    decoder.decode(message._message, out.ctypes.data)
    return _as(message._library, out, message.dtype)


def _values(tensor: Any) -> tuple[np.ndarray[Any, np.dtype[np.float32]], str, str]:
    """float32 values in C order on the host, the name of their type before, and the library that they came from."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in (*_NUMPY, "bfloat16"):
            raise ValueError(f"the tensor's type is {name}, allowed are {', '.join(_NUMPY)} and bfloat16")
        if tensor.layout != torch.strided or tensor.device.type == "meta":
            kind = "meta" if tensor.device.type == "meta" else str(tensor.layout).removeprefix("torch.")
            raise ValueError(f"the tensor is a {kind} one, allowed are dense ones with values; to_dense() makes one of a sparse one")
        values = tensor.detach().to(device="cpu", dtype=torch.float32).contiguous().numpy()
        return values, name, "torch"
    array = np.asarray(tensor)
    if array.dtype.name not in _NUMPY:
        raise ValueError(f"the array's type is {array.dtype.name}, allowed are {', '.join(_NUMPY)}")
    with np.errstate(over="ignore"):
        return np.require(array, np.float32, ["C", "A"]), array.dtype.name, "numpy"


def _as(library: str, values: np.ndarray[Any, np.dtype[np.float32]], dtype: str) -> Any:
    if library == "torch":
        torch = sys.modules["torch"]
        return torch.from_numpy(values).to(getattr(torch, dtype))
    return values.astype(dtype, copy=False) if dtype in _NUMPY else values

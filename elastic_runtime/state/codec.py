"""Nested values as bytes that can be decoded without executing anything: what workers send to each other.

Each value is one letter for its type, then its content; lengths are 8 bytes. The types are None, numbers, text, bytes,
lists, tuples, sets, dictionaries, torch's dtypes, devices, sizes and tensors, numpy's arrays and numbers, the places of
tensors (`Hole`), and tensors made of others (`Composite`). Anything else is written by pickle, and marks the result as
opaque: that is decoded only where the bytes are trusted, as those of a file of the job's own and those that came
through the coordinator.

Rejected: pickle for all, because its bytes are a program for the reader; JSON, which has neither bytes nor tuples; and
marshal, which must not be given bytes that others have made.
"""

from __future__ import annotations

import ctypes
import importlib
import pickle
import struct
import sys
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from elastic_runtime.errors import StateError
from elastic_runtime.state.layouts import allocate, describe, flat

if TYPE_CHECKING:
    from collections.abc import Callable

_LENGTH = struct.Struct("<q")
_FLOAT = struct.Struct("<d")
_LONG_ROW = 64
_MAX_DEPTH = 200
_INT64 = 1 << 63
UNPICKLABLE = (pickle.PicklingError, TypeError, AttributeError)


class Skeleton(bytes):
    """An encoded value; `opaque`: decoding it needs pickle (None: unknown). Nested ones are verified with the outer."""

    opaque: bool | None = None


@dataclass(frozen=True)
class Hole:
    """A placeholder for tensor number `index`."""

    index: int


@dataclass(frozen=True)
class Composite:
    """A tensor of a class of its own, which is made of `parts`: see torch's `__tensor_flatten__`."""

    kind: type[torch.Tensor]
    parts: dict[str, object]
    context: object
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def encode(value: object) -> Skeleton:
    """The value as bytes. Raises one of `UNPICKLABLE` where it cannot be written at all."""
    out = _Parts()
    _write(value, out)
    made = Skeleton(b"".join(out))
    made.opaque = out.opaque
    return made


def decode(data: bytes, *, trusted: bool) -> Any:
    """The value again. Raises StateError where the bytes are no encoded value, or not `trusted` and opaque."""
    reader = _Reader(data, trusted=trusted)
    value = reader.read(0)
    if reader.at != len(data):
        raise StateError(f"{len(data) - reader.at} bytes follow an encoded value")
    return value


def is_opaque(data: bytes) -> bool:
    """Return whether `decode` would need pickle for the value."""
    if isinstance(data, Skeleton) and data.opaque is not None:
        return data.opaque
    try:
        decode(data, trusted=False)
    except OpaqueError:
        return True
    return False


class OpaqueError(StateError):
    """The bytes hold an object that only pickle can make, and they are not trusted."""


class _Parts(list[bytes]):
    """The bytes written so far; `opaque`: some of them by pickle."""

    opaque = False


def _counted(letter: bytes, content: bytes) -> bytes:
    return letter + _LENGTH.pack(len(content)) + content


def _write(value: object, out: _Parts) -> None:
    writer = _WRITERS.get(type(value))
    if writer is not None:
        writer(value, out)
    elif _is_numpy(value):
        _write_numpy(value, out)
    else:
        out.opaque = True
        out.append(_counted(b"o", pickle.dumps(value, protocol=5)))


def _write_int(value: Any, out: _Parts) -> None:
    out.append(_counted(b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)))


def _write_row(letter: bytes) -> Callable[[Any, _Parts], None]:
    def write(value: Any, out: _Parts) -> None:
        kinds = set(map(type, value)) if len(value) >= _LONG_ROW else set()
        if letter in b"lt" and kinds == {float}:
            out.append(letter.upper() + _counted(b"d", array("d", value).tobytes()))
        elif letter in b"lt" and kinds == {int} and min(value) >= -_INT64 and max(value) < _INT64:
            out.append(letter.upper() + _counted(b"q", array("q", value).tobytes()))
        else:
            out.append(letter + _LENGTH.pack(len(value)))
            for item in value:
                _write(item, out)

    return write


def _write_skeleton(value: Any, out: _Parts) -> None:
    out.opaque = out.opaque or is_opaque(value)
    out.append(_counted(b"k", value))


def _write_dict(value: Any, out: _Parts) -> None:
    out.append(b"D" + _LENGTH.pack(len(value)))
    for key, item in value.items():
        _write(key, out)
        _write(item, out)


def _write_composite(value: Any, out: _Parts) -> None:
    out.append(b"c")
    kind = value.kind
    _write((f"{kind.__module__}:{kind.__qualname__}", value.parts, value.context, value.shape, value.stride), out)


def _is_numpy(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray | numpy.generic):
        return False
    return type(value).__module__ == "numpy" and value.dtype.kind in "biufcSU"


def _write_numpy(value: Any, out: _Parts) -> None:
    scalar = not isinstance(value, sys.modules["numpy"].ndarray)
    out.append(b"a")
    _write((scalar, value.dtype.str, tuple(value.shape), value.tobytes()), out)


def _write_tensor(value: Any, out: _Parts) -> None:
    """A tensor in place, for values that do not leave their tensors to `packing`."""
    tensor = value.detach().cpu()
    (description,) = describe([tensor])
    memory = flat(tensor)
    out.append(b"x")
    raw = ctypes.string_at(memory.data_ptr(), memory.numel() * memory.element_size()) if memory.numel() else b""
    dtype, shape, *strides = description
    _write((dtype, shape, raw, *strides), out)


_WRITERS: dict[type, Callable[[Any, _Parts], None]] = {
    type(None): lambda _, out: out.append(b"N"),
    bool: lambda value, out: out.append(b"1" if value else b"0"),
    int: _write_int,
    float: lambda value, out: out.append(b"f" + _FLOAT.pack(value)),
    complex: lambda value, out: out.append(b"j" + _FLOAT.pack(value.real) + _FLOAT.pack(value.imag)),
    str: lambda value, out: out.append(_counted(b"s", value.encode("utf-8", "surrogatepass"))),
    bytes: lambda value, out: out.append(_counted(b"b", value)),
    bytearray: lambda value, out: out.append(_counted(b"B", bytes(value))),
    Skeleton: _write_skeleton,
    list: _write_row(b"l"),
    tuple: _write_row(b"t"),
    set: _write_row(b"u"),
    frozenset: _write_row(b"v"),
    torch.Size: _write_row(b"z"),
    dict: _write_dict,
    torch.dtype: lambda value, out: out.append(_counted(b"y", str(value).removeprefix("torch.").encode())),
    torch.device: lambda value, out: out.append(_counted(b"e", str(value).encode())),
    torch.Tensor: _write_tensor,
    Hole: lambda value, out: out.append(b"h" + _LENGTH.pack(value.index)),
    Composite: _write_composite,
}


class _Reader:
    """Reads one value after another; every length is verified against what is there."""

    def __init__(self, data: bytes, *, trusted: bool) -> None:
        self.data, self.at, self.trusted = data, 0, trusted

    def read(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise StateError(f"a received state is nested deeper than {_MAX_DEPTH} levels")
        letter = self._take(1)
        reader = _READERS.get(letter)
        if reader is None:
            raise StateError(f"a received state has a part of unknown type {letter!r}")
        try:
            return reader(self, depth)
        except (ValueError, TypeError, OverflowError, RuntimeError) as error:
            raise StateError(f"a received state has a part that cannot be read: {error}") from error

    def _take(self, count: int) -> bytes:
        end = self.at + count
        if count < 0 or end > len(self.data):
            raise StateError(f"a received state ends after {len(self.data)} bytes, but {count} more are announced")
        taken, self.at = self.data[self.at : end], end
        return taken

    def length(self) -> int:
        length: int = _LENGTH.unpack(self._take(8))[0]
        return length

    def counted(self) -> bytes:
        return self._take(self.length())

    def real(self) -> float:
        value: float = _FLOAT.unpack(self._take(8))[0]
        return value

    def items(self, depth: int) -> list[Any]:
        count = self.length()
        if count > len(self.data) - self.at:
            raise StateError(f"a received state announces {count} parts, more than it has bytes")
        return [self.read(depth + 1) for _ in range(count)]

    def long_row(self) -> list[Any]:
        row = array("d" if self._take(1) == b"d" else "q")
        row.frombytes(self.counted())
        return row.tolist()

    def mapping(self, depth: int) -> dict[Any, Any]:
        count = self.length()
        if count > len(self.data) - self.at:
            raise StateError(f"a received state announces {count} parts, more than it has bytes")
        return {self.read(depth + 1): self.read(depth + 1) for _ in range(count)}

    def opaque(self) -> Any:
        content = self.counted()
        if not self.trusted:
            raise OpaqueError("a received state holds an object that only pickle can make")
        return pickle.loads(content)  # noqa: S301  (only of bytes that the caller trusts)

    def skeleton(self) -> Skeleton:
        content = self.counted()
        if not self.trusted:
            decode(content, trusted=False)
        return Skeleton(content)

    def dtype(self) -> torch.dtype:
        name = self.counted().decode()
        found = getattr(torch, name, None)
        if not isinstance(found, torch.dtype):
            raise StateError(f"a received state has a tensor of type {name!r}, which this torch does not have")
        return found

    def tensor(self, depth: int) -> torch.Tensor:
        dtype, shape, raw, *strides = self.read(depth + 1)
        memory = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        if not strides:
            return memory.view(shape)
        found = allocate((dtype, shape, strides[0]))
        flat(found).copy_(memory)
        return found

    def composite(self, depth: int) -> Composite:
        name, parts, context, shape, stride = self.read(depth + 1)
        return Composite(_loaded_class(name), parts, context, shape, stride)

    def numpy(self, depth: int) -> Any:
        scalar, kind, shape, content = self.read(depth + 1)
        numpy = importlib.import_module("numpy")
        if numpy.dtype(kind).kind not in "biufcSU":
            raise StateError(f"a received state holds an array of type {kind!r}")
        made = numpy.frombuffer(content, dtype=kind).reshape(shape)
        return made[()] if scalar else made.copy()


def _loaded_class(name: str) -> type[torch.Tensor]:
    """The class of tensors, of a module that this worker has imported itself."""
    module, _, path = str(name).partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, torch.Tensor) and hasattr(found, "__tensor_unflatten__")):
        raise StateError(f"a received state holds a tensor of class {name}, which this worker has not imported")
    return found


_READERS: dict[bytes, Callable[[_Reader, int], Any]] = {
    b"N": lambda _, __: None,
    b"1": lambda _, __: True,
    b"0": lambda _, __: False,
    b"i": lambda reader, _: int.from_bytes(reader.counted(), "little", signed=True),
    b"f": lambda reader, _: reader.real(),
    b"j": lambda reader, _: complex(reader.real(), reader.real()),
    b"s": lambda reader, _: reader.counted().decode("utf-8", "surrogatepass"),
    b"b": lambda reader, _: reader.counted(),
    b"B": lambda reader, _: bytearray(reader.counted()),
    b"k": lambda reader, _: reader.skeleton(),
    b"l": lambda reader, depth: reader.items(depth),
    b"t": lambda reader, depth: tuple(reader.items(depth)),
    b"L": lambda reader, _: reader.long_row(),
    b"T": lambda reader, _: tuple(reader.long_row()),
    b"u": lambda reader, depth: set(reader.items(depth)),
    b"v": lambda reader, depth: frozenset(reader.items(depth)),
    b"z": lambda reader, depth: torch.Size(reader.items(depth)),
    b"D": lambda reader, depth: reader.mapping(depth),
    b"y": lambda reader, _: reader.dtype(),
    b"e": lambda reader, _: torch.device(reader.counted().decode()),
    b"x": lambda reader, depth: reader.tensor(depth),
    b"h": lambda reader, _: Hole(reader.length()),
    b"c": lambda reader, depth: reader.composite(depth),
    b"a": lambda reader, depth: reader.numpy(depth),
    b"o": lambda reader, _: reader.opaque(),
}

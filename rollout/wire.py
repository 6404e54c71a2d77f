"""Records to bytes and back: msgpack, arrays as dtype and bytes, decoded strictly against the record's types.

A record is a map of its fields, an array an extension of one dtype character and its little-endian bytes. Decoding is
driven by the type that is expected, so that a message can only ever become what its reader asked for: unknown or missing
fields, a wrong type and a broken invariant are each a `WireError` that names the field. Decoded arrays are read-only.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack  # type: ignore[import-untyped]
import numpy as np

T = TypeVar("T")
Decoder = Callable[[Any, str], Any]  # (plain value, its path for messages) -> typed value

ARRAY = 1  # msgpack extension type
DTYPES = {b"i": np.dtype("<i4"), b"f": np.dtype("<f4"), b"b": np.dtype("|b1")}
CODES = {dtype: code for code, dtype in DTYPES.items()}


class WireError(ValueError):
    """Bytes that are not the message they should be, or a value that cannot travel."""


def pack(value: Any) -> bytes:
    """Any nesting of records, arrays, mappings with string keys, sequences and scalars."""
    try:
        return msgpack.packb(value, default=_to_plain)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"cannot pack a {type(value).__name__}: {error}") from error


def unpack(kind: type[T], data: bytes) -> T:
    """The value of type `kind` in `data`. Raises WireError."""
    return decode(kind, unpack_plain(data))


def unpack_plain(data: bytes) -> Any:
    """Maps, lists, scalars and arrays, not yet checked against a type."""
    try:
        return msgpack.unpackb(data, ext_hook=_array_of, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"not a msgpack message ({len(data)} bytes): {error or type(error).__name__}") from error


def decode(kind: Any, plain: Any, path: str = "") -> Any:
    return _decoder(kind)(plain, path or getattr(kind, "__name__", str(kind)))


def _to_plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        dtype = value.dtype.newbyteorder("<")
        if value.ndim != 1 or dtype not in CODES:
            raise TypeError(f"an array of {value.dtype}{list(value.shape)} does not travel; vectors of int32, float32, bool do")
        return msgpack.ExtType(ARRAY, CODES[dtype] + value.astype(dtype, copy=False).tobytes())
    if is_dataclass(value) and not isinstance(value, type):
        return {name: getattr(value, name) for name in _names(type(value))}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} does not travel")


def _array_of(code: int, data: bytes) -> np.ndarray:
    dtype = DTYPES.get(data[:1]) if code == ARRAY else None
    if dtype is None or (len(data) - 1) % dtype.itemsize:
        raise WireError(f"unknown extension {code} with {len(data)} bytes that begin with {data[:1]!r}")
    return np.frombuffer(data, dtype=dtype, offset=1)


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind))


@cache
def _decoder(kind: Any) -> Decoder:
    """How to read a value of this type; made once a type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda plain, path: plain
    if origin is np.ndarray:
        return _array(np.dtype(get_args(arguments[1])[0]))
    if origin in (Union, UnionType):
        return _optional(kind, arguments)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(_decoder(arguments[1]))
    if origin is not None and issubclass(origin, Sequence):
        return _sequence(_decoder(arguments[0]))
    if is_dataclass(kind):
        return _record(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum(kind)
    if kind in (int, float, str, bool, NoneType):
        return _scalar(kind)
    raise TypeError(f"{kind} is not a type that travels")


def _scalar(kind: type) -> Decoder:
    accepted: tuple[type, ...] = (int, float) if kind is float else (kind,)

    def read(plain: Any, path: str) -> Any:
        if type(plain) not in accepted:
            raise _wrong(path, "nothing" if kind is NoneType else kind.__name__, plain)
        return kind(plain) if kind is float else plain

    return read


def _enum(kind: type[Enum]) -> Decoder:
    def read(plain: Any, path: str) -> Any:
        try:
            return kind(plain)
        except ValueError:
            raise _wrong(path, "one of " + ", ".join(str(member.value) for member in kind), plain) from None

    return read


def _array(dtype: np.dtype[Any]) -> Decoder:
    def read(plain: Any, path: str) -> Any:
        if not isinstance(plain, np.ndarray) or plain.dtype != dtype:
            raise _wrong(path, f"an array of {dtype.name}", plain)
        return plain

    return read


def _optional(kind: Any, arguments: tuple[Any, ...]) -> Decoder:
    rest = [a for a in arguments if a is not NoneType]
    if len(rest) != 1 or len(arguments) != 2:
        raise TypeError(f"{kind}: of unions only `X | None` travels")
    inner = _decoder(rest[0])
    return lambda plain, path: None if plain is None else inner(plain, path)


def _mapping(inner: Decoder) -> Decoder:
    def read(plain: Any, path: str) -> Any:
        if not isinstance(plain, dict) or not all(isinstance(key, str) for key in plain):
            raise _wrong(path, "a map with string keys", plain)
        return {key: inner(value, f"{path}.{key}") for key, value in plain.items()}

    return read


def _sequence(inner: Decoder) -> Decoder:
    def read(plain: Any, path: str) -> Any:
        if not isinstance(plain, list):
            raise _wrong(path, "a list", plain)
        return tuple(inner(value, f"{path}[{i}]") for i, value in enumerate(plain))

    return read


def _record(kind: Any) -> Decoder:
    hints = get_type_hints(kind)
    readers = {f.name: _decoder(hints[f.name]) for f in fields(kind)}
    required = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}

    def read(plain: Any, path: str) -> Any:
        if not isinstance(plain, dict):
            raise _wrong(path, f"a {kind.__name__}", plain)
        if unknown := plain.keys() - readers.keys():
            raise WireError(f"{path}: unknown field {sorted(map(str, unknown))[0]!r}; {kind.__name__} has {sorted(readers)}")
        if missing := required - plain.keys():
            raise WireError(f"{path}: field {sorted(missing)[0]!r} of {kind.__name__} is missing")
        values = {name: readers[name](value, f"{path}.{name}") for name, value in plain.items()}
        try:
            return kind(**values)
        except WireError:
            raise
        except ValueError as error:
            raise WireError(f"{path}: {error}") from error

    return read


def _wrong(path: str, expected: str, plain: Any) -> WireError:
    shown = repr(plain)
    return WireError(f"{path}: expected {expected}, got {shown if len(shown) <= 80 else shown[:77] + '...'}")

"""Turns records into bytes and back: msgpack, decoded strictly against the record's types.

A record becomes a map of its fields and a named tuple becomes a list. An array becomes a msgpack extension that holds its
little-endian bytes; the extension's number says the dtype. An array with few distinct runs (versions, masks) is sent as the end
and the value of each run. Any integer and any string that Python has can be sent: an integer beyond 64 bits is an extension too.

The expected type drives decoding, so a message can only become what its reader asked for. An unknown or missing field, a wrong
type and a broken invariant each raise a `WireError` that names the field. Decoded arrays are read-only.
"""

import reprlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack  # type: ignore[import-untyped]
import numpy as np

T = TypeVar("T")
Decoder = Callable[[Any], Any]  # plain value -> typed value; it raises WireError without the path to the value

DTYPES = {1: np.dtype("<i4"), 2: np.dtype("<f4"), 3: np.dtype("|b1")}  # by msgpack extension type
CODES = {dtype.char: code for code, dtype in DTYPES.items()}
BIG_INTEGER = 4  # extension type of an integer beyond 64 bits: its two's complement, little-endian
RUNS = 16  # added to an array's extension type when the array is sent as runs
MOST_RUNS = 8  # an array with more runs is sent as its elements
SHORTEST, LONGEST = 32, 1 << 24  # elements of an array that is sent as runs
STRINGS = "surrogatepass"  # how strings are encoded: a lone surrogate is a string too, and must not end a process


class WireError(ValueError):
    """The bytes are not the message that they should be, or the value has no encoding."""

    def __init__(self, text: str, path: str = "") -> None:
        super().__init__(text)
        self.text, self.path = text, path

    def __str__(self) -> str:
        return f"{self.path}: {self.text}" if self.path else self.text


def pack(value: Any) -> bytes:
    """The bytes of any nesting of records, arrays, mappings with string keys, sequences and scalars. Raises WireError."""
    try:
        return msgpack.packb(value, default=_to_plain, unicode_errors=STRINGS)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"cannot pack a {type(value).__name__}: {error}") from error


def unpack(kind: type[T], data: bytes) -> T:
    """The value of type `kind` in `data`. Raises WireError."""
    return decode(kind, unpack_plain(data))


def unpack_plain(data: bytes) -> Any:
    """Maps, lists, scalars and arrays, not yet checked against a type. Raises WireError."""
    try:
        return msgpack.unpackb(data, ext_hook=_extension, strict_map_key=True, unicode_errors=STRINGS)
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"not a msgpack message ({len(data)} bytes): {error or type(error).__name__}") from error


def decode(kind: Any, plain: Any) -> Any:
    try:
        return _decoder(kind)(plain)
    except WireError as error:
        error.path = getattr(kind, "__name__", str(kind)) + error.path
        raise


# To plain values. msgpack asks only about what it cannot pack itself.


def _to_plain(value: Any) -> Any:
    kind = type(value)
    plainer = _PLAINERS.get(kind)
    if plainer is None:
        plainer = _PLAINERS[kind] = _plainer(kind)
    return plainer(value)


_PLAINERS: dict[type, Callable[[Any], Any]] = {}


def _plainer(kind: type) -> Callable[[Any], Any]:
    if kind is np.ndarray:
        return _plain_array
    if kind is int:  # msgpack asks only when it has more than 64 bits
        return _plain_integer
    if is_dataclass(kind):
        names = tuple(f.name for f in fields(kind))
        if len(names) < 2:
            return lambda value: {name: getattr(value, name) for name in names}
        values = attrgetter(*names)
        return lambda value: dict(zip(names, values(value), strict=True))
    if issubclass(kind, np.generic):
        return lambda value: value.item()
    if issubclass(kind, Mapping):
        return dict
    if issubclass(kind, Sequence):
        return list
    raise TypeError(f"a value of type {kind.__name__} cannot be sent")


def _plain_integer(value: int) -> msgpack.ExtType:
    return msgpack.ExtType(BIG_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _plain_array(value: np.ndarray) -> msgpack.ExtType:
    code, base, strides = CODES.get(value.dtype.char), value.base, value.strides
    if type(base) is bytes and code and len(base) == value.nbytes and strides == (value.itemsize,) and value.dtype.isnative:
        return msgpack.ExtType(code, base)  # it was received: pass its bytes on without a copy
    if code is None or value.ndim != 1:
        raise TypeError(f"an array of {value.dtype}{list(value.shape)} cannot be sent; vectors of int32, float32 and bool can")
    if code != 2 and strides == (0,) and SHORTEST <= len(value) <= LONGEST:  # one run, as received
        return msgpack.ExtType(RUNS + code, struct.pack("<2i", len(value), value.item(0)))
    if code != 2 and SHORTEST <= len(value) <= LONGEST and len(set(value[:SHORTEST].tolist())) <= MOST_RUNS:
        ends = (value[1:] != value[:-1]).nonzero()[0]
        if len(ends) < MOST_RUNS:
            runs = np.empty((2, len(ends) + 1), "<i4")
            runs[0, :-1], runs[0, -1] = ends + 1, len(value)
            runs[1] = value[runs[0] - 1]
            return msgpack.ExtType(RUNS + code, runs.tobytes())
    return msgpack.ExtType(code, value.astype(DTYPES[code], copy=False).tobytes())


def _extension(code: int, data: bytes) -> np.ndarray | int:
    if code == BIG_INTEGER:
        return int.from_bytes(data, "little", signed=True)
    if code - RUNS in DTYPES:
        return _array_of_runs(DTYPES[code - RUNS], data)
    dtype = DTYPES.get(code)
    if dtype is None or len(data) % dtype.itemsize:
        raise WireError(f"unknown extension {code} with {len(data)} bytes that begin with {data[:1]!r}")
    return np.frombuffer(data, dtype=dtype)


def _array_of_runs(dtype: np.dtype[Any], data: bytes) -> np.ndarray:
    if not data or len(data) % 8 or len(data) > 8 * MOST_RUNS:
        raise WireError(f"an array of runs with {len(data)} bytes")
    numbers = np.frombuffer(data, "<i4").tolist()
    ends, values = numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]
    if ends[-1] > LONGEST or any(end <= begin for begin, end in zip([0, *ends], ends, strict=False)):
        raise WireError(f"an array whose runs end at {ends}")
    if len(ends) == 1:
        array = np.ndarray(ends, dtype, np.array(values, dtype), strides=(0,))  # one value, however long
    else:
        array = np.empty(ends[-1], dtype)
        for begin, end, value in zip([0, *ends], ends, values, strict=False):
            array[begin:end] = value
    array.flags.writeable = False
    return array


# From plain values.


@cache
def _decoder(kind: Any) -> Decoder:
    """How to read a value of this type; made once per type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda plain: plain
    if origin is np.ndarray:
        return _array(np.dtype(get_args(arguments[1])[0]))
    if origin in (Union, UnionType):
        return _optional(kind, arguments)
    if isinstance(kind, type) and issubclass(kind, tuple):
        return _named_tuple(kind)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(arguments[1])
    if origin is not None and issubclass(origin, Sequence):
        return _sequence(_decoder(arguments[0]))
    if is_dataclass(kind):
        return _record(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum(kind)
    if kind in (int, float, str, bool, NoneType):
        return _scalar(kind)
    raise TypeError(f"values of type {kind} cannot be sent")


def _scalar(kind: type) -> Decoder:
    def read(plain: Any) -> Any:
        if type(plain) is kind:
            return plain
        if kind is float and type(plain) is int:
            return float(plain)
        raise _wrong("nothing" if kind is NoneType else kind.__name__, plain)

    return read


def _enum(kind: type[Enum]) -> Decoder:
    members = {member.value: member for member in kind}

    def read(plain: Any) -> Any:
        if type(plain) is str and (member := members.get(plain)) is not None:
            return member
        raise _wrong("one of " + ", ".join(members), plain)

    return read


def _array(dtype: np.dtype[Any]) -> Decoder:
    def read(plain: Any) -> Any:
        if type(plain) is np.ndarray and plain.dtype == dtype:
            return plain
        raise _wrong(f"an array of {dtype.name}", plain)

    return read


def _optional(kind: Any, arguments: tuple[Any, ...]) -> Decoder:
    rest = [a for a in arguments if a is not NoneType]
    if len(rest) != 1 or len(arguments) != 2:
        raise TypeError(f"{kind}: the only union that can be sent is `X | None`")
    inner = _decoder(rest[0])
    return lambda plain: None if plain is None else inner(plain)


def _mapping(kind: Any) -> Decoder:
    inner = None if kind is Any else _decoder(kind)

    def read(plain: Any) -> Any:
        if type(plain) is not dict or not all(type(key) is str for key in plain):
            raise _wrong("a map with string keys", plain)
        if inner is None:
            return plain
        values, key = {}, ""
        try:
            for key, value in plain.items():
                values[key] = inner(value)
        except WireError as error:
            error.path = f".{key}{error.path}"
            raise
        return values

    return read


def _sequence(inner: Decoder) -> Decoder:
    def read(plain: Any) -> Any:
        if type(plain) is not list:
            raise _wrong("a list", plain)
        values: list[Any] = []
        try:
            for value in plain:
                values.append(inner(value))
        except WireError as error:
            error.path = f"[{len(values)}]{error.path}"
            raise
        return tuple(values)

    return read


def _named_tuple(kind: Any) -> Decoder:
    hints = get_type_hints(kind)
    readers = tuple(_decoder(hints[name]) for name in kind._fields)
    length, numbers, new = len(readers), all(hints[name] is int for name in kind._fields), tuple.__new__

    def read(plain: Any) -> Any:
        if type(plain) is not list or len(plain) != length:
            raise _wrong(f"a list of {', '.join(kind._fields)}", plain)
        if numbers:
            for value in plain:
                if type(value) is not int:
                    raise _wrong("int", value)
            return new(kind, plain)
        return new(kind, [reader(value) for reader, value in zip(readers, plain, strict=True)])

    return read


def _record(kind: Any) -> Decoder:
    hints = get_type_hints(kind)
    readers = {f.name: _decoder(hints[f.name]) for f in fields(kind)}
    required = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}

    def read(plain: Any) -> Any:
        if type(plain) is not dict:
            raise _wrong(f"a {kind.__name__}", plain)
        if plain.keys() != readers.keys():
            if unknown := plain.keys() - readers.keys():
                raise WireError(f"unknown field {sorted(map(str, unknown))[0]!r}; {kind.__name__} has {sorted(readers)}")
            if missing := required - plain.keys():
                raise WireError(f"field {sorted(missing)[0]!r} of {kind.__name__} is missing")
        values, name = {}, ""
        try:
            for name, value in plain.items():
                values[name] = readers[name](value)
        except WireError as error:
            error.path = f".{name}{error.path}"
            raise
        try:
            return kind(**values)
        except WireError:
            raise
        except ValueError as error:
            raise WireError(str(error)) from error

    return read


def _wrong(expected: str, plain: Any) -> WireError:
    return WireError(f"expected {expected}, got {reprlib.repr(plain)}")

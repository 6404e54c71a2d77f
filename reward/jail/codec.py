"""Plain data as JSON, with the exact types kept: how arguments, results and expected values travel and are stored.

Plain data is None, bool, int, float, str, bytes, complex, list, tuple, set, frozenset and dict, nested. What JSON cannot say is
an object with one tag as its only key:

    (1, 2)          {"__tuple__": [1, 2]}           {1, 2}        {"__set__": [1, 2]}
    b"ab"           {"__bytes__": "6162"}           frozenset()   {"__frozenset__": []}
    {1: "a"}        {"__dict__": [[1, "a"]]}        1 + 2j        {"__complex__": [1.0, 2.0]}
    float("nan")    {"__float__": "nan"}            10 ** 5000    {"__int__": "0x..."}

Both ends of a pipe to hostile code use it, so decoding never runs code, builds only the types above, and refuses deep nesting.
`encode` takes subclasses (Counter, namedtuple, IntEnum, numpy scalars) by their value: an object cannot cross, only data can.
"""

import json
import math
from typing import Any

MAX_DEPTH = 100
_PLAIN_INT_BITS = 1024
TAGS = frozenset(("__tuple__", "__set__", "__frozenset__", "__bytes__", "__dict__", "__int__", "__float__", "__complex__"))

SCALAR_TAGS = frozenset(("__bytes__", "__int__", "__float__", "__complex__"))


class CodecError(ValueError):
    """A value that is not plain data, or JSON that does not stand for any."""


def dumps(value: object) -> bytes:
    """Compact JSON in ASCII."""
    return json.dumps(encode(value), separators=(",", ":"), allow_nan=False).encode("ascii")


def loads(data: bytes | str) -> Any:
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"not JSON: {error}") from None
    return decode(parsed)


def encode(value: object, depth: int = 0) -> Any:
    """`value` as what `json` can write. Raises CodecError where it is not plain data."""
    if depth > MAX_DEPTH:
        raise CodecError(f"nested more than {MAX_DEPTH} deep")
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        number = int.__index__(value)
        return number if number.bit_length() <= _PLAIN_INT_BITS else {"__int__": hex(number)}
    if isinstance(value, float):
        real = float.__float__(value)
        return real if math.isfinite(real) else {"__float__": repr(real)}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [encode(item, depth + 1) for item in list.__iter__(value)]
    if isinstance(value, dict):
        return _encode_dict(value, depth)
    if isinstance(value, tuple):
        return {"__tuple__": [encode(item, depth + 1) for item in tuple.__iter__(value)]}
    if isinstance(value, set):
        return {"__set__": [encode(item, depth + 1) for item in set.__iter__(value)]}
    if isinstance(value, frozenset):
        return {"__frozenset__": [encode(item, depth + 1) for item in frozenset.__iter__(value)]}
    if isinstance(value, bytes):
        return {"__bytes__": bytes.hex(value)}
    if isinstance(value, complex):
        return {"__complex__": [encode(value.real), encode(value.imag)]}
    if type(value).__module__ == "numpy" and callable(item := getattr(value, "item", None)) and not _shape(value):
        return encode(item(), depth + 1)
    raise CodecError(f"{type(value).__name__} is not plain data")


def decode(data: Any, depth: int = 0) -> Any:
    """The value that `data` (as `json` read it) stands for. Raises CodecError."""
    if depth > MAX_DEPTH:
        raise CodecError(f"nested more than {MAX_DEPTH} deep")
    if isinstance(data, list):
        return [decode(item, depth + 1) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) == 1 and (tag := next(iter(data))) in TAGS:
        try:
            return _decode_tagged(tag, data[tag], depth)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise CodecError(str(error) if isinstance(error, CodecError) else f"bad {tag}: {error}") from None
    return {key: decode(item, depth + 1) for key, item in data.items()}


def shorten(data: Any, limit: int = 80) -> str:
    """A value in its JSON form in a few characters, for a message."""
    text = json.dumps(data)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _encode_dict(value: dict[Any, Any], depth: int) -> Any:
    items = list(dict.items(value))
    if all(type(key) is str for key, _ in items) and not (len(items) == 1 and items[0][0] in TAGS):
        return {key: encode(item, depth + 1) for key, item in items}
    return {"__dict__": [[encode(key, depth + 1), encode(item, depth + 1)] for key, item in items]}


def _decode_tagged(tag: str, body: Any, depth: int) -> Any:
    if tag == "__bytes__":
        return bytes.fromhex(body)
    if tag == "__int__":
        return int(body, 16)
    if tag == "__float__":
        return float(body)
    if tag == "__complex__":
        return complex(*map(_decode_real, body))
    if not isinstance(body, list):
        raise CodecError(f"{tag} must hold a list, got {type(body).__name__}")
    items = [decode(item, depth + 1) for item in body]
    if tag == "__tuple__":
        return tuple(items)
    if tag == "__dict__":
        return {key: item for key, item in items}
    return frozenset(items) if tag == "__frozenset__" else set(items)


def _decode_real(data: Any) -> float:
    """One part of a complex number: nothing else may be decoded here, because a set must not be built of hostile data."""
    return float(data["__float__"] if isinstance(data, dict) and len(data) == 1 and "__float__" in data else data)


def _shape(value: object) -> object:
    return getattr(value, "shape", ())

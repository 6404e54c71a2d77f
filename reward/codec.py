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
_TAGS = frozenset(("__tuple__", "__set__", "__frozenset__", "__bytes__", "__dict__", "__int__", "__float__", "__complex__"))


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
    if len(data) == 1 and (tag := next(iter(data))) in _TAGS:
        try:
            return _decode_tagged(tag, data[tag], depth)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise CodecError(str(error) if isinstance(error, CodecError) else f"bad {tag}: {error}") from None
    return {key: decode(item, depth + 1) for key, item in data.items()}


def same(left: object, right: object, tolerance: float | None = None) -> bool:
    """Equal in type and value, all the way down: 1 is neither True nor 1.0; NaN is NaN.

    With a `tolerance` (relative and absolute), numbers may differ by so much, and an int may stand for a float.
    """
    if tolerance is not None and _is_number(left) and _is_number(right):
        return _close(left, right, tolerance)  # type: ignore[arg-type]
    if type(left) is not type(right):
        return False
    if isinstance(left, float) and isinstance(right, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(same(a, b, tolerance) for a, b in zip(left, right, strict=True))
    if isinstance(left, dict) and isinstance(right, dict):
        if len(left) != len(right):
            return False
        others = {_canonical(key): item for key, item in right.items()}
        return all((k := _canonical(key)) in others and same(item, others[k], tolerance) for key, item in left.items())
    if isinstance(left, set | frozenset) and isinstance(right, set | frozenset):
        return {_canonical(item) for item in left} == {_canonical(item) for item in right}
    return left == right


def shorten(value: object, limit: int = 80) -> str:
    """`value` in a few characters, for a message. Safe for any plain data, however big."""
    text = dumps(value).decode("ascii")
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _encode_dict(value: dict[Any, Any], depth: int) -> Any:
    items = list(dict.items(value))
    if all(type(key) is str for key, _ in items) and not (len(items) == 1 and items[0][0] in _TAGS):
        return {key: encode(item, depth + 1) for key, item in items}
    return {"__dict__": [[encode(key, depth + 1), encode(item, depth + 1)] for key, item in items]}


def _decode_tagged(tag: str, body: Any, depth: int) -> Any:
    if tag == "__bytes__":
        return bytes.fromhex(body)
    if tag == "__int__":
        return int(body, 16)
    if tag == "__float__":
        return float(body)
    if not isinstance(body, list):
        raise CodecError(f"{tag} must hold a list, got {type(body).__name__}")
    items = [decode(item, depth + 1) for item in body]
    if tag == "__complex__":
        return complex(*items)
    if tag == "__tuple__":
        return tuple(items)
    if tag == "__dict__":
        return {key: item for key, item in items}
    return frozenset(items) if tag == "__frozenset__" else set(items)


def _shape(value: object) -> object:
    return getattr(value, "shape", ())


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _close(left: float, right: float, tolerance: float) -> bool:
    try:
        return math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance) or (math.isnan(left) and math.isnan(right))
    except OverflowError:  # an int too big for a float
        return left == right


def _canonical(item: object) -> bytes:
    """Equal bytes for equal members of a set: nested frozensets have no order of their own."""
    if isinstance(item, frozenset):
        return b"frozenset(" + b",".join(sorted(_canonical(inner) for inner in item)) + b")"
    if isinstance(item, tuple):
        return b"tuple(" + b",".join(_canonical(inner) for inner in item) + b")"
    return dumps(0.0 if isinstance(item, float) and item == 0 else item)

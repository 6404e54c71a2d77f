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

_SCALAR_TAGS = frozenset(("__bytes__", "__int__", "__float__", "__complex__"))


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

    With a `tolerance` (relative and absolute), a number may differ by so much from an expected float, and an expected integer may
    be a float of exactly that value.
    """
    return matches(encode(left), right, tolerance)


def matches(data: Any, expected: object, tolerance: float | None = None) -> bool:
    """Whether `data`, in its JSON form and from hostile hands, stands for the same as `expected`.

    It is compared as it came. Sets and dicts are never built of it: members with one hash would cost quadratic time.
    """
    if isinstance(expected, list):
        return isinstance(data, list) and _all_match(data, expected, tolerance)
    if isinstance(expected, tuple):
        items = _body(data, "__tuple__")
        return items is not None and _all_match(items, expected, tolerance)
    if isinstance(expected, set | frozenset):
        members = _body(data, "__set__" if isinstance(expected, set) else "__frozenset__")
        if members is None or len(members) != len(expected):
            return False
        return {_canonical(member) for member in members} == {_canonical(encode(member)) for member in expected}
    if isinstance(expected, dict):
        theirs = _items(data)
        ours = [(_canonical(encode(key)), value) for key, value in expected.items()]
        if theirs is None or len(theirs) != len(ours) or theirs.keys() != {key for key, _ in ours}:
            return False
        return all(matches(theirs[key], value, tolerance) for key, value in ours)
    return _scalar_matches(data, expected, tolerance)


def shorten(data: Any, limit: int = 80) -> str:
    """A value in its JSON form in a few characters, for a message."""
    text = json.dumps(data)
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


def equals(data: Any, expected: object) -> bool:
    """Whether `data`, in its JSON form and from hostile hands, stands for what Python's `==` calls equal to `expected`: 1 is True
    and 1.0 there, and a set a frozenset."""
    if isinstance(expected, list):
        return isinstance(data, list) and _all_equal(data, expected)
    if isinstance(expected, tuple):
        items = _body(data, "__tuple__")
        return items is not None and _all_equal(items, expected)
    if isinstance(expected, set | frozenset):
        members = _body(data, "__set__")
        members = _body(data, "__frozenset__") if members is None else members
        if members is None or len(members) != len(expected):
            return False
        return {_canonical(m, loose=True) for m in members} == {_canonical(encode(m), loose=True) for m in expected}
    if isinstance(expected, dict):
        theirs = _items(data, loose=True)
        ours = [(_canonical(encode(key), loose=True), value) for key, value in expected.items()]
        if theirs is None or len(theirs) != len(ours) or theirs.keys() != {key for key, _ in ours}:
            return False
        return all(equals(theirs[key], value) for key, value in ours)
    if isinstance(data, dict | list) and not _is_scalar(data):
        return False
    return bool((decode(data) if isinstance(data, dict) else data) == expected)


def in_json(data: Any, depth: int = 0, *, whole_floats: bool = False) -> Any:
    """What `json` would have made of the value that `data` stands for: tuples are lists, keys are strings, and a whole float is
    an int, as 1.0 and 1 are the same number there (`whole_floats` leaves it). Sets and bytes stay what they are."""
    if depth > MAX_DEPTH:
        raise CodecError(f"nested more than {MAX_DEPTH} deep")
    if isinstance(data, float):
        return int(data) if data.is_integer() and not whole_floats else data
    if isinstance(data, list):
        return [in_json(item, depth + 1, whole_floats=whole_floats) for item in data]
    if not isinstance(data, dict):
        return data
    if (items := _body(data, "__tuple__")) is not None:
        return [in_json(item, depth + 1, whole_floats=whole_floats) for item in items]
    if (pairs := _body(data, "__dict__")) is not None and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        data = {key if isinstance(key, str) else json.dumps(key): item for key, item in pairs}
    elif len(data) == 1 and next(iter(data)) in _TAGS:
        return data
    return {key: in_json(item, depth + 1, whole_floats=whole_floats) for key, item in data.items()}


def truth(data: Any) -> bool:
    """What `bool` says of the value that `data` stands for."""
    if isinstance(data, dict) and len(data) == 1 and (tag := next(iter(data))) in _TAGS:
        return bool(decode(data) if tag in _SCALAR_TAGS else data[tag])
    return bool(data)


def is_close(got: float, expected: float, tolerance: float) -> bool:
    """Whether a number is the expected one within a tolerance, both absolute and relative to the expected number. Relative to the
    larger of the two, a huge number would be close to everything."""
    try:
        is_there = abs(got - expected) <= tolerance * max(1.0, abs(expected)) and math.isfinite(expected)
    except OverflowError:  # an int too big for a float
        return got == expected
    return is_there or got == expected or (math.isnan(got) and math.isnan(expected))


def is_near(data: Any, expected: float, tolerance: float) -> bool:
    """`abs(value - expected) < tolerance`"""
    number = decode(data) if _is_scalar(data) else data
    try:
        return isinstance(number, int | float | complex) and abs(number - expected) < tolerance
    except OverflowError:  # an int too big for a float
        return False


def _is_scalar(data: Any) -> bool:
    return isinstance(data, dict) and len(data) == 1 and next(iter(data)) in _SCALAR_TAGS


def _all_equal(data: list[Any], expected: list[Any] | tuple[Any, ...]) -> bool:
    return len(data) == len(expected) and all(equals(d, e) for d, e in zip(data, expected, strict=True))


def _shape(value: object) -> object:
    return getattr(value, "shape", ())


def _all_match(data: list[Any], expected: list[Any] | tuple[Any, ...], tolerance: float | None) -> bool:
    return len(data) == len(expected) and all(matches(d, e, tolerance) for d, e in zip(data, expected, strict=True))


def _body(data: Any, tag: str) -> list[Any] | None:
    """The items under a tag, if that is what `data` is."""
    body = data.get(tag) if isinstance(data, dict) and len(data) == 1 else None
    return body if isinstance(body, list) else None


def _items(data: Any, *, loose: bool = False) -> dict[bytes, Any] | None:
    """The items of a dict in its JSON form, by canonical bytes of the keys, if that is what `data` is."""
    if isinstance(data, dict) and (len(data) != 1 or next(iter(data)) not in _TAGS):
        return {_canonical(key): value for key, value in data.items()}
    pairs = _body(data, "__dict__")
    if pairs is None or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        return None
    return {_canonical(key, loose=loose): value for key, value in pairs}


def _scalar_matches(data: Any, expected: object, tolerance: float | None) -> bool:
    if isinstance(data, dict):
        if not _is_scalar(data):
            return False
        data = decode(data)
    if tolerance is not None and _is_number(data) and _is_number(expected):
        return data == expected or (isinstance(expected, float) and is_close(data, expected, tolerance))
    if type(data) is not type(expected):
        return False
    return data == expected or encode(data) == encode(expected)  # the latter for NaN


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _canonical(data: Any, depth: int = 0, *, loose: bool = False) -> bytes:
    """Equal bytes for equal values in their JSON form: the members of a frozenset have no order, and -0.0 is 0.0. With `loose`,
    equal numbers have equal bytes whatever their type."""
    if depth > MAX_DEPTH:
        raise CodecError(f"nested more than {MAX_DEPTH} deep")
    if isinstance(data, list):
        return b"[" + b",".join(_canonical(item, depth + 1, loose=loose) for item in data) + b"]"
    if isinstance(data, dict) and len(data) == 1:
        ((tag, body),) = data.items()
        if tag == "__frozenset__" and isinstance(body, list):
            return b"frozenset[" + b",".join(sorted(_canonical(item, depth + 1, loose=loose) for item in body)) + b"]"
        if loose and tag == "__complex__" and isinstance(body, list) and len(body) == 2 and body[1] == 0:
            return _canonical(body[0], depth + 1, loose=True)
        return tag.encode("utf-8", "surrogatepass") + b":" + _canonical(body, depth + 1, loose=loose)
    if isinstance(data, float):
        data = int(data) if loose and data.is_integer() else data + 0.0
    elif loose and isinstance(data, bool):
        data = int(data)
    if isinstance(data, dict):
        return json.dumps(data, sort_keys=True).encode("ascii")
    return repr(data).encode("ascii", "backslashreplace")

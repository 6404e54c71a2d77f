"""Does a value from hostile hands equal the expected one? Pure.

The value is compared in its JSON form (`reward/jail/codec.py`), as it came. No set and no dict is ever built of it, because
members with one hash would cost quadratic time.
"""

import json
import math
from typing import Any

from reward.jail.codec import MAX_DEPTH, SCALAR_TAGS, TAGS, CodecError, decode, encode


def matches(data: Any, expected: object, tolerance: float | None = None) -> bool:
    """Whether `data`, in its JSON form, has the type and the value of `expected`, all the way down: 1 is neither True nor 1.0,
    and NaN is NaN.

    With a `tolerance` (relative and absolute), a number may differ by so much from an expected float, and an expected integer may
    be a float of exactly that value.
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


def equals(data: Any, expected: object) -> bool:
    """Whether `data`, in its JSON form, stands for what Python's `==` calls equal to `expected`: 1 equals True and 1.0, and a set
    equals a frozenset."""
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
    elif len(data) == 1 and next(iter(data)) in TAGS:
        return data
    return {key: in_json(item, depth + 1, whole_floats=whole_floats) for key, item in data.items()}


def truth(data: Any) -> bool:
    """What `bool` says of the value that `data` stands for."""
    if isinstance(data, dict) and len(data) == 1 and (tag := next(iter(data))) in TAGS:
        return bool(decode(data) if tag in SCALAR_TAGS else data[tag])
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


def _all_match(data: list[Any], expected: list[Any] | tuple[Any, ...], tolerance: float | None) -> bool:
    return len(data) == len(expected) and all(matches(d, e, tolerance) for d, e in zip(data, expected, strict=True))


def _all_equal(data: list[Any], expected: list[Any] | tuple[Any, ...]) -> bool:
    return len(data) == len(expected) and all(equals(d, e) for d, e in zip(data, expected, strict=True))


def _body(data: Any, tag: str) -> list[Any] | None:
    """The items under a tag, if that is what `data` is."""
    body = data.get(tag) if isinstance(data, dict) and len(data) == 1 else None
    return body if isinstance(body, list) else None


def _items(data: Any, *, loose: bool = False) -> dict[bytes, Any] | None:
    """The items of a dict in its JSON form, by canonical bytes of the keys, if that is what `data` is."""
    if isinstance(data, dict) and (len(data) != 1 or next(iter(data)) not in TAGS):
        return {_canonical(key): value for key, value in data.items()}
    pairs = _body(data, "__dict__")
    if pairs is None or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        return None
    return {_canonical(key, loose=loose): value for key, value in pairs}


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


def _is_scalar(data: Any) -> bool:
    return isinstance(data, dict) and len(data) == 1 and next(iter(data)) in SCALAR_TAGS


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

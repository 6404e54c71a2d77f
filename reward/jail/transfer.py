"""How values are transferred between a candidate's jail and the jail of its tests: data is copied, anything else is a reference.

Copied are the exact plain types, some types of the standard library that hold nothing but data, and Python's own types and
exceptions. Every other object stays in its jail and gets a number. An object of the candidate is a {"__ref__": …} for the tests;
a function or another object of the tests is a {"__fn__": …} for the candidate. Every JSON object on this wire has one tag as its
only key.
"""

import builtins
import collections.abc
import datetime
import importlib
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from reward.jail import codec

MAX_DEPTH = codec.MAX_DEPTH
_LEAVES = (type(None), bool, int, float, str, bytes, complex)
_CONTAINERS: dict[type, str] = {
    tuple: "__tuple__",
    set: "__set__",
    frozenset: "__frozenset__",
    list: "__list__",
    deque: "__deque__",
}
MUTABLE = (list, dict, set, bytearray, deque, Counter, OrderedDict, defaultdict)
"""Those of the copied types that a call can change in place."""
_MAPPINGS: dict[type, str] = {dict: "__dict__", Counter: "__counter__", OrderedDict: "__ordered_dict__"}
_MAPPING_BUILDERS: dict[str, Callable[[Any], Any]] = {
    **{tag: kind for kind, tag in _MAPPINGS.items()},
    "__keys__": lambda pairs: dict(pairs).keys(),
    "__values__": lambda pairs: dict(pairs).values(),
    "__items__": lambda pairs: dict(pairs).items(),
}
_VIEWS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    type({}.keys()): ("__keys__", lambda view: ((key, None) for key in view)),
    type({}.values()): ("__values__", enumerate),
    type({}.items()): ("__items__", iter),
}
_BUILDERS: dict[str, Callable[[Any], Any]] = {
    **{tag: kind for kind, tag in _CONTAINERS.items()},
    "__slice__": lambda parts: slice(*parts),
}
_RICH: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    bytearray: ("__bytearray__", lambda v: v.hex(), bytearray.fromhex),
    range: ("__range__", lambda v: [v.start, v.stop, v.step], lambda b: range(*b)),
    Decimal: ("__decimal__", str, Decimal),
    Fraction: (
        "__fraction__",
        lambda v: [hex(v.numerator), hex(v.denominator)],
        lambda b: Fraction(int(b[0], 16), int(b[1], 16)),
    ),
    datetime.date: ("__date__", datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.datetime: ("__datetime__", datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.time: ("__time__", datetime.time.isoformat, datetime.time.fromisoformat),
    datetime.timezone: (
        "__timezone__",
        lambda v: v.utcoffset(None).total_seconds(),
        lambda b: datetime.timezone(datetime.timedelta(seconds=b)),
    ),
    uuid.UUID: ("__uuid__", str, uuid.UUID),
    datetime.timedelta: ("__timedelta__", lambda v: [v.days, v.seconds, v.microseconds], lambda b: datetime.timedelta(*b)),
}
_TYPES = {name: value for name, value in vars(builtins).items() if type(value) is type and value.__name__ == name}
_TYPES |= {kind.__name__: kind for kind in (*_CONTAINERS, *_MAPPINGS, *_RICH, defaultdict)}
_TYPES |= {name: vars(collections.abc)[name] for name in collections.abc.__all__}
_PYTHON_KINDS: tuple[type[Any], ...] = (
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.GeneratorType, types.CoroutineType),
    *(types.AsyncGeneratorType, type),
)
PYTHON_KINDS = {kind.__name__: kind for kind in _PYTHON_KINDS}
"""What an object of the candidate is for `isinstance` and `inspect`, where it is one of these."""
_ARRAY_KINDS = "biufc"  # booleans, integers, floats, complex numbers
_TYPE, _EXCEPTION = "__type__", "__exception__"
_RICH_BUILDERS = {tag: build for tag, _, build in _RICH.values()}


def pack(value: object, wrap: Callable[[object], dict[str, Any]], depth: int = 0) -> Any:
    """`value` as what `json` can write; `wrap` makes a reference of what is not data."""
    if depth > MAX_DEPTH:
        raise codec.CodecError(f"nested more than {MAX_DEPTH} deep")
    kind = type(value)
    if kind in _LEAVES:
        return codec.encode(value)
    if kind in _CONTAINERS:
        return {_CONTAINERS[kind]: [pack(item, wrap, depth + 1) for item in value]}  # type: ignore[attr-defined]
    if kind in _MAPPINGS:
        return {_MAPPINGS[kind]: _pack_pairs(value.items(), wrap, depth)}  # type: ignore[attr-defined]
    if kind is defaultdict:
        return {"__defaultdict__": [pack(value.default_factory, wrap), _pack_pairs(value.items(), wrap, depth)]}  # type: ignore[attr-defined]
    if kind in _VIEWS:
        tag, pairs_of = _VIEWS[kind]
        return {tag: _pack_pairs(pairs_of(value), wrap, depth)}
    if kind is slice:
        return {"__slice__": [pack(part, wrap, depth + 1) for part in (value.start, value.stop, value.step)]}  # type: ignore[attr-defined]
    if kind in _RICH:
        tag, flatten, _ = _RICH[kind]
        return {tag: flatten(value)}
    if kind.__module__ == "numpy" and hasattr(value, "dtype") and value.dtype.kind in _ARRAY_KINDS:
        return _pack_array(value)
    if kind.__name__ == "PosixPath" and kind.__module__ == "pathlib":
        return {"__path__": str(value)}
    if not hasattr(kind, "_kestrel_kind"):  # which says of a proxy that it is what it stands for
        if isinstance(value, type) and _TYPES.get(value.__name__) is value:
            return {_TYPE: value.__name__}
        if isinstance(value, Exception) and _TYPES.get(kind.__name__) is kind:
            return {_EXCEPTION: [kind.__name__, [pack(item, wrap, depth + 1) for item in value.args]]}
    return wrap(value)


def unpack(data: Any, resolve: Callable[[str, Any], Any], depth: int = 0) -> Any:
    """The value that `data` stands for; `resolve` gets the tag and the body of a reference. Raises CodecError."""
    if depth > MAX_DEPTH:
        raise codec.CodecError(f"nested more than {MAX_DEPTH} deep")
    if not isinstance(data, dict):
        if isinstance(data, list):
            raise codec.CodecError("a list without a tag")
        return data
    if len(data) != 1:
        raise codec.CodecError("an object must have one tag")
    ((tag, body),) = data.items()
    try:
        if tag in _MAPPING_BUILDERS:
            return _MAPPING_BUILDERS[tag](_unpack_pairs(body, resolve, depth))
        if tag == "__defaultdict__":
            return defaultdict(unpack(body[0], resolve), _unpack_pairs(body[1], resolve, depth))
        if tag in _BUILDERS:
            return _BUILDERS[tag]([unpack(item, resolve, depth + 1) for item in body])
        if tag in _RICH_BUILDERS:
            return _RICH_BUILDERS[tag](body)
        if tag == "__path__":
            return importlib.import_module("pathlib").PosixPath(body)  # a job that needs none does not import it
        if tag == "__array__":
            return _unpack_array(*body)
        if tag == _TYPE:
            return _TYPES[body]
        if tag == _EXCEPTION:
            return _exception(body[0])(*[unpack(item, resolve, depth + 1) for item in body[1]])
    except codec.CodecError:
        raise
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise codec.CodecError(f"bad {tag}: {error}") from None
    if tag in ("__ref__", "__fn__"):
        return resolve(tag, body)
    return codec.decode(data)


def _pack_array(value: Any) -> Any:
    """A numpy array by its contents, or a numpy scalar as Python's own number."""
    if not value.shape:
        return codec.encode(value.item())
    return {"__array__": [value.dtype.str, list(value.shape), value.tobytes().hex()]}


def _unpack_array(dtype: str, shape: list[int], content: str) -> Any:
    numpy = importlib.import_module("numpy")  # only where the sandbox offers it
    if numpy.dtype(dtype).kind not in _ARRAY_KINDS:
        raise TypeError(f"an array of {dtype}")
    return numpy.frombuffer(bytes.fromhex(content), dtype).reshape(shape).copy()


def _pack_pairs(pairs: Iterable[Any], wrap: Callable[[object], dict[str, Any]], depth: int) -> list[list[Any]]:
    return [[pack(key, wrap, depth + 1), pack(item, wrap, depth + 1)] for key, item in pairs]


def _unpack_pairs(body: Any, resolve: Callable[[str, Any], Any], depth: int) -> dict[Any, Any]:
    return {unpack(key, resolve, depth + 1): unpack(item, resolve, depth + 1) for key, item in body}


def _exception(name: str) -> type[Exception]:
    cls = _TYPES[name]
    if not issubclass(cls, Exception):
        raise TypeError(f"{name} is no exception")
    return cls

"""An object of the candidate's, as the tests hold it: every operation happens in the candidate's jail.

What the candidate says about an object of its own is believed only as far as it cannot fake a pass: such an object equals no
plain data. A subclass of a plain type (`plain`) stands for its data, which is fetched and compared here.
"""

import operator
from collections.abc import Callable, Iterator
from typing import Any, Protocol


class LinkLike(Protocol):
    def ask(self, operation: str, *args: object, **kwargs: object) -> Any: ...

    def is_named(self, cls: int) -> bool: ...


class Proxy:
    # Defines operators only; every other attribute is the candidate's, the docstring too.
    __doc__ = property(lambda self: self.__getattr__("__doc__"))
    __slots__ = ("_kestrel_class", "_kestrel_link", "_kestrel_number", "_kestrel_plain")
    _kestrel_link: LinkLike
    _kestrel_number: int
    _kestrel_class: int
    _kestrel_plain: bool

    def __init__(self, link: LinkLike, number: int, cls: int, *, plain: bool) -> None:
        for name, value in (("link", link), ("number", number), ("class", cls), ("plain", plain)):
            object.__setattr__(self, f"_kestrel_{name}", value)

    def __getattr__(self, name: str) -> Any:
        return self._kestrel_link.ask("getattr", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._kestrel_link.ask("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._kestrel_link.ask("delattr", self, name)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self._kestrel_link.ask("call", self, *args, **kwargs)

    def __eq__(self, other: object) -> bool:
        if is_proxy(other):
            return self._kestrel_link.ask("eq", self, other) is True
        return self._kestrel_plain and _data(self) == other

    def __ne__(self, other: object) -> bool:
        if is_proxy(other):
            return self._kestrel_link.ask("ne", self, other) is True
        return not self == other

    def __hash__(self) -> int:
        return hash(self._kestrel_link.ask("hash", self))

    def __contains__(self, item: object) -> bool:
        if is_proxy(item) or _is_named(self):
            return self._kestrel_link.ask("contains", self, item) is True
        return any(one == item for one in (_data(self) if self._kestrel_plain else self))

    def __bool__(self) -> bool:
        return self._kestrel_link.ask("bool", self) is True

    def __iter__(self) -> Iterator[Any]:
        found = self._kestrel_link.ask("iter", self)
        return found if is_proxy(found) else iter(found)

    def __next__(self) -> Any:
        return self._kestrel_link.ask("next", self)

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        return self._kestrel_link.ask("exit", self) is True and kind is None

    def __instancecheck__(self, instance: object) -> bool:
        return self._kestrel_link.ask("isinstance", instance, self) is True

    def __subclasscheck__(self, cls: object) -> bool:
        return self._kestrel_link.ask("issubclass", cls, self) is True

    def __repr__(self) -> str:
        return str(self._kestrel_link.ask("repr", self))

    def __str__(self) -> str:
        return str(self._kestrel_link.ask("str", self))

    def __format__(self, spec: str) -> str:
        return str(self._kestrel_link.ask("format", self, spec))


def is_proxy(value: object) -> bool:
    return type(value) is Proxy


def number_of(value: Any) -> int:
    return int(object.__getattribute__(value, "_kestrel_number"))


def _is_named(value: Proxy) -> bool:
    return value._kestrel_link.is_named(value._kestrel_class)


def _data(value: Proxy) -> Any:
    return value._kestrel_link.ask("plain", value)


def _binary(name: str, local: Callable[[Any, Any], Any], *, swapped: bool) -> Callable[[Proxy, object], Any]:
    def forward(self: Proxy, other: object) -> Any:
        if is_proxy(other) or _is_named(self):
            return self._kestrel_link.ask(name, other, self) if swapped else self._kestrel_link.ask(name, self, other)
        if self._kestrel_plain:
            return local(other, _data(self)) if swapped else local(_data(self), other)
        raise TypeError(f"an object of the candidate's does not go with a {type(other).__name__}")

    return forward


def _forward(name: str) -> Callable[..., Any]:
    return lambda self, *args: self._kestrel_link.ask(name, self, *args)


_BINARY = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "lshift", "rshift", "and", "or", "xor")
_UNARY = (
    "neg", "pos", "abs", "invert", "len", "int", "float", "complex", "index", "round", "reversed", "dir", "enter", "getitem",
    "setitem", "delitem",
)  # fmt: skip

for _name in _BINARY:
    _operation = _name + "_" if _name in ("and", "or") else _name
    _local = getattr(operator, _operation)
    setattr(Proxy, f"__{_name}__", _binary(_operation, _local, swapped=False))
    setattr(Proxy, f"__r{_name}__", _binary(_operation, _local, swapped=True))
for _name in ("lt", "le", "gt", "ge", "pow", "divmod"):
    _local = getattr(operator, _name) if hasattr(operator, _name) else divmod
    setattr(Proxy, f"__{_name}__", _binary(_name, _local, swapped=False))
for _name in _UNARY:
    setattr(Proxy, f"__{_name}__", _forward(_name))

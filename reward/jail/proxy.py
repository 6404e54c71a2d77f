"""The candidate's objects, as the tests hold them.

An instance of a subclass of plain data becomes a `DataCopy`: its real contents, copied, so that only Python's own methods answer
for it here. Every other object becomes a `Proxy`, and every operation on it happens in the candidate's jail. What a proxy answers
is believed only as far as it cannot fake a pass:

- it equals no plain data, unless the problem declares its class and the class holds such data;
- it has no length, order, items or arithmetic with plain data, unless the problem declares its class (`is_declared`);
- it has no method such as `startswith`, `index` or `union`, by which plain data says how it compares with what is expected,
  unless the tests visibly call it on its class;
- of the names between double underscores it has those in `SPECIAL`: what else looks such names up trusts what it finds.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol, Self

METHODS = frozenset(
    name
    for name in (*vars(str), *vars(frozenset), *vars(tuple), "is_integer", "equals", "all", "any")
    if not name.startswith("_") and name != "copy"
)
SPECIAL = frozenset(
    f"__{name}__"
    for name in (
        *("annotations", "bases", "code", "defaults", "dict", "doc", "func", "init", "kwdefaults", "members", "module", "mro"),
        *("name", "new", "post_init", "qualname", "self", "slots", "version", "wrapped"),
    )
)


class LinkLike(Protocol):
    def ask(self, operation: str, *args: object, **kwargs: object) -> Any: ...

    def is_declared(self, value: "Proxy", operation: str = "") -> bool: ...

    def is_named(self, value: "Proxy") -> bool: ...

    def iterate(self, value: "Proxy") -> Iterator[Any]: ...

    def leave_context(self, manager: "Proxy", error: BaseException | None) -> bool: ...

    async def leave_async_context(self, manager: "Proxy", error: BaseException | None) -> bool: ...


class DataCopy:
    """The first base of the class of every copy; the other base is the plain type."""

    kestrel_original: "Proxy"

    def __getattr__(self, name: str) -> Any:
        """An attribute that plain data has not: a field of a named tuple, a method that the candidate adds."""
        if name.startswith(("__", "kestrel")):
            raise AttributeError(name)
        return getattr(self.kestrel_original, name)  # which has no method of another plain type

    def __repr__(self) -> str:
        return repr(self.kestrel_original)

    def __str__(self) -> str:
        return str.__str__(self) if isinstance(self, str) else str(self.kestrel_original)


class Proxy:
    # Defines operators only; every other attribute is the candidate's, the docstring too.
    __doc__ = property(lambda self: self.__getattr__("__doc__"))
    __class__ = property(lambda self: self._kestrel_kind)
    __slots__ = ("_kestrel_classes", "_kestrel_holds_data", "_kestrel_kind", "_kestrel_link", "_kestrel_number")
    _kestrel_link: LinkLike
    _kestrel_number: int
    _kestrel_classes: frozenset[int]  # numbers of its class and that class's bases
    _kestrel_holds_data: bool  # its class is a subclass of plain data

    _kestrel_kind: type  # what `isinstance` and `inspect` take it for: a function, a generator, a class; otherwise a proxy

    def __init__(
        self, link: LinkLike, number: int, classes: frozenset[int], *, holds_data: bool = False, kind: type | None = None
    ) -> None:
        object.__setattr__(self, "_kestrel_link", link)
        object.__setattr__(self, "_kestrel_number", number)
        object.__setattr__(self, "_kestrel_classes", classes)
        object.__setattr__(self, "_kestrel_holds_data", holds_data)
        object.__setattr__(self, "_kestrel_kind", kind or Proxy)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in SPECIAL:
            raise AttributeError(name)
        found = self._kestrel_link.ask("getattr", self, name)
        if name in METHODS and is_proxy(found) and not self._kestrel_link.is_declared(self, name):
            raise AttributeError(
                f"{name} of an object on whose class the tests do not call it: the candidate must return plain data"
            )
        return found

    def __setattr__(self, name: str, value: object) -> None:
        self._kestrel_link.ask("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._kestrel_link.ask("delattr", self, name)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self._kestrel_link.ask("call", self, *args, **kwargs)

    def __eq__(self, other: object) -> bool:
        if is_proxy(other):
            return self._kestrel_link.ask("eq", self, other) is True
        return self._kestrel_holds_data and bool(self._kestrel_link.ask("plain", self) == other)

    def __ne__(self, other: object) -> bool:
        if is_proxy(other):
            return self._kestrel_link.ask("ne", self, other) is True
        return not self == other

    def __hash__(self) -> int:
        return hash(self._kestrel_link.ask("hash", self))

    def __contains__(self, item: object) -> bool:
        if is_proxy(item) or self._kestrel_link.is_declared(self, "contains"):
            return self._kestrel_link.ask("contains", self, item) is True
        return any(one == item for one in self)

    def __bool__(self) -> bool:
        return self._kestrel_link.ask("bool", self) is True

    def __iter__(self) -> Iterator[Any]:
        return self._kestrel_link.iterate(self)

    def __next__(self) -> Any:
        return self._kestrel_link.ask("next", self)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return self._kestrel_link.leave_context(self, error)

    def __aiter__(self) -> Self:
        return self._kestrel_link.ask("aiter", self)

    async def __anext__(self) -> Any:
        found = self._kestrel_link.ask("anext", self)
        return self._kestrel_link.ask("await", found) if is_proxy(found) else await found

    async def __aenter__(self) -> Any:
        return await self._kestrel_link.ask("aenter", self)

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return await self._kestrel_link.leave_async_context(self, error)

    def __copy__(self) -> Any:
        return self._kestrel_link.ask("copy", self)

    def __deepcopy__(self, memo: object) -> Any:
        return self._kestrel_link.ask("deepcopy", self)

    def __await__(self) -> Iterator[Any]:
        yield from ()
        return self._kestrel_link.ask("await", self)

    def __instancecheck__(self, instance: object) -> bool:
        return is_candidates(instance) and self._kestrel_link.ask("isinstance", instance, self) is True

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


def is_candidates(value: object) -> bool:
    """Whether a value is, or is copied from, an object of the candidate."""
    return is_proxy(value) or isinstance(value, DataCopy | BaseException)


def number_of(value: Any) -> int:
    return int(object.__getattribute__(value, "_kestrel_number"))


def copy_class(name: str, base: type) -> type[DataCopy]:
    """The class of the copies of one class of the candidate that holds plain data."""
    return type(name, (DataCopy, base), {})


def _with_plain_data(name: str, *, swapped: bool = False, in_place: bool = False) -> Callable[[Proxy, object], Any]:
    """An operator on two objects of the candidate, or on one whose class the problem declares."""

    def forward(self: Proxy, other: object, *more: object) -> Any:
        if not is_proxy(other):
            _check_declared(self, name)
        return self._kestrel_link.ask(asked, *((other, self) if swapped else (self, other)), *more)

    asked = f"i{name}".rstrip("_") if in_place else name
    return forward


def _alone(name: str) -> Callable[..., Any]:
    """An operator that makes plain data of an object."""

    def forward(self: Proxy, *args: object) -> Any:
        _check_declared(self, name)
        return self._kestrel_link.ask(name, self, *args)

    return forward


def _check_declared(value: Proxy, operation: str) -> None:
    if not value._kestrel_link.is_declared(value, operation):
        raise TypeError(
            f"{operation} of an object to whose class the tests do not apply it: the candidate must return plain data"
        )


def _forward(name: str) -> Callable[..., Any]:
    return lambda self, *args: self._kestrel_link.ask(name, self, *args)


_BINARY = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "divmod", "lshift", "rshift", "and", "or", "xor")

for _name in _BINARY:
    _operation = _name + "_" if _name in ("and", "or") else _name
    setattr(Proxy, f"__{_name}__", _with_plain_data(_operation))
    setattr(Proxy, f"__r{_name}__", _with_plain_data(_operation, swapped=True))
    if _name != "divmod":
        setattr(Proxy, f"__i{_name}__", _with_plain_data(_operation, in_place=True))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Proxy, f"__{_name}__", _with_plain_data(_name))
for _name in ("neg", "pos", "abs", "invert", "len", "int", "float", "complex", "index", "round", "reversed", "getitem"):
    setattr(Proxy, f"__{_name}__", _alone(_name))
for _name in ("dir", "enter", "setitem", "delitem"):
    setattr(Proxy, f"__{_name}__", _forward(_name))

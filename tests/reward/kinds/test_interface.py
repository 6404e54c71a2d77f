"""Which names of the candidate test code means, and whose operators count."""

import builtins
import keyword

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward.kinds.interface import MODULES, Interface, read_interface

NAMES = st.from_regex(r"[a-z]{3,8}", fullmatch=True).filter(
    lambda name: not keyword.iskeyword(name) and not hasattr(builtins, name) and name not in MODULES
)


@given(st.sampled_from(sorted(vars(builtins))))
def test_a_builtin_is_never_the_candidates(name: str) -> None:
    if name.isidentifier() and not keyword.iskeyword(name):
        assert read_interface("", f"assert {name}(f(1)) == {name}(2)", "f").names == {"f"}


@given(st.sampled_from(sorted(name for name in MODULES if not hasattr(builtins, name) and not name.startswith("_"))))
def test_a_module_is_never_the_candidates(name: str) -> None:
    found = read_interface("", f"assert {name}.x == f(1)", "f")
    assert (found.names, found.modules) == ({"f"}, {name})


@given(NAMES)
@pytest.mark.parametrize(
    "binding",
    [
        "{} = 1",
        "import {}",
        "def {}(): pass",
        "class {}: pass",
        "for {} in []: pass",
        "with g as {}: pass",
        "from a import b as {}",
    ],
)
def test_a_name_that_the_tests_bind_is_theirs(binding: str, name: str) -> None:
    code = f"def g(): pass\n{binding.format(name)}\nassert f({name})"
    assert read_interface("", code, "f").names == {"f"}
    assert read_interface(binding.format(name), f"def g(): pass\nassert f({name})", "f").names - {"g"} == {"f"}


@given(NAMES)
@pytest.mark.parametrize(
    "use", ["def check({0}):\n    assert {0}(1)", "import math\nassert math.{}", "x = lambda {0}: {0}", "[{0} for {0} in ()]"]
)
def test_a_parameter_or_an_attribute_names_nothing_of_the_candidates(use: str, name: str) -> None:
    assert name not in read_interface("", use.format(name), "f").names


@given(NAMES)
def test_a_name_that_nothing_else_defines_is_the_candidates(name: str) -> None:
    assert name in read_interface("", f"def test_x():\n    assert {name}(1) == 2", "").names
    assert name in read_interface(f"root = {name}(1)", "assert root", "").names
    assert name in read_interface("", f"from solution import {name}\nassert {name}(1) == 2", "").names


@pytest.mark.parametrize(
    "code",
    [
        "assert Vector(1) + 2 == Vector(3)",
        "v = Vector(1)\nassert len(v) == 2",
        "a, b = Vector(1), 2\nassert b in a",
        "with Vector(1) as v:\n    assert v[0]",
        "for v in [Vector(1)]:\n    assert v < 3",
        "class T:\n    def set_up(self): self.v = Vector(1)\n    def test(self): self.assertIn(1, self.v)",
        "v = Vector(1)\nw = v * 2\nassert abs(w) == 3",
        "v = Vector(1)\nv += 2",
    ],
)
def test_operators_count_for_a_class_that_the_tests_apply_them_to(code: str) -> None:
    assert with_operators(read_interface("", code, "")) == {"Vector"}


@pytest.mark.parametrize(
    "code",
    [
        "assert abs(Vector(1).length() - 2) < 1",
        "v = Vector(1)\nassert v.length() - 2 < 1 and v == 3 and not v",
        "assert abs(f(2) - 3.5) < 1 and isinstance(f(2), Vector)",
        "assert len(Vector.both()) == 2",
    ],
)
def test_operators_on_what_a_method_returns_do_not_count(code: str) -> None:
    assert with_operators(read_interface("", code, "f")) == set()


def with_operators(found: Interface) -> set[str]:
    return {name for name, _ in found.operators}


@pytest.mark.parametrize(
    ("code", "operations"),
    [
        ("s = S()\nassert len(s) == 4 and abs(s.mean() - 2.5) < 1", {"len"}),
        ("v = S() + S()\nassert v == S() and abs(v.length() - 5) < 1", set()),
        ("v = S() * 2\nassert v[0] == 3 and 4 in v", {"mul", "getitem", "contains"}),
        ("v = S()\nv += 1\nassert -v == 2 and int(v) == 3", {"add", "neg", "int"}),
        ("assert S() < S() and 1 < S()", {"lt", "le", "gt", "ge"}),
    ],
)
def test_a_class_has_the_operators_on_plain_data_that_the_tests_use_and_no_others(code: str, operations: set[str]) -> None:
    assert {operation for _, operation in read_interface("", code, "").operators} == operations


def test_the_entry_point_is_a_class_only_if_it_has_attributes() -> None:
    assert with_operators(read_interface("", "assert abs(F(2) - 3.5) < 1", "F")) == set()
    assert with_operators(read_interface("", "assert abs(F(2) - F(1)) < 1 and F(2).x == 2", "F")) == {"F"}


def test_examples_of_doctest_are_read_too() -> None:
    assert "helper" in read_interface("", "def test_x():\n    run('''\n    >>> helper(1)\n    2\n    ''')", "f").names


@pytest.mark.parametrize(
    ("code", "looked_at"),
    [
        ("xs = [2, 1]\nf(xs)\nassert xs == [1, 2]", True),
        ("xs = [2, 1]\nf(xs)\nassert [1, 2] == xs", True),
        ("xs, ys = [2, 1], [1, 2]\nf(xs)\nassert xs == ys", True),
        ("xs, want = [2, 1], [1]\nk = f(xs)\nassert k == 1 and xs[:k] == want[:k]", True),
        ("xs = {}\nassert f(xs) == 1\nassert xs['a'] == 1 and 'a' in xs", True),
        ("xs = [2, 1]\nassert f(xs) == sorted(xs)", False),
        ("xs = [2, 1]\nassert len(f(xs)) == 2\nassert f(xs) == sorted(xs)", False),
        ("xs = [2, 1]\nassert xs == [2, 1]\nassert f(xs) == sorted(xs)", False),
        ("xs = [2, 1]\ngot = f(xs)\nwant = sorted(xs)\nassert xs == [2, 1] and got == want", False),
    ],
)
def test_an_argument_is_looked_at_where_it_is_compared_with_what_does_not_depend_on_it(code: str, looked_at: bool) -> None:
    assert (("<module>", "xs") in read_interface("", code, "f").in_place) is looked_at
    body = "class T:\n    def test_a(self):\n" + "".join(f"        {line}\n" for line in code.split("\n"))
    assert (("test_a", "xs") in read_interface("", body, "f").in_place) is looked_at


@pytest.mark.parametrize(
    ("code", "counts"),
    [
        ("v = V(1)\nassert v * 2", True),
        ("v = 3\nv = V(1)\nassert v * 2", True),
        ("v = V(1)\nv = v + v\nassert v * 2", True),
        ("v = V(1)\nv = v.length()\nassert v * 2", False),
        ("for v in [V(1), 3]:\n    assert v * 2", True),
        ("with V(1) as v: assert v * 2", True),
        ("def test():\n    assert v * 2\ndef use():\n    global v\n    v = V(1)", True),
    ],
)
def test_operators_count_for_what_a_variable_holds_where_it_is_used(code: str, counts: bool) -> None:
    for setup in ("", "import math\n\nx = 1\n"):
        assert (with_operators(read_interface(setup, code + "\nV(1).x", "V")) == {"V"}) is counts

"""Test code as people write it, with pytest, unittest and the library: honest code passes, what knows no answer fails."""

import pytest

from reward.sandbox.sandbox import Sandbox
from reward.task import parse_task
from tests.reward.graded import grade


def passes(sandbox: Sandbox, tests: str, code: str, entry_point: str = "f", **limits: float) -> bool:
    task = parse_task({"kind": "asserts", "tests": [tests], "entry_point": entry_point, **limits})
    return grade(task, f"```python\n{code}\n```", sandbox=sandbox).reward == 1.0


@pytest.mark.parametrize(
    ("expected", "code"),
    [
        ("FileExistsError", "raise FileExistsError('x')"),
        ("ConnectionError", "raise ConnectionResetError('x')"),
        ("UnicodeDecodeError", "b'\\xff'.decode()"),
        ("json.JSONDecodeError", "json.loads('{')"),
        ("decimal.InvalidOperation", "decimal.Decimal('x')"),
        ("dataclasses.FrozenInstanceError", "dataclasses.make_dataclass('A', ['x'], frozen=True)(1).x = 2"),
        ("queue.Empty", "queue.Queue().get_nowait()"),
        ("ValueError", "json.loads('{')"),
    ],
)
def test_an_exception_of_python_or_of_its_library_is_the_one_that_the_tests_expect(
    sandbox: Sandbox, expected: str, code: str
) -> None:
    imports = "import dataclasses, decimal, json, queue\n"
    tests = f"import pytest\n{imports}def test_f():\n    with pytest.raises({expected}):\n        f()"
    assert passes(sandbox, tests, f"{imports}def f():\n    {code}")
    assert not passes(sandbox, tests, "def f():\n    raise NotImplementedError")


def test_a_candidate_cannot_skip_a_test(sandbox: Sandbox) -> None:
    tests = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): pass\n    def test_b(self): assert f() == 2"
    assert not passes(sandbox, tests, "import unittest\ndef f(): raise unittest.SkipTest('x')")
    assert not passes(sandbox, tests, "import unittest\nclass E(unittest.SkipTest): pass\ndef f(): raise E")


def test_marks_of_pytest_leave_a_test_as_it_is(sandbox: Sandbox) -> None:
    tests = (
        "import pytest\n@pytest.mark.asyncio\nasync def test_a():\n    assert await f(1) == 2\n"
        "@pytest.mark.slow\n@pytest.mark.timeout(5)\n@pytest.mark.parametrize('a, b', [pytest.param(1, 2, id='x'), (2, 3)])\n"
        "async def test_b(a, b):\n    assert await f(a) == b"
    )
    assert passes(sandbox, tests, "async def f(x): return x + 1")
    assert not passes(sandbox, tests, "async def f(x): return 2")


def test_tests_may_look_at_an_argument_after_a_call_that_returns_a_value(sandbox: Sandbox) -> None:
    tests = "def check(candidate):\n    nums = [3, 2, 2, 3]\n    k = candidate(nums, 3)\n    assert k == 2 and nums[:k] == [2, 2]"
    assert passes(sandbox, tests, "def f(nums, v):\n    nums[:] = [n for n in nums if n != v]\n    return len(nums)")
    assert not passes(sandbox, tests, "def f(nums, v):\n    return 2")


def test_a_literal_somewhere_in_the_tests_lets_no_candidate_empty_their_arguments(sandbox: Sandbox) -> None:
    tests = (
        "def check(candidate):\n    got = candidate([])\n    assert isinstance(got, list)\n    assert got == []\n"
        "    xs = [3, 1]\n    assert candidate(xs) == sorted(xs)"
    )
    assert passes(sandbox, tests, "def f(xs): return sorted(xs)")
    assert not passes(sandbox, tests, "def f(xs):\n    xs.clear()\n    return []")


def test_operators_count_where_the_class_is_called_by_the_parameter_of_check(sandbox: Sandbox) -> None:
    tests = "def check(candidate):\n    s = candidate()\n    s.push(1)\n    assert len(s) == 1\n    assert 1 in s"
    code = (
        "class Stack:\n    def __init__(self): self.i = []\n    def push(self, x): self.i.append(x)\n"
        "    def __len__(self): return len(self.i)\n    def __contains__(self, x): return x in self.i"
    )
    assert passes(sandbox, tests, code, "Stack")
    assert passes(sandbox, tests.replace("candidate()", "Stack()"), code, "Stack")
    assert not passes(sandbox, tests, code.replace("append", "index"), "Stack")


@pytest.mark.parametrize(
    ("tests", "honest", "fake"),
    [
        ("Counter(f([1, 1])) == {1: 2}", "from collections import Counter\ndef f(x): return x", "def Counter(x): return {1: 2}"),
        ("isclose(f([0.1, 0.2]), 0.3)", "def f(x): return sum(x)", "def isclose(*_): return True"),
        ("f([2]) == sqrt(4)", "def f(x): return 2.0", "def sqrt(x): return 5"),
    ],
)
def test_what_tests_use_of_the_library_without_an_import_is_the_librarys(
    sandbox: Sandbox, tests: str, honest: str, fake: str
) -> None:
    for entry_point in ("f", ""):
        assert passes(sandbox, f"assert bool({tests})", honest, entry_point)
        assert not passes(sandbox, f"assert bool({tests})", f"{fake}\ndef f(x): return 5", entry_point)
    assert passes(sandbox, "assert isclose(1, 1)", "def isclose(a, b): return a == b", "")


@pytest.mark.parametrize("test", ["startswith('q')", "isdigit()", "issubset({1})", "isdisjoint([1])", "is_integer()"])
def test_an_object_that_says_yes_as_plain_data_would_is_not_believed(sandbox: Sandbox, test: str) -> None:
    code = "class Yes:\n    def __getattr__(self, name): return lambda *a: True\ndef f(x): return Yes()"
    assert not passes(sandbox, f"def check(candidate):\n    assert candidate(1).{test}", code)


def test_a_class_that_the_tests_name_may_have_such_methods(sandbox: Sandbox) -> None:
    code = "class Trie:\n    def __init__(self, words): self.words = words\n"
    code += "    def startswith(self, prefix): return any(word.startswith(prefix) for word in self.words)"
    assert passes(sandbox, "t = Trie(['ab'])\nassert t.startswith('a') and not t.startswith('b')", code, "Trie")


def test_a_decorator_keeps_the_name_and_the_docstring_of_a_function_of_the_tests(sandbox: Sandbox) -> None:
    tests = "@f\ndef g(a):\n    'doc'\n    return a\nassert g(2) == 2\nassert g.__name__ == 'g' and g.__doc__ == 'doc'"
    code = "import functools\ndef f(fn):\n    @functools.wraps(fn)\n    def inner(*args): return fn(*args)\n    return inner"
    assert passes(sandbox, tests, code)
    assert not passes(sandbox, tests, "def f(fn): return lambda *args: fn(*args)")


@pytest.mark.parametrize(
    "tests",
    [
        "import io\nfrom contextlib import redirect_stdout\nwith redirect_stdout(io.StringIO()) as out:\n    f(3)\n"
        "assert out.getvalue() == '3\\n'",
        "from io import StringIO\nfrom unittest.mock import patch\n"
        "def test_f():\n    with patch('sys.stdout', new_callable=StringIO) as o:\n        f(2)\n        f(3)\n"
        "    assert o.getvalue() == '2\\n3\\n'",
    ],
)
def test_tests_may_look_at_what_a_call_prints(sandbox: Sandbox, tests: str) -> None:
    assert passes(sandbox, tests, "print('loaded')\ndef f(x): print(x)")
    assert passes(sandbox, tests, "import sys\ndef f(x): sys.stdout.buffer.write(b'%d\\n' % x)")
    assert not passes(sandbox, tests, "def f(x): print(x, x)")
    assert not passes(sandbox, tests, "def f(x): return x")


def test_tests_may_ask_for_the_class_of_an_object(sandbox: Sandbox) -> None:
    tests = (
        "c = f('circle')\nassert type(c) is Circle and type(c) == Circle and c.__class__ is Circle\n"
        "assert type(c).__name__ == 'Circle' and c.__class__.__name__ == 'Circle'\nassert type(f) is not Circle\n"
        "assert type(c) is not dict and type(f('name')) is str"
    )
    code = "class Circle: pass\ndef f(kind): return Circle() if kind == 'circle' else kind"
    assert passes(sandbox, tests, code)
    assert not passes(sandbox, tests, code.replace("Circle()", "object()"))
    assert not passes(sandbox, "assert type(f(1)) is dict", "class D:\n    __class__ = dict\ndef f(x): return D()")


def test_tests_may_give_a_file_or_a_coroutine(sandbox: Sandbox) -> None:
    assert passes(sandbox, "import io\nout = io.StringIO()\nf(out)\nassert out.getvalue() == 'x'", "def f(out): out.write('x')")
    assert not passes(sandbox, "import io\nout = io.StringIO()\nf(out)\nassert out.getvalue() == 'x'", "def f(out): pass")
    assert passes(
        sandbox, "import io\nassert f(io.BytesIO(b'abc')) == 3", "def f(file):\n    with file:\n        return len(file.read())"
    )
    assert passes(
        sandbox, "import io\nassert f(io.StringIO('a\\nb')) == ['a', 'b']", "def f(file): return [l.strip() for l in file]"
    )
    tests = "import asyncio\nasync def g(x):\n    await asyncio.sleep(0.001)\n    return 2 * x\nassert asyncio.run(f(g)) == 4"
    assert passes(sandbox, tests, "async def f(g): return await g(2)")
    assert not passes(sandbox, tests, "async def f(g): return 3")


def test_tests_may_copy_an_object(sandbox: Sandbox) -> None:
    tests = "import copy\na = A([1])\nb = copy.deepcopy(a)\nb.add(2)\nassert a.items == [1] and b.items == [1, 2]"
    code = "class A:\n    def __init__(self, items): self.items = items\n    def add(self, x): self.items.append(x)"
    assert passes(sandbox, tests, code, "A")


def test_an_asynchronous_context_manager_may_suppress_what_the_tests_raise_on_purpose(sandbox: Sandbox) -> None:
    code = (
        "class Y:\n    async def __aenter__(self): return 1\n    async def __aexit__(self, *_): return True\ndef f(x): return Y()"
    )
    tests = "import asyncio\nasync def test_a():\n    async with f(2) as r:\n        "
    assert passes(sandbox, f"{tests}raise ValueError", code)
    assert not passes(sandbox, f"{tests}assert r == 7919", code)


def test_a_context_manager_suppresses_no_exception_that_depends_on_a_condition(sandbox: Sandbox) -> None:
    code = "class Y:\n    def __enter__(self): return 1\n    def __exit__(self, *error): return True\ndef f(x): return Y()"
    assert not passes(sandbox, "with f(2) as r:\n    if r != 7919:\n        raise ValueError\nassert True", code)
    assert passes(sandbox, "if f:\n    with f(2) as r:\n        raise ValueError\nassert True", code)


@pytest.mark.parametrize("kind", ["class L(list): pass", "from array import array\ndef L(xs): return array('i', xs)"])
def test_a_call_that_returns_a_value_empties_no_container_of_the_tests(sandbox: Sandbox, kind: str) -> None:
    tests = f"{kind}\nxs = L([3, 1])\nassert f(xs) == sorted(xs)\nassert len(xs)"
    assert passes(sandbox, tests, "def f(xs): return sorted(xs)")
    fake = "def f(xs):\n    while len(xs): xs.pop()\n    return []"
    assert not passes(sandbox, tests.replace("\nassert len(xs)", ""), fake)
    assert not passes(sandbox, tests.replace("sorted(xs)", "list(xs)"), fake)


@pytest.mark.slow
def test_nothing_but_cpu_time_bounds_how_many_calls_tests_make(sandbox: Sandbox) -> None:
    tests = "c = Cache()\nfor i in range(60_000):\n    c.put(i)\nassert c.last == 59_999"
    code = "class Cache:\n    def put(self, x): self.last = x"
    assert passes(sandbox, tests, code, "Cache", cpu_limit_s=100.0)


NODES = """
class Node:
    def __init__(self, x):
        self.val, self.next = x, None
def chain(n, back=None):
    nodes = [Node(i) for i in range(n)]
    for a, b in zip(nodes, nodes[1:]):
        a.next = b
    if back is not None:
        nodes[-1].next = nodes[back]
    return nodes[0]
"""


@pytest.mark.parametrize("is_same", ["slow is fast", "slow == fast", "id(slow) == id(fast)"])
def test_object_of_the_tests_is_the_same_object_for_the_code_wherever_it_meets_it(sandbox: Sandbox, is_same: str) -> None:
    tests = NODES + "assert f(chain(5, 2)) and f(chain(1, 0)) and not f(chain(5)) and not f(chain(1))"
    code = (
        "def f(head):\n    slow = fast = head\n    while fast and fast.next:\n        slow, fast = slow.next, fast.next.next\n"
        f"        if {is_same}: return True\n    return False"
    )
    assert passes(sandbox, tests, code)


def test_code_may_walk_over_many_objects_of_the_tests(sandbox: Sandbox) -> None:
    code = "def f(head):\n    n = 0\n    while head: n, head = n + 1, head.next\n    return n"
    assert passes(sandbox, NODES + "assert f(chain(20_000)) == 20_000", code, cpu_limit_s=100.0)


def test_a_variable_that_is_used_again_for_a_number_has_no_operators_of_a_class(sandbox: Sandbox) -> None:
    tests = "result = Circle(2)\nassert result.r == 2\nresult = result.area()\nassert abs(result - 12.566) < 0.01"
    code = (
        "class Circle:\n    def __init__(self, r): self.r = r\n    def area(self): return {}\n    def __sub__(self, x): return 0"
    )
    for entry_point in ("Circle", ""):
        assert passes(sandbox, tests, code.format("3.14159 * self.r ** 2"), entry_point)
        assert not passes(sandbox, tests, code.format("self"), entry_point)


IN_MAIN = "def main():\n    assert f(2) == 4\n"
CASE = "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(2), 4)\n"


@pytest.mark.parametrize(
    "tests",
    [
        IN_MAIN + "main()",
        IN_MAIN + "if __name__ == '__main__':\n    main()",
        "if __name__ == '__main__':\n    assert f(2) == 4",
        CASE + "unittest.main()",
        CASE + "if __name__ == '__main__':\n    unittest.main(verbosity=2)",
        "import pytest\ndef test_f(): assert f(2) == 4\nif __name__ == '__main__':\n    pytest.main([__file__])",
    ],
)
def test_tests_that_start_themselves_run_and_decide(sandbox: Sandbox, tests: str) -> None:
    assert passes(sandbox, tests, "def f(x): return 2 * x")
    assert not passes(sandbox, tests, "def f(x): return 7")


@pytest.mark.parametrize("tests", ["import solution\nassert solution.f(2) == 4", "import solution as s\nassert s.f(2) == 4"])
def test_tests_may_import_the_module_of_the_solution(sandbox: Sandbox, tests: str) -> None:
    assert passes(sandbox, tests, "def f(x): return 2 * x", "")
    assert not passes(sandbox, tests, "def f(x): return 7", "")


def test_code_may_ask_a_mock_how_often_it_was_called_and_may_not_say_it(sandbox: Sandbox) -> None:
    tests = "from unittest.mock import Mock\nm = Mock()\nassert f(m) == 1\nassert m.call_count == 1"
    assert passes(sandbox, tests, "def f(m):\n    m()\n    return m.call_count")
    assert not passes(sandbox, tests, "def f(m):\n    m.call_count = 1\n    return 1")


@pytest.mark.parametrize(
    "use", ["dict(d) == {'a': 1}", "{**d} == {'a': 1}", "list(d.keys()) == ['a']", "sorted(d.items()) == [('a', 1)]"]
)
@pytest.mark.parametrize(
    "code",
    [
        "from collections import UserDict\nclass D(UserDict): pass",
        "from collections.abc import Mapping\nclass D(Mapping):\n    def __init__(self, d): self.d = d\n"
        "    def __getitem__(self, k): return self.d[k]\n    def __iter__(self): yield from self.d\n"
        "    def __len__(self): return 1",
    ],
)
def test_mapping_of_the_candidate_can_be_read_like_a_dict(sandbox: Sandbox, use: str, code: str) -> None:
    tests = f"d = D({{'a': 1}})\nassert {use}"
    assert passes(sandbox, tests, code, "")
    assert not passes(
        sandbox, tests, code.replace("D(", "E(") + "\nclass D(E):\n    def __init__(self, d): super().__init__({'b': 2})", ""
    )


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        ("deque([1, 2, 3])", "deque([3, 2, 1])", "x.reverse()"),
        ("deque([1, 2])", "deque([2])", "x.popleft()"),
        ("Counter('aab')", "Counter('ab')", "x.subtract('a')"),
        ("OrderedDict(a=1, b=2)", "OrderedDict(b=2, a=1)", "x.move_to_end('a')"),
        ("defaultdict(int, a=1)", "defaultdict(int, a=2)", "x['a'] += 1"),
        ("bytearray(b'ab')", "bytearray(b'ba')", "x.reverse()"),
        ("[1, 2]", "[2, 1]", "x.reverse()"),
        ("{1, 2}", "{2}", "x.discard(1)"),
    ],
)
def test_what_a_call_changes_in_place_is_changed_for_the_tests(sandbox: Sandbox, before: str, after: str, code: str) -> None:
    tests = f"from collections import *\nx = {before}\nassert f(x) is None\nassert x == {after} and list(x) == list({after})"
    assert passes(sandbox, tests, f"def f(x):\n    {code}")
    assert not passes(sandbox, tests, "def f(x):\n    pass")


def test_text_of_an_exception_is_what_its_own_class_makes_of_it(sandbox: Sandbox) -> None:
    tests = (
        "import pytest\n"
        "with pytest.raises(NoFunds, match='lacks 5') as caught: pay(5)\n"
        "assert str(caught.value) == 'lacks 5' and caught.value.amount == 5 and f'{caught.value}' == 'lacks 5'"
    )
    code = (
        "class NoFunds(Exception):\n    def __init__(self, amount):\n        self.amount = amount\n"
        "    def __str__(self): return f'lacks {self.amount}'\ndef pay(x): raise NoFunds(x)"
    )
    assert passes(sandbox, tests, code, "pay")
    assert not passes(sandbox, tests, code.replace("lacks", "has"), "pay")

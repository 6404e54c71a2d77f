"""Assertions in a jail of their own: honest code of every sort passes, what fakes a pass does not."""
# ruff: noqa: E501

from typing import Any

import pytest

from reward.sandbox.sandbox import Sandbox
from reward.task import TaskError, parse_task
from rollout.ledger.records import Verdict
from tests.reward.graded import grade

VECTOR = """
class Vector:
    def __init__(self, x, y): self.x, self.y = x, y
    def __add__(self, o): return Vector(self.x + o.x, self.y + o.y)
    def __mul__(self, k): return Vector(self.x * k, self.y * k)
    __rmul__ = __mul__
    def __eq__(self, o): return isinstance(o, Vector) and (self.x, self.y) == (o.x, o.y)
    def __hash__(self): return hash((self.x, self.y))
    def __lt__(self, o): return (self.x, self.y) < (o.x, o.y)
    def __len__(self): return 2
    def __getitem__(self, i): return (self.x, self.y)[i]
    def __iter__(self): return iter((self.x, self.y))
    def __repr__(self): return f"Vector({self.x}, {self.y})"
    def __contains__(self, v): return v in (self.x, self.y)
    def __abs__(self): return (self.x ** 2 + self.y ** 2) ** 0.5
    def __bool__(self): return bool(self.x or self.y)
    def __call__(self, k): return self * k
"""

HONEST: dict[str, tuple[str, str]] = {
    "plain": ("def f(x): return x * x", "assert f(3) == 9\nassert f(-2) == 4"),
    "humaneval check": ("def f(x): return x * x", "def check(candidate):\n    assert candidate(3) == 9\n    assert abs(candidate(0.1) - 0.01) < 1e-9"),
    "all and map": ("def f(x): return x * x", "assert all(map(lambda x: f(x) == x * x, range(5)))\nassert sum(map(f, [1, 2])) == 5"),
    "rich values": (
        "from decimal import Decimal\nfrom fractions import Fraction\nimport datetime\nfrom collections import Counter, deque\n"
        "def f(x): return [Decimal('1.5'), Fraction(1, 3), datetime.date(2020, 1, 2), Counter('aab'), deque([1]), range(3), (1, {2})]",
        "from decimal import Decimal\nfrom fractions import Fraction\nimport datetime\nfrom collections import deque\n"
        "assert f(0) == [Decimal('1.5'), Fraction(1, 3), datetime.date(2020, 1, 2), {'a': 2, 'b': 1}, deque([1]), range(3), (1, {2})]",
    ),
    "named tuple": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(x): return P(x, x + 1)",
        "assert f(1) == (1, 2)\nassert f(1).y == 2\nx, y = f(3)\nassert (x, y) == (3, 4)",
    ),
    "enum": ("from enum import IntEnum\nclass C(IntEnum):\n    A = 3\ndef f(x): return C.A", "assert f(0) == 3\nassert f(0) + 1 == 4\nassert C.A.name == 'A'"),
    "operators": (
        VECTOR,
        "v = Vector(1, 2)\nassert v + Vector(3, 4) == Vector(4, 6)\nassert v * 2 == Vector(2, 4) and 2 * v == Vector(2, 4)\nassert v < Vector(2, 0)\n"
        "assert len(v) == 2 and v[1] == 2 and list(v) == [1, 2]\nassert repr(v) == 'Vector(1, 2)' and f'{v}' == str(v)\nassert 2 in v and 5 not in v\n"
        "assert abs(Vector(3, 4)) == 5.0\nassert not Vector(0, 0)\nassert v(3) == Vector(3, 6)\nassert isinstance(v, Vector)\n"
        "assert len({v, Vector(1, 2)}) == 1\nassert sorted([Vector(2, 0), v])[0] is v\nassert v != Vector(0, 0)",
    ),
    "attributes": (
        "class Account:\n    rate = 0.5\n    def __init__(self): self.balance = 0\n    def pay(self, n, *, tip=0): self.balance += n + tip\n"
        "    @property\n    def double(self): return 2 * self.balance\n    @classmethod\n    def rich(cls):\n        a = cls()\n        a.balance = 100\n        return a",
        "a = Account()\na.pay(5, tip=1)\nassert a.balance == 6 and a.double == 12\na.balance = 1\nassert a.double == 2\nassert Account.rich().balance == 100\n"
        "assert hasattr(a, 'pay') and not hasattr(a, 'nothing')\nassert Account.rate == 0.5",
    ),
    "own exceptions": (
        "class Empty(LookupError):\n    def __init__(self, m, code): super().__init__(m); self.code = code\ndef f(x):\n    raise Empty('no', 7)",
        "try:\n    f(1)\nexcept Empty as e:\n    assert e.code == 7 and str(e) == \"('no', 7)\" or e.args\nelse:\n    assert False\n"
        "try:\n    f(1)\nexcept LookupError:\n    pass",
    ),
    "builtin exceptions": (
        "def f(x):\n    if x < 0: raise ValueError('negative')\n    return 1 / x",
        "import pytest\nwith pytest.raises(ValueError, match='neg'):\n    f(-1)\nwith pytest.raises(ZeroDivisionError):\n    f(0)",
    ),
    "callbacks": (
        "def f(g, xs): return [g(x) for x in xs]",
        "seen = []\ndef g(x):\n    seen.append(x)\n    return x + 1\nassert f(g, [1, 2]) == [2, 3]\nassert seen == [1, 2]\nassert f(lambda x: x, [5]) == [5]",
    ),
    "an exception through a callback": (
        "def f(g):\n    try:\n        return g()\n    finally:\n        pass",
        "class Mine(Exception): pass\ndef g(): raise Mine('x')\ntry:\n    f(g)\nexcept Mine as e:\n    assert e.args == ('x',)\nelse:\n    assert False",
    ),
    "a decorator": (
        "import functools\ndef f(g):\n    @functools.wraps(g) if hasattr(g, '__name__') else (lambda w: w)\n    def w(*a): return g(*a) * 2\n    return w",
        "@f\ndef g(x): return x + 1\nassert g(3) == 8",
    ),
    "changes in place": (
        "def f(xs, d, s):\n    xs.sort()\n    d['n'] = len(xs)\n    s.discard(1)",
        "xs, d, s = [3, 1, 2], {}, {1, 2}\nassert f(xs, d, s) is None\nassert xs == [1, 2, 3] and d == {'n': 3} and s == {2}",
    ),
    "changes in place, and a result": (
        "def f(xs):\n    xs.sort()\n    return xs.pop()", "xs = [3, 1, 2]\nassert f(xs) == 3\nassert xs == [1, 2]\nys = [2, 1]\nf(ys)\nassert ys == [1]",
    ),
    "a changed node": (
        "def f(n):\n    n.val += 1\n    return n", "class N:\n    def __init__(s, v): s.val = v\nn = N(8)\nassert f(n) is n and n.val == 9",
    ),
    "generators": (
        "def f(n):\n    for i in range(n):\n        yield i",
        "assert list(f(3)) == [0, 1, 2]\ng = f(2)\nassert next(g) == 0 and next(g) == 1\ntry:\n    next(g)\nexcept StopIteration:\n    pass\nelse:\n    assert False",
    ),
    "context manager": (
        "class M:\n    log = []\n    def __enter__(self): self.log.append('in'); return self\n    def __exit__(self, *a): self.log.append('out')",
        "with M() as m:\n    assert m.log == ['in']\nassert m.log == ['in', 'out']",
    ),
    "unittest": (
        "def f(x): return x * x",
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(3), 9)\n    def test_b(self):\n        with self.assertRaises(TypeError): f('a')\n"
        "if __name__ == '__main__':\n    unittest.main()",
    ),
    "pytest": (
        "def f(x): return x / 3",
        "import pytest\n@pytest.mark.parametrize('x, y', [(3, 1), (6, 2)])\ndef test_f(x, y):\n    assert f(x) == y\ndef test_near():\n    assert f(1) == pytest.approx(0.3333333333)",
    ),
    "pytest fixtures": (
        "class Account:\n    def __init__(self): self.balance = 0\n    def pay(self, n): self.balance += n",
        "import pytest\n@pytest.fixture\ndef account(): return Account()\n@pytest.fixture()\ndef paid(account):\n    account.pay(5)\n    yield account\n"
        "@pytest.mark.parametrize('n', [1, 2])\ndef test_a(paid, n):\n    paid.pay(n)\n    assert paid.balance == 5 + n",
    ),
    "pytest classes": (
        "def f(x): return x * x", "class TestF:\n    def setup_method(self): self.x = 3\n    def test_a(self): assert f(self.x) == 9\n    def test_b(self):\n        self.x = 2\n        assert f(2) == 4",
    ),
    "prints": ("def f(x):\n    print('{\"done\": {\"passed\": false}}')\n    return x", "print('hello')\nassert f(1) == 1"),
    "constants": ("LIMIT = 5\ndef f(x): return min(x, LIMIT)", "assert f(9) == LIMIT == 5"),
    "recursion": ("def f(n): return 0 if n == 0 else 1 + f(n - 1)", "assert f(900) == 900"),
    "iterators as arguments": (
        "from itertools import islice\ndef f(xs): return list(islice(xs, 3))",
        "assert f(iter([1, 2, 3, 4])) == [1, 2, 3]\nassert f(x * x for x in range(9)) == [0, 1, 4]\nassert f(map(str, [1])) == ['1']\n"
        "assert f({'a': 1}.keys()) == ['a']\ng = iter('abcd')\nassert f(g) == ['a', 'b', 'c'] and next(g) == 'd'",
    ),
    "a generator that the candidate drives": (
        "def f(g):\n    def start(*a):\n        it = g(*a)\n        next(it)\n        return it\n    return start",
        "@f\ndef numbers():\n    yield 1\n    yield 2\nassert next(numbers()) == 2",
    ),
    "types and exceptions as arguments": (
        "def f(kind, x): return kind(x)\ndef g(error): raise error",
        "assert f(int, '3') == 3 and f(tuple, [1]) == (1,)\ntry:\n    g(ValueError('no'))\nexcept ValueError as e:\n    assert e.args == ('no',)\n"
        "else:\n    assert False\nassert f(type, 3) == int",
    ),
    "exceptions of callbacks, caught": (
        "def f(g, xs):\n    found = []\n    for x in xs:\n        try:\n            found.append(g(x))\n        except ValueError:\n            found.append(None)\n    return found",
        "assert f(int, ['1', 'x']) == [1, None]\ndef g(x): raise ValueError(x)\nassert f(g, [1]) == [None]",
    ),
    "linked lists of the tests": (
        "def f(head):\n    prev = None\n    while head:\n        head.next, prev, head = prev, head, head.next\n    return prev",
        "class ListNode:\n    def __init__(self, val, next=None): self.val, self.next = val, next\n"
        "node = f(ListNode(1, ListNode(2, ListNode(3))))\nfound = []\nwhile node:\n    found.append(node.val)\n    node = node.next\nassert found == [3, 2, 1]",
    ),
    "trees of the tests": (
        "def f(t): return 0 if t is None else 1 + max(f(t.left), f(t.right))",
        "class TreeNode:\n    def __init__(self, left=None, right=None): self.left, self.right = left, right\n"
        "assert f(TreeNode(TreeNode(), TreeNode(TreeNode()))) == 3",
    ),
    "a random generator of the tests": ("def f(rng): return rng.randint(0, 9)", "import random\nassert f(random.Random(3)) == random.Random(3).randint(0, 9)"),
    "a method of class Solution": ("class Solution:\n    def f(self, x): return x * x", "def check(candidate):\n    for x in range(3):\n        assert candidate(x) == x * x"),
    "a coroutine": ("async def f(x): return x + 1", "import asyncio\nassert asyncio.run(f(2)) == 3"),
    "coroutines that share a lock": (
        "import asyncio\nlock = asyncio.Lock()\nasync def f(x):\n    async with lock:\n        await asyncio.sleep(0)\n        return x + 1",
        "import asyncio\nasync def test_f():\n    assert await f(2) == 3\n    assert await asyncio.gather(f(1), f(2)) == [2, 3]",
    ),
    "an asynchronous generator": (
        "async def f(n):\n    for i in range(n):\n        yield i",
        "import asyncio\nasync def collect():\n    return [i async for i in f(3)]\nassert asyncio.run(collect()) == [0, 1, 2]",
    ),
    "an asynchronous context manager": (
        "class M:\n    async def __aenter__(self): return 7\n    async def __aexit__(self, *a): pass",
        "import asyncio\nasync def use():\n    async with M() as x:\n        return x\nassert asyncio.run(use()) == 7",
    ),
    "a context manager that swallows what the tests raise": (
        "from contextlib import contextmanager\n@contextmanager\ndef f(kind):\n    try:\n        yield\n    except kind:\n        pass",
        "with f(ValueError):\n    raise ValueError('x')\nwith f(ZeroDivisionError):\n    1 / 0\nclass Mine(Exception): pass\ntry:\n    with f(KeyError):\n        raise Mine\n"
        "except Mine:\n    pass\nelse:\n    assert False",
    ),
    "a context manager that sees the exception": (
        "class M:\n    seen = None\n    def __enter__(self): return self\n    def __exit__(self, kind, error, trace):\n        self.seen = (kind.__name__, str(error))\n        return kind is ValueError",
        "m = M()\nwith m:\n    raise ValueError('x')\nassert m.seen == ('ValueError', 'x')",
    ),
    "the solution's module": ("def f(x): return x * x\nclass P:\n    y = 3", "from solution import f, P\nimport solution\nassert f(3) == 9 and P.y == 3 and solution.f(2) == 4"),
    "modules that nobody imports": ("import math\ndef f(x): return math.sqrt(x)", "assert f(2) == math.sqrt(2)"),
    "a class that the code imports": (
        "from datetime import datetime, timedelta\ndef f(d): return d + timedelta(days=1)", "assert f(datetime(2020, 1, 1)) == datetime(2020, 1, 2)"
    ),
    "containers of the standard library": (
        "from collections import *\ndef f(x):\n    d = defaultdict(list)\n    d[x].append(1)\n    return Counter('aab'), OrderedDict(a=1), d, {1: 2}.items()",
        "from collections import Counter, OrderedDict\nc, o, d, items = f(1)\nassert isinstance(c, Counter) and c.most_common(1) == [('a', 2)] and c['x'] == 0\n"
        "assert type(o) is OrderedDict and d[1] == [1] and d[2] == [] and items == {(1, 2)} and len(items) == 1",
    ),
    "a subclass of plain data": (
        "class L(list):\n    def second(self): return self[1]\n    def __repr__(self): return 'L'\ndef f(x): return L([1, x])",
        "r = f(2)\nassert isinstance(r, list) and r == [1, 2] and len(r) == 2 and r[0] == 1 and r.second() == 2 and repr(r) == 'L' and sorted(r) == [1, 2]",
    ),
    "a class of the tests with a lower-case name": (
        "class stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n    def __len__(self): return len(self.items)",
        "s = stack()\ns.push(1)\nassert isinstance(s, stack) and len(s) == 1",
    ),
    "a queue in setUp": (
        "class Queue:\n    def __init__(self): self.items = []\n    def put(self, x): self.items.append(x)\n    def __len__(self): return len(self.items)\n    def __contains__(self, x): return x in self.items",
        "import unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.q = Queue()\n    def test_a(self):\n        self.q.put(1)\n        self.assertEqual(len(self.q), 1)\n        self.assertIn(1, self.q)",
    ),
    "a function named like a builtin": ("def f(x): return sum(x)\ndef sum(x):\n    t = 0\n    for y in x: t += y\n    return t", "assert f([1, 2]) == sum([1, 2])"),
    "a slice": ("class L:\n    def __init__(s, *a): s.a = list(a)\n    def __getitem__(s, i): return s.a[i]", "l = L(1, 2, 3)\nassert l[1:] == [2, 3] and l[::2] == [1, 3] and l[0] == 1"),
    "an argument by keyword that is changed": ("def f(nums): nums.sort()", "xs = [3, 1]\nf(nums=xs)\nassert xs == [1, 3]"),
    "operators the other way round and in place": (
        "class N:\n    def __init__(s, n): s.n = n\n    def __rpow__(s, o): return o ** s.n\n    def __pow__(s, o, m=None): return pow(s.n, o, m)\n    def __rdivmod__(s, o): return divmod(o, s.n)\n"
        "    def __iadd__(s, o):\n        s.n += o\n        return s",
        "n = N(3)\nassert 2 ** n == 8 and pow(n, 2, 5) == 4 and divmod(10, n) == (3, 1)\nm = n\nn += 2\nassert m is n and n.n == 5",
    ),
    "threads of the tests": (
        "import threading\nclass C:\n    def __init__(s): s.n, s.lock = 0, threading.Lock()\n    def inc(s):\n        with s.lock: s.n += 1\ndef f(x): return 2 * x",
        "import threading\nfrom concurrent.futures import ThreadPoolExecutor\nc = C()\nts = [threading.Thread(target=lambda: [c.inc() for _ in range(10)]) for _ in range(3)]\n"
        "[t.start() for t in ts]\n[t.join() for t in ts]\nassert c.n == 30\nwith ThreadPoolExecutor(4) as e:\n    assert list(e.map(f, range(5))) == [0, 2, 4, 6, 8]",
    ),
    "what a generator returns": ("def f():\n    yield 1\n    return 9", "g = f()\nassert next(g) == 1\ntry:\n    next(g)\nexcept StopIteration as e:\n    assert e.value == 9"),
    "a context of the tests": ("def f(c):\n    with c as x: return x + 1", "from contextlib import contextmanager\n@contextmanager\ndef c(): yield 2\nassert f(c()) == 3"),
    "an assignment that raises on purpose": ("class S:\n    def __enter__(s): pass\n    def __exit__(s, t, e, b): return t is ZeroDivisionError\ndef f(): return S()", "x = []\nwith f():\n    x.append(1)\n    y = 1 / 0\nassert x == [1]"),
    "more values of the library": (
        "import pathlib, uuid\ndef f(): return pathlib.Path('a/b'), uuid.UUID(int=5), complex(1, 2), frozenset([1]), b'x'",
        "import pathlib, uuid\np, u, *rest = f()\nassert p.name == 'b' and p == pathlib.Path('a/b') and u == uuid.UUID(int=5) and rest == [1 + 2j, frozenset([1]), b'x']",
    ),
    "a fixture that makes an object": (
        "class Stack:\n    def __init__(s): s.xs = []\n    def push(s, x): s.xs.append(x)\n    def __len__(s): return len(s.xs)\n    def count(s, x): return s.xs.count(x)",
        "import pytest\n@pytest.fixture\ndef stack():\n    s = Stack()\n    s.push(1)\n    return s\ndef test_a(stack): assert len(stack) == 1 and stack.count(1) == 1",
    ),
    "a sum of objects of the tests": (
        "def f(xs): return sum(xs)",
        "class M:\n    def __init__(s, n): s.n = n\n    def __add__(s, o): return M(s.n + o.n)\n    def __radd__(s, o): return s\nassert f([M(1), M(2)]).n == 3",
    ),
    "members of an enumeration": (
        "from enum import Enum\nclass Colour(Enum):\n    RED = 1\n    BLUE = 2\ndef f(x): return Colour(x)",
        "assert f(1) == Colour.RED and f(1) is Colour.RED and f(2) != Colour.RED and Colour['RED'] is f(1) and len(Colour) == 2 and [c.name for c in Colour] == ['RED', 'BLUE']\n"
        "assert isinstance(f(1), Colour) and f(2) in Colour and Colour.RED.value == 1",
    ),
    "a data class": (
        "from dataclasses import dataclass\n@dataclass(order=True)\nclass P:\n    x: int\n    y: int = 0\ndef f(x): return P(x)",
        "assert f(1) == P(1, 0) and f(1) < P(2) and repr(f(1)) == 'P(x=1, y=0)' and f(1).__dict__ == {'x': 1, 'y': 0}",
    ),
    "a magic mock": ("def f(repo): return sum(repo.prices())", "from unittest.mock import MagicMock\nrepo = MagicMock()\nrepo.prices.return_value = [1, 2]\nassert f(repo) == 3\nrepo.prices.assert_called_once_with()"),
    "what is callable, an iterator or a length": (
        "class C:\n    def __len__(s): return 1\ndef f(x): return C\ndef g(x): yield x",
        "from collections.abc import Iterator, Sized\nimport inspect, types\nassert callable(f(1)) and not callable(f(1)()) and isinstance(g(1), Iterator) and isinstance(f(1)(), (str, Sized))\n"
        "assert not isinstance(f(1)(), Iterator) and isinstance(g(1), types.GeneratorType) and inspect.isgenerator(g(1)) and inspect.isfunction(f) and inspect.isclass(f(1)) and callable(len)",
    ),
    "an attribute that is called like a method of plain data": (
        "class Book:\n    def __init__(s): s.title, s.count = 'T', 3\ndef f(x): return Book()", "b = f(1)\nassert b.title == 'T' and b.count == 3",
    ),
    "methods of a container that a function makes": (
        "class Stack:\n    def __init__(s): s.xs = []\n    def append(s, x): s.xs.append(x)\n    def pop(s): return s.xs.pop()\ndef f(): return Stack()",
        "s = f()\ns.append(3)\nassert s.pop() == 3",
    ),
    "an argument that is left alone": ("def f(xs): return sorted(xs)", "xs = [3, 1, 2]\norig = xs[:]\nassert f(xs) == sorted(orig)\nassert xs == orig"),
    "a docstring": ("def f(x):\n    'Squares.'", "assert f.__doc__ == 'Squares.' and f.__name__ == 'f'"),
}  # fmt: skip

RAW_NAMES = """
import os, json
def send(o, fd=4):
    d = json.dumps(o).encode()
    os.write(fd, len(d).to_bytes(4, "little") + d)
send({"ok": None}, 3)
send({"f": {"__ref__": {"n": 0, "classes": [1]}}, %s})
while os.read(4, 1 << 16):
    send({"ok": True, "back": [None, {"__list__": []}]})
"""
EQUAL = "    def __eq__(s, o): return True\n    def __ne__(s, o): return False\n    __hash__ = object.__hash__\n"
FAKED: dict[str, tuple[str, str]] = {
    "wrong": ("def f(x): return 0", "assert f(3) == 9"),
    "nothing there": ("pass", "assert f(3) == 9"),
    "always equal": ("class A:\n" + EQUAL + "def f(x): return A()", "assert f(3) == 9"),
    "always equal, the other way round": ("class A:\n" + EQUAL + "def f(x): return A()", "assert 9 == f(3)"),
    "always equal int": ("class A(int):\n" + EQUAL + "def f(x): return A(1)", "assert f(3) == 9"),
    "always equal list": ("class A(list):\n" + EQUAL + "def f(x): return A()", "assert f(3) == [1]"),
    "in a list of answers": ("class A:\n" + EQUAL + "def f(x): return A()", "assert f(3) in [9, 10]"),
    "inside a list": ("class A:\n" + EQUAL + "def f(x): return [A(), A()]", "assert f(3) == [1, 2]"),
    "always near": (
        "class A:\n    def __sub__(s, o): return 0\n    __rsub__ = __sub__\n    def __abs__(s): return 0\n    def __lt__(s, o): return True\ndef f(x): return A()",
        "assert abs(f(3) - 2.5) < 1e-6",
    ),
    "always near, as an object": (
        "class A:\n    def __sub__(s, o): return s\n    def __abs__(s): return 0\ndef f(x): return A()",
        "assert abs(f(3) - 2.5) < 1e-6",
    ),
    "always less": ("class A:\n    def __lt__(s, o): return True\n    __gt__ = __le__ = __ge__ = __lt__\ndef f(x): return A()", "assert 1 < f(3) < 5"),
    "contains all": ("class A:\n    def __contains__(s, o): return True\n    def __iter__(s): return iter(())\ndef f(x): return A()", "assert 9 in f(3)"),
    "StopIteration in all(map)": ("def f(x): raise StopIteration", "assert all(map(lambda x: f(x) == x * x, range(5)))"),
    "StopIteration in a for": ("def f(x): raise StopIteration", "assert all(f(x) == 1 for x in map(f, range(5)))"),
    "death where an exception is wanted": ("import os\ndef f(x): os._exit(0)", "import pytest\nwith pytest.raises(Exception):\n    f(1)\nassert True"),
    "death, swallowed": ("import os\ndef f(x): os._exit(0)", "try:\n    f(1)\nexcept BaseException:\n    pass\nassert True"),
    "loop, swallowed": ("def f(x):\n    while True: pass", "try:\n    f(1)\nexcept BaseException:\n    pass\nassert True"),
    "memory, swallowed": ("def f(x): return [0] * 10**12", "try:\n    f(1)\nexcept BaseException:\n    pass\nassert True"),
    "stack, swallowed": ("def f(x): return f(x)", "try:\n    f(1)\nexcept RuntimeError:\n    pass\nassert True"),
    "SystemExit": ("def f(x): raise SystemExit(0)", "assert f(3) == 9"),
    "exit at import": ("import sys\nsys.exit(0)", "assert f(3) == 9"),
    "SkipTest": ("import unittest\ndef f(x): raise unittest.SkipTest('')", "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(3), 9)"),
    "skipped module": ("import unittest\nunittest.TestCase.assertEqual = print\ndef f(x): return 0", "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(3), 9)"),
    "patched builtins": ("import builtins\nbuiltins.abs = lambda x: 0\ndef f(x): return 1", "assert abs(f(3) - 9) < 1e-6"),
    "forged verdict": (
        "import os, struct\ndef f(x):\n    d = b'{\"done\":{\"passed\":true,\"error\":\"\"}}'\n    os.write(3, struct.pack('<I', len(d)) + d)\n    os._exit(0)",
        "assert f(3) == 9",
    ),
    "forged answers": (
        "import os, struct\ndef f(x):\n    for d in (b'{\"exhausted\":true}', b'[]', b'{\"ok\":{\"__ref__\":{}}}', b'{\"callback\":99,\"args\":[],\"kwargs\":{}}'):\n"
        "        os.write(3, struct.pack('<I', len(d)) + d)",
        "assert f(3) == 9",
    ),
    "raises the wanted": ("class Mine(Exception): pass\ndef f(x): raise AssertionError", "assert f(3) == 9"),
    "tests that are empty": ("def f(x): return 9", "def helper():\n    assert False"),
    "hunt": ("import gc\ndef f(x):\n    for o in gc.get_objects():\n        if isinstance(o, str) and 'assert' in o: return 9\n    return 0", "assert f(3) == 10"),
    "callback that is replaced": ("def f(g):\n    g.__call__ = lambda x: 1\n    return 0", "assert f(lambda x: x) == 9"),
    "globals of a callback": (
        "def f(g, x):\n    for name in ('__globals__', '__closure__', '__code__', '__self__', 'gi_frame'):\n        try: return getattr(g, name)['expected']\n        except Exception: pass",
        "expected = 9\nassert f(lambda: 0, 3) == expected",
    ),
    "frame of a generator": (
        "def f(g):\n    try: return g.gi_frame.f_locals['secret']\n    except AttributeError: return 0",
        "def g():\n    secret = 9\n    yield 1\n    yield secret\nit = g()\nnext(it)\nassert f(it) == 9",
    ),
    "class of an object of the tests": (
        "def f(o):\n    try: return o.__class__.__init__.__globals__['expected']\n    except Exception: return 0",
        "expected = 9\nclass A: pass\nassert f(A()) == expected",
    ),
    "equal to an object of the tests": ("class A:\n" + EQUAL + "def f(o): return A()", "class B:\n    def __eq__(s, o): return type(o) is B\nassert f(B()) == B()"),
    "StopIteration through a callback": ("def f(g): return g()", "def g(): raise StopIteration\ndef h():\n    f(g)\n    return 0\nassert all(h() for _ in range(3))"),
    **{
        f"own {name}": (f"def f(x): return 1\ndef {name}(*a, **k): return {result}", test)
        for name, result, test in [
            ("abs", "0", "assert abs(f(3) - 9.5) < 1e-6"), ("zip", "iter(())", "for a, b in zip([f(3)], [9]): assert a == b"),
            ("all", "True", "assert all(f(x) == x * x for x in [3, 4])"), ("isinstance", "True", "assert isinstance(f(3), dict)"),
            ("range", "[]", "for x in range(5): assert f(x) == x * x"), ("len", "9", "assert len(str(f(3))) == 9"), ("sorted", "[]", "assert sorted([f(3)]) == sorted([9])"),
            ("str", "'9'", "assert str(f(3)) == str(9)"), ("round", "9", "assert round(f(3)) == round(9.1)"), ("set", "0", "assert set([f(3)]) == set([9])"),
        ]
    },
    "own class like a module": ("def f(x): return 1\nclass math:\n    isclose = lambda *a: True", "assert math.isclose(f(3), 9)"),
    "own class like a parameter": ("class candidate:\n    def __sub__(s, o): return 0\ndef f(x): return candidate()", "def check(candidate):\n    assert abs(candidate(2) - 7919.5) < 1e-6"),
    "own class like an attribute": ("class pi:\n    def __sub__(s, o): return 0\ndef f(x): return pi()", "import math\nassert abs(f(2) - math.pi) < 1e-6"),
    "own class like a variable": ("class r:\n    def __sub__(s, o): return 0\ndef f(x): return r()", "r = f(2)\nassert abs(r - 7919.5) < 1e-6"),
    "entry point is a class": ("class f:\n    def __init__(s, x): pass\n    def __sub__(s, o): return 0", "assert abs(f(2) - 7919.5) < 1e-6"),
    "an area that is a circle": ("class Circle:\n    def __init__(s, r): pass\n    def area(s): return s\n    def __sub__(s, o): return 0", "assert abs(Circle(2).area() - 12.566) < 1e-3"),
    "a class that goes by a declared name": (
        "class Vector:\n    def __add__(s, o): return s\nclass A:\n    def __sub__(s, o): return 0\nA.__name__ = 'Vector'\ndef f(x): return A()",
        "v = Vector() + 1\nassert abs(f(2) - 7919.5) < 1e-6",
    ),
    "a list that lies": ("class L(list):\n    def __len__(s): return 3\n    def __iter__(s): return iter([])\n    def __contains__(s, x): return True\ndef f(x): return L()",
        "r = f(2)\nassert len(r) == 3 and 9 in r\nfor a, b in zip(r, [7919, 2, 3]): assert a == b"),
    "a sequence that lies": ("class L:\n    def __len__(s): return 3\n    def __iter__(s): return iter([])\ndef f(x): return L()", "r = f(2)\nassert len(r) == 3\nfor a, b in zip(r, [7919, 2, 3]): assert a == b"),
    "a number of two minds": ("class A:\n    n = 0\n    def __int__(s):\n        s.n += 1\n        return 2 if s.n == 1 else 3\ndef f(x): return A()", "r = f(2)\nassert int(r) % 3 == 2 and int(r) % 5 == 3"),
    "an emptied argument": ("def f(xs):\n    xs.clear()\n    return []", "xs = [3, 1, 2]\nassert f(xs) == sorted(xs)"),
    "an emptied argument, with an object": (
        "class R:\n    data = []\ndef f(xs):\n    xs.clear()\n    return R()", "xs = [3, 1, 2]\nassert f(xs).data == sorted(xs)",
    ),
    "a changed object of the tests": ("def f(n):\n    n.val = 0\n    return 0", "class N:\n    val = 9\nn = N()\nassert f(n) == n.val * 2"),
    "a changed object of the tests, by way of a callback": (
        "def g(): return 1\ndef f(n, h):\n    n.val = 0\n    h()\n    return 0", "class N:\n    val = 9\nn = N()\nassert f(n, lambda: g()) == n.val * 2",
    ),
    "an emptied argument, by a method": ("class R:\n    def same(s, xs):\n        xs.clear()\n        return []\ndef f(x): return R()", "xs = [3, 1, 2]\nassert f(0).same(xs) == sorted(xs)"),
    "a swallowed assertion": ("class M:\n    def __enter__(s): return 0\n    def __exit__(s, *a): return True\ndef f(): return M()", "with f() as x:\n    assert x == 9"),
    "a swallowed error of a bad value": ("class M:\n    def __enter__(s): return None\n    def __exit__(s, *a): return True\ndef f(): return M()", "with f() as x:\n    x += 1\n    assert x == 9"),
    "a swallowed error of its own": ("class M:\n    def __enter__(s): return s\n    def __exit__(s, *a): return True\n    def g(s): raise ValueError\ndef f(): return M()", "with f() as x:\n    assert x.g() == 9"),
    "a test that is never awaited": ("async def f(x): return 0", "async def test_f():\n    assert await f(3) == 9"),
    "a deep copy of its own": ("class L(list):\n    def __deepcopy__(s, m): return [9]\ndef f(x): return L()", "import copy\nassert copy.deepcopy(f(3)) == [9]"),
    "an instance of any class": ("class M(type):\n    def __instancecheck__(c, o): return True\nclass C(metaclass=M): pass\ndef f(x): return 0", "assert isinstance(f(3), C)"),
    "raw builtins": (RAW_NAMES % '"__builtins__": {"__dict__": [["all", {"__ref__": {"n": 2, "classes": [1]}}]]}', "assert all(f(x) == y for x, y in [(1, 7919)])"),
    "a raw module": (RAW_NAMES % '"math": {"__ref__": {"n": 2, "classes": [1]}}', "assert math.isclose(f(1), 7919)"),
    "raw changes of a literal": (RAW_NAMES % '"g": null', "xs = [7919]\nassert f(xs) == sum(xs)"),
    "a method of a pytest class": ("def f(x): return 0", "class TestF:\n    def test_a(self): assert f(3) == 9"),
    "a failing fixture": ("def f(x): return 0", "import pytest\n@pytest.fixture\ndef r(): return f(3)\ndef test_a(r): assert r == 9"),
    "an order that is none": (
        "class L:\n    n = 0\n    def index(s, x):\n        s.n += 1\n        return s.n\ndef f(g): return L()",
        "order = f({'a': ['b']})\nassert order.index('a') < order.index('b')",
    ),
    "an order that is a dict": (
        "class L(dict):\n    n = 0\n    def index(s, x):\n        L.n += 1\n        return L.n\ndef f(g): return L(g)",
        "g = {'a': ['b'], 'b': []}\norder = f(g)\nassert len(order) == 2 and set(order) == set(g)\nassert order.index('a') < order.index('b')",
    ),
    "a text that is none": (
        "class L:\n    def find(s, x): return 0\n    def count(s, x): return 2\n    def lower(s): return s\ndef f(x): return L()",
        "html = f(1)\nassert html.find('<h1>') != -1 and html.count('<li>') >= 2 and html.lower().find('<ul>') >= 0",
    ),
    "a mean that is the object": (
        "class S:\n    n = 0\n    def add(s, x): s.n += 1\n    def __len__(s): return s.n\n    def mean(s): return s\n    def __sub__(s, o): return 0.0\n    def __round__(s, n): return 2.5",
        "s = S()\nfor x in [1, 2]: s.add(x)\nassert len(s) == 2\nassert abs(s.mean() - 1.5) < 1e-9 and round(s.mean(), 2) == 2.5",
    ),
    "a length that is the vector": (
        "class V:\n    def __init__(s, *a): pass\n    def __add__(s, o): return s\n    def __eq__(s, o): return True\n    def __sub__(s, o): return 0.0\n    def length(s): return s",
        "v = V(3, 4)\nassert v + V(1, 1) == V(4, 5)\nassert abs(v.length() - 5.0) < 1e-9",
    ),
    "a record of a mock that is set": (
        "def f(people, send):\n    send.assert_has_calls = send.assert_any_call = lambda *a, **k: None\n    send.call_count = 1",
        "from unittest.mock import Mock, call\nsend = Mock()\nf(['a'], send)\nassert send.call_count == 1\nsend.assert_any_call('a')",
    ),
    "a mock that equals everything": (
        "def f(repo):\n    x = repo.anything\n    x.configure_mock(**{'__eq__': lambda *a: True})\n    return x",
        "from unittest.mock import Mock\nassert f(Mock()) == 9",
    ),
    "a method of a spy that is replaced": (
        "def f(spy): spy.check = lambda *a: True", "class Spy:\n    def check(s, x): return False\nspy = Spy()\nf(spy)\nassert spy.check(3)",
    ),
    **{
        f"{name} by another name": (f"E = {name}\ndef f(x): pass", "try:\n    f(-1)\n    assert False, 'must be refused'\nexcept E:\n    pass")
        for name in ("Exception", "AssertionError", "BaseException", "(ValueError, Exception)")
    },
    "a StopIteration that was kept": (
        "err = None\ndef prime(src):\n    global err\n    try:\n        while True: src()\n    except Exception as e: err = e\ndef f(x): raise err",
        "from unittest.mock import Mock\nassert prime(Mock(side_effect=[1])) is None\nassert all(map(f, [1, 2, 3]))",
    ),
    "the source of the tests in a stack": (
        "import re\ndef f(log): return int(re.findall(r'== (\\d+)', log.findCaller(True)[3])[-1])", "import logging\nassert f(logging.getLogger('x')) == 7219",
    ),
    "tests under a guard": ("def f(x): return 0", "if __name__ == '__main__':\n    assert f(1) == 2"),
    "a coroutine of a test case": ("async def f(x): return 0", "import unittest\nclass T(unittest.TestCase):\n    async def test_x(self): self.assertEqual(await f(1), 2)"),
    "a test that yields": ("def f(x): return 0", "def test_x():\n    assert f(1) == 2\n    yield"),
    "a test that returns": ("def f(x): return 0", "def test_x():\n    return f(1) == 2"),
    "a test of nothing": ("def f(x): return 0", "for x, y in []:\n    assert f(x) == y"),
    "a container of the library that is emptied": (
        "def f(xs):\n    xs.clear()\n    return 0", "from collections import UserList\nxs = UserList([3, 1, 2])\nassert f(xs) == sum(xs)",
    ),
    "a container that is emptied by a method of before": (
        "kept = []\ndef f(xs):\n    if not kept:\n        kept.append(xs.pop)\n        return 6\n    for _ in range(3): kept[0]()\n    return 0",
        "from array import array\nxs = array('i', [3, 1, 2])\nassert f(xs) == 6\nassert f(xs) == sum(xs)",
    ),
    "an own equals": ("class R:\n    def equals(s, o): return True\n    all = equals\ndef f(x): return R()", "assert f(1).equals(2)"),
    "a text that is a class": (
        "class T:\n    def __init__(s, x): pass\n    def upper(s): return s\n    words = upper\n    def index(s, *a): return 1\n    startswith = isupper = index",
        "assert T('a').words().startswith('A') and T('b').words().index('b') == 1",
    ),
    "own functions of the library": ("def log(x): return 0.0\ndef gcd(*a): return 0.0\ndef f(x): return 0.0", "x = f(5)\nassert abs(x - log(5)) < 1e-9 and x == gcd(12, 18)"),
    "other items each time": (
        "class R:\n    n = 0\n    def __iter__(s):\n        s.n += 1\n        return iter([3, 1, 2] if s.n == 1 else [])\ndef f(x): return R()",
        "r = f([3, 1, 2])\nassert sorted(r) == [1, 2, 3] and list(r) == sorted(r)",
    ),
    "a failed assertion of a callback": (
        "import re\ndef f(done):\n    try: done(0)\n    except BaseException as e:\n        try: done(int(re.search(r'!= (\\d+)', str(e))[1]))\n        except BaseException: done(9)",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        seen = []\n        def done(x):\n            seen.append(1)\n            self.assertEqual(x, 9)\n        f(done)\n        self.assertTrue(seen)",
    ),
    "what is no function": ("def f(x): return object()", "g = f(1)\nassert callable(g)"),
    "what is no iterator": ("def f(x): return object()", "from collections.abc import Iterator\ng = f(1)\nassert isinstance(g, Iterator)"),
    "what is no length": ("def f(x): return object()", "import collections.abc\ng = f(1)\nassert isinstance(g, (int, collections.abc.Sized))"),
    "own entries of the bases": ("class S:\n    __mro_entries__ = staticmethod(lambda bases: (dict,))\ndef f(x): return 0", "class Q(S):\n    pass\nassert Q() == {}"),
    "own numpy": ("class np:\n    allclose = staticmethod(lambda *a: True)\ndef f(x): return None", "assert np.allclose(f(1), [2.0])"),
    "own approx": ("def approx(x): return 7\ndef f(x): return 7", "assert f(2) == approx(4.2)"),
    "own assertion": ("def assert_equal(*a): pass\ndef f(x): return 7", "def test_x():\n    assert_equal(f(2), 4)"),
    "a changed argument": ("def f(xs):\n    xs.sort()\n    return xs", "xs = [3, 1, 2]\norig = list(xs)\nassert f(xs) == [1, 2, 3]\nassert xs == orig"),
    "a changed argument, deep": (
        "def f(d):\n    d['a'].append(2)\n    d['x'] = 1\n    return d",
        "import copy\ndef test_pure():\n    d = {'a': [1]}\n    before = copy.deepcopy(d)\n    f(d)\n    assert d == before",
    ),
    "truthy": ("class A:\n    def __bool__(s): return True\ndef f(x): return A()", "assert f(3) is True"),
}  # fmt: skip


def verdict(code: str, *tests: str, sandbox: Sandbox, **fields: Any) -> Verdict:
    task = parse_task(
        {"kind": "asserts", "entry_point": "f", "tests": list(tests), "cpu_limit_s": 1, "memory_limit_mb": 256, **fields}
    )
    return grade(task, f"```python\n{code}\n```", sandbox=sandbox)


@pytest.mark.parametrize("name", HONEST)
def test_honest_code_passes(name: str, sandbox: Sandbox) -> None:
    code, tests = HONEST[name]
    result = verdict(code, tests, sandbox=sandbox)
    assert (result.reward, result.reason) == (1.0, "")


@pytest.mark.parametrize("name", FAKED)
def test_a_faked_pass_fails(name: str, sandbox: Sandbox) -> None:
    code, tests = FAKED[name]
    result = verdict(code, tests, sandbox=sandbox)
    assert result.reward == 0.0
    assert result.reason


def test_units_are_counted_and_the_death_of_one_costs_only_itself(sandbox: Sandbox) -> None:
    code = "import os\ndef f(x):\n    if x == 2: os._exit(0)\n    return x"
    result = verdict(
        code, "assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3", "assert f(4) == 5", sandbox=sandbox, credit="fraction"
    )
    assert result.parts["tests_passed"] == 0.5


def test_helpers_of_the_prompt_are_the_tests_own(sandbox: Sandbox) -> None:
    helper = "def poly(x):\n    return x - 3"
    test = "def check(candidate):\n    assert abs(poly(candidate(0))) < 1e-9"
    assert verdict("def f(x): return 3", test, sandbox=sandbox, setup=helper).reward == 1.0
    assert verdict("def poly(x): return 0\ndef f(x): return 1", test, sandbox=sandbox, setup=helper).reward == 0.0


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("x = 1", "tests nothing"),
        ("assert (", "not Python"),
        (3, "must be a string"),
        ("assert (f(2) == 4, 'wrong')", "a tuple always holds"),
        ("x = [2]\nassert len(x) == 1", "defines all that it tests"),
        ("def add(a, b): return a + b\nassert add(1, 2) == 3", "defines all that it tests"),
        ("def add(a, b): return a + b\ndef test_add(): assert add(1, 2) == 3", "defines all that it tests"),
    ],
)
def test_tests_that_test_nothing_are_refused(test: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        parse_task({"kind": "asserts", "tests": [test]})

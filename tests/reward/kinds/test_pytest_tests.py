"""Tests written for pytest, which the jail runs without pytest: right code passes them and wrong code does not."""

import pytest

from reward.sandbox.sandbox import Sandbox
from reward.task import parse_task
from tests.reward.graded import grade

RIGHT = "def f(x):\n    if x < 0:\n        raise ValueError('below 0')\n    print(f'got {x}')\n    return x + 1\n"
WRONG = "def f(x):\n    return None\n"

UNITS = {
    "type and match of what was raised": """
def test_raises():
    with pytest.raises(ValueError) as info:
        f(-1)
    assert info.type is ValueError
    assert info.match("below")
    assert "below" in str(info.value)
""",
    "raises with a function": """
def test_raises():
    pytest.raises(ValueError, f, -1)
    pytest.raises(ValueError, lambda: f(-1), match="below")
""",
    "setup_method with and without the method": """
class TestF:
    def setup_class(cls):
        cls.base = 1
    def setup_method(self, method):
        self.x = self.base + len(method.__name__) * 0
    def teardown_method(self):
        del self.x
    def test_f(self):
        assert f(self.x) == 2
    def test_g(self):
        assert f(self.x + 1) == 3
""",
    "setup_function and setup_module": """
seen = []
def setup_module(): seen.append("module")
def setup_function(function): seen.append(function.__name__)
def test_f():
    assert seen == ["module", "test_f"] and f(1) == 2
""",
    "capsys": """
def test_prints(capsys):
    f(3)
    assert capsys.readouterr().out == "got 3\\n"
    print("mine")
    out, err = capsys.readouterr()
    assert out == "mine\\n" and err == ""
""",
    "fixtures of a class, of a module, and one that needs another": """
@pytest.fixture
def one(): return 1
@pytest.fixture(scope="module")
def two(one):
    yield one + 1
class TestF:
    @pytest.fixture
    def three(self, two): return two + self.step()
    def step(self): return 1
    def test_f(self, one, three):
        assert f(one) == 2 and f(three) == 4
""",
    "autouse": """
class TestF:
    @pytest.fixture(autouse=True)
    def prepare(self): self.x = 4
    def test_f(self): assert f(self.x) == 5
""",
    "parameters of a fixture": """
@pytest.fixture(params=[1, 2])
def x(request): return request.param
@pytest.mark.parametrize("step", [0, 5])
def test_f(x, step): assert f(x + step) == x + step + 1
""",
    "parameters of a class": """
@pytest.mark.parametrize("x, y", [(1, 2), (2, 3)])
class TestF:
    def test_f(self, x, y): assert f(x) == y
""",
    "skipped tests": """
@pytest.mark.skip(reason="no")
def test_a(): assert False
@pytest.mark.skipif(True, reason="no")
def test_b(): assert False
@pytest.mark.xfail
def test_c(): assert False
def test_d(): pytest.skip("no")
@pytest.mark.skipif(False, reason="no")
def test_f(): assert f(1) == 2
""",
    "inherited tests": """
class Base:
    def test_f(self): assert f(self.x) == self.x + 1
class TestOne(Base): x = 1
class TestTwo(Base): x = 2
""",
}


def passes(sandbox: Sandbox, unit: str, code: str) -> bool:
    task = parse_task({"kind": "asserts", "tests": ["import pytest\n" + unit], "entry_point": "f"})
    return grade(task, f"```python\n{code}\n```", sandbox=sandbox).reward == 1.0


@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
def test_right_code_passes_and_wrong_code_does_not(sandbox: Sandbox, unit: str) -> None:
    assert passes(sandbox, unit, RIGHT)
    assert not passes(sandbox, unit, WRONG)


@pytest.mark.parametrize("mark", ["@pytest.mark.skip\ndef test_a(): assert f(1) == 2", "def test_a(): pytest.skip('x')"])
def test_unit_whose_tests_are_all_skipped_tests_nothing_and_fails(sandbox: Sandbox, mark: str) -> None:
    assert not passes(sandbox, mark, RIGHT)


def test_candidate_cannot_skip_a_test(sandbox: Sandbox) -> None:
    unit = "def test_a(): pass\ndef test_b(): assert f(1) == 2"
    assert not passes(sandbox, unit, "class Skipped(Exception): pass\ndef f(x): raise Skipped('x')")

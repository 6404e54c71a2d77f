"""Programs that the grader is tried on: honest but odd ones, faked passes, hostile ones. Data only.

A hostile program prints BREACH when it got what it wanted, and its task expects just that, so a reward of 1 is a breach.
"""
# ruff: noqa: E501

# --- honest: each reads two numbers and prints their sum, or defines f(x) = x * x -------------------------------------------

HONEST_STDIO = {
    "plain": "a, b = map(int, input().split())\nprint(a + b)",
    "exit": "print(sum(map(int, input().split())))\nexit()",
    "quit": "print(sum(map(int, input().split())))\nquit(0)",
    "sys exit": "import sys\nprint(sum(map(int, input().split())))\nsys.exit(0)",
    "main guard": "def main():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    main()",
    "exit in main": "def main():\n    print(sum(map(int, input().split())))\n    raise SystemExit\nmain()",
    "os exit after flush": "import os\nprint(sum(map(int, input().split())), flush=True)\nos._exit(0)",
    "atexit": "import atexit\natexit.register(lambda: print(sum(map(int, input().split()))))",
    "fast output": "import sys, io, atexit\nb = io.StringIO()\nsys.stdout = b\n"
    "atexit.register(lambda: sys.__stdout__.write(b.getvalue()))\nprint(sum(map(int, input().split())))",
    "output left open": "o = open(1, 'w')\no.write(str(sum(map(int, input().split()))))",
    "non-daemon thread": "import threading, time\ndef g():\n    time.sleep(0.05)\n    print(sum(map(int, input().split())))\n"
    "threading.Thread(target=g).start()",
    "big stack in a thread": "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 26)\n"
    "def d(n):\n    return 0 if n == 0 else 1 + d(n - 1)\ndef main():\n    assert d(20000) == 20000\n    print(sum(map(int, input().split())))\n"
    "t = threading.Thread(target=main)\nt.start()\nt.join()",
    "thread pool": "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(8) as p:\n"
    "    print(sum(p.map(int, input().split())))",
    "asyncio": "import asyncio\nasync def main():\n    await asyncio.sleep(0.01)\n    print(sum(map(int, input().split())))\nasyncio.run(main())",
    "asyncio to_thread": "import asyncio\nasync def main():\n    s = await asyncio.to_thread(input)\n    print(sum(map(int, s.split())))\n"
    "asyncio.run(main())",
    "asyncio gather": "import asyncio\nasync def n(x):\n    await asyncio.sleep(0)\n    return int(x)\nasync def main():\n"
    "    print(sum(await asyncio.gather(*map(n, input().split()))))\nasyncio.run(main())",
    "stdin buffer": "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))",
    "stdin iteration": "import sys\nprint(sum(int(x) for line in sys.stdin for x in line.split()))",
    "open zero": "print(sum(map(int, open(0).read().split())))",
    "os read": "import os\nprint(sum(map(int, os.read(0, 1000).split())))",
    "input until EOF": "t = 0\nwhile True:\n    try:\n        t += sum(map(int, input().split()))\n    except EOFError:\n        break\nprint(t)",
    "stdout buffer": "import sys\nsys.stdout.buffer.write(b'%d\\n' % sum(map(int, input().split())))",
    "os write": "import os\nos.write(1, b'%d' % sum(map(int, input().split())))",
    "CRLF": "print(sum(map(int, input().split())), end='\\r\\n')",
    "trailing blanks": "print(sum(map(int, input().split())), '  \\n\\n')",
    "stderr": "import sys\nprint('debug ' * 1000, file=sys.stderr)\nprint(sum(map(int, input().split())))",
    "recursion to 900": "def d(n):\n    return 0 if n == 0 else 1 + d(n - 1)\nassert d(900) == 900\nprint(sum(map(int, input().split())))",
    "300 ms of CPU": "import time\nt = time.process_time()\nwhile time.process_time() - t < 0.3:\n    pass\nprint(sum(map(int, input().split())))",
    "50 MB": "x = bytearray(50 * 10**6)\nprint(sum(map(int, input().split())))",
    "own operators": "class N:\n    def __init__(s, v): s.v = v\n    def __add__(s, o): return N(s.v + o.v)\n    def __str__(s): return str(s.v)\n"
    "a, b = map(int, input().split())\nprint(N(a) + N(b))",
    "own exceptions": "class Stop(Exception): pass\ntry:\n    raise Stop(sum(map(int, input().split())))\nexcept Stop as e:\n    print(e)",
    "context manager": "from contextlib import contextmanager\n@contextmanager\ndef c():\n    yield sum(map(int, input().split()))\n"
    "with c() as s:\n    print(s)",
    "generators": "def g():\n    yield from map(int, input().split())\nprint(sum(g()))",
    "dataclass": "from dataclasses import dataclass\n@dataclass\nclass P:\n    a: int\n    b: int\nprint(sum(vars(P(*map(int, input().split()))).values()))",
    "temporary file": "import tempfile\nwith tempfile.TemporaryFile('w+') as f:\n    f.write(input())\n    f.seek(0)\n"
    "    print(sum(map(int, f.read().split())))",
    "sqlite in memory": "import sqlite3\nc = sqlite3.connect(':memory:')\nprint(c.execute('select ? + ?', tuple(map(int, input().split()))).fetchone()[0])",
    "sqlite in a file": "import sqlite3\nfor _ in 1, 2:\n    c = sqlite3.connect('x.db')\n    c.execute('create table if not exists t (a)')\n"
    "    c.commit()\nc.executemany('insert into t values (?)', [(int(n),) for n in input().split()])\nc.commit()\nc.close()\n"
    "print(sqlite3.connect('x.db').execute('select sum(a) from t').fetchone()[0])",
    "file lock": "import fcntl\nwith open('x', 'w') as f:\n    fcntl.lockf(f, fcntl.LOCK_EX)\n    print(sum(map(int, input().split())))\n    fcntl.lockf(f, fcntl.LOCK_UN)",
    "lazy imports": "import xml.etree.ElementTree, email.message, http.client, zoneinfo, doctest\nprint(sum(map(int, input().split())))",
    "decimal": "from decimal import Decimal\nprint(sum(map(Decimal, input().split())))",
    "replaced print": "import builtins\np = print\ndef loud(*a): p(*a, flush=True)\nbuiltins.print = loud\nprint(sum(map(int, input().split())))",
    "signal handler": "import signal\nsignal.signal(signal.SIGALRM, lambda *a: print(sum(map(int, input().split()))))\nsignal.alarm(1)\nsignal.pause()",
    "resource limit raised": "import resource\ns, h = resource.getrlimit(resource.RLIMIT_STACK)\n"
    "resource.setrlimit(resource.RLIMIT_STACK, (h, h))\nprint(sum(map(int, input().split())))",
    "global and exec": "exec('a, b = map(int, input().split())')\nprint(a + b)",
    "pickle of its own class": "import pickle\nclass A:\n    def __init__(s, v): s.v = v\n"
    "a = pickle.loads(pickle.dumps(A(sum(map(int, input().split())))))\nprint(a.v)",
    "source of itself": "import inspect\ndef f(a, b): return a + b\nassert 'return a + b' in inspect.getsource(f)\n"
    "print(f(*map(int, input().split())))",
    "BOM": "\ufeffprint(sum(map(int, input().split())))",
    "encoding cookie": "# -*- coding: latin-1 -*-\nprint(sum(map(int, input().split())))",
    "tabs": "def main():\n\ta, b = map(int, input().split())\n\tif a:\n\t\tprint(a + b)\n\telse:\n\t\tprint(b)\nmain()",
    "CRLF source": "a, b = map(int, input().split())\r\nprint(a + b)\r\n",
    "CR source": "a, b = map(int, input().split())\rprint(a + b)\r",
    "form feed": "\x0ca, b = map(int, input().split())\n\x0cprint(a + b)",
    "unicode identifiers": "α, β = map(int, input().split())\nprint(α + β)",
    "sys.exit in main": "import sys\ndef main():\n    print(sum(map(int, input().split())))\n    return 0\nif __name__ == '__main__':\n    sys.exit(main())",
    "exit code 1 after answer": "import sys\nprint(sum(map(int, input().split())))\nsys.exit(1)",
    "exit with text": "import sys\nprint(sum(map(int, input().split())))\nsys.exit('done')",
    "stdin readlines": "import sys\nprint(sum(map(int, sys.stdin.readlines()[0].split())))",
    "stdin replaced": "import sys, io\nsys.stdin = io.StringIO(sys.stdin.read())\nprint(sum(map(int, input().split())))",
    "fast IO class": "import os, sys\nfrom io import BytesIO, IOBase\nclass F(IOBase):\n    def __init__(s, f):\n        s._fd = f.fileno(); s.buffer = BytesIO(); s.writable = 'x' in f.mode or 'r' not in f.mode; s.write = s.buffer.write if s.writable else None\n    def readline(s):\n        b = os.read(s._fd, max(os.fstat(s._fd).st_size, 8192)); p = s.buffer.tell(); s.buffer.seek(0, 2), s.buffer.write(b), s.buffer.seek(p)\n        return s.buffer.readline()\n    def flush(s):\n        if s.writable: os.write(s._fd, s.buffer.getvalue()); s.buffer.truncate(0), s.buffer.seek(0)\ni = F(sys.stdin)\nprint(sum(map(int, i.readline().split())))",
    "stdout of its own": "import sys, os\nclass W:\n    def __init__(self): self.parts = []\n    def write(self, text): self.parts.append(text)\n"
    "    def flush(self):\n        os.write(1, ''.join(self.parts).encode())\n        self.parts.clear()\nsys.stdout = W()\nprint(sum(map(int, input().split())))",
    "stdout of its own without flush": "import sys\nclass W:\n    def write(self, text): sys.__stdout__.write(text)\nsys.stdout = W()\nprint(sum(map(int, input().split())))",
    "stdout of None": "import sys\nprint(sum(map(int, input().split())), flush=True)\nsys.stdout = None",
    "stack limit lifted": "import resource, sys\nresource.setrlimit(resource.RLIMIT_STACK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\nprint(sum(map(int, input().split())))",
    "stdout reopened": "import os, sys\nsys.stdout = os.fdopen(1, 'w')\nprint(sum(map(int, input().split())))",
    "stdout duplicated": "import os, sys\nd = os.dup(1)\nsys.stdout = os.fdopen(d, 'w')\nprint(sum(map(int, input().split())))",
    "dup2 of stderr": "import os\nos.dup2(2, 9)\nos.dup2(1, 2)\nos.dup2(9, 1)\nos.write(2, b'%d' % sum(map(int, input().split())))",
    "stdout closed at the end": "import sys\nprint(sum(map(int, input().split())))\nsys.stdout.close()",
    "stdout flushed and detached": "import sys\nout = sys.stdout.detach()\nout.write(b'%d' % sum(map(int, input().split())))\nout.flush()",
    "line buffering": "import sys\nsys.stdout.reconfigure(line_buffering=True)\nprint(sum(map(int, input().split())))",
    "binary write without flush": "import sys\nsys.stdout.buffer.write(str(sum(map(int, input().split()))).encode())",
    "atexit order": "import atexit\nout = []\natexit.register(lambda: print(*out))\natexit.register(lambda: out.append(sum(map(int, input().split()))))",
    "atexit that raises": "import atexit\ndef bad(): raise ValueError\natexit.register(bad)\nprint(sum(map(int, input().split())))",
    "daemon thread left": "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\nprint(sum(map(int, input().split())))",
    "settrace": "import sys\nsys.settrace(lambda *a: None)\nprint(sum(map(int, input().split())))",
    "__del__ prints": "class A:\n    def __del__(s): print(sum(map(int, input().split())))\na = A()\ndel a",
    "__del__ at the end": "class A:\n    def __del__(s): print(s.v)\na = A()\na.v = sum(map(int, input().split()))",
    "weakref finalizer": "import weakref\nclass A: pass\na = A()\nweakref.finalize(a, lambda: print(sum(map(int, input().split()))))",
    "finalize left alive": "import weakref, sys\nclass A: pass\nsys.keep = A()\nweakref.finalize(sys.keep, print, sum(map(int, input().split())))",
    "huge recursion limit": "import sys\nsys.setrecursionlimit(10**7)\ndef d(n): return 0 if n == 0 else 1 + d(n - 1)\nassert d(5000) == 5000\nprint(sum(map(int, input().split())))",
    "threading main with stack": "import sys, threading\nsys.setrecursionlimit(1 << 25)\nthreading.stack_size(1 << 27)\ndef main(): print(sum(map(int, input().split())))\nt = threading.Thread(target=main); t.start(); t.join()",
    "int max str digits": "import sys\nsys.set_int_max_str_digits(0)\nassert len(str(10**5000)) == 5001\nprint(sum(map(int, input().split())))",
    "alarm never fires": "import signal\nsignal.signal(signal.SIGALRM, lambda *a: 1 / 0)\nsignal.alarm(5)\nprint(sum(map(int, input().split())))\nsignal.alarm(0)",
    "setitimer": "import signal, time\nn = []\nsignal.signal(signal.SIGALRM, lambda *a: n.append(1))\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\nwhile not n: time.sleep(0.001)\nprint(sum(map(int, input().split())))",
    "async generators": "import asyncio\nasync def g():\n    for x in input().split():\n        yield int(x)\nasync def main(): print(sum([x async for x in g()]))\nasyncio.run(main())",
    "event loop by hand": "import asyncio\nloop = asyncio.new_event_loop()\nasync def m(): return sum(map(int, input().split()))\nprint(loop.run_until_complete(m()))",
    "main module looked up": "import __main__\n__main__.total = sum(map(int, input().split()))\nprint(total)",
    "class Solution with main": "class Solution:\n    def solve(self, a, b): return a + b\nif __name__ == '__main__':\n    print(Solution().solve(*map(int, input().split())))",
    "interrupt caught": "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    print(sum(map(int, input().split())))",
    "fileinput": "import fileinput\nprint(sum(int(x) for line in fileinput.input() for x in line.split()))",
    "argv and file": "import sys, os\nassert len(sys.argv) == 1 and os.path.basename(__file__)\nprint(sum(map(int, input().split())))",
    "print with sep and end": "a, b = map(int, input().split())\nprint(a + b, sep='', end='')",
    "walrus and match": "match [int(x) for x in input().split()]:\n    case [a, b] if (s := a + b) >= 0:\n        print(s)",
    "type hints from future": "from __future__ import annotations\ndef f(a: NoSuch, b: int) -> int: return a + b\nprint(f(*map(int, input().split())))",
    "nested f-strings": "a, b = map(int, input().split())\nprint(f'{f\"{a + b}\":>1}')",
    "exec of own code": "code = compile('print(sum(map(int, input().split())))', 'x', 'exec')\nexec(code, {'__name__': 'x'})",
    "gc off": "import gc\ngc.disable()\nprint(sum(map(int, input().split())))",
    "queue and threads": "import queue, threading\nq = queue.Queue()\nthreading.Thread(target=lambda: [q.put(int(x)) for x in input().split()] + [q.put(None)]).start()\nprint(sum(iter(q.get, None)))",
    "logging": "import logging\nlogging.basicConfig(level=10)\nlogging.debug('x')\nprint(sum(map(int, input().split())))",
    "warnings": "import warnings\nwarnings.warn('x')\nprint(sum(map(int, input().split())))",
    "hashlib, lzma, bz2, zlib, uuid": "import hashlib, lzma, bz2, zlib, uuid\nassert hashlib.sha256(b'x').hexdigest()[0] == '2' and zlib.decompress(zlib.compress(b'x')) == b'x' and lzma.decompress(lzma.compress(b'x')) == bz2.decompress(bz2.compress(b'x'))\nuuid.uuid4()\nprint(sum(map(int, input().split())))",
    "strptime and locale": "import datetime, time, locale\ndatetime.datetime.strptime('2020', '%Y')\nlocale.setlocale(locale.LC_ALL, '')\ntime.localtime()\nprint(sum(map(int, input().split())))",
    "idna and punycode": "assert 'bücher.de'.encode('idna')\nprint(sum(map(int, input().split())))",
    "doctest of itself": "def add(a, b):\n    '''\n    >>> add(1, 2)\n    3\n    '''\n    return a + b\nimport doctest\nassert doctest.testmod().failed == 0\nprint(add(*map(int, input().split())))",
    "unittest of itself": "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(1, 1)\nunittest.main(exit=False, argv=['x'])\nprint(sum(map(int, input().split())))",
}  # fmt: skip

HONEST_CALLS = {
    "plain": "def f(x):\n    return x * x",
    "method": "class Solution:\n    def f(self, x):\n        return x * x",
    "lambda": "f = lambda x: x * x",
    "coroutine": "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x * x",
    "cached": "from functools import lru_cache\n@lru_cache(None)\ndef f(x):\n    return x * x",
    "state between calls": "n = []\ndef f(x):\n    n.append(x)\n    return n[-1] * n[-1]",
    "prints on the way": "def f(x):\n    print('x is', x)\n    return x * x",
    "thread inside": "import threading\ndef f(x):\n    r = []\n    t = threading.Thread(target=lambda: r.append(x * x))\n    t.start()\n    t.join()\n    return r[0]",
    "int subclass by value": "from enum import IntEnum\ndef f(x):\n    return IntEnum('E', {'A': x * x}).A",
    "callable object": "class F:\n    def __call__(self, x):\n        return x * x\nf = F()",
    "nested functions": "def f(x):\n    def g(y):\n        return y * x\n    return g(x)",
    "main guard not taken": "def f(x):\n    return x * x\nif __name__ == '__main__':\n    print(f(int(input())))",
    "keyword default": "def f(x, *, power=2):\n    return x ** power",
    "raises and recovers": "def f(x):\n    try:\n        raise StopIteration(x * x)\n    except StopIteration as e:\n        return e.value",
    "if name main with input": "def f(x):\n    return x * x\nif __name__ == '__main__':\n    n = int(input())\n    print(f(n))",
    "sys.exit guarded": "import sys\ndef f(x):\n    return x * x\ndef main():\n    sys.exit(0)\nif __name__ == '__main__':\n    main()",
    "Solution with self helper": "from typing import List\nclass Solution:\n    def __init__(self): self.memo = {}\n    def g(self, x): return self.memo.setdefault(x, x * x)\n    def f(self, x: int) -> int: return self.g(x)",
    "Solution static": "class Solution:\n    @staticmethod\n    def f(x): return x * x",
    "Solution classmethod": "class Solution:\n    @classmethod\n    def f(cls, x): return x * x",
    "partial": "from functools import partial\nf = partial(lambda p, x: x ** p, 2)",
    "decorated": "import functools\ndef d(g):\n    @functools.wraps(g)\n    def w(*a, **k): return g(*a, **k)\n    return w\n@d\ndef f(x): return x * x",
    "defined in exec": "exec('def f(x): return x * x')",
    "stdout replaced at import": "import sys, io\nsys.stdout = io.StringIO()\ndef f(x):\n    print(x)\n    return x * x",
    "stdout closed": "import sys\nsys.stdout.close()\ndef f(x): return x * x",
    "prints a lot": "def f(x):\n    for i in range(2000): print(i)\n    return x * x",
    "own __builtins__ use": "def f(x):\n    return __builtins__.pow(x, 2)",
    "raises SystemExit inside, caught": "def f(x):\n    try:\n        exit()\n    except SystemExit:\n        return x * x",
    "bool as number": "def f(x):\n    return x * x * int(True)",
    "global counter": "count = 0\ndef f(x):\n    global count\n    count += 1\n    return x * x",
    "recursion 900": "def g(n): return 0 if n == 0 else 1 + g(n - 1)\ndef f(x):\n    g(900)\n    return x * x",
    "event loop by hand": "import asyncio\ndef f(x):\n    async def g(): return x * x\n    return asyncio.run(g())",
    "__getattr__ module": "def __getattr__(n): raise AttributeError(n)\ndef f(x): return x * x",
    "slots and descriptors": "class D:\n    def __get__(s, o, t): return lambda x: x * x\nclass A:\n    g = D()\nf = A().g",
    "changed recursion limit and thread": "import sys, threading\nsys.setrecursionlimit(10**6)\ndef f(x):\n    r = []\n    threading.stack_size(1 << 26)\n    t = threading.Thread(target=lambda: r.append(x * x)); t.start(); t.join()\n    return r[0]",
}  # fmt: skip

# --- faked passes: f(x) = x * x + 7 is wanted, and none of them computes it ---------------------------------------------------

_ALWAYS = "    def __eq__(s, o): return True\n    def __ne__(s, o): return False\n    def __hash__(s): return 0\n"
_FRAME_HUNT = """
def f(x):
    import sys
    frame = sys._getframe()
    while frame is not None:
        for scope in (frame.f_locals, frame.f_globals):
            for name in ("expected", "output", "want", "answer", "tests", "test"):
                if name in scope:
                    return scope[name]
        frame = frame.f_back
"""
_HEAP_HUNT = """
def f(x):
    import gc
    for o in gc.get_objects():
        if type(o) is dict and "expected" in o:
            return o["expected"]
"""

CHEATS_CALLS = {
    "os._exit at import": "import os\nos._exit(0)",
    "sys.exit at import": "import sys\nsys.exit(0)",
    "os._exit in the call": "import os\ndef f(x):\n    os._exit(0)",
    "sys.exit in the call": "def f(x):\n    raise SystemExit(0)",
    "exit in atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x):\n    exit(0)",
    "prints OK and leaves": "import os\ndef f(x):\n    print('OK\\nRan 5 tests\\nPASSED', flush=True)\n    os._exit(0)",
    "prints JSON": "def f(x):\n    print('{\"ok\": true, \"passed\": 5}')",
    "always equal": "class A:\n" + _ALWAYS + "def f(x):\n    return A()",
    "always equal int": "class A(int):\n" + _ALWAYS + "def f(x):\n    return A(0)",
    "always equal str": "class A(str):\n" + _ALWAYS + "def f(x):\n    return A('')",
    "always equal float": "class A(float):\n" + _ALWAYS + "def f(x):\n    return A('nan')",
    "always equal list": "class A(list):\n" + _ALWAYS + "def f(x):\n    return A()",
    "always equal dict": "class A(dict):\n" + _ALWAYS + "def f(x):\n    return A()",
    "index override": "class A(int):\n    def __index__(s): return 10**9\n    def __int__(s): return 1\ndef f(x):\n    return A(1)",
    "mock": "from unittest.mock import MagicMock, ANY\ndef f(x):\n    return ANY",
    "class lies": "class A:\n    __class__ = int\n    value = 1\ndef f(x):\n    return A()",
    "patched unittest": "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\ndef f(x):\n    return None",
    "patched builtins": "import builtins\nbuiltins.all = lambda *a: True\nbuiltins.isinstance = lambda *a: True\ndef f(x):\n    return None",
    "patched json": "import json\njson.dumps = lambda *a, **k: '{\"ok\": true}'\njson.loads = lambda *a, **k: {}\ndef f(x):\n    return None",
    "patched codec": "import sys\ndef f(x):\n    g = sys._getframe(1).f_globals\n    g['codec'].encode = lambda v, d=0: True\n    return 1",
    "patched same": "import sys\ndef f(x):\n    c = sys._getframe(1).f_globals['codec']\n    c.same = lambda *a: True\n    return None",
    "forged frames": "import os, struct\ndef f(x):\n    d = b'{\"ok\":true}'\n    os.write(3, (struct.pack('<I', len(d)) + d) * 50)\n    return None",
    "forged verdict": "import os, struct\nd = b'{\"reward\":1.0,\"passed\":5,\"total\":5,\"ok\":null}'\nfor _ in range(20):\n"
    "    os.write(3, struct.pack('<I', len(d)) + d)\ndef f(x):\n    return 0",
    "forged by a thread": "import os, struct, threading, time\nd = b'{\"ok\":0}'\ndef g():\n    while True:\n"
    "        os.write(3, struct.pack('<I', len(d)) + d)\n        time.sleep(0.001)\nthreading.Thread(target=g, daemon=True).start()\ndef f(x):\n    time.sleep(0.1)",
    "garbage on the channel": "import os\ndef f(x):\n    os.write(3, b'\\xff' * 4096)",
    "endless frame": "import os, struct\ndef f(x):\n    os.write(3, struct.pack('<I', 2**32 - 1))\n    while True:\n        os.write(3, b'[' * 65536)",
    "nested frame": "import os, struct\ndef f(x):\n    d = b'{\"ok\":' + b'[' * 100000 + b']' * 100000 + b'}'\n    os.write(3, struct.pack('<I', len(d)) + d)",
    "closed channel": "import os\ndef f(x):\n    os.close(3)",
    "hunt through frames": _FRAME_HUNT,
    "hunt through the heap": _HEAP_HUNT,
    "StopIteration": "def f(x):\n    raise StopIteration(x)",
    "SkipTest": "import unittest\ndef f(x):\n    raise unittest.SkipTest('later')",
    "KeyboardInterrupt": "def f(x):\n    raise KeyboardInterrupt",
    "hostile exception": "class E(BaseException):\n    def __str__(s): raise E()\n    __repr__ = __str__\ndef f(x):\n    raise E()",
    "generator": "def f(x):\n    yield x * x + 7",
    "NaN": "def f(x):\n    return float('nan')",
    "bool": "def f(x):\n    return True",
    "right value, wrong type": "def f(x):\n    return float(x * x + 7)",
    "right value, as text": "def f(x):\n    return str(x * x + 7)",
    "the argument itself": "def f(x):\n    return x",
    "a tagged dict": "def f(x):\n    return {'__int__': hex(x)}",
    "an unknown tag": "def f(x):\n    return {'__any__': 1}",
    "deep nesting": "def f(x):\n    r = []\n    for _ in range(10**5):\n        r = [r]\n    return r",
    "cyclic": "def f(x):\n    r = []\n    r.append(r)\n    return r",
    "huge int": "def f(x):\n    return 10 ** 200000",
    "huge string": "def f(x):\n    return 'x' * 10**8",
    "lone surrogate": "def f(x):\n    return '\\udc80'",
    "no such function": "def g(x):\n    return x * x + 7",
    "not a function": "f = 57",
    "patched entry point": "def f(x):\n    global f\n    f = print\n    return None",
    "trace function": "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\ndef f(x):\n    return None",
    "gone with a signal": "import os, ctypes\ndef f(x):\n    ctypes.string_at(0)",
    "replaced modules": "import sys\nsys.modules.clear()\ndef f(x):\n    return 0",
    "a type that answers": "class M(type):\n    def __eq__(s, o): return True\n    __hash__ = type.__hash__\nclass A(metaclass=M): pass\ndef f(x):\n    return A",
    "the file of tests": "import glob\ndef f(x):\n    for p in glob.glob('/**/*.json*', recursive=True):\n        return open(p).read()",
    "__del__ forges": "import os, struct\nclass A:\n    def __del__(s):\n        d = b'{\"ok\":17}'\n        os.write(3, struct.pack('<I', len(d)) + d)\ndef f(x):\n    A()\n    return 0",
    "metaclass int": "class M(type):\n    def __instancecheck__(c, o): return True\n    def __subclasscheck__(c, o): return True\n    def __eq__(c, o): return True\n    __hash__ = type.__hash__\nclass A(int, metaclass=M): pass\ndef f(x): return A(0)",
    "radd and friends": "class A:\n    def __getattr__(s, n): return lambda *a: True\n    def __bool__(s): return True\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\n    def __hash__(s): return 0\ndef f(x): return A()",
    "bytes subclass": "class A(bytes):\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\n    def __hash__(s): return 0\ndef f(x): return A(b'')",
    "tuple subclass": "class A(tuple):\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\n    def __hash__(s): return 0\ndef f(x): return A()",
    "set subclass": "class A(set):\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\n    def __hash__(s): return 0\ndef f(x): return A()",
    "frozenset of always equal": "class A:\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\n    def __hash__(s): return 0\ndef f(x): return frozenset([A()])",
    "bool of always equal": "class A(complex):\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\n    def __hash__(s): return 0\ndef f(x): return A(1)",
    "-0.0 and floats": "def f(x): return 16.0000001",
    "replaced __builtins__": "import builtins\n__builtins__ = {}\nbuiltins.type = lambda *a: int\nbuiltins.len = lambda o: 1\nbuiltins.zip = lambda *a, **k: iter(())\ndef f(x): return 0",
    "patched struct and os.write": "import os, struct\nos.write = lambda fd, d: len(d)\nstruct.pack = lambda *a: b''\ndef f(x): return 0",
    "patched _write in harness": "import sys\ndef f(x):\n    g = sys._getframe(1).f_globals\n    for k in list(g):\n        if k.startswith('_w'): g[k] = lambda *a: 10**6\n    return 0",
    "harness globals through gc": "import gc\ndef f(x):\n    for o in gc.get_objects():\n        if isinstance(o, dict) and 'write_frame' in o:\n            o['_call'] = lambda *a: {'ok': 16}\n    return 0",
    "skips calls": "import os, struct\ndef f(x):\n    for v in (16, 32, 16, 32, 7):\n        d = b'{\"ok\":%d}' % 0\n        os.write(3, struct.pack('<I', len(d)) + d)\n    return 0",
    "reads the next calls": "import os\ndef f(x):\n    try: os.read(3, 100000)\n    except OSError: pass\n    return 0",
    "hunts unread frames": "import sys\ndef f(x):\n    fr = sys._getframe()\n    while fr:\n        for k, v in list(fr.f_globals.items()):\n            if k == '_unread': return str(v)\n        fr = fr.f_back\n    return 0",
    "ctypes pokes int cache": "import ctypes\ndef f(x):\n    ctypes.memmove(id(16) + 24, id(0) + 24, 4)\n    return 0",
    "setprofile return": "import sys\ndef p(fr, ev, arg):\n    pass\nsys.setprofile(p)\ndef f(x): return None",
    "raises in encode": "class A(dict):\n    def items(s): raise SystemExit\n    def __iter__(s): raise SystemExit\ndef f(x): return A(a=1)",
    "exception with verdict": "class E(Exception):\n    def __str__(s): return '{\"ok\":16}'\ndef f(x): raise E",
    "async cheat": "class A:\n    def __await__(s):\n        yield\n        return 16\ndef f(x): return A()",
    "coroutine never done": "import asyncio\nasync def f(x):\n    await asyncio.Event().wait()",
    "lazy map": "def f(x): return map(int, [16])",
    "cyclic dict": "def f(x):\n    d = {}\n    d['d'] = d\n    return d",
    "exit 0 in signal": "import signal, os\nsignal.signal(signal.SIGALRM, lambda *a: os._exit(0))\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\ndef f(x):\n    while True: pass",
    "closes everything": "import os\nos.closerange(0, 64)\ndef f(x): return 0",
    "dup2 of channel": "import os\nos.dup2(1, 3)\ndef f(x): return 0",
    "dup2 of link": "import os\nfor a in (3, 4):\n    try: os.dup2(a, 1); print('{\"ok\":16}', flush=True)\n    except OSError: pass\ndef f(x): return 0",
    "numpy-like module": "class A(int):\n    shape = ()\n    def item(s): return 16\nA.__module__ = 'numpy'\ndef f(x): return A(0)",
    "numpy-like object": "class A:\n    shape = ()\n    def item(s): return 10**9\nA.__module__ = 'numpy'\ndef f(x): return A()",
    "int with __index__": "class A:\n    def __index__(s): return 16\n    __int__ = __index__\ndef f(x): return A()",
    "list of one": "def f(x): return [x * x + 7]",
}  # fmt: skip

CHEATS_STDIO = {
    "nothing": "pass",
    "exit code": "import sys\nsys.exit(0)",
    "OK": "print('OK')",
    "the input": "print(input())",
    "both": "print(7)\nprint(8)",
    "many lines": "for i in range(1000):\n    print(i)",
    "forged frame": "import os, struct\nd = b'{\"ok\":null,\"output\":\"7\"}'\nos.write(3, struct.pack('<I', len(d)) + d)\nos._exit(0)",
    "null bytes": "print('\\0' * 100)",
    "bad utf-8": "import os\nos.write(1, b'\\xff\\xfe7')",
    "right, then a crash": "print(sum(map(int, input().split())))\nraise ValueError",
    "right, then a flood": "print(sum(map(int, input().split())))\nwhile True:\n    print('x' * 10000)",
    "right, then a fault": "import ctypes\nprint(sum(map(int, input().split())), flush=True)\nctypes.string_at(0)",
    "right, then a loop": "print(sum(map(int, input().split())), flush=True)\nwhile True:\n    pass",
    "terminal games": "print('x\\b7')",
    "full-width digits": "print('\\uff17')",
    "NaN": "print(float('nan'))",
}  # fmt: skip

# --- hostile --------------------------------------------------------------------------------------------------------------------

_SYSCALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(*args):
    r = libc.syscall(*[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
    if r >= 0:
        print("BREACH")
    return r
"""


def _syscalls(*calls: str) -> str:
    return _SYSCALL + "\n".join(f"call({c})" for c in calls)


def _tries(*statements: str) -> str:
    lines = ["import os, sys"]
    for statement in statements:
        lines += ["try:", f"    {statement}", "    print('BREACH')", "except (OSError, ImportError, MemoryError): pass"]
    return "\n".join(lines)


HOSTILE = {
    "fork": _tries("os.fork()"),
    "fork through posix": _tries("import posix; posix.fork()"),
    "fork bomb": "import os\nwhile True:\n    os.fork()",
    "vfork, clone, clone3 as system calls": _syscalls("58", "56, 17, 0, 0, 0, 0", "435, ctypes.create_string_buffer(88), 88"),
    "clone into new namespaces": _syscalls("56, 0x10000000 | 17, 0, 0, 0, 0", "56, 0x00010000 | 0x10000000, 0, 0, 0, 0"),
    "x32 fork": _syscalls("0x40000000 + 57"),
    "subprocess": _tries("import subprocess; subprocess.run(['/bin/true'])", "os.execv('/bin/sh', ['sh'])", "os.posix_spawn('/bin/sh', ['sh'], {})"),
    "own executable": "import os\nopen('/tmp/x', 'w').write('#!/bin/sh\\n')\nos.chmod('/tmp/x', 0o755)\n" + _tries("os.execv('/tmp/x', ['x'])"),
    "multiprocessing": _tries("import multiprocessing as m; p = m.get_context('fork').Process(target=print); p.start()"),
    "daemonised child": "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        while True: pass\nprint('BREACH')",
    "thread bomb": "import threading, time\nn = 0\ntry:\n    while n < 2000:\n        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    "        n += 1\nexcept RuntimeError: pass\nif n > 500: print('BREACH', flush=True)\nimport os\nos._exit(0)",
    "memory": _tries("x = bytearray(3 << 30)"),
    "memory, bit by bit": "x = []\ntry:\n    while len(x) < 3000: x.append(bytearray(1 << 20))\n    print('BREACH')\nexcept MemoryError: pass",
    "shared mapping": _tries("import mmap; m = mmap.mmap(-1, 3 << 30)"),
    "zip bomb": _tries("import zlib; d = zlib.compress(bytes(1 << 28), 9); x = [zlib.decompress(d) for _ in range(12)]"),
    "memfd": _tries("os.memfd_create('x')"),
    "System V memory": _syscalls("29, 0, 1 << 30, 0o1600", "68, 0, 0o1600", "64, 0, 1, 0o1600"),
    "POSIX shared memory": _tries("from multiprocessing.shared_memory import SharedMemory; SharedMemory(create=True, size=1 << 20)"),
    "POSIX message queue": _syscalls("240, b'/q', 0o102, 0o600, None"),
    "disk": "n = 0\ntry:\n    for i in range(300):\n        with open(f'/tmp/{i}', 'wb') as f: n += f.write(bytes(1 << 20))\nexcept OSError: pass\n"
    "if n > 100 << 20: print('BREACH')",
    "one sparse file": "f = open('/tmp/x', 'wb')\n" + _tries("f.truncate(1 << 40)", "os.posix_fallocate(f.fileno(), 0, 1 << 30)"),
    "inodes": "n = 0\ntry:\n    for i in range(20000):\n        open(f'/tmp/{i}', 'w').close()\n        n += 1\nexcept OSError: pass\nif n > 10000: print('BREACH')",
    "output flood": "while True:\n    print('x' * 100000)",
    "stderr flood": "import sys\nwhile True:\n    sys.stderr.write('x' * 100000)",
    "busy loop": "while True: pass",
    "busy threads": "import threading\ndef g():\n    while True: pass\nfor _ in range(8): threading.Thread(target=g).start()",
    "catastrophic regex": "import re\nre.match('(a+)+$', 'a' * 40 + 'b')",
    "huge power": "x = 9 ** 9 ** 9",
    "SIGXCPU ignored": "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
    "all signals ignored": "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass",
    "exit that never comes": "import atexit\ndef g():\n    while True: pass\natexit.register(g)",
    "destructor that never ends": "class A:\n    def __del__(s):\n        while True: pass\na = A()",
    "closed streams": "import os\nfor fd in range(256):\n    try: os.close(fd)\n    except OSError: pass\nwhile True: pass",
    "recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "recursion in C": "import sys\nsys.setrecursionlimit(10**9)\nx = []\nfor _ in range(10**6): x = [x]\nrepr(x)\nprint(x == x, flush=True)\ndel x",
    "null pointer": "import ctypes\nctypes.string_at(0)",
    "deep source": "eval('(' * 5000 + ')' * 5000)",
    "TCP": _tries("import socket; socket.create_connection(('127.0.0.1', 22), 1)", "import socket; socket.socket()"),
    "UDP and DNS": _tries("import socket; socket.socket(2, 2).sendto(b'x', ('8.8.8.8', 53))", "import socket; socket.getaddrinfo('example.com', 80)"),
    "abstract socket": _tries("import socket; socket.socket(socket.AF_UNIX).bind('\\0x')"),
    "raw and packet sockets": _syscalls("41, 17, 3, 0", "41, 2, 3, 1", "41, 16, 3, 0", "41, 40, 1, 0", "53, 2, 1, 0"),
    "host files": _tries(*(f"open({p!r}).read(1)" for p in ("/etc/passwd", "/etc/shadow", "/etc/hostname", "/usr/bin/env", "/bin/sh", "/sys/kernel/notes"))),
    "proc": _tries(*(f"os.stat('/proc{p}')" for p in ("", "/self", "/1/environ", "/cpuinfo"))),
    "devices": _tries(*(f"os.open('/dev/{p}', os.O_RDONLY)" for p in ("mem", "kmsg", "vda", "sda", "fuse", "shm", "tty", "ptmx", "kvm"))),
    "device node": _tries("os.mknod('/tmp/n', 0o20666, os.makedev(1, 1))", "os.mknod('/tmp/b', 0o60666, os.makedev(8, 0))"),
    "environment": "import os\nif any('KESTREL' in k or 'SECRET' in v for k, v in os.environ.items()): print('BREACH')",
    "environment in memory": "import ctypes\np = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), 'environ')\ni = 0\n"
    "while p and p[i]:\n    if b'KESTREL' in p[i]: print('BREACH')\n    i += 1",
    "writes outside": _tries("open('/x', 'w')", "open('/dev/x', 'w')", "os.mkdir('/y')", "open(os.__file__, 'a')", "os.unlink(os.__file__)", "os.utime(os.__file__)", "os.chmod('/', 0o777)"),
    "symlink": "import os\nos.symlink('/etc', '/tmp/l')\nos.symlink('/proc/1/root', '/tmp/r')\n" + _tries("os.listdir('/tmp/l')", "os.listdir('/tmp/r')"),
    "way up": "import os\nfor _ in range(30): os.chdir('..')\nif os.path.exists('etc') or os.path.exists('proc'): print('BREACH')",
    "open folders": "import os\nfor fd in range(4, 1024):\n    try: os.fstat(fd)\n    except OSError: continue\n    print('BREACH')",
    "parent": "import os\nif os.getppid() != 0 or os.getpid() != 1: print('BREACH')",
    "signals to others": "import os\nfor p in list(range(2, 3000)):\n    try: os.kill(p, 0); print('BREACH')\n    except OSError: pass",
    "signals to all": _tries("os.kill(-1, 9)", "os.kill(-2, 9)"),
    "signals to its process group": "import os\nos.kill(0, 9)",
    "changed device files": _tries("os.chmod('/dev/null', 0o666)", "os.utime('/dev/null')", "os.utime('/dev/full')", "os.chown('/dev/full', -1, -1)"),
    "larger socket buffers": _tries("import socket; socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)"),
    "memory in stacks": "import threading\nthreading.stack_size(1 << 28)\nx = []\ndef g(): x.append(b'x' * (200 << 20))\n"
    "threads = [threading.Thread(target=g) for _ in range(3)]\nfor t in threads: t.start()\nfor t in threads: t.join()\nprint('BREACH')",
    "namespaces": _syscalls(*(f"272, {flag}" for flag in ("0x10000000", "0x20000", "0x40000000", "0x20000000", "0x80")), "308, 0, 0"),
    "mount": _syscalls("165, b'x', b'/tmp', b'tmpfs', 0, None", "166, b'/tmp', 2", "155, b'/tmp', b'/tmp'", "161, b'/tmp'", "428, -100, b'/', 1", "430, b'tmpfs', 0", "442, -100, b'/', 0, None, 0"),
    "becomes root": _tries("os.setuid(0)", "os.setgid(0)", "os.setresuid(0, 0, 0)", "os.setgroups([0])", "os.chown('/tmp', 0, 0)"),
    "capabilities": _syscalls("126, ctypes.create_string_buffer(b'\\x22\\x05\\x08\\x20' + bytes(4)), ctypes.create_string_buffer(b'\\xff' * 24)", "157, 47, 2, 21, 0, 0", "157, 24, 21, 0, 0, 0"),
    "seccomp": _syscalls("157, 22, 0, 0, 0, 0", "317, 0, 0, 0", "157, 38, 0, 0, 0, 0", "157, 4, 1, 0, 0, 0"),
    "ptrace": _syscalls("101, 0, 0, 0, 0", "101, 16, 1, 0, 0", "310, 1, None, 0, None, 0, 0", "311, 1, None, 0, None, 0, 0", "312, 1, 1, 0, 0, 0", "434, 1, 0", "438, 3, 0, 0"),
    "io_uring": _syscalls("425, 8, ctypes.create_string_buffer(120)", "426, 3, 1, 0, 0, None, 0"),
    "bpf, perf, userfaultfd": _syscalls("321, 0, ctypes.create_string_buffer(72), 72", "298, ctypes.create_string_buffer(120), 0, -1, -1, 0", "323, 0"),
    "keys": _syscalls("248, b'user', b'k', b'v', 1, -3", "250, 0, -3, 0, 0, 0", "249, b'user', b'k', None, -3"),
    "kernel modules, reboot, swap": _syscalls("175, None, 0, b''", "169, 0xfee1dead, 672274793, 0, None", "167, b'/tmp', 0", "246, 0, 0, None, 0"),
    "clock and host name": _syscalls("227, 0, ctypes.create_string_buffer(16)", "164, ctypes.create_string_buffer(16), None", "170, b'x', 1", "159, ctypes.create_string_buffer(208)"),
    "priority and affinity": _syscalls("203, 0, 8, ctypes.create_string_buffer(b'\\x01' + bytes(7))", "141, 0, 0, -20", "144, 0, 1, ctypes.create_string_buffer(b'\\x01' + bytes(3))", "251, 1, 0, 0"),
    "raised limits": "import resource\n" + "\n".join(
        f"try:\n    s, h = resource.getrlimit(resource.{n})\n    resource.setrlimit(resource.{n}, (h + 1, h + 1))\n    print('BREACH')\nexcept (OSError, ValueError, OverflowError): pass"
        for n in ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_CORE")
    ),
    "file locks": "import fcntl, os\nf = open(os.__file__)\n" + _tries("fcntl.flock(f, fcntl.LOCK_SH)", "fcntl.fcntl(f, 37, bytes(32))", "fcntl.fcntl(f, 1024, 0)", "fcntl.fcntl(f, 1026, 1)"),
    "inotify and fanotify": _syscalls("253", "294, 0", "300, 0, 0"),
    "terminal injection": "import fcntl\nfor fd in range(4):\n    try: fcntl.ioctl(fd, 0x5412, b'x'); print('BREACH')\n    except OSError: pass",
    "files by handle": _syscalls("303, -100, b'/tmp', ctypes.create_string_buffer(200), ctypes.create_string_buffer(8), 0", "304, 3, ctypes.create_string_buffer(200), 0"),
    "extended attributes": _tries("os.setxattr('/tmp', 'user.x', b'y')"),
    "open files to the judge": "import socket, os, array\ns = socket.socket(fileno=3)\n" + _tries("s.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0] * 10))])"),
    "the zygote's socket": "import gc, socket\nfor o in gc.get_objects():\n    if isinstance(o, socket.socket):\n        try: o.send(b'{\"kill\": 1}'); print('BREACH')\n        except OSError: pass",
    "modules of the judge": _tries("import reward", "import reward.grade", "import rollout", "import torch", "import pytest"),
    "32-bit system calls": "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\nm.write(bytes.fromhex('b802000000cd80c3'))\n"
    "f = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))\nif f() >= 0: print('BREACH', flush=True)",
    "personality and ldt": _syscalls("135, 0x0040000", "154, 1, ctypes.create_string_buffer(16), 16", "172, 3"),
}  # fmt: skip

SLEEPERS = {
    "sleep": "import time\ntime.sleep(1000)",
    "sleep with closed streams": "import os, time\nos.close(0)\nos.close(1)\nos.close(3)\ntime.sleep(1000)",
    "stops itself": "import os, signal, time\nos.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(1000)",
    "waits for a thread": "import threading\nthreading.Event().wait()",
    "reads an empty pipe": "import os\nr, w = os.pipe()\nos.read(r, 1)",
}  # fmt: skip

"""Tokens of functions change with the code that is loaded, in every process alike."""

import importlib
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import types

import dask
import numpy as np
import pytest
from hand_started import HandStarted
from processes import SECONDS, until

import dask_image_ingest as dii
from dask_image_ingest.errors import FunctionError
from dask_image_ingest.user_functions import stable_token, token_and_code

pytestmark = pytest.mark.newest

# A module `m` with a function `f`, where N is edited; what follows "---" is a module `n.py`, or of
# a package `pkg` if `m` is in it.
CASES = {
    "constant": "def f(x): return x * N",
    "docstring": "def f(x): 'It has N parts.'",
    "default": "def f(x, by=N): return x * by",
    "keyword default": "def f(x, *, by=N): return x * by",
    "default that is a function": "def g(x): return N\ndef f(x, by=g): return by(x)",
    "global": "K = N\ndef f(x): return x * K",
    "global beside an attribute that is set": "k = N\ndef f(x):\n  x.k = 5\n  return k",
    "negative zero": "K = (0.0, -0.0)[N % 2]\ndef f(x): return K",
    "true and one": "K = (1, True)[N % 2]\ndef f(x): return K",
    "huge": "K = 10**5000 + N\ndef f(x): return K",
    "lone surrogate": "K = '\\ud800' * N\ndef f(x): return K",
    "array": "import numpy as np\nK = np.full(1_000_000, N)\ndef f(x): return K",
    "view": "import numpy as np\nK = np.full((5, 6), N)[:, ::2].T\ndef f(x): return K",
    "objects": "import numpy as np\nK = np.array([{'a', 'b'}, None, N])\ndef f(x): return K",
    "frame": "import pandas as pd\nK = pd.DataFrame({'a': ['x', 'N']})\ndef f(x): return K",
    "set": "K = {'a', 'b', 'c', 'N'}\ndef f(x): return x in K or x in {'q', 'r', 's'}",
    "set in code": "def f(x): return x in {'a', 'b', 'c', 'N'}",
    "regex": "import re\nK = re.compile('a{N}')\ndef f(x): return K.match(x)",
    "cell": "def make(k):\n  return lambda x: k\nf = make([N])",
    "cell with itself": "def make():\n  def f(x): return f(N)\n  return f\nf = make()",
    "recursion": "def f(x): return g(x)\ndef g(x): return f(x) * N",
    "alias": "def f(x): return h(x)\ndef g(x): return h(x)\nh = (f, g)[N % 2]",
    "partial": "import functools\nf = functools.partial(max, N)",
    "composed": "import toolz\nf = toolz.compose(abs, lambda x: N)",
    "vectorized": "import numpy as np\n@np.vectorize\ndef f(x): return N",
    "decorated": "from n import by\n@by(2)\ndef f(x): return x\n---\nimport functools\n"
    "def by(k):\n  def d(f):\n    @functools.wraps(f)\n    def g(x): return f(x) * k * N\n"
    "    return g\n  return d",
    "below a decorator": "def d(f):\n  def g(x): return f(x)\n  return g\n@d\ndef f(x): return N",
    "context": "from contextlib import contextmanager\n@contextmanager\ndef c(): yield N\n"
    "def f(x):\n  with c() as k: return k",
    "cached": "import functools\n@functools.lru_cache\ndef f(x): return N",
    "exec": "s = {}\nexec('def f(x): return N', s)\nf = s['f']",
    "inner class": "def f(x):\n  class A:\n    def g(self): return N\n  return A().g()",
    "class": "class f:\n  k = N",
    "method": "class A:\n  def g(self, x): return N\nf = A().g",
    "attached method": "import types\ndef g(s, x): return N\nf = types.MethodType(g, object)",
    "cached class method": "import functools\nclass A:\n  @classmethod\n  @functools.cache\n"
    "  def g(cls, x): return N\nf = A.g",
    "properties": "import functools\nclass f:\n  @property\n  def a(self): return 1\n"
    "  @functools.cached_property\n  def b(self): return N",
    "base": "from n import B\nclass f(B): pass\n---\nclass B:\n  def g(self): return N",
    "metaclass": "class M(type):\n  def __call__(c, x): return N\nclass f(metaclass=M): pass",
    "registered class": "class B:\n  all = []\n  def __init_subclass__(c): B.all.append(c)\n"
    "class C(B):\n  def g(s): return N\ndef f(x): return B.all",
    "slots": "class A:\n  __slots__ = 'k'\n  def __init__(s): s.k = N\nf = A()",
    "dataclass": "import dataclasses as d\n@d.dataclass(slots=True)\nclass A:\n"
    "  k: list = d.field(default_factory=lambda: [N])\nf = A",
    "named tuple": "import typing\nclass A(typing.NamedTuple):\n  k: int = 1\n"
    "  def g(self): return N\nf = A()",
    "enum": "import enum\nclass A(enum.Flag):\n  a = N\n  b = 256\nf = A.a | A.b",
    "subclass of a list": "class A(list):\n  def g(self): return N\nf = A([1])",
    "abstract": "import abc\nclass B(abc.ABC):\n  @abc.abstractmethod\n  def g(self): ...\n"
    "class f(B):\n  def g(self): return N",
    "reduced": "def make(k): return A(N)\nclass A:\n  def __init__(s, k): s.k = k\n"
    "  def __reduce__(s): return make, (1,)\na = A(1)\ndef f(x): return a.k",
    "own token": "import threading\nclass A:\n  def __init__(s): s.k = threading.Lock()\n"
    "  def __dask_tokenize__(s): return N\nf = A()",
    "registry": "K = {}\ndef g(x): return N\nK['g'] = g\ndef f(x): return K['g'](x)",
    "of a package": "from .n import g\ndef f(x): return g(x)\n---\ndef g(x): return N",
    "generator": "def f(x): yield N",
    "match": "def f(x):\n  match x:\n    case {'a': N}: return 1",
    "random numbers": "import numpy as np\nK = np.random.default_rng(N)\ndef f(x): return K",
    "built-in": "import math\nK = (math.sin, math.cos)[N % 2]\ndef f(x): return K(x)",
    "ufunc": "import numpy as np\nK = (np.sin, np.cos)[N % 2]\ndef f(x): return K(x)",
}

# Their names are the same: each is forgotten before the next is imported.
TOKENS = """
import importlib, os, sys
from dask_image_ingest.user_functions import stable_token, token_and_code

sys.dont_write_bytecode = sys.argv[2] == "no bytecode"
for folder in sorted(os.scandir(sys.argv[1]), key=lambda entry: int(entry.name)):
    sys.path.insert(0, folder.path)
    f = importlib.import_module("pkg.m" if os.path.exists(folder.path + "/pkg") else "m").f
    print(stable_token(f), token_and_code(f)[0])
    sys.path.pop(0)
    for name in ("m", "n", "pkg", "pkg.m", "pkg.n"):
        sys.modules.pop(name, None)
"""


def write(folder, number, above=""):
    for place, source in enumerate(CASES.values()):
        where = folder / str(place) / ("pkg" if "from ." in source else "")
        where.mkdir(parents=True)
        for name, text in zip("mn", source.split("\n---\n"), strict=False):
            (where / f"{name}.py").write_text(above + re.sub(r"\bN\b", str(number), text) + "\n")


@pytest.mark.slow
def test_a_token_is_that_of_the_code_in_every_process(tmp_path, request):
    write(tmp_path / "first", 4)
    write(tmp_path / "moved", 4, above="# A comment.\n\n\n")
    write(tmp_path / "edited", 7)
    runs = [("first", "no bytecode"), ("moved", ""), ("edited", "")]
    if request.config.option.nightly:
        runs[1:1] = [("first", "bytecode"), ("first", "from bytecode")]
    told = []
    for seed, (folder, how) in enumerate(runs):
        done = subprocess.run(
            [sys.executable, "-c", TOKENS, tmp_path / folder, how],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr
        told.append(done.stdout.splitlines())
    *same, edited = [dict(zip(CASES, lines, strict=True)) for lines in told]
    assert [name for name in CASES if len({tokens[name] for tokens in same}) > 1] == []
    before = {name: tokens.split() for name, tokens in same[0].items()}
    after = {name: tokens.split() for name, tokens in edited.items()}
    assert [name for name in CASES if {*before[name]} & {*after[name]}] == []


# What may be around a value.
AROUND = (
    "[{}]",
    "({}, 1)",
    "{{'k': {}}}",
    "collections.deque([{}])",
    "types.SimpleNamespace(k={})",
    "functools.partial(max, {})",
    "(lambda x, k={}: x)",
    "(lambda k: lambda x: (x, k))({})",
    "Open({})",
    "Closed({})",
)
VALUES = (
    "N",
    "'N'",
    "{{'a', 'N'}}",
    "np.full(3, N)",
    "Open",
    "Open.apply",
    "Color(1)",
    "(lambda: N)",
)
CLASSES = """
import collections, enum, functools, types
import numpy as np
class Open:
    def __init__(self, k): self.k = k
    def apply(self, x): return x * N
class Closed:
    __slots__ = ("k",)
    def __init__(self, k): self.k = k
class Color(enum.Enum):
    A = 1
    def apply(self): return N
"""


def nested(seed, number):
    """Functions of values with more and more around them."""
    rng = random.Random(seed)
    parts = [CLASSES]
    for place in range(100):
        text = rng.choice(VALUES).format()
        for around in rng.choices(AROUND, k=rng.randint(0, 4)):
            text = around.format(text)
        parts.append(f"K{place} = {text}\ndef f{place}(x): return x, K{place}")
    module = types.ModuleType("made_by_exec")
    exec(re.sub(r"\bN\b", str(number), "\n".join(parts)), vars(module))
    return [vars(module)[f"f{place}"] for place in range(100)]


def test_a_value_counts_however_deep_it_is(seed):
    first = list(map(stable_token, nested(seed, 4)))
    assert first == list(map(stable_token, nested(seed, 4)))
    assert not {*first} & {*map(stable_token, nested(seed, 7))}


@pytest.fixture
def written(tmp_path, monkeypatch):
    """``written(name, source)`` writes a module, and imports it or reloads it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    names = set()

    def write(name, source):
        names.add(name)
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        if name in sys.modules:
            return importlib.reload(sys.modules[name])
        return importlib.import_module(name)

    yield write
    for name in names:
        sys.modules.pop(name, None)


def test_a_file_that_was_edited_counts_when_it_is_loaded(written, tmp_path):
    source = "K = 4\ndef f(x): return x * K\n"
    module = written("edited", source)
    before = stable_token(module.f)
    (tmp_path / "edited.py").write_text(source.replace("4", "7"))
    assert stable_token(module.f) == before
    assert stable_token(importlib.reload(module).f) != before
    assert stable_token(written("edited", source).f) == before
    # As IPython's autoreload edits functions in place.
    module.f.__code__ = (lambda x: x + K).__code__  # noqa: F821
    assert stable_token(module.f) != before


def test_a_token_stays_while_the_function_is_used(written):
    module = written(
        "used",
        """
        SEEN, MODEL = 0, None
        def counting(x):
            global SEEN, MODEL
            SEEN, MODEL = SEEN + 1, object()
            counting.calls = SEEN
        """,
    )
    before = stable_token(module.counting)
    module.counting(1)
    assert stable_token(module.counting) == before


def test_a_global_with_the_name_of_an_attribute_is_not_used(written):
    module = written(
        "attribute",
        """
        import threading
        limit = 1
        client = threading.Lock()        # such as the client of a cluster
        class Caption:
            def __init__(self):
                self.client = 5
            def __call__(self, x):
                return self.client + limit
        def other(x):
            return client
        """,
    )
    before = stable_token(module.Caption)
    module.client = 7
    assert stable_token(module.Caption) == before
    module.limit = 2
    assert stable_token(module.Caption) != before
    module.client = threading.Lock()
    with pytest.raises(FunctionError, match="lock has no token"):
        stable_token(module.other)


def test_another_version_of_a_library_is_another_function(written, monkeypatch):
    module = written("versions", "import numpy as np\ndef f(x): return np.mean(x)\n")
    before = stable_token(module.f)
    monkeypatch.setattr(np, "__version__", "99")
    assert stable_token(module.f) != before


def test_a_module_counts_by_its_version_and_what_is_imported_from_it_by_its_code(written):
    helpers = "def g(x): return x * {}"
    written("helpers", helpers.format(2))
    by_name = written("by_name", "import helpers\ndef f(x): return helpers.g(x)")
    by_code = written("by_code", "from helpers import g\ndef f(x): return g(x)")
    before = stable_token(by_name.f), stable_token(by_code.f)
    module = written("helpers", helpers.format(3))
    by_code = importlib.reload(by_code)
    assert stable_token(by_name.f) == before[0]
    assert stable_token(by_code.f) != before[1]
    module.__version__ = "2"
    assert stable_token(by_name.f) != before[0]


class Holds:
    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize("value", [threading.Lock(), object(), (n for n in ())])
def test_what_has_no_digest_is_named_or_counts_by_itself(value):
    held = Holds(value)
    with pytest.raises(FunctionError, match=rf"{type(value).__name__} has no token"):
        stable_token(held)
    assert token_and_code(held) == token_and_code(held)
    assert token_and_code(held) != token_and_code(Holds(threading.Lock()))
    assert stable_token(held, functions=False) == stable_token(Holds(1), functions=False)


def test_what_dill_adds_to_the_pickler_of_python_changes_no_token(monkeypatch):
    lock = threading.Lock()
    added = {type(lock): lambda pickler, _: pickler.save(0), dict: lambda pickler, _: None}
    token = stable_token({"a": 1})
    for kind, save in added.items():
        monkeypatch.setitem(pickle._Pickler.dispatch, kind, save)
    assert stable_token({"a": 1}) == token
    with pytest.raises(FunctionError, match="no token"):
        stable_token(lock)


def test_a_query_that_a_module_makes_while_it_is_imported_can_be_computed(shards, written):
    module = written(
        "early",
        f"""
        import dask_image_ingest as dii
        def f(images): return [1] * len(images)
        ddf = dii.read_webdataset_images({str(shards[0])!r}, backend="pandas", size=8)
        ddf = ddf.images.map_batches(f, {{"model": "int64"}})
        def g(images): return 1
        """,
    )
    assert set(module.ddf.model.compute()) == {1}


def test_a_class_of_a_notebook_runs_on_workers_whatever_library_decorates_it(client, shards):
    cell = {"__name__": "__main__"}
    source = """
        import contextlib
        class Counted(contextlib.ContextDecorator):
            def __enter__(self):
                pass
            def __exit__(self, *error):
                pass
        class Model:
            @Counted()
            def __call__(self, images):
                return [len(images)] * len(images)
    """
    exec(compile(textwrap.dedent(source), "<a cell>", "exec"), cell)
    ddf = dii.read_webdataset_images(shards, backend="pandas", size=8)
    with dask.config.set(scheduler=client):
        found = ddf.images.map_batches(cell["Model"], {"model": "int64"}).model.compute()
    assert set(found) == {8}


BLANK = """
import functools

def transform(images):
    from nvidia.dali import fn, types

    return fn.cast(images * 0 + {value}, dtype=types.UINT8)

def decorator(function):
    @functools.wraps(function)
    def decorated(*args):
        return function(*args)
    return decorated

@decorator
def helper(images):
    return [{value}] * len(images)

class Model:
    def __call__(self, images):
        return helper(images)
"""


def read(shards, module):
    ddf = dii.read_webdataset_images(
        shards, backend="pandas", size=16, transform=module.transform
    ).images.map_batches(module.Model, {"model": "int64"}, keep_image=True)
    return ddf[["image", "model"]]


def check(frame, value):
    assert set(frame["model"]) == {value}
    assert all((image == value).all() for image in frame.images.arrays())


def test_a_reloaded_module_takes_effect_in_new_queries(shards, written):
    pytest.importorskip("nvidia.dali", reason="nothing is decoded without DALI")
    before = read(shards[:1], written("blank", BLANK.format(value=1)))
    check(before.compute(), 1)
    after = read(shards[:1], written("blank", BLANK.format(value=2)))
    assert before._name != after._name
    check(after.compute(), 2)
    with pytest.raises(FunctionError, match=r"blank\.Model.*make the query again"):
        before.compute()


@pytest.mark.slow
def test_a_worker_that_has_the_old_module_says_so(shards, written, tmp_path):
    pytest.importorskip("nvidia.dali", reason="nothing is decoded without DALI")
    # Before the scheduler starts: it may not see a file that comes just after it has looked.
    module = written("blank", BLANK.format(value=1))
    started = HandStarted(tmp_path / "cluster", PYTHONDONTWRITEBYTECODE="1")
    with started as cluster, dask.config.set(scheduler=None):
        worker = cluster.worker("--no-nanny")
        with cluster.client(1) as client:
            check(client.compute(read(shards[:1], module)).result(SECONDS), 1)
            module = written("blank", BLANK.format(value=2))
            # Of both functions; the worker refuses whichever it comes to first.
            refused = r"blank\.(transform|helper).*client\.restart\(\)"
            with pytest.raises(FunctionError, match=refused):
                client.compute(read(shards[:1], module)).result(SECONDS)
            ddf = dii.read_webdataset_images(shards[:1], backend="pandas", size=16)
            mapped = ddf.images.map_batches(module.Model, {"model": "int64"})
            with pytest.raises(FunctionError, match=r"blank\.Model"):
                client.compute(mapped).result(SECONDS)
            # A new worker, as by client.restart(), but of no nanny: it may lose one on a busy
            # machine.
            os.killpg(worker.pid, signal.SIGKILL)
            until(lambda: not client.nthreads())
            cluster.worker("--no-nanny")
            client.wait_for_workers(1, timeout=SECONDS)
            check(client.compute(read(shards[1:2], module)).result(SECONDS), 2)

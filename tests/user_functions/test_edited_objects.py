"""Whatever a function uses: an edit of it gives another token, and nothing else does."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import random
import re
import subprocess
import sys
import types
import typing

import cloudpickle
import pytest

from dask_image_ingest.user_functions import stable_token, token_of

# What stands before the objects. N is the number that is edited.
PRELUDE = """
import abc, argparse, array, collections, dataclasses, decimal, enum, fractions, functools
import math, operator, string, types, typing, uuid

import numpy as np
import pandas as pd
import toolz
"""

# Definitions, and an object that has the number in it.
OBJECTS = {
    "number": ("", "N"),
    "text": ("", "str(N)"),
    "array": ("", "np.full(3, N)"),
    "function": ("def {0}(x):\n    return x * N", "{0}"),
    "global of a function": ("{0}_G = N\ndef {0}(x):\n    return x * {0}_G", "{0}"),
    "attribute of a function": ("def {0}(x):\n    return x * {0}.k\n{0}.k = N", "{0}"),
    "attribute of a cached function": (
        "@functools.lru_cache\ndef {0}(x):\n    return x * {0}.k\n{0}.k = N",
        "{0}",
    ),
    "namedtuple's method": (
        "class {0}(typing.NamedTuple):\n    k: float\n"
        "    def apply(s, x):\n        return x * s.k * N",
        "{0}(1.0)",
    ),
    "namedtuple's field": ("{0} = collections.namedtuple('{0}', 'k')", "{0}(N)"),
    "namedtuple's default": ("class {0}(typing.NamedTuple):\n    k: int = N", "{0}"),
    "dict's method": ("class {0}(dict):\n    def f(self, x):\n        return x * N", "{0}(a=1)"),
    "dict's attribute": ("class {0}(dict):\n    pass\n{0}_1 = {0}()\n{0}_1.k = N", "{0}_1"),
    "dict's item": ("class {0}(dict):\n    pass", "{0}(k=N)"),
    "list's method": ("class {0}(list):\n    def f(self, x):\n        return x * N", "{0}([1])"),
    "list's item": ("class {0}(list):\n    pass", "{0}([N])"),
    "tuple's class data": ("class {0}(tuple):\n    k = N", "{0}([1])"),
    "set's item": ("class {0}(set):\n    pass", "{0}(map(str, range(N, N + 9)))"),
    "int's value": ("class {0}(int):\n    pass", "{0}(N)"),
    "int's method": ("class {0}(int):\n    def f(self):\n        return N", "{0}(1)"),
    "str's value": ("class {0}(str):\n    pass", "{0}(N)"),
    "float's value": ("class {0}(float):\n    pass", "{0}(N)"),
    "bytes's value": ("class {0}(bytes):\n    pass", "{0}(bytes([N]))"),
    "array's class": (
        "class {0}(np.ndarray):\n    def f(self):\n        return N",
        "np.zeros(3).view({0})",
    ),
    "array of a class": ("class {0}(np.ndarray):\n    pass", "np.full(3, N).view({0})"),
    "int enum": ("class {0}(enum.IntEnum):\n    A = N", "{0}.A"),
    "enum's method": (
        "class {0}(enum.Enum):\n    A = 1\n    def f(self):\n        return N",
        "{0}.A",
    ),
    "flags": ("class {0}(enum.Flag):\n    A = N\n    B = 256", "{0}.A | {0}.B"),
    "default factory": ("", "collections.defaultdict(lambda: N)"),
    "ordered dict": ("", "collections.OrderedDict([(1, N), (2, 3)])"),
    "counter": ("", "collections.Counter(a=N)"),
    "chain map": ("", "collections.ChainMap({{}}, {{'a': N}})"),
    "user dict": ("", "collections.UserDict(a=N)"),
    "deque": ("", "collections.deque([1, N])"),
    "deque's length": ("", "collections.deque([1], maxlen=N)"),
    "bytearray": ("", "bytearray([N] * 3)"),
    "long bytearray": ("", "bytearray([N] * 3000)"),
    "array.array": ("", "array.array('d', [N])"),
    "fraction": ("", "fractions.Fraction(N, 1001)"),
    "decimal": ("", "decimal.Decimal(N)"),
    "uuid": ("", "uuid.UUID(int=N)"),
    "namespace of argparse": ("", "argparse.Namespace(k=N)"),
    "simple namespace": ("", "types.SimpleNamespace(k=N)"),
    "class of namespaces": (
        "class {0}(types.SimpleNamespace):\n    def f(self):\n        return N",
        "{0}(k=1)",
    ),
    "mapping proxy": ("", "types.MappingProxyType({{'k': N}})"),
    "slots": (
        "class {0}:\n    __slots__ = ('__k', 'never')\n"
        "    def __init__(self, k):\n        self.__k = k",
        "{0}(N)",
    ),
    "slots of a base": (
        "class {0}_B:\n    __slots__ = ('k',)\nclass {0}({0}_B):\n    __slots__ = ('j',)\n"
        "{0}_1 = {0}()\n{0}_1.k = N",
        "{0}_1",
    ),
    "dataclass": ("@dataclasses.dataclass\nclass {0}:\n    k: int", "{0}(N)"),
    "dataclass with slots": (
        "@dataclasses.dataclass(frozen=True, slots=True)\nclass {0}:\n    k: int",
        "{0}(N)",
    ),
    "dataclass's default": ("@dataclasses.dataclass\nclass {0}:\n    k: int = N", "{0}"),
    "dataclass's factory": (
        "@dataclasses.dataclass(slots=True)\nclass {0}:\n"
        "    k: list = dataclasses.field(default_factory=lambda: [N])",
        "{0}",
    ),
    "dataclass's metadata": (
        "@dataclasses.dataclass\nclass {0}:\n"
        "    k: int | None = dataclasses.field(default=1, metadata={{'k': N}})",
        "{0}(1)",
    ),
    "cached call": (
        "class {0}:\n    @functools.lru_cache\n    def __call__(self, x):\n        return x * N",
        "{0}()",
    ),
    "partial method": (
        "class {0}:\n    def f(self, x, by):\n        return x * by\n"
        "    __call__ = functools.partialmethod(f, by=N)",
        "{0}()",
    ),
    "decorated call": (
        "class {0}_D:\n    def __init__(self, f):\n        self.f = f\n"
        "    def __get__(self, value, kind):\n        return functools.partial(self.f, value)\n"
        "class {0}:\n    @{0}_D\n    def __call__(self, x):\n        return x * N",
        "{0}()",
    ),
    "decorator's class": (
        "class {0}_D:\n    def __init__(self, f):\n        functools.update_wrapper(self, f)\n"
        "    def __call__(self, x):\n        return self.__wrapped__(x) * N\n"
        "@{0}_D\ndef {0}(x):\n    return x",
        "{0}",
    ),
    "decorator's state": (
        "class {0}_D:\n    def __init__(self, f):\n        functools.update_wrapper(self, f)\n"
        "        self.k = N\n    def __call__(self, x):\n        return self.__wrapped__(x)\n"
        "@{0}_D\ndef {0}(x):\n    return x",
        "{0}",
    ),
    "decorator of a package": ("@np.vectorize\ndef {0}(x):\n    return x * N", "{0}"),
    "curried": ("@toolz.curry\ndef {0}(x, y):\n    return x * N", "{0}"),
    "composed": ("def {0}(x):\n    return x * N", "toolz.compose({0}, abs)"),
    "class data with underscores": ("class {0}:\n    __power__ = N", "{0}()"),
    "call of another class": (
        "class {0}:\n    __call__ = [int.__add__, int.__sub__][N % 2]",
        "{0}",
    ),
    "metaclass": (
        "class {0}_M(type):\n    def __call__(cls):\n        return N\n"
        "class {0}(metaclass={0}_M):\n    pass",
        "{0}",
    ),
    "metaclass's data": (
        "class {0}_M(abc.ABCMeta):\n    k = N\nclass {0}(metaclass={0}_M):\n    pass",
        "{0}",
    ),
    "abstract class": (
        "class {0}_B(abc.ABC):\n    @abc.abstractmethod\n    def f(self): ...\n"
        "class {0}({0}_B):\n    def f(self):\n        return N",
        "{0}()",
    ),
    "protocol": (
        "class {0}_P(typing.Protocol):\n    def f(self): ...\n"
        "class {0}({0}_P):\n    def f(self):\n        return N",
        "{0}()",
    ),
    "generic class": (
        "T = typing.TypeVar('T')\nclass {0}(typing.Generic[T]):\n    k: T | None = N",
        "{0}()",
    ),
    "frame": ("", "pd.DataFrame({{'a': [N]}})"),
    "frame's class": (
        "class {0}(pd.DataFrame):\n    def f(self):\n        return N",
        "{0}({{'a': [1]}})",
    ),
    "frame of a class": ("class {0}(pd.DataFrame):\n    pass", "{0}({{'a': [N]}})"),
    "typed dict": ("class {0}(typing.TypedDict):\n    k: int", "{0}(k=N)"),
    "property": ("class {0}:\n    @property\n    def k(self):\n        return N", "{0}()"),
    "cached property": (
        "class {0}:\n    @functools.cached_property\n    def k(self):\n        return N",
        "{0}()",
    ),
    "built-in function": ("", "[math.sin, math.cos][N % 2]"),
    "getter": ("", "operator.itemgetter(N)"),
    "docstring that is used": ("def {0}(x):\n    return 'unit' * N", "{0}"),
}

# The same with packages that are no part of this one's dependencies.
with contextlib.suppress(ImportError):
    import attrs

    PRELUDE += f"import {attrs.__name__}\n"
    OBJECTS |= {
        "attrs": ("@attrs.define\nclass {0}:\n    k: int", "{0}(N)"),
        "attrs's default": ("@attrs.define\nclass {0}:\n    k: int = N", "{0}"),
        "attrs's factory": (
            "@attrs.define\nclass {0}:\n    k: int = attrs.field(factory=lambda: N)",
            "{0}",
        ),
        "attrs's converter": (
            "@attrs.define\nclass {0}:\n"
            "    k: int = attrs.field(default=1, converter=lambda k: k * N)",
            "{0}",
        ),
    }

with contextlib.suppress(ImportError):
    import pydantic

    PRELUDE += f"import {pydantic.__name__}\n"
    OBJECTS |= {
        "pydantic model": ("class {0}(pydantic.BaseModel):\n    k: int", "{0}(k=N)"),
        "pydantic model's default": ("class {0}(pydantic.BaseModel):\n    k: int = N", "{0}"),
        "pydantic model's type": (
            "class {0}(pydantic.BaseModel):\n    k: [int, str][N % 2] | None = None",
            "{0}",
        ),
        "pydantic model's validator": (
            "class {0}(pydantic.BaseModel):\n    k: int = 1\n    @pydantic.field_validator('k')\n"
            "    @classmethod\n    def check(cls, k):\n        return k * N",
            "{0}()",
        ),
    }

# What may be around an object.
AROUND = (
    "{}",
    "[{}]",
    "({}, 1)",
    "{{'k': {}}}",
    "collections.defaultdict(int, k={})",
    "collections.deque([{}])",
    "types.SimpleNamespace(k={})",
    "functools.partial(max, {})",
    "(lambda x, k={}: x)",
    "(lambda k: lambda x: (x, k))({})",
    "Open({})",
    "Closed({})",
    "Pair(1, {})",
    "Items([{}])",
)

AROUND_IT = """
class Open:
    def __init__(self, k):
        self.k = k

class Closed:
    __slots__ = ("k",)
    def __init__(self, k):
        self.k = k

class Pair(typing.NamedTuple):
    a: int
    b: object

class Items(list):
    pass
"""


def module(choices, number):
    """A module with a function for each of the choices, which are an object and what is around."""
    parts = [PRELUDE, AROUND_IT]
    for place, (name, around) in enumerate(choices):
        definition, value = (text.format(f"O{place}") for text in OBJECTS[name])
        for outer in around:
            value = outer.format(value)
        parts += [definition, f"K{place} = {value}", f"def f{place}(x):\n    return x, K{place}"]
    source = re.sub(r"\bN\b", str(number), "\n".join(parts))
    made = sys.modules["edited"] = types.ModuleType("edited")
    exec(compile(source, "edited.py", "exec"), vars(made))
    return made


def tokens(made, of=stable_token):
    """The token of each function of a module."""
    count = sum(name.startswith("K") for name in vars(made))
    return [of(getattr(made, f"f{place}")) for place in range(count)]


def chosen(seed, count=150):
    """Each object as it is, and then objects with more and more around them."""
    rng = random.Random(seed)
    names = [*OBJECTS, *rng.choices([*OBJECTS], k=count)]
    return [
        (name, rng.choices(AROUND, k=rng.randint(1, 3)) if place >= len(OBJECTS) else [])
        for place, name in enumerate(names)
    ]


@pytest.fixture(autouse=True)
def no_module_stays(monkeypatch):
    monkeypatch.setitem(sys.modules, "edited", None)


def used(made):
    """Do with the objects of a module what leaves its marks in them and in their classes."""
    for name, value in list(vars(made).items()):
        if name.startswith("K"):
            for use in (
                copy.copy,
                cloudpickle.dumps,
                repr,
                typing.get_type_hints,
                inspect.signature,
            ):
                with contextlib.suppress(Exception):
                    use(value)
            isinstance(value, (made.abc.ABC, made.typing.Sized))


@pytest.mark.slow
@pytest.mark.parametrize("of", [token_of, stable_token])
def test_an_edit_of_whatever_is_used_gives_another_token_and_nothing_else_does(of, seed):
    choices = chosen(seed)
    number, other = random.Random(seed).sample(range(1, 250), 2)
    # Some objects know only odd from even.
    other += (other - number) % 2 == 0
    first = module(choices, number)
    before = tokens(first, of)
    used(first)
    assert differing(choices, before, tokens(first, of)) == []
    assert differing(choices, before, tokens(module(choices, number), of)) == []
    same = differing(choices, before, tokens(module(choices, other), of), equal=True)
    assert same == []


def differing(choices, one, other, equal=False):
    """The choices whose tokens are not the same, or, if asked for, the same."""
    return [c for c, a, b in zip(choices, one, other, strict=True) if (a == b) == equal]


PROGRAM = """
from test_edited_objects import chosen, module, token_of, tokens

made = module(chosen({seed}), 7)
print(*tokens(made), *tokens(made, token_of))
"""


@pytest.mark.newest
@pytest.mark.slow
def test_objects_have_the_same_token_in_every_process(seed):
    told = []
    for hash_seed in "12":
        finished = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(seed=seed)],
            env=os.environ
            | {"PYTHONPATH": ":".join([*sys.path, os.path.dirname(__file__)])}
            | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert finished.returncode == 0, finished.stderr
        told.append(finished.stdout.split())
    choices = chosen(seed) * 2
    assert differing(choices, *told) == []

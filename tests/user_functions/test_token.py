"""A function that was edited is another function, wherever its name is the same."""

import importlib
import os
import signal
import subprocess
import sys
import textwrap

import dask
import numpy as np
import pytest
from hand_started import HandStarted
from processes import SECONDS, until

import dask_image_ingest as dii
from dask_image_ingest.user_functions import code_digests, token_of

pytestmark = pytest.mark.newest


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


ORIGINAL = """
import functools

SHINE = 2
SEEN = 0

def by(factor):
    def multiplied(images):
        return images * factor
    return multiplied

twice = by(2)

def helper(images):
    return images + 1

def plain(images, times=1):
    # A comment.
    return helper(images) * times

def constant(images):
    return images * SHINE

def member(images):
    return images in {"a", "b", "c"}

def nested(images):
    def inner(image):
        return image + 1
    return [inner(image) for image in images]

def counting(images):
    global SEEN
    SEEN += 1
    return images

def decorator(function):
    @functools.wraps(function)
    def decorated(images):
        return function(images)
    return decorated

@decorator
def decorated(images):
    return images - 1

@functools.lru_cache
def cached(images):
    return images - 2

class Base:
    size = 3

    def weigh(self, images):
        return images

class Model(Base):
    factor = 4

    def __init__(self, scale=1):
        self.scale = scale

    def __call__(self, images):
        return self.weigh(images) * self.factor

    @staticmethod
    def still(images):
        return images

    @property
    def known(self):
        return 1

def unrelated(images):
    return images
"""

FUNCTIONS = {
    "plain": lambda m: m.plain,
    "partial": lambda m: m.functools.partial(m.plain, times=2),
    "constant": lambda m: m.constant,
    "member": lambda m: m.member,
    "nested": lambda m: m.nested,
    "closure": lambda m: m.twice,
    "decorated": lambda m: m.decorated,
    "cached": lambda m: m.cached.__wrapped__,
    "class": lambda m: m.Model,
    "instance": lambda m: m.Model(2),
    "bound method": lambda m: m.Model(2).weigh,
    "static method": lambda m: m.Model.still,
    "lambda over it": lambda m: lambda images: m.plain(images),
}

EDITS = {
    "images + 1\n\ndef plain": ("images + 2\n\ndef plain", {"plain", "partial", "lambda over it"}),
    "times=1": ("times=2", {"plain", "partial", "lambda over it"}),
    "SHINE = 2": ("SHINE = 3", {"constant"}),
    '"a", "b", "c"': ('"a", "b", "d"', {"member"}),
    "return image + 1": ("return image + 2", {"nested"}),
    "twice = by(2)": ("twice = by(3)", {"closure"}),
    "images - 1": ("images - 3", {"decorated"}),
    "images - 2": ("images - 3", {"cached"}),
    "return function(images)": ("return function(images) + 1", {"decorated"}),
    "factor = 4": ("factor = 5", {"class", "instance", "bound method"}),
    "self.weigh(images) *": ("self.weigh(images) +", {"class", "instance", "bound method"}),
    "weigh(self, images):\n        return images": (
        "weigh(self, images):\n        return images + 1",
        {"class", "instance", "bound method"},
    ),
    "size = 3": ("size = 4", {"class", "instance", "bound method"}),
    "still(images):\n        return images": (
        "still(images):\n        return -images",
        {"class", "instance", "bound method", "static method"},
    ),
    "return 1\n": ("return 2\n", {"class", "instance", "bound method"}),
    "# A comment.": ("# Another comment, of\n    # two lines.", set()),
    "unrelated(images):\n    return images": ("unrelated(images):\n    return -images", set()),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_changes_the_token_of_what_it_changes(edit, written):
    assert ORIGINAL.count(edit) == 1
    edited, concerned = EDITS[edit]
    module = written("edited", ORIGINAL)
    before = {name: token_of(get(module)) for name, get in FUNCTIONS.items()}
    module = written("edited", ORIGINAL.replace(edit, edited))
    after = {name: token_of(get(module)) for name, get in FUNCTIONS.items()}
    assert {name for name in FUNCTIONS if before[name] != after[name]} == concerned


def test_which_equal_strings_are_one_object_does_not_count(written):
    module = written("edited", ORIGINAL)

    def tokens():
        inner = module.cached.__wrapped__
        held = module.Model(module.twice)
        functions = [module.twice, inner, held, held.weigh, module.functools.partial(inner)]
        return [token_of(function) for function in functions]

    before = tokens()
    # Python decides whether this is the object that the code has.
    module.__file__ = "".join(list(module.__file__))
    assert tokens() == before


def test_what_a_module_imports_counts_if_it_is_the_users(written):
    written("helpers", "def flip(x):\n    return x\n\ndef crop(x):\n    return x\n")
    source = """
    import helpers
    import numpy as np

    def f(images):
        return helpers.flip(np.mean(images))

    def g(images):
        return f(images) + helpers.crop(images)
    """
    module = written("main", source)
    before = token_of(module.f), token_of(module.g)
    written("helpers", "def flip(x):\n    return x\n\ndef crop(x):\n    return -x\n")
    after = token_of(module.f), token_of(module.g)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False]
    assert not any("numpy" in name for name in code_digests(module.g))


def test_a_token_stays_while_the_function_is_used(written):
    module = written("edited", ORIGINAL)
    functions = [module.plain, module.counting, module.Model(2)]
    before = [token_of(function) for function in functions]
    for function in functions:
        for _ in range(100):
            function(1)
    assert [token_of(function) for function in functions] == before
    again = written("edited", ORIGINAL)
    assert [token_of(f) for f in (again.plain, again.counting, again.Model(2))] == before


@pytest.mark.slow
def test_a_token_is_the_same_in_every_process(written, tmp_path):
    written("edited", ORIGINAL)
    program = (
        "import edited; from dask_image_ingest.user_functions import code_digests, token_of;"
        "print(token_of(edited.plain), token_of(edited.member), token_of(edited.Model),"
        "code_digests(edited.Model))"
    )
    outputs = set()
    for seed in "012":
        path = os.pathsep.join([str(tmp_path), *sys.path])
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path}
        command = [sys.executable, "-c", program]
        outputs.add(
            subprocess.run(command, env=environment, capture_output=True, check=True).stdout
        )
    assert len(outputs) == 1


def test_odd_functions_have_a_token(written):
    source = """
    import functools
    import threading

    LOCK = threading.Lock()
    LOOP = []
    LOOP.append(LOOP)
    TABLE = list(range(100_000))

    def f(images):
        with LOCK:
            return f(images), LOOP, TABLE, undefined

    class A:
        def __call__(self, images):
            return B

    class B(A):
        a = A()

    A.me = A
    """
    module = written("odd", source)
    for function in (module.f, module.A, module.B, np.mean, len, print, str.lower, np.add):
        assert token_of(function) == token_of(function)


# What it means for a query.

BLANK = """
def transform(images):
    from nvidia.dali import fn, types

    return fn.cast(images * 0 + {value}, dtype=types.UINT8)

class Model:
    def __call__(self, images):
        return [{value}] * len(images)
"""


def read(shards, module):
    ddf = dii.read_webdataset_images(
        shards, backend="pandas", size=16, transform=module.transform
    ).images.map_batches(module.Model, {"model": "int64"}, keep_image=True)
    return ddf[["image", "model"]]


def check(frame, value):
    assert set(frame["model"]) == {value}
    assert all((image == value).all() for image in frame.images.arrays())


def test_a_reloaded_module_takes_effect(shards, written):
    pytest.importorskip("nvidia.dali", reason="nothing is decoded without DALI")
    before = read(shards[:1], written("blank", BLANK.format(value=1)))
    check(before.compute(), 1)
    after = read(shards[:1], written("blank", BLANK.format(value=2)))
    assert before._name != after._name
    check(after.compute(), 2)
    check(before.compute(), 1)


def test_a_helper_that_was_reloaded_is_not_mixed_with_the_old_query(shards, written):
    source = "def helper(images):\n    return [{value}] * len(images)\n\n"
    source += "def model(images):\n    return helper(images)\n"
    module = written("mixed", source.format(value=1))
    ddf = dii.read_webdataset_images(shards[:1], backend="pandas", size=16)
    before = ddf.images.map_batches(module.model, {"model": "int64"}).model
    assert set(before.compute()) == {1}
    module = written("mixed", source.format(value=2))
    with pytest.raises(dii.FunctionError, match=r"mixed\.helper.*make the query again"):
        before.compute()
    after = ddf.images.map_batches(module.model, {"model": "int64"}).model
    assert set(after.compute()) == {2}


@pytest.mark.slow
def test_a_worker_that_has_the_old_module_says_so(shards, written, tmp_path):
    pytest.importorskip("nvidia.dali", reason="nothing is decoded without DALI")
    path = {"PYTHONPATH": HandStarted.path(first=[tmp_path]), "PYTHONDONTWRITEBYTECODE": "1"}
    with HandStarted(tmp_path / "cluster", **path) as cluster, dask.config.set(scheduler=None):
        worker = cluster.worker("--no-nanny")
        with cluster.client(1) as client:
            module = written("blank", BLANK.format(value=1))
            check(client.compute(read(shards[:1], module)).result(SECONDS), 1)
            module = written("blank", BLANK.format(value=2))
            # Of both functions; the worker refuses whichever it comes to first.
            refused = r"blank\.(transform|Model\.__call__).*client\.restart\(\)"
            with pytest.raises(dii.FunctionError, match=refused):
                client.compute(read(shards[:1], module)).result(SECONDS)
            ddf = dii.read_webdataset_images(shards[:1], backend="pandas", size=16)
            mapped = ddf.images.map_batches(module.Model, {"model": "int64"})
            with pytest.raises(dii.FunctionError, match=r"blank\.Model\.__call__"):
                client.compute(mapped).result(SECONDS)
            # A new worker, as by client.restart(), but of no nanny: it may lose one on a busy
            # machine.
            os.killpg(worker.pid, signal.SIGKILL)
            until(lambda: not client.scheduler_info()["workers"])
            cluster.worker("--no-nanny")
            client.wait_for_workers(1, timeout=SECONDS)
            check(client.compute(read(shards[1:2], module)).result(SECONDS), 2)

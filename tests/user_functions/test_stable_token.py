"""A token that lasts: the same in every process, another when what is done is another."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from dask_image_ingest.errors import FunctionError
from dask_image_ingest.user_functions import stable_token

PROGRAM = """
import enum, functools, logging
import numpy as np
from dask.utils import M
from dask_image_ingest.user_functions import stable_token

WEIGHTS, NAMES, LOGGER = np.arange(10.0), {"a", "b", "c"}, logging.getLogger("x")

class Kind(enum.Enum):
    A = 1

class Base:
    factor = 3

class Model(Base):
    def __init__(self, power=2):
        self.power, self.names = power, set("abcdef")

    def __call__(self, images):
        LOGGER.info("called")
        return images ** self.power * self.factor * WEIGHTS.sum() + len(NAMES)

def function(images):
    return Model(4)(images)

for value in (
    function, Model, Model(5), functools.partial(function, 3), lambda x: x + 1, Model(2).__call__,
    M.reset_index, np.mean, np.add, len, [1, {"a": function}], Kind.A, b"1" * 5000, WEIGHTS,
):
    print(stable_token(value), stable_token(value, functions=False))
"""


@pytest.mark.newest
@pytest.mark.slow
def test_a_token_is_the_same_in_every_process(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    told = []
    for seed in ("1", "2"):
        finished = subprocess.run(
            [sys.executable, program],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert finished.returncode == 0, finished.stderr
        told.append(finished.stdout.split())
    assert told[0] == told[1]
    # Each does something else; without the functions, the user's are all alike.
    assert len(set(told[0][::2])) == 14
    assert len(set(told[0][1::2])) < 14


class Holds:
    def __init__(self, value):
        self.value = value

    def __call__(self, images):
        return images * self.value


OTHERS = {
    "state": (Holds(1), Holds(2)),
    "array": (Holds(np.zeros(3)), Holds(np.ones(3))),
    "inner array": (Holds([np.zeros(3)]), Holds([np.ones(3)])),
    "long list": (Holds([0] * 20_000), Holds([0] * 19_999 + [1])),
    "bytes": (Holds(b"0" * 9999), Holds(b"0" * 9998 + b"1")),
    "random state": (Holds(np.random.default_rng(1)), Holds(np.random.default_rng(2))),
    "default": (lambda images, by=1: images * by, lambda images, by=2: images * by),
    "constant": (lambda images: images * 1.0, lambda images: images * 2.0),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_does_something_else_has_another_token(name):
    one, other = OTHERS[name]
    assert stable_token(one) != stable_token(other)
    assert stable_token(one) == stable_token(one)


@pytest.mark.parametrize("value", [threading.Lock(), object(), (n for n in ()), threading.local()])
def test_what_cannot_be_told_is_refused_and_named(value):
    name = type(value).__name__
    with pytest.raises(FunctionError, match=rf"{name} has no token"):
        stable_token(Holds(value))
    assert stable_token(Holds(value), functions=False) == stable_token(Holds(1), functions=False)

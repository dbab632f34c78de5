"""Wrong arguments at random: whatever is given, only this package's errors come out."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pandas as pd
import pytest
from small_frames import lazy_frame, small_frame

import dask_image_ingest as dii
from dask_image_ingest.cluster import local as cluster

NONSENSE = {
    "None": None,
    "minus one": -1,
    "zero": 0,
    "a float": 1.5,
    "nan": float("nan"),
    "infinity": float("inf"),
    "text": "x",
    "no text": "",
    "bytes": b"x",
    "True": True,
    "a list": [1],
    "an empty list": [],
    "a list of lists": [["key"]],
    "a dict": {"a": 1},
    "an empty dict": {},
    "an object": object(),
    "a number of NumPy": np.int64(-3),
    "an array": np.zeros(2),
    "a huge number": 2**70,
    "a tuple": (1, 2, 3),
    "a function": len,
    "a class": dict,
    "NA": pd.NA,
    "a set": {1, 2},
    "a generator": (n for n in [1]),
}


def mean(images):
    return images.mean(axis=(1, 2, 3))


FRAME = small_frame([1, 2, 3], (4, 5, 3)).assign(
    v=pd.array([[1.0], [2.0], [3.0]], dtype="list<float32>")
)

# Each method with arguments that are right.
METHODS = {
    "stack": {"shape": (4, 5, 3)},
    "vectors": {"column": "v"},
    "map_batches": {
        "fn": mean,
        "outputs": {"mean": "float32"},
        "inputs": ["image"],
        "batch_size": 2,
        "keep_image": False,
        "skip_missing": True,
    },
    "iter_batches": {
        "batch_size": 2,
        "format": "numpy",
        "columns": ["key"],
        "shuffle": 1,
        "epoch": 1,
        "steps": 2,
        "repeat": False,
        "weights": "key",
        "replacement": True,
        "drop_last": False,
        "prefetch": 1,
        "start": 0,
        "shard": (0, 2),
    },
    "show": {"n": 2, "size": 8, "columns": ("key",), "storage_options": {}},
    "encode": {"format": "png", "quality": 90},
    "thumbnails": {"size": 4, "resize": "longer"},
}
CASES = [(name, argument) for name, arguments in METHODS.items() for argument in arguments]


def call(frame, name, arguments):
    """Call it, and use what it gives as far as that needs no computation of a lazy frame."""
    given = getattr(frame.images, name)(**arguments)
    if name == "iter_batches":
        list(itertools.islice(given, 4))  # with repeat= there are always more
        given.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eager", "lazy"])
@pytest.mark.parametrize(("name", "argument"), CASES)
def test_one_wrong_argument(kind, name, argument):
    frame = FRAME if kind == "eager" else lazy_frame([FRAME, FRAME])
    call(frame, name, METHODS[name])
    for told, value in NONSENSE.items():
        check(frame, name, METHODS[name] | {argument: value}, told)


def test_several_wrong_arguments(rng):
    frames = [FRAME, lazy_frame([FRAME, FRAME]), FRAME.image]
    for _ in range(300):
        name = rng.choice(list(METHODS))
        arguments = dict(METHODS[name])
        told = {}
        for argument in rng.sample(list(arguments), rng.randint(1, len(arguments))):
            told[argument], arguments[argument] = rng.choice(list(NONSENSE.items()))
        check(rng.choice(frames), name, arguments, str(told))


def check(frame, name, arguments, told):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call(frame, name, arguments)
        except dii.DaskImageIngestError:
            pass
        except Exception as error:
            raise AssertionError(f"{name}: {told}: {type(error).__name__}: {error}") from error


def test_start_cluster_refuses_before_it_starts(monkeypatch):
    started = []

    def start(**settings):
        started.append(settings)
        raise dii.DaskImageIngestError("not in this test")

    monkeypatch.setattr(cluster, "LocalCluster", start)
    right = {"n_workers": 1, "decode_threads": 1, "memory_limit": "1 GiB", "gpu": False}
    names = [*right, "rmm_pool_size", "device_memory_limit", "dashboard_address", "unknown"]
    for name, (told, value) in itertools.product(names, NONSENSE.items()):
        if name == "gpu" and value is None:
            continue  # what the machine has
        try:
            dii.start_cluster(**right | {name: value})
        except dii.DaskImageIngestError:
            pass
        except Exception as error:
            raise AssertionError(f"{name}: {told}: {type(error).__name__}: {error}") from error
    for settings in started:
        assert settings["n_workers"] >= 1
        assert "unknown" not in settings

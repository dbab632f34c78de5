"""``map_batches(errors="null")``: a row whose function fails costs that row, and no other."""

from __future__ import annotations

import logging
import math

import numpy as np
import pandas as pd
import pytest
from small_frames import lazy_frame, small_frame

import dask_image_ingest as dii

OUTPUTS = {
    "i": "int64",
    "b": "bool",
    "f": "float32",
    "v": "float32[2]",
    "l": "list<int32>",
    "s": "string",
    "d": "struct<x: int64>",
    "p": "image",
}


def of_key(key: int) -> dict[str, object]:
    """A result of every type, that tells its row."""
    return {
        "i": key,
        "b": key % 2 == 0,
        "f": key / 2,
        "v": [key, key + 1],
        "l": list(range(key % 3)),
        "s": f"s{key}",
        "d": {"x": key},
        "p": np.full((key % 4 + 1, 2, 3), key, "uint8"),
    }


class Fails:
    """Fails for some values of pixels; counts its calls, and the rows of each."""

    def __init__(self, bad):
        self.bad = set(bad)
        self.calls = []

    def __dask_tokenize__(self):
        return sorted(self.bad)

    def __call__(self, images):
        keys = [int(image.flat[0]) for image in images]
        images[:] = 255  # a function may change what it gets
        self.calls.append(keys)
        if wrong := self.bad.intersection(keys):
            raise ValueError(f"can't take {min(wrong)}")
        rows = [of_key(key) for key in keys]
        return {name: [row[name] for row in rows] for name in OUTPUTS}


def with_reasons(keys, bad) -> pd.DataFrame:
    """A frame as of a read, which has the reasons of images that can't be decoded."""
    reasons = ["corrupt: made so" if key in bad else None for key in keys]
    return small_frame(keys, bad=bad).assign(error=pd.Series(reasons, dtype="string"))


def check(made: pd.DataFrame, keys, bad, missing=()) -> None:
    assert made["key"].tolist() == list(keys)
    pixels = made.images["p"].arrays()
    for row, key in enumerate(keys):
        got = {name: made[name].iloc[row] for name in OUTPUTS if name != "p"}
        error = made["error"].iloc[row]
        if key in bad or key in missing:
            assert pixels[row] is None
            assert all(value is None or value is pd.NA or _is_nan(value) for value in got.values())
            want = f"function-failed: Fails: ValueError: can't take {key}"
            assert error == ("corrupt: made so" if key in missing else want)
            continue
        want = of_key(key)
        assert pd.isna(error)
        assert (pixels[row] == want.pop("p")).all()
        assert {name: _plain(value) for name, value in got.items()} == want


def _is_nan(value) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _plain(value):
    return value.tolist() if hasattr(value, "tolist") else value


@pytest.mark.rounds(3, nightly=100)
def test_only_the_rows_that_fail_have_no_results(rng):
    count = rng.randrange(40)
    keys = list(range(count))
    share = rng.choice([0.02, 0.3, 1])
    bad = [key for key in keys if rng.random() < share]
    missing = [key for key in keys if rng.random() < 0.1 and key not in bad]
    frame = with_reasons(keys, missing)
    size = rng.randrange(1, 20)
    made = frame.images.map_batches(Fails(bad), OUTPUTS, batch_size=size, errors="null")
    check(made, keys, bad, missing)


def test_a_lazy_frame_has_the_reasons_and_the_types_it_says():
    parts = [small_frame(range(8 * part, 8 * part + 8)) for part in range(3)]
    lazy = lazy_frame(parts).images.map_batches(Fails([3, 9]), OUTPUTS, errors="null")
    made = lazy.compute(scheduler="synchronous")
    check(made, range(24), [3, 9])
    assert made.dtypes.to_dict() == lazy.dtypes.to_dict()
    failed = lazy[lazy["error"].notnull()]
    assert failed["key"].compute(scheduler="synchronous").tolist() == [3, 9]
    assert lazy[["key", "error"]].compute(scheduler="synchronous")["error"].count() == 2


NO_RESULT = {
    "int8": 3,
    "uint64": 2**63 + 1,
    "bool": True,
    "float16": 1.5,
    "string": "a",
    "binary": b"x",
    "float32[2]": [1, 2],
    "list<int32>": [1, 2],
    "list<float32[4]>": np.zeros((3, 4)),
    "list<string>": ["a"],
    "struct<a: int64, b: string>": {"a": 1, "b": None},
    "image": np.zeros((2, 3, 3), "uint8"),
}


@pytest.mark.parametrize("type_", NO_RESULT)
def test_no_result_is_none_for_every_type(type_):
    value = NO_RESULT[type_]
    for given in ([None] * 5, [None, value, None, value, value], [value, value, None, None, None]):
        for size in (1, 2, 5):
            rows = iter(given)

            def of_batch(images, rows=rows):
                values = np.empty(len(images), object)
                for number in range(len(images)):
                    values[number] = next(rows)
                return values if size == 2 else list(values)  # noqa: B023

            frame = small_frame(range(5))
            made = frame.images.map_batches(of_batch, {"o": type_}, batch_size=size)
            assert made["o"].isna().tolist() == [each is None for each in given]


def test_one_bad_row_among_256_costs_few_calls():
    for bad in (0, 100, 255):
        function = Fails([bad])
        frame = small_frame(range(256))
        check(frame.images.map_batches(function, OUTPUTS, errors="null"), range(256), [bad])
        assert len(function.calls) <= 1 + 2 * 8
        # A good row is part of one call that ends well; of a half known to fail, no call is made.
        ended_well = [key for keys in function.calls if bad not in keys for key in keys]
        assert sorted(ended_well) == [key for key in range(256) if key != bad]


@pytest.mark.parametrize("size", [1, 7, 256])
def test_the_row_that_fails_is_named(size):
    for bad in ([0], [100], [255], [31, 32, 200], range(256)):
        function = Fails(bad)
        frame = small_frame(range(256)).rename(columns={"key": "__key__"})
        with pytest.raises(dii.FunctionError, match=rf"Fails fails for sample {bad[0]}: ValueErr"):
            frame.images.map_batches(function, OUTPUTS, batch_size=size)
        assert len(function.calls) <= 256 // size + 1 + 2 * 8


def test_rows_that_fail_only_together_are_named_by_their_ends():
    def fails(images):
        if len(images) > 3:
            raise ValueError("too many")
        return images.max(axis=(1, 2, 3))

    frame = small_frame(range(9)).rename(columns={"key": "__key__"})
    for size, ends in ((9, "4 images, from sample 0 to sample 3"), (5, "5 images, from sample 0 ")):
        with pytest.raises(dii.FunctionError, match=f"fails for one of {ends}.*: too many"):
            frame.images.map_batches(fails, {"o": "int64"}, batch_size=size)


WRONG = {
    "uint8": (3, 300),
    "int64": (3, "seven"),
    "bool": (True, 2),
    "string": ("a", 5),
    "float32[2]": ([1, 2], [1, 2, 3]),
    "list<float32[4]>": ([[1, 2, 3, 4]], [[1, 2]]),
    "struct<a: int64>": ({"a": 1}, {"b": 1}),
    "image": (np.zeros((2, 3, 3), "uint8"), np.zeros((2, 3), "uint8")),
}


@pytest.mark.parametrize("size", [1, 4, 20])
@pytest.mark.parametrize("type_", WRONG)
def test_a_result_of_another_type_costs_its_row_unless_all_are(type_, size):
    right, wrong = WRONG[type_]

    def of_batch(images, bad):
        return [wrong if image.flat[0] in bad else right for image in images]

    frame = small_frame(range(10))
    for bad in ([3], [9], [2, 3, 4, 5, 8, 9]):
        made = frame.images.map_batches(
            lambda images, bad=bad: of_batch(images, bad),
            {"o": type_}, batch_size=size, errors="null",
        )  # fmt: skip
        assert made["o"].isna().tolist() == [key in bad for key in range(10)]
        reasons = made["error"].dropna()
        assert reasons.index.tolist() == bad
        assert reasons.str.match(r"function-failed: .*<lambda>: gave ").all()
    with pytest.raises(dii.ArgumentError, match="map_batches: the function gave"):
        frame.images.map_batches(
            lambda images: of_batch(images, range(10)), {"o": type_}, batch_size=size, errors="null"
        )


def test_a_failure_that_does_not_come_again_costs_no_row():
    calls = []

    def busy(images):
        calls.append(len(images))
        if len(calls) in (1, 3):
            raise OSError("busy")
        return images.max(axis=(1, 2, 3))

    made = small_frame(range(8)).images.map_batches(busy, {"o": "int64"}, errors="null")
    assert made["o"].tolist() == list(range(8))
    assert made["error"].isna().all()


def test_a_frame_without_reasons_gets_a_column_of_them():
    frame = small_frame(range(3))[["image"]]
    made = frame.images.map_batches(Fails([1]), OUTPUTS, errors="null")
    assert list(made.columns) == [*OUTPUTS, "error"]
    assert made["error"].isna().tolist() == [True, False, True]


def test_the_first_reason_stays():
    frame = with_reasons(range(4), [2])
    first = frame.images.map_batches(Fails([1]), OUTPUTS, errors="null", keep_image=True)
    second = first.images["image"].map_batches(
        lambda images: 1 / 0, {"o": "float32"}, errors="null", skip_missing=False
    )
    assert [reason.partition(":")[0] for reason in second["error"]] == [
        *["function-failed"] * 2,
        "corrupt",
        "function-failed",
    ]
    assert "can't take 1" in second["error"].iloc[1]


def test_one_line_is_logged_for_the_failures_of_a_partition(caplog):
    frame = small_frame(range(9)).rename(columns={"key": "__key__"})
    with caplog.at_level(logging.WARNING, "dask_image_ingest"):
        frame.images.map_batches(Fails([4, 7]), OUTPUTS, batch_size=2, errors="null")
    assert [record.getMessage() for record in caplog.records] == [
        "map_batches: 2 of 9 rows failed, first sample 4: function-failed: Fails: ValueError: "
        "can't take 4"
    ]


class OutOfMemoryError(RuntimeError):
    """As torch's."""


class CannotBeBuilt:
    def __init__(self):
        raise OSError("no such weights")

    def __call__(self, images):
        raise AssertionError


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("all of it"),
        OutOfMemoryError("all of the GPU"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        ImportError("no module named x"),
        ModuleNotFoundError("no module named x"),
    ],
)
def test_an_error_that_is_no_row_s_is_raised(error):
    def fails(images):
        raise error

    with pytest.raises(dii.FunctionError, match="fails for one of 4 images") as told:
        small_frame(range(4)).images.map_batches(fails, {"o": "int64"}, errors="null")
    assert told.value.__cause__ is error


def test_an_interrupt_a_model_that_cannot_be_built_and_a_wrong_result_are_raised():
    frame = small_frame(range(4))

    def interrupted(images):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        frame.images.map_batches(interrupted, {"o": "int64"}, errors="null")
    with pytest.raises(dii.FunctionError, match="CannotBeBuilt can't be instantiated: OSError: no"):
        frame.images.map_batches(CannotBeBuilt, {"o": "int64"}, errors="null")
    for wrong in (np.zeros(3), np.zeros((4, 2)), [1, 2, 3], {"x": [1] * 4}, ["a"] * 4):
        with pytest.raises(dii.ArgumentError):
            frame.images.map_batches(lambda images, w=wrong: w, {"o": "int64"}, errors="null")


def test_what_cannot_be_is_refused_when_it_is_asked_for():
    frame = small_frame(range(2))
    with pytest.raises(dii.ArgumentError, match="errors='drop'"):
        frame.images.map_batches(len, {"o": "int64"}, errors="drop")
    with pytest.raises(dii.ArgumentError, match="outputs= names too"):
        frame.images.map_batches(len, {"error": "string"}, errors="null")
    numbers = lazy_frame([frame.assign(error=1.5)])
    with pytest.raises(dii.ArgumentError, match="is of double, not of strings"):
        numbers.images.map_batches(len, {"o": "int64"}, errors="null")


@pytest.mark.slow
def test_an_export_leaves_out_the_rows_that_failed(shards, tmp_path):
    ddf = dii.read_webdataset_images(shards[:1], size=8, backend="pandas")
    keys = ddf["__key__"].compute().tolist()

    def length(images, names):
        if keys[3] in names:
            raise ValueError("not this one")
        return list(map(len, names))

    scored = ddf.images.map_batches(
        length, {"o": "int64"}, inputs=["image", "__key__"], errors="null"
    )
    written = dii.to_webdataset(scored, f"{tmp_path}/{{shard:06d}}.tar", errors="drop")
    assert keys[3] in written.attrs["left_out"]["bad-image"]["first"]
    bad = ddf["error"].compute().notnull().sum()
    assert written["samples"].sum() == len(keys) - bad - 1

"""Filters give the rows that pandas and plain Python give, for every type of column and constant."""

import json
import math
import operator
import random
import warnings
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from photo_shards import write_tar

import dask_image_ingest as dii
from dask_image_ingest.expr import ReadWebDataset
from dask_image_ingest.filters import matching
from dask_image_ingest.predicates import as_filters

NAN, INF = math.nan, math.inf

# Values at the edges of the types, and on both sides of them.
INTEGERS = (0, 1, -1, 2, 7, 100, 127, -128, 255, 256, 2**24, 2**24 + 1, -(2**24) - 1, 2**31 - 1,
            2**31, 2**53, 2**53 + 1, -(2**53) - 1, 2**62, 2**63 - 1, -(2**63))  # fmt: skip
FLOATS = (0.0, -0.0, 0.5, 0.1, 0.3, 1.0, -1.5, 2.0**24, 2.0**53, 2.0**63, -(2.0**63), 1e300, 5e-324,
          NAN, INF, -INF)  # fmt: skip
TEXTS = ("", "a", "b", "a\0", "é", "Z", "aa", "0", "😀", "1")
FIELDS = {
    "i8": ("int8", INTEGERS),
    "u8": ("uint8", INTEGERS),
    "i32": ("int32", INTEGERS),
    "i64": ("int64", INTEGERS),
    "u64": ("uint64", (*INTEGERS, 2**63, 2**64 - 1)),
    "f32": ("float32", FLOATS),
    "f64": ("float64", FLOATS),
    "flag": ("bool", (True, False)),
    "text": ("string", TEXTS),
}
CONSTANTS = (
    *INTEGERS, *FLOATS, *TEXTS, True, False, 2**63, 2**64, 2**70, -(2**70), 2**24 + 1.0, 2.0**53 + 2,
    np.int8(1), np.int64(2**53 + 1), np.uint8(255), np.uint64(2**63), np.float32(0.1), np.bool_(1),
    np.float64(0.5), np.float16(0.5), np.longdouble("0.1"), np.str_("a"), np.datetime64("2020-01-01"),
    Decimal("0.1"), Decimal(2**53 + 1), pd.Timestamp("2020-01-01"), b"a", b"a\0", None, pd.NA, 1j,
)  # fmt: skip
COMPARISONS = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
ROWS = 240


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    """Samples with a field of each type, null, absent or at an edge, and members of other types."""
    source = random.Random(5)
    members = {}
    for number in range(ROWS):
        key = f"{number:04d}"
        record = {}
        for name, (type_, values) in FIELDS.items():
            value = source.choice((None, *values))
            if type_[0] in "iu" and value is not None:
                limits = np.iinfo(type_)
                value = min(max(value, int(limits.min)), int(limits.max))
            if source.random() < 0.9:
                record[name] = value
        members[f"{key}.json"] = json.dumps(record).encode()
        if source.random() < 0.8:
            members[f"{key}.cls"] = str(source.choice(INTEGERS)).encode()
        if source.random() < 0.8:
            members[f"{key}.bin"] = source.choice((b"", b"a", b"a\0", b"\xff"))
    return write_tar(tmp_path_factory.mktemp("filters") / "a.tar", members)


def read(shard, **options):
    fields = {name: type_ for name, (type_, _) in FIELDS.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no image is among the members
        return dii.read_webdataset_images(shard, backend="pandas", json_fields=fields, **options)


@pytest.fixture(scope="module")
def table(shard):
    """The samples with their metadata."""
    return read(shard).drop(columns=["image", "error"])


@pytest.fixture(scope="module")
def frame(table):
    """The same, as pandas has it: parts of it have other dtypes in NumPy than the whole."""
    computed = table.compute()
    assert len(computed) == ROWS
    return computed


COLUMNS = (*(f"json.{name}" for name in FIELDS), "cls", "bin", "json", "__key__", "width", "offset")


def random_leaf(source):
    column, constant = source.choice(COLUMNS), source.choice(CONSTANTS)
    compare = source.choice(list(COMPARISONS.values()))
    several = source.choices(CONSTANTS, k=source.randint(1, 4))
    if source.random() < 0.5:
        several = [value for value in several if isinstance(value, type(several[0]))]
    several = source.choice((list, tuple))(several)
    kind = source.random()
    if kind < 0.6:
        return lambda f: compare(f[column], constant)
    if kind < 0.65:
        return lambda f: compare(constant, f[column])
    if kind < 0.8:
        return lambda f: f[column].isin(several)
    if kind < 0.88:
        return lambda f: f[column].isna()
    if kind < 0.96:
        return lambda f: f[column].notnull()
    return lambda f: f["json.flag"]


def random_predicate(source, depth=2):
    if depth == 0 or source.random() < 0.4:
        return random_leaf(source)
    left, right = (random_predicate(source, depth - 1) for _ in range(2))
    return source.choice(
        (lambda f: left(f) & right(f), lambda f: left(f) | right(f), lambda f: ~left(f))
    )


def test_predicates_that_become_filters_keep_the_rows_that_pandas_keeps(table, frame):
    seed = 20261203
    print("seed", seed)
    source = random.Random(seed)
    (whole,) = table.expr.find_operations(ReadWebDataset)
    read, dataset = type(table)(whole), whole.dataset
    metadata = pa.Table.from_pandas(frame, preserve_index=False)
    pushed = Counted()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NumPy, about NaN
        for round_ in range(4000):
            predicate = random_predicate(source)
            try:
                lazy = predicate(read)
            except Exception:  # what pandas raises for an empty frame, Dask raises at once
                continue
            filters = as_filters(lazy.expr, read.expr, dataset.schema.types, "pandas")
            if filters is None:
                continue
            for part in (slice(None), slice(0, 9), slice(100, 103)):
                got = matching(metadata.slice(part.start or 0, (part.stop or ROWS) - (part.start or 0)), filters)
                want = frame.iloc[part]
                kept = want.iloc[got]["__key__"].tolist()
                assert kept == want[predicate(want)]["__key__"].tolist(), (seed, round_, filters)
            pushed.add(filters)
    assert pushed.operators >= {*COMPARISONS, "not <", "not >=", "in", "not in", "is null"}
    assert pushed.columns >= {*COLUMNS} - {"json"}
    assert pushed.count > 500


class Counted:
    """What random filters were made of."""

    def __init__(self):
        self.count, self.operators, self.columns = 0, set(), set()

    def add(self, filters):
        self.count += 1
        for conjunction in filters:
            for column, op, _ in conjunction:
                self.operators.add(op)
                self.columns.add(column)


def test_random_queries_keep_the_rows_that_pandas_keeps(table, frame):
    seed = 20261204
    print("seed", seed)
    source = random.Random(seed)
    compared = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while compared < 60:
            predicate = random_predicate(source)
            try:
                want = frame[predicate(frame)]["__key__"].tolist()
                lazy = table[predicate(table)]["__key__"]
            except Exception:  # noqa: S112  what pandas can't answer, nobody answers
                continue
            assert lazy.compute().tolist() == want, (seed, compared)
            compared += 1

"""Filters give the rows that pandas and plain Python give, whatever the types."""

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
from loop_over import loop_over
from photo_shards import write_tar

import dask_image_ingest as dii
from dask_image_ingest.dataset import predicates
from dask_image_ingest.dataset.plan.operations import as_predicate
from dask_image_ingest.dataset.plan.scan_node import Scan
from dask_image_ingest.dataset.predicates import Term, parse_filters, terms_of

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
    *INTEGERS, *FLOATS, *TEXTS, True, False, 2**63, 2**64, 2**70, -(2**70), 2.0**53 + 2,
    np.int8(1), np.int64(2**53 + 1), np.uint8(255), np.uint64(2**63), np.float32(0.1), np.bool_(1),
    np.float64(0.5), np.float16(0.5), np.longdouble("0.1"), np.str_("a"), np.datetime64(0, "D"),
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


@pytest.mark.slow
@pytest.mark.rounds(1, nightly=4)
def test_predicates_that_become_filters_keep_the_rows_that_pandas_keeps(table, frame, rng):
    (whole,) = table.expr.find_operations(Scan)
    read, dataset = type(table)(whole), whole.dataset
    metadata = pa.Table.from_pandas(frame, preserve_index=False)
    pushed = Counted()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NumPy, about NaN
        for round_ in range(400):
            predicate = random_predicate(rng)
            try:
                lazy = predicate(read)
            except Exception:  # what pandas raises for an empty frame, Dask raises at once
                continue
            filters = as_predicate(lazy.expr, read.expr, dataset.schema.types, "pandas")
            if filters is None:
                continue
            for start, stop in ((0, ROWS), (0, 9), (100, 103)):
                part = frame.iloc[start:stop]
                got = part.iloc[matching(metadata.slice(start, stop - start), filters)]
                want = part[predicate(part)]
                assert got.index.tolist() == want.index.tolist(), (round_, filters)
            pushed.add(filters)
    assert pushed.operators >= {
        (op, negated)
        for op in ("==", "<", "<=", ">", ">=", "in", "is null")
        for negated in (False, True)
    }
    assert pushed.columns >= {*COLUMNS} - {"json"}
    assert pushed.count > 80


def matching(table, predicate):
    return np.flatnonzero(predicates.holds(predicate, table))


class Counted:
    """What random filters were made of."""

    def __init__(self):
        self.count, self.operators, self.columns = 0, set(), set()

    def add(self, filters):
        self.count += 1
        for term in terms_of(filters):
            self.operators.add((term.op, term.negated))
            self.columns.add(term.column)


@pytest.mark.slow
@pytest.mark.rounds(1, nightly=4)
def test_random_queries_keep_the_rows_that_pandas_keeps(table, frame, rng):
    compared = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while compared < 25:
            predicate = random_predicate(rng)
            try:
                want = frame[predicate(frame)]["__key__"].tolist()
                lazy = table[predicate(table)]["__key__"]
            except Exception:  # what pandas can't answer, nobody answers
                continue
            assert lazy.compute().tolist() == want, compared
            compared += 1


def holds(value, op, constant):
    """One predicate of ``filters=`` in plain Python, as its documentation has it."""
    if op == "in":
        return any(c is None if value is None else c is not None and value == c for c in constant)
    if op == "not in":
        return not holds(value, "in", constant)
    if value is not None and value != value:
        return op == "!="
    return value is not None and COMPARISONS[op](value, constant)


@pytest.mark.slow
def test_the_filters_argument_means_what_plain_python_means(shard, table, frame, rng):
    types = next(table.expr.find_operations(Scan)).dataset.schema.types
    metadata = pa.Table.from_pandas(frame, preserve_index=False)
    columns = {name: metadata.column(name).to_pylist() for name in COLUMNS}
    refused = answered = 0
    for round_ in range(1000):
        filters = [
            [random_filter(rng) for _ in range(rng.randint(1, 2))] for _ in range(rng.randint(1, 2))
        ]
        try:
            normal = parse_filters(filters, types)
        except dii.ArgumentError:
            # One of them alone is what is wrong with them all.
            assert any(is_refused(f, types) for conjunction in filters for f in conjunction)
            refused += 1
            continue
        answered += 1
        want = [
            row
            for row in range(ROWS)
            if any(
                all(holds(columns[c][row], op, plain(value)) for c, op, value in conjunction)
                for conjunction in filters
            )
        ]
        assert matching(metadata, normal).tolist() == want, (round_, filters)
        if answered % 40 == 0:
            lazy = read(shard, filters=filters)
            assert lazy["__key__"].compute().tolist() == frame["__key__"].iloc[want].tolist()
    assert answered > 150
    assert refused > 300


def random_filter(source):
    column = source.choice(COLUMNS)
    if source.random() < 0.3:
        several = source.choices(CONSTANTS, k=source.randint(0, 3))
        return (column, source.choice(("in", "not in")), source.choice((list, tuple))(several))
    return (column, source.choice(list(COMPARISONS)), source.choice(CONSTANTS))


def is_refused(predicate, types):
    """Whether a predicate is one that can't be answered: other kinds, NaN, None."""
    column, op, constant = predicate
    constants = constant if op in ("in", "not in") else [constant]
    return any(not same_kind(types[column], op, plain(value)) for value in constants)


def same_kind(type_, op, constant):
    if constant is None:
        return op in ("in", "not in")
    if pa.types.is_integer(type_) or pa.types.is_floating(type_):
        number = isinstance(constant, (int, float, Decimal)) and type(constant) is not bool
        return number and constant == constant
    kinds = {pa.string(): str, pa.binary(): bytes, pa.bool_(): bool}
    return type(constant) is kinds[type_]


def plain(value):
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value.item() if isinstance(value, np.generic) else value


@loop_over(
    "filters, reason",
    [
        ([("json.f32", "<", NAN)], "NaN compares with nothing"),
        ([("json.f32", "in", [1.0, NAN])], "NaN compares with nothing"),
        ([("cls", "==", None)], "None compares with nothing"),
        ([("cls", "==", "1")], "of type int64"),
        ([("json.text", "==", 1)], "of type string"),
        ([("json.text", "==", "\ud83d")], "of type string"),
        ([("bin", "==", "a")], "of type binary"),
        ([("json.flag", "==", 1)], "of type bool"),
        ([("cls", "in", "12")], "must be a list"),
        ([("cls", "in", {1: 2})], "must be a list"),
        ([("cls", "in", np.array(1))], "must be a list"),
        ([("cls", "in", [[1]])], "of type int64"),
        ([(["cls"], "==", 1)], "no column"),
        ([("cls", ["=="], 1)], "operator must be one of"),
        ([("cls", "is null", 1)], "operator must be one of"),
        ([("cls", "==")], "pass a list of"),
        ([()], "pass a list of"),
        ({"cls": 1}, "pass a list of"),
        (7, "pass a list of"),
    ],
)
def test_a_filter_that_is_refused_says_why(shard, filters, reason):
    with pytest.raises(dii.ArgumentError, match=rf"filters=.*{reason}"):
        read(shard, filters=filters)


def test_a_constant_no_type_holds_is_compared_all_the_same(shard, frame):
    assert len(read(shard, filters=[("cls", "<", 2**70)])) == frame["cls"].notna().sum()
    assert len(read(shard, filters=[("cls", ">=", 10**400)])) == 0
    finite = [value for value in frame["json.f64"] if value is not pd.NA and value < INF]
    assert len(read(shard, filters=[("json.f64", "<", 10**400)])) == len(finite)


@pytest.mark.slow
def test_a_predicate_on_nan_keeps_what_pandas_keeps(table, frame):
    for predicate in (
        lambda f: ~(f["json.f32"] < 0.5),
        lambda f: ~((f["json.f32"] >= 0.5) | f["json.flag"]),
        lambda f: f["json.f64"] != 0.5,
        lambda f: f["json.f64"].notnull(),
    ):
        want = frame[predicate(frame)]
        (made,) = table[predicate(table)].optimize(fuse=False).expr.find_operations(Scan)
        assert made.operand("filters")
        assert table[predicate(table)].compute()["__key__"].tolist() == want["__key__"].tolist()


def test_cudf_compares_float32_in_its_own_precision_and_takes_nan_for_missing(table):
    (whole,) = table.expr.find_operations(Scan)
    read, types = type(table)(whole), whole.dataset.schema.types

    def filters(mask, backend):
        return as_predicate(mask.expr, read.expr, types, backend)

    above, missing = read["json.f32"] > 0.1, read["json.f32"].isna()
    assert filters(above, "pandas") == Term("json.f32", ">", 0.1)
    assert filters(above, "cudf") == Term("json.f32", ">", float(np.float32(0.1)))
    assert filters(missing, "pandas") == Term("json.f32", "is null", False)
    assert filters(missing, "cudf") == Term("json.f32", "is null", True)
    column = pa.table({"json.f32": pa.array([1.0, NAN, None], pa.float32())})
    assert matching(column, filters(missing, "pandas")).tolist() == [2]
    assert matching(column, filters(missing, "cudf")).tolist() == [1, 2]
    assert matching(column, filters(~missing, "cudf")).tolist() == [0]


@pytest.mark.slow
def test_a_long_list_of_keys_is_not_carried_by_every_task(table, frame):
    keys = [*frame["__key__"].iloc[::3], *(f"none-{n}" for n in range(20_000))]
    kept = table[table["__key__"].isin(keys)]
    assert not any(
        made.operand("filters") for made in kept.optimize(fuse=False).expr.find_operations(Scan)
    )
    assert kept["__key__"].compute().tolist() == frame["__key__"].iloc[::3].tolist()


def test_filters_one_after_the_other_hold_where_both_do(shard, frame):
    """pandas can't combine the mask of ``str.contains`` with one of numbers that has nulls.

    Not in this order, and Dask makes one mask of two filters.
    """
    table = read(shard)
    for first, second in (
        (lambda f: f["json.text"].str.contains("a"), lambda f: f["json.i32"] > 1),
        (lambda f: f["json.i32"] + 1 > 1, lambda f: f["json.text"].str.contains("a")),
        (lambda f: f["json.text"].str.contains("a"), lambda f: f["json.i32"] + 1 > 1),
    ):
        eager = frame[first(frame)]
        want = eager[second(eager)]["__key__"].tolist()
        lazy = table[first(table)]
        lazy = lazy[second(lazy)]
        assert lazy["__key__"].compute().tolist() == want
        assert len(lazy) == len(want)
        third = lazy[lazy["json.u8"] > 1]
        assert len(third) == (eager[second(eager)]["json.u8"] > 1).sum()
        assert 0 < len(want) < ROWS
        both = table[first(table) & second(table)]
        assert both["__key__"].compute().tolist() == want
        assert len(table[first(table) | second(table)]) >= len(want)


def test_a_condition_on_the_whole_frame_beside_one_on_rows_still_works(table, frame):
    lazy = table[(table["json.i32"] > 1) & (table["json.i32"].max() > 1)]
    assert lazy["__key__"].compute().tolist() == frame["__key__"][frame["json.i32"] > 1].tolist()

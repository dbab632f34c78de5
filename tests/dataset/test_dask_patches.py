"""Rules that are added to Dask's expressions: few, chained, and without effect on other frames."""

from __future__ import annotations

import dask
import dask.dataframe as dd
import pandas as pd
import pytest
from dask.dataframe.dask_expr import _expr
from distributed import Client, LocalCluster
from processes import printed

import dask_image_ingest as dii

pytestmark = pytest.mark.slow

# Dask's expressions of which a method is replaced: (class, method).
REPLACED = [
    ("FilterAlign", "_simplify_up"),
    ("MaybeAlignPartitions", "_lower"),
    ("OpAlignPartitions", "_lower"),
    ("Expr", "_filter_passthrough_available"),
    ("AsType", "_filter_simplification"),
    ("Blockwise", "_simplify_up"),
    ("Assign", "_simplify_up"),
    ("Projection", "_simplify_up"),
    ("RenameFrame", "_simplify_up"),
    ("AsType", "_simplify_up"),
    ("Fillna", "_simplify_up"),
    ("Replace", "_simplify_up"),
    ("Round", "_simplify_up"),
    ("Drop", "_simplify_up"),
    ("Index", "_simplify_up"),
    ("DropnaFrame", "_simplify_up"),
    ("Head", "_simplify_down"),
    ("Tail", "_simplify_down"),
    ("Index", "_simplify_down"),
    ("Partitions", "_divisions"),
    ("Partitions", "_simplify_down"),
    ("And", "_simplify_down"),
    ("Or", "_simplify_down"),
    ("XOr", "_simplify_down"),
]

# The name of each optimised query, which stands for all that it does.
QUERIES = """
import pandas as pd
import dask.dataframe as dd
frame = pd.DataFrame({"a": range(20), "b": [1.5] * 20, "c": list("xy") * 10})
ddf = dd.from_pandas(frame, npartitions=4)
other = dd.from_pandas(frame.set_index("a"), npartitions=3)
names = [
    query.optimize(fuse=False).expr._name
    for query in (
        ddf[ddf.a > 3],
        ddf[(ddf.a > 3) & (ddf.b < 2) | (ddf.c == "x") ^ (ddf.a < 9)],
        ddf[ddf.a > 3].index,
        ddf.query("a > 3")[["b"]],
        ddf.query("a > 3 and c == 'x'").index,
        ddf.assign(d=ddf.a + 1).query("d > 3")["b"],
        ddf.assign(e=other.b),
        ddf[other.b > 1].index,
        ddf[other.b > 1]["c"],
        other + other,
        ddf.sort_values("b")[["a"]],
        ddf.merge(other, on="b").groupby("c_x").a.sum(),
        ddf.fillna({"b": 0})["b"],
    )
]
"""

# Dask as it is; then with methods that count their calls, and this package upon them.
ALONE = """
import json
from dask.dataframe.dask_expr import _expr

two, three = (dd.from_map(lambda i: pd.DataFrame({"a": range(5)}), [*range(n)]) for n in (2, 3))
told = {
    "names": names,
    "rules": [n for n in ("And", "Or", "XOr") if "_simplify_down" in vars(getattr(_expr, n))],
    "nodes": [type(node).__name__ for node in two[three.a > 1].index.simplify().walk()],
}
calls = set()

def count(kind, name):
    method = getattr(kind, name)
    def counted(self, *args):
        calls.add(type(self).__name__)
        return method(self, *args)
    setattr(kind, name, counted)

for name in ("And", "Or", "XOr"):
    count(getattr(_expr, name), "_simplify_down")
for name in ("Blockwise", "FilterAlign"):
    count(getattr(_expr, name), "_simplify_up")
for name in ("MaybeAlignPartitions", "OpAlignPartitions"):
    count(getattr(_expr, name), "_lower")

import dask_image_ingest

ddf = dd.from_pandas(pd.DataFrame({"a": range(20), "b": range(20)}), npartitions=4)
other = dd.from_pandas(pd.DataFrame({"a": range(20)}), npartitions=3)
mask = ((ddf.a > 3) & (ddf.a < 9)) | (ddf.a == 1) ^ (ddf.a == 2)
for query in (ddf[mask].index, ddf.isna()[["a"]], ddf.assign(b=other.a), ddf.a + other.a,
              ddf[other.a > 3].b):
    query.optimize()
print(json.dumps(told | {"calls": [*calls]}))
"""


@pytest.fixture(scope="module")
def alone():
    """What a process tells of Dask before this package is imported, and of their rules after it."""
    return printed(QUERIES + ALONE)


def test_frames_without_images_are_optimised_as_without_this_package(alone):
    imported: dict = {}
    exec(QUERIES, imported)
    assert imported["names"] == alone["names"]


FILTERS = {
    "cast mask": lambda ddf: ddf[(ddf["nbytes"] != 3).astype("boolean")],
    "renamed mask": lambda ddf: ddf[(ddf["txt"] != "").fillna(False).rename("m")],
    "cast values": lambda ddf: (lambda cast: cast[cast["half"] == 1])(
        ddf.astype({"half": "int64"})
    ),
    "nlargest": lambda ddf: ddf.nlargest(3, "nbytes")[["__key__"]],
}


@pytest.mark.parametrize("decode", [False, True], ids=["references", "decoded"])
@pytest.mark.parametrize("name", FILTERS)
def test_filters_of_references_that_dask_reads_are_those_of_pandas(name, decode, shards):
    # The decode rises above the filter, so that nothing of this package is left below it.
    lazy = dii.read_webdataset_images(shards, backend="pandas", decode=False)
    parts = [part.compute(scheduler="sync") for part in lazy.partitions]
    parts = [part.assign(half=[n / 2 for n in range(len(part))]) for part in parts]
    ddf = dd.from_map(lambda n: parts[n], range(len(parts)))
    query = FILTERS[name](dii.decode_images(ddf, size=16) if decode else ddf)
    got, wanted = query.compute(scheduler="sync"), FILTERS[name](pd.concat(parts))
    assert len(wanted) > 0
    assert sorted(got["__key__"]) == sorted(wanted["__key__"])


@pytest.mark.parametrize("npartitions", [1, 3])
def test_a_head_of_a_column_with_an_aggregate_is_that_of_pandas(npartitions):
    frame = pd.DataFrame({"a": range(10)})
    ddf = dd.from_pandas(frame, npartitions=npartitions)
    share, expected = ddf.assign(b=ddf.a / ddf.a.max()), frame.assign(b=frame.a / frame.a.max())
    pd.testing.assert_frame_equal(share.head(2), expected.head(2))
    pd.testing.assert_frame_equal(share.tail(2), expected.tail(2))


def test_every_rule_calls_the_one_that_was_there(alone):
    assert {"And", "FilterAlign", "IsNa", "Or", "XOr"} <= {*alone["calls"]}


def test_dask_has_no_rule_of_its_own_yet(alone):
    # If it brings one, look whether ours is still needed: dataset/plan/dask_patches.py.
    assert alone["rules"] == []


def test_dask_still_drops_the_alignment_of_a_filter_for_its_index(alone):
    # Once it doesn't, `_simplify_filter` of dataset/plan/alignment.py can go.
    assert "Filter" in alone["nodes"]
    assert "FilterAlign" not in alone["nodes"]


def test_no_other_method_of_dask_is_replaced():
    replaced = {
        (name, method)
        for name, kind in vars(_expr).items()
        if isinstance(kind, type)
        for method, value in vars(kind).items()
        if str(getattr(value, "__module__", "")).startswith("dask_image_ingest")
    }
    assert replaced == {*REPLACED}


@pytest.mark.timeout(200)
def test_a_query_that_computes_in_between_does_not_wait_for_its_own_scheduler(shards):
    # The scheduler is in this process, as with start_cluster.
    with (
        LocalCluster(n_workers=1, processes=False, dashboard_address=None) as cluster,
        Client(cluster),
        dask.config.set(scheduler=None),
    ):
        ddf = dii.read_webdataset_images(shards, backend="pandas", size=16)
        plain = dd.from_pandas(pd.DataFrame({"n": range(99)}), npartitions=3)
        for frame in (ddf, ddf.repartition(partition_size="4 kB"), plain):
            assert len(frame.repartition(partition_size="2 kB").compute()) == len(frame)
        assert ddf.sort_values("__key__").set_index("__key__").size.compute() > 0

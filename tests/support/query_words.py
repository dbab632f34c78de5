"""The words of random queries: what their names stand for, lazily, in memory and in pandas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
from dask.dataframe.dask_expr import _expr as dx
from dask.dataframe.dask_expr import new_collection
from query_sources import SIZE, Source

import dask_image_ingest as dii


def namespaces(source: Source) -> tuple[dict, dict, dict]:
    """What the names in a query stand for in each of its three runs."""
    lazy = {**WORDS, "d": source.lazy, "decode_images": decode, "map_batches": map_batches}
    lazy |= {"find_issues": dii.curate.find_issues}
    plain = {**WORDS, "d": source.plain, "decode_images": plain_decode, "map_batches": plain_map}
    plain |= {"find_issues": plain_issues}
    return lazy, plain, {**lazy, "d": source.whole}


def decode(frame: Any, **options: Any) -> Any:
    return dii.decode_images(frame, size=SIZE, **options)


def map_batches(frame: Any) -> Any:
    return frame.images.map_batches(brightness, {"light": "float32"}, batch_size=3)


def brightness(images: Any) -> list[float]:
    return [float(np.asarray(image).mean()) for image in images]


class EachPartition(dx.Blockwise):
    """A function of every partition, which takes up nothing of a query."""

    _parameters: ClassVar = ["frame", "function", "options"]

    @staticmethod
    def operation(frame: Any, function: Callable, options: dict) -> Any:
        return function(frame, **options)


class EachRow(EachPartition, dx.Elemwise):
    """A function that makes as many rows as there are."""


def plain_decode(frame: Any, **options: Any) -> Any:
    kind = EachPartition if options.get("errors") == "drop" else EachRow
    return new_collection(kind(frame.expr, decode, options))


def plain_map(frame: Any) -> Any:
    return new_collection(EachRow(frame.expr, map_batches, {}))


def plain_issues(frame: Any) -> Any:
    issues = new_collection(EachRow(frame.expr, dii.curate.find_issues, {}))
    if "issue.odd_size" not in issues.columns:
        return issues
    sides = issues["quality.area"].compute().dropna().to_numpy(float) ** 0.5
    first, third = np.percentile(sides, [25, 75]) if len(sides) else (0.0, 0.0)
    limits = {"low": first - 3 * (third - first), "high": third + 3 * (third - first)}
    return new_collection(EachRow(frame.expr, issues_within, limits))


def issues_within(frame: Any, low: float, high: float) -> Any:
    side = (issues := dii.curate.find_issues(frame))["quality.area"] ** 0.5
    return issues.assign(**{"issue.odd_size": (side < low) | (side > high)})


def put(frame: Any, name: str, values: Any) -> Any:
    frame = frame.copy()
    frame[name] = values
    return frame


def first_two(part: Any) -> Any:
    return part.iloc[:2]


def with_group_sizes(frame: Any, key: str) -> Any:
    meta = frame._meta.drop(columns=key).assign(rows=pd.Series([], dtype="int64"))
    return frame.groupby(key, group_keys=False).apply(with_size, meta=meta)


def with_size(group: Any) -> Any:
    return group.assign(rows=len(group))


def with_group_light(frame: Any, key: str, **options: Any) -> Any:
    meta = frame._meta.drop(columns=key).assign(light=pd.Series([], dtype="float64"))
    return frame.groupby(key, **{"group_keys": False, **options}).apply(with_light, meta=meta)


def with_light(group: Any) -> Any:
    return group.assign(light=light(group))


def group_light(frame: Any, key: str, **options: Any) -> Any:
    columns = {"light": "float64", "rows": "int64"}
    meta = pd.DataFrame({name: pd.Series([], dtype=dtype) for name, dtype in columns.items()})
    return frame.groupby(key, **{"group_keys": False, **options}).apply(total_light, meta=meta)


def total_light(group: Any) -> Any:
    return pd.DataFrame({"light": [sum(light(group))], "rows": [len(group)]})


def light(group: Any) -> list[float]:
    return [0.0 if a is None else float(a.mean()) for a in group.images.arrays()]


def rows(part: Any) -> pd.Series:
    return pd.Series([len(part)])


def compute(value: Any) -> Any:
    return value.compute() if hasattr(value, "compute") else value


def compute_both(first: Any, second: Any) -> Any:
    return dask.compute(first, second)


def layout(value: Any) -> Any:
    """How many partitions, between which divisions, and how long, when all is optimised."""
    optimized = value.optimize()
    return optimized.npartitions, optimized.divisions, value.map_partitions(len).compute()


def by_partition(value: Any) -> Any:
    return list(dask.compute(*value.to_delayed()))


def each_partition(value: Any) -> Any:
    return [value.partitions[n].compute() for n in range(value.npartitions)]


def unfused(value: Any) -> Any:
    return value.optimize(fuse=False).compute()


WORDS = {
    function.__name__: function
    for function in (
        first_two,
        rows,
        compute,
        compute_both,
        layout,
        by_partition,
        each_partition,
        unfused,
        group_light,
        with_group_light,
        with_group_sizes,
        put,
    )
} | {"dd": dd, "pd": pd, "np": np, "dask": dask}

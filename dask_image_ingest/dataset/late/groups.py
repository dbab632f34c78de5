"""``groupby().apply`` over references: shuffle references, decode one group at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.late.decode import decode_partition
from dask_image_ingest.dataset.plan.nodes import ImageNode
from dask_image_ingest.dataset.scan.decode_rows import ColumnDecode


def apply_to_groups(
    apply: dx.Expr, child: dx.Expr, rows: dx.Expr, images: tuple[ColumnDecode, ...]
) -> dx.Expr | None:
    """Rewrite a ``groupby().apply`` of ``child`` to group its undecoded ``rows``.

    None if it groups by decoded columns or by anything but names, or applies to a series.
    """
    decoded = {name for each in images for name in each.columns}
    names = {*child.columns, child._meta.index.name}
    if (
        apply.frame._name != child._name
        or apply._slice is not None
        or not callable(apply.func)
        or not all(isinstance(name, str) and name in names for name in apply.by)
        or not decoded.isdisjoint(apply.by)
        or not all(isinstance(name, str) for name in child.columns)
    ):
        return None
    frame = rows
    if apply.need_to_shuffle:
        # By the first column alone, as Dask does.
        method = apply.operand("shuffle_method")
        frame = dx.RearrangeByColumn(frame, [apply.by[0]], frame.npartitions, method=method)
    options = [apply.operand(name) for name in ("group_keys", "observed", "dropna")]
    call = [apply.operand(name) for name in ("args", "kwargs", "func")]
    # The meta of ``apply``: Dask infers it by calling the function, which expects pixels.
    return GroupsOfReferences(frame, None, *options, *call, apply._meta, images, *apply.by)


def _apply_decoded(
    frame: Any,
    *by: Any,
    images: tuple[ColumnDecode, ...],
    dask_func: Callable[..., Any],
    **options: Any,
) -> Any:
    function: Callable[..., Any] = partial(_apply_to_decoded, dask_func, images)
    if not len(frame):
        # For an empty frame cuDF makes no groups, and returns its rows instead of a result.
        frame, function = decode_partition(frame, images), dask_func
    call = partial(dx.groupby_slice_apply, func=function)
    return dx.GroupByUDFBlockwise.operation(frame, *by, dask_func=call, **options)


def _apply_to_decoded(
    function: Callable[..., Any],
    images: tuple[ColumnDecode, ...],
    group: Any,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    decoded = decode_partition(group, images)
    if "name" in vars(group):  # pandas sets the group's key so; ``decoded`` is a new frame
        object.__setattr__(decoded, "name", group.name)
    return function(decoded, *args, **kwargs)


class GroupsOfReferences(ImageNode, dx.GroupByUDFBlockwise):
    """Applies a function to the groups of each partition, decoding one group at a time.

    All groups of a partition, decoded together, could exceed a worker's memory.
    """

    _parameters: ClassVar = [*dx.GroupByUDFBlockwise._parameters, "images"]
    _keyword_only: ClassVar = [*dx.GroupByUDFBlockwise._keyword_only, "images"]
    operation = staticmethod(_apply_decoded)

"""Functions of groups: references are grouped, and each group is decoded when its turn comes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.late.decode import decode_partition
from dask_image_ingest.dataset.plan.nodes import ImageNode
from dask_image_ingest.dataset.scan.decode_rows import ImageDecode


def apply_to_groups(
    apply: dx.Expr, child: dx.Expr, rows: dx.Expr, images: tuple[ImageDecode, ...]
) -> dx.Expr | None:
    """A function of groups of ``child``, which are put together by the references in ``rows``.

    None where the groups depend on what is decoded, or the function gets a series.
    """
    made = {name for each in images for name in each.columns}
    known = {*child.columns, child._meta.index.name}
    if (
        apply.frame._name != child._name
        or apply._slice is not None
        or not callable(apply.func)
        or not all(isinstance(name, str) and name in known for name in apply.by)
        or not made.isdisjoint(apply.by)
        or not all(isinstance(name, str) for name in child.columns)
    ):
        return None
    frame = rows
    if apply.need_to_shuffle:
        # As dask itself would: by the first of the columns.
        method = apply.operand("shuffle_method")
        frame = dx.RearrangeByColumn(frame, [apply.by[0]], frame.npartitions, method=method)
    options = [apply.operand(name) for name in ("group_keys", "observed", "dropna")]
    given = [apply.operand(name) for name in ("args", "kwargs", "func")]
    # Its meta was made by the function's own answer to pixels, where it was not given.
    return GroupsOfReferences(frame, None, *options, *given, apply._meta, images, *apply.by)


def _apply_decoded(
    frame: Any,
    *by: Any,
    images: tuple[ImageDecode, ...],
    dask_func: Callable[..., Any],
    **options: Any,
) -> Any:
    function: Callable[..., Any] = partial(_of_decoded, dask_func, images)
    if not len(frame):
        # cuDF gives no groups of no rows, and the rows themselves in place of an answer.
        frame, function = decode_partition(frame, images), dask_func
    call = partial(dx.groupby_slice_apply, func=function)
    return dx.GroupByUDFBlockwise.operation(frame, *by, dask_func=call, **options)


def _of_decoded(
    function: Callable[..., Any],
    images: tuple[ImageDecode, ...],
    group: Any,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    decoded = decode_partition(group, images)
    if "name" in vars(group):
        object.__setattr__(decoded, "name", group.name)
    return function(decoded, *args, **kwargs)


class GroupsOfReferences(ImageNode, dx.GroupByUDFBlockwise):
    """A function of the groups in each partition of references.

    All groups of a partition decoded at the same time could be more than a worker holds.
    """

    _parameters: ClassVar = [*dx.GroupByUDFBlockwise._parameters, "images"]
    _keyword_only: ClassVar = [*dx.GroupByUDFBlockwise._keyword_only, "images"]
    operation = staticmethod(_apply_decoded)

"""Functions of groups of moved rows: each group is decoded when the function gets it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.moved_rows import (
    EncodedImages,
    MovedImages,
    cuts,
    decode_moved,
    encoded_sizes,
)
from dask_image_ingest.dataset.partition import check_size
from dask_image_ingest.decode import Pixels
from dask_image_ingest.frames import assigned, backend_of

# Of a partition of the read, what is decoded at a time of groups that are smaller: enough images to
# keep a decoder busy, beside whatever the function makes of the largest group.
_SHARE = 1 / 4

__all__ = ["GroupsOfMoved", "apply_to_groups"]


def apply_to_groups(
    apply: dx.Expr, child: dx.Expr, pointers: dx.Expr, images: tuple[MovedImages, ...]
) -> dx.Expr | None:
    """A function of groups of ``child``, which are put together by ``pointers``.

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
    frame = pointers
    if apply.need_to_shuffle:
        # As dask itself would: by the first of the columns.
        method = apply.operand("shuffle_method")
        frame = dx.RearrangeByColumn(frame, [apply.by[0]], frame.npartitions, method=method)
    options = [apply.operand(name) for name in ("group_keys", "observed", "dropna")]
    given = [apply.operand(name) for name in ("args", "kwargs", "func")]
    # Its meta was made by the function's own answer to pixels, where it was not given.
    return GroupsOfMoved(frame, None, *options, *given, apply._meta, images, *apply.by)


def apply_to_decoded(
    frame: Any, *by: Any, images: Sequence[MovedImages], dask_func: Any, **options: Any
) -> Any:
    chosen = {name: options[name] for name in ("observed", "dropna") if options[name] is not None}
    number = frame.groupby(list(by), **chosen).ngroup().fillna(-1).astype("int64")
    groups = _Groups(frame, images, backend_of(frame).host(number.to_numpy()), dask_func)
    function = partial(dx.groupby_slice_apply, func=groups)
    return dx.GroupByUDFBlockwise.operation(groups.places(), *by, dask_func=function, **options)


class GroupsOfMoved(dx.GroupByUDFBlockwise):
    """A function of the groups in each partition of pointers.

    All groups of a partition decoded at the same time could be more than a worker holds.
    """

    _parameters: ClassVar = [*dx.GroupByUDFBlockwise._parameters, "images"]
    _keyword_only: ClassVar = [*dx.GroupByUDFBlockwise._keyword_only, "images"]
    operation = staticmethod(apply_to_decoded)

    def __str__(self) -> str:
        names = ", ".join(str(each.image) for each in self.images)
        return f"GroupsOfMoved({self.frame}, {names})"

    def _tree_repr_argument_construction(self, i: int, op: Any, header: str) -> str:
        if op is self.images:
            names = ", ".join(repr(each.image) for each in self.images)
            return f"{header} decodes={names}"
        return super()._tree_repr_argument_construction(i, op, header)


class _Groups:
    """Calls a function of decoded groups with groups whose rows tell their places."""

    def __init__(
        self,
        frame: Any,
        images: Sequence[MovedImages],
        number: np.ndarray,
        function: Callable[..., Any],
    ) -> None:
        self._frame = frame
        self._images = images
        self._number = number
        self._function = function
        self._backend = backend_of(frame)
        # Of many small groups, images are fetched and decoded together: the next will be asked for.
        self._largest = int(self._backend.partition_memory() * _SHARE)
        sizes = np.sum([encoded_sizes(frame, each) for each in images], axis=0)
        self._to_fetch = _Runs(number, sizes, self._largest)
        self._fetched = -1

    def places(self) -> Any:
        """The frame with the place of each row where its images will be."""
        places = np.arange(len(self._frame))
        return assigned(self._frame, {each.image: places for each in self._images})

    def __call__(self, group: Any, /, *args: Any, **kwargs: Any) -> Any:
        """What the function makes of a group, which it gets as pandas would have given it."""
        decoded = self._decoded(group) if len(group) else self._empty(group)
        if "name" in vars(group):
            object.__setattr__(decoded, "name", group.name)
        return self._function(decoded, *args, **kwargs)

    def _decoded(self, group: Any) -> Any:
        rows = self._backend.host(self._backend.values(group[self._images[0].image]))
        run = self._to_fetch.run[rows[0]]
        if run != self._fetched:
            self._fetch(run)
        places = self._to_fetch.place[rows]
        run = self._to_decode.run[places[0]]
        if run != self._done:
            self._decode(run)
        places = self._to_decode.place[places]
        for each, pixels in zip(self._images, self._pixels, strict=True):
            group = self._backend.with_images(group, pixels.take(places), *each.names)
        return group

    def _empty(self, group: Any) -> Any:
        # As of a category that no row is of.
        return decode_moved(self._frame.iloc[:0][list(group.columns)], self._images)

    def _fetch(self, run: int) -> None:
        rows = self._to_fetch.rows[run]
        self._encoded: list[EncodedImages] = []
        self._pixels: list[Pixels] = []
        part = self._frame.iloc[rows]
        self._encoded = [EncodedImages(part, each) for each in self._images]
        self._sizes = np.sum([each.nbytes for each in self._encoded], axis=0)
        self._to_decode = _Runs(self._number[rows], self._sizes, self._largest)
        self._fetched, self._done = run, -1

    def _decode(self, run: int) -> None:
        rows = self._to_decode.rows[run]
        self._pixels = []
        what, nbytes = f"the images of a group of {len(rows)} rows", int(self._sizes[rows].sum())
        check_size(what, nbytes, self._backend.largest_partition)
        self._pixels = [each.decode(rows) for each in self._encoded]
        self._done = run


class _Runs:
    """Rows of whole groups, in the order of groups, cut where bytes are full.

    Attributes
    ----------
    rows
        Those of each run.
    run, place
        For each row the run that it is in, and where.
    """

    def __init__(self, number: np.ndarray, sizes: np.ndarray, largest: int) -> None:
        order = np.argsort(number, kind="stable")
        # Those that belong to no group come first.
        order = order[np.searchsorted(number[order], 0) :]
        of_groups = np.bincount(number[order], sizes[order]).astype(np.int64)
        edges = np.searchsorted(number[order], np.arange(len(of_groups) + 1))
        self.rows = [order[edges[g.start] : edges[g.stop]] for g in cuts([of_groups], largest)]
        self.run = np.zeros(len(number), np.int64)
        self.place = np.zeros(len(number), np.int64)
        for run, rows in enumerate(self.rows):
            self.run[rows] = run
            self.place[rows] = np.arange(len(rows))

"""Boxes and points of images, which follow the region, the resize and the flip of a decode."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.arguments import check_choice, is_share, list_of_names, shown
from dask_image_ingest.dataset.schema.columns import REGION
from dask_image_ingest.decode import DecodeSpec, Placement, Placements
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import (
    backend_of,
    is_any_list,
    is_list,
    is_number,
    list_array,
    nesting,
    one_chunk,
)
from dask_image_ingest.typedefs import DataFrame

#: Numbers of a box: two corners, or a corner and the size.
BoxFormat = Literal["xyxy", "xywh"]

#: Unit of boxes and points.
Coordinates = Literal["pixels", "shares"]


def regions(placements: Sequence[Placement | None]) -> pa.StructArray:
    """The column of type `REGION`."""
    rows = [
        None if placement is None else dict(zip(REGION.names, placement.region, strict=True))
        for placement in placements
    ]
    return pa.array(rows, REGION)


def parse_annotations(
    boxes: str | None,
    box_format: BoxFormat,
    box_labels: str | Sequence[str] | None,
    min_visibility: float,
    points: str | Sequence[str] | None,
    coordinates: Coordinates,
    decode: bool = True,
) -> Annotations | None:
    """Validate these arguments of a read; None without boxes and points.

    They are refused if the read does not ``decode``.

    Raises
    ------
    ArgumentError
    """
    check_choice("box_format", box_format, ("xyxy", "xywh"))
    check_choice("coordinates", coordinates, ("pixels", "shares"))
    if not is_share(min_visibility):
        raise ArgumentError(f"min_visibility={shown(min_visibility)}: pass a share, 0 to 1")
    if boxes is not None and not isinstance(boxes, str):
        raise ArgumentError(f"boxes={shown(boxes)}: pass the name of a column")
    if boxes is None and box_labels is not None:
        raise ArgumentError("box_labels= are columns with a value for each box: pass boxes= too")
    labels = None if box_labels is None else _names("box_labels", box_labels)
    places = () if points is None else _names("points", points)
    if boxes is not None and boxes in (*places, *(labels or ())):
        raise ArgumentError(f"boxes={shown(boxes)} is one of points= or box_labels=, too")
    if boxes is None and not places:
        return None
    if not decode:
        raise ArgumentError("boxes= and points= follow a decode: pass them to decode_images")
    return Annotations(boxes, box_format, labels, float(min_visibility), places, coordinates)


def _names(argument: str, value: str | Sequence[str]) -> tuple[str, ...]:
    return tuple(list_of_names(argument, [value] if isinstance(value, str) else value, "columns"))


def check_annotations(
    annotations: Annotations | None, types: Mapping[Any, pa.DataType], decoding: DecodeSpec
) -> None:
    """Raise `ArgumentError` if a column does not exist, or its type can't be that of its values.

    Also if ``decoding`` moves pixels to places that these columns don't follow to.
    """
    if annotations is None:
        return
    if decoding.moves is not None:
        raise ArgumentError(
            f"boxes= and points= follow crops, resizes and flips, and {decoding.moves} of augment= "
            "turns, shears and shifts images: leave one of them out"
        )
    for name in annotations.columns:
        if name not in types:
            field = str(name).removeprefix("json.")
            hint = f"json_fields={{{field!r}: 'list<list<float32>>'}} makes it of a JSON member; "
            raise ArgumentError(
                f"there is no column {name!r} of boxes, labels or points: "
                f"{hint if field != name else ''}the columns are {', '.join(map(repr, types))}"
            )
        type_, labels = types[name], annotations.box_labels
        levels, value = nesting(type_)
        is_aligned = labels is not None and name in (annotations.boxes, *labels)
        is_wrong = not (is_list(type_) if is_aligned else is_any_list(type_))
        if name == annotations.boxes or name in annotations.points:
            is_wrong |= not is_number(value)
        if name == annotations.boxes and is_aligned:
            is_wrong |= levels != 2
        if is_wrong:
            raise ArgumentError(
                f"the column {name!r} is of type {type_}: boxes= names lists of lists of four "
                "numbers, such as 'list<list<float32>>', points= lists of two numbers in any "
                "nesting, and box_labels= lists with an item for each box"
            )


@dataclass(frozen=True, slots=True)
class Annotations:
    """Columns of boxes and points of an image column, arguments of a read.

    Attributes
    ----------
    boxes
        Column with a list of boxes in each row; None without boxes.
    box_format
        What the first four numbers of a box are.
    box_labels
        Columns with a value for each box, which are removed with it; None keeps removed boxes as
        zeros.
    min_visibility
        Least share of a box's area that is left in the image.
    points
        Columns of points: their first two numbers are x and y.
    coordinates
        Unit of all.
    """

    boxes: Any | None
    box_format: BoxFormat = "xyxy"
    box_labels: tuple[Any, ...] | None = None
    min_visibility: float = 0.0
    points: tuple[Any, ...] = ()
    coordinates: Coordinates = "pixels"

    @property
    def columns(self) -> list[Any]:
        """All columns that change."""
        names = (self.boxes, *(self.box_labels or ()), *self.points)
        return [name for name in dict.fromkeys(names) if name is not None]

    @property
    def _groups(self) -> list[list[Any]]:
        """The boxes with the columns that are aligned with them; each other column by itself."""
        aligned = [] if self.boxes is None else [self.boxes, *(self.box_labels or ())]
        others = [[name] for name in self.points if name not in aligned]
        return [aligned, *others] if aligned else others

    def selected(self, names: Collection[Any]) -> Annotations | None:
        """All of them if one is named: lists that are aligned decide together; else None."""
        return None if {*self.columns}.isdisjoint(names) else self

    def renamed(self, names: Callable[[Any], Any]) -> Annotations:
        """Rename the columns by the function ``names``."""
        return replace(
            self,
            boxes=None if self.boxes is None else names(self.boxes),
            box_labels=None if self.box_labels is None else tuple(map(names, self.box_labels)),
            points=tuple(map(names, self.points)),
        )

    def follow(self, frame: DataFrame, placements: Sequence[Placement | None]) -> DataFrame:
        """Replace the columns by those of the decoded images, whose ``placements`` are given.

        A row without a placement is null, and so is one whose lists are no boxes or points, or
        whose labels are not as many as its boxes.
        """
        backend = backend_of(frame)
        table = backend.to_arrow(frame[self.columns])
        arrays = {name: one_chunk(table.column(place)) for place, name in enumerate(self.columns)}
        placed = np.array([placement is not None for placement in placements], np.bool_)
        for names in self._groups:
            group = {name: arrays[name] for name in names}
            rows = np.flatnonzero(placed & self._is_complete(group))
            some = Placements([p for row in rows.tolist() if (p := placements[row]) is not None])
            taken = {name: array.take(pa.array(rows)) for name, array in group.items()}
            columns = {name: (array, array.type) for name, array in self._moved(taken, some)}
            frame = backend.with_columns(frame, columns, rows.tolist())
        return frame

    def _is_complete(self, group: Mapping[Any, pa.Array]) -> np.ndarray:
        """Rows of aligned columns without nulls and with enough numbers, as many in each column."""
        complete: np.ndarray = np.array(True)
        lengths = []
        for name, array in group.items():
            complete = complete & array.is_valid().to_numpy(zero_copy_only=False)
            lengths.append(pc.list_value_length(array).fill_null(0).to_numpy())
            if name == self.boxes or name in self.points:
                lists = _unnested(array)
                few = lists.lengths < (4 if name == self.boxes else 2)
                complete[np.union1d(lists.broken, lists.rows[few])] = False
        return complete & np.all([other == lengths[0] for other in lengths], axis=0)

    def _moved(
        self, group: Mapping[Any, pa.Array], placements: Placements
    ) -> Iterable[tuple[Any, pa.Array]]:
        """The columns of complete rows, after the decode."""
        is_left: np.ndarray | None = None
        for name, array in group.items():
            if name == self.boxes:
                lists = _unnested(array)
                numbers, is_left = self._moved_boxes(lists.first(4), lists.rows, placements)
                if self.box_labels is None:
                    numbers[~is_left] = 0
                array = lists.replaced(numbers)
            elif name in self.points:
                lists = _unnested(array)
                points = self._moved_points(lists.first(2), lists.rows, placements)
                array = lists.replaced(points)
            if self.box_labels is not None and is_left is not None:
                array = _filtered(array, is_left)
            yield name, array

    def _moved_points(
        self, points: np.ndarray, rows: np.ndarray, placements: Placements
    ) -> np.ndarray:
        if self.coordinates == "pixels":
            return placements.move(points, rows, last=1)
        moved = placements.move(points * placements.source[rows], rows, last=0)
        return moved / placements.shape[rows]

    def _moved_boxes(
        self, boxes: np.ndarray, rows: np.ndarray, placements: Placements
    ) -> tuple[np.ndarray, np.ndarray]:
        """Boxes (k, 4), cut at the edges of the image, and whether enough of them is left."""
        corners = boxes.reshape(-1, 2, 2)
        if self.box_format == "xywh":
            corners = np.stack([corners[:, 0], corners.sum(axis=1)], axis=1)
        shape = placements.shape[rows][:, None]
        if self.coordinates == "shares":
            corners = corners * placements.source[rows][:, None]
        moved = placements.move(corners.reshape(-1, 2), rows.repeat(2), last=0).reshape(-1, 2, 2)
        mirrored = placements.mirrored[rows]
        moved[mirrored, :, 0] = moved[mirrored, ::-1, 0]
        cut = np.clip(moved, 0, shape)
        sides, whole = cut[:, 1] - cut[:, 0], moved[:, 1] - moved[:, 0]
        enough = sides.prod(axis=1) >= self.min_visibility * whole.prod(axis=1)
        is_left = enough & (sides > 0).all(axis=1)
        if self.coordinates == "shares":
            cut = cut / shape
        if self.box_format == "xywh":
            cut[:, 1] -= cut[:, 0]
        return cut.reshape(-1, 4), is_left


class _Lists(NamedTuple):
    """The innermost lists of a column of nested lists of numbers.

    Attributes
    ----------
    levels : list of (type, int64 array)
        Type of each level, and the lengths of its lists.
    rows : int64 array, shape (k,)
        Row of each innermost list.
    values : float array
        All numbers.
    broken : int64 array
        Rows with a null in a list.
    """

    levels: list[tuple[pa.DataType, np.ndarray]]
    rows: np.ndarray
    values: np.ndarray
    broken: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Length of each innermost list."""
        return self.levels[-1][1]

    def _places(self, count: int) -> np.ndarray:
        return (np.cumsum(self.lengths) - self.lengths)[:, None] + np.arange(count)

    def first(self, count: int) -> np.ndarray:
        """The first numbers of each innermost list: float64 (k, count)."""
        return self.values[self._places(count)].astype(np.float64)

    def replaced(self, numbers: np.ndarray) -> pa.Array:
        """The column with other first numbers of each innermost list."""
        values = self.values.copy()
        values[self._places(numbers.shape[1])] = numbers
        array = pa.array(values)
        for type_, lengths in reversed(self.levels):
            array = list_array(type_, lengths, array)
        return array


def _unnested(array: pa.Array) -> _Lists:
    rows, levels, broken = np.arange(len(array)), [], []
    while is_any_list(array.type):
        outer, valid = rows, array.is_valid().to_numpy(zero_copy_only=False)
        broken.append(rows[~valid])
        lengths = pc.list_value_length(array).fill_null(0).to_numpy().astype(np.int64)
        levels.append((array.type, lengths))
        rows, array = rows.repeat(lengths), array.drop_null().flatten()
    broken.append(rows[array.is_null().to_numpy(zero_copy_only=False)])
    kind = pa.float64() if array.type == pa.float64() else pa.float32()
    values = array.cast(kind, safe=False).to_numpy(zero_copy_only=False)
    return _Lists(levels, outer, values, np.concatenate(broken))


def _filtered(lists: pa.Array, is_left: np.ndarray) -> pa.Array:
    """A column of lists with only those items that are left; ``is_left`` is of all items."""
    lengths = pc.list_value_length(lists).to_numpy()
    rows = np.arange(len(lists)).repeat(lengths)
    left = np.bincount(rows[is_left], minlength=len(lists))
    return list_array(lists.type, left, lists.flatten().filter(pa.array(is_left)))

"""`Decode`, the expression that turns references into pixels, and its optimiser rules.

Late materialization: where the parent of a decode only moves rows (shuffle, sort, join), the rules
move references and decode afterwards. Applied again at each parent, this decodes a chain of moves
once, at its end. Filters go the other way: below the decode.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, ClassVar

import dask

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.plan.base_nodes import (
    Dependents,
    IsShared,
    PreservesRows,
    filtered,
    is_optimized,
    keep_rows,
    never,
    post_dominates,
)
from dask_image_ingest.dataset.plan.columns import (
    AppendsColumns,
    AssignColumns,
    uses_columns,
    value_sources,
)
from dask_image_ingest.dataset.plan.operations import (
    ROW_WISE,
    conjuncts,
    is_row_wise,
    is_total,
)
from dask_image_ingest.dataset.plan.scan_node import (
    HeadOfRead,
    ReadAndDecode,
    Scan,
    fuse_with_scan,
)
from dask_image_ingest.dataset.references.fetch import decode_partition
from dask_image_ingest.dataset.references.host_moves import Converted, moved_on_host
from dask_image_ingest.dataset.references.moves import (
    Undecoded,
    groups_together,
    leads_to_a_move,
    over_references,
)
from dask_image_ingest.dataset.scan.rows import (
    ColumnDecode,
    ErrorFilter,
    decoded_meta,
)
from dask_image_ingest.decode import ImageShape
from dask_image_ingest.frames import BackendName, backend_of
from dask_image_ingest.typedefs import DataFrame


def decode_after(parent: dx.Expr, child: dx.Expr, dependents: Dependents) -> dx.Expr | None:
    """Apply ``parent`` to the references of ``child`` and decode its result.

    None if ``parent`` needs the pixels, is unknown, or no move follows that would make it cheaper.
    """
    if not dask.config.get("image-ingest.decode-late", True):
        return None
    if type(parent) is dx.Merge:
        return _decode_result(parent, _merge_references(parent))
    undecoded = child.as_references() if isinstance(child, Decode) else None
    if undecoded is None:
        return None
    if type(parent) is dx.GroupByApply:
        moved = groups_together(parent, child, undecoded)
        return None if moved is None else parent.substitute_parameters({"frame": Decode(*moved)})
    if not (
        leads_to_a_move(parent, dependents)
        or (
            isinstance(parent, (*ROW_WISE, AssignColumns))
            and post_dominates(child, parent, dependents)
            and not _computes_columns(parent)
        )
    ):
        return None
    return _decode_result(parent, over_references(parent, child, *undecoded))


def _computes_columns(parent: dx.Expr) -> bool:
    """True if an operand is computed from images, which would be decoded a second time."""
    values = (operand for operand in parent.operands[1:] if isinstance(operand, dx.Expr))
    return any(next(value.find_operations(AppendsColumns), None) is not None for value in values)


def _decode_result(parent: dx.Expr, undecoded: Undecoded | None) -> dx.Expr | None:
    """The decode that replaces ``parent``; None if its columns or dtypes would differ."""
    if undecoded is None:
        return None
    decode = Decode(*undecoded)
    same_columns = list(decode.columns) == list(parent.columns)
    return decode if same_columns and decode._meta.dtypes.equals(parent._meta.dtypes) else None


def _merge_references(merge: dx.Expr) -> Undecoded | None:
    """A merge with references on one side or both; None if neither side can be left undecoded."""
    if merge.how not in ("inner", "left", "right", "outer"):
        return None
    sides = [merge.left, merge.right]
    images: list[ColumnDecode] = []
    for number, keys in enumerate((merge.left_on, merge.right_on)):
        side, other = (merge.left, merge.right) if number == 0 else (merge.right, merge.left)
        keys = keys if isinstance(keys, list) else [] if keys is None else [keys]
        undecoded = side.as_references() if isinstance(side, Decode) else None
        if not all(isinstance(key, str) for key in keys):
            return None
        if undecoded is None or len(set(side.columns)) < len(side.columns):
            continue
        references, side_images = undecoded
        if not all(image.pixels for image in side_images):
            continue  # the hidden column of references could clash with one of the other side
        decoded = {name for image in side_images for name in image.columns}
        if not decoded.isdisjoint(keys):
            continue
        sides[number] = references
        suffix = merge.suffixes[number] or ""
        renamed = {name: f"{name}{suffix}" if name in other.columns else name for name in decoded}
        images += [image.renamed(renamed.__getitem__) for image in side_images]
    if not images:
        return None
    return type(merge)(*sides, *merge.operands[2:]), tuple(images)


class Decode(AppendsColumns, PreservesRows):
    """Decodes columns of references; filters and projections that need no pixels go below it.

    Attributes
    ----------
    images
        The columns to decode, and how.
    only
        ``"good"`` keeps only rows whose images decode, ``"bad"`` only those that fail, None all.
    limit
        Rows of each partition at most, counted after ``only``.
    """

    _parameters: ClassVar = ["frame", "images", "only", "limit"]
    _defaults: ClassVar = {"only": None, "limit": None}
    _preserves_partitioning_information = True
    images: tuple[ColumnDecode, ...]
    only: ErrorFilter
    limit: int | None

    operation = staticmethod(decode_partition)

    @functools.cached_property
    def _meta(self) -> DataFrame:
        return decoded_meta(self.frame._meta, self.images)

    @property
    def _is_length_preserving(self) -> bool:  # type: ignore[override] # as in Dask: a property
        return self.only is None and self.limit is None

    @property
    def added(self) -> frozenset[Any]:
        """The columns that the decode creates or changes."""
        return frozenset(name for image in self.images for name in image.columns)

    @property
    def _projection_columns(self) -> list[Any]:
        # All of them: references are needed even if only errors are selected.
        return list(self.frame.columns)

    @property
    def shapes(self) -> dict[Any, ImageShape]:
        """Image column → shape of its images."""
        return {image.image: image.decoding.shape for image in self.images}

    @property
    def _undecoded(self) -> dx.Expr:
        """The undecoded rows, as frames of the result's backend."""
        return self.frame

    def as_references(self) -> Undecoded | None:
        """The undecoded rows and the decodes they need; None if this decode drops rows."""
        return (self._undecoded, self.images) if self._is_length_preserving else None

    def _simplify_down(self) -> dx.Expr | None:
        below = self.frame
        if type(below) is not Decode or not below._is_length_preserving:
            return None
        if self._is_length_preserving:
            return type(self)(below.frame, (*below.images, *self.images))
        # Swap with the decode below: its images are decoded only for rows that this one keeps.
        swapped = type(self)(self.substitute_parameters({"frame": below.frame}), below.images)
        return swapped if swapped.columns == self.columns else swapped[self.columns]

    def _simplify_up(self, parent: dx.Expr, dependents: Dependents) -> dx.Expr | None:
        if is_optimized(self, dependents):
            return None
        if isinstance(parent, HeadOfRead):
            return None
        if type(parent) is dx.Head:
            limited = self._push_head(parent)
            if limited is not None:
                return limited
        if isinstance(parent, (dx.Head, dx.Tail)) and not self._is_length_preserving:
            return None
        simplified = super()._simplify_up(parent, dependents)
        if simplified is None and self._is_length_preserving:
            return decode_after(parent, self, dependents)
        return simplified

    def _push_head(self, head: dx.Head) -> dx.Expr | None:
        """Push ``head(n)`` into the scan's or this decode's limit; None if done or not possible."""
        n, scan = head.n, self.frame
        if n < 0:
            return None
        if self._is_length_preserving:
            # A limit in the scan leaves scan and decode one task; other heads just go below.
            if not isinstance(scan, Scan) or head.operand("npartitions") != 1:
                return None
            limited_scan = scan.limited(n)
            if limited_scan is None:
                return None
            limited = self.substitute_parameters({"frame": limited_scan})
        elif self.limit is not None and self.limit <= n:
            return None
        else:
            limited = self.substitute_parameters({"limit": n})
        return HeadOfRead(limited, *head.operands[1:])

    def filtered_by(self, mask: dx.Expr, is_shared: IsShared = never) -> dx.Expr:
        """The rows by a mask, as far below the decode as the filter may run."""
        pushed = None if self.limit is not None else self._push_predicate(mask, is_shared)
        return filtered(self, mask) if pushed is None else pushed

    def _push_predicate(self, mask: dx.Expr, is_shared: IsShared) -> dx.Expr | None:
        """Let each conjunct of a filter run as early as it can; None leaves the filter in place.

        A mask that uses no decoded column runs below a decode that keeps all rows. Others run by
        conjunct:

        ======================================================  =================================
        conjunct                                                runs
        ======================================================  =================================
        ``error.isna()``, ``error.notnull()``, or their ``~``   in the decode, as its ``only``
        uses no decoded column, and raises for no row           below the decode
        uses a decoded column or may raise, but is row-wise     above the decode
        anything else: an aggregate, another frame              the whole filter stays
        ======================================================  =================================

        The first row that applies counts. With ``decode-late`` off, only what the scan absorbs
        (`Scan.filtered_by`) runs below.
        """
        late = dask.config.get("image-ingest.decode-late", True)
        placed = self._place_conjuncts(mask, late)
        if placed is None:
            return None
        below, only, above = placed
        if not below and only == self.only:
            return None
        frame = self.frame
        if below:
            on_frame = functools.reduce(dx.And, below).substitute(self, frame)
            if not dx.are_co_aligned(frame, on_frame):
                return None
            frame = keep_rows(frame, on_frame, is_shared)
        decode = self.substitute_parameters({"frame": frame, "only": only})
        return decode if not above else filtered(decode, self._mask_of(above, decode))

    def _place_conjuncts(
        self, mask: dx.Expr, late: bool
    ) -> tuple[list[dx.Expr], ErrorFilter, list[dx.Expr]] | None:
        """Conjuncts for below the decode, its ``only``, and conjuncts for above it."""
        if late and self.only is None and not uses_columns(mask, self, self.added):
            return [mask], None, []
        rows = (self._name, self.frame._name)
        below, above, only = [], [], self.only
        for part in conjuncts(mask):
            error_filter = self._as_error_filter(part)
            on_metadata = not uses_columns(part, self, self.added) and is_total(part, rows)
            if error_filter is not None and only in (None, error_filter):
                only = error_filter
            elif on_metadata and (late or self._scan_absorbs(part)):
                below.append(part)
            elif is_row_wise(part, rows):
                above.append(part)
            else:
                return None
        return below, only, above

    def _scan_absorbs(self, part: dx.Expr) -> bool:
        """True if a mask can become a filter of the scan directly below."""
        scan = self.frame
        return isinstance(scan, Scan) and scan.absorbs(part.substitute(self, scan))

    def _as_error_filter(self, part: dx.Expr) -> ErrorFilter:
        """``ddf.error.isna()`` and its negations as a value of ``only``; None for the rest."""
        negated = isinstance(part, dx.Invert)
        part = part.frame if negated else part
        if not isinstance(part, (dx.IsNa, dx.NotNull)) or not self.images[0].error:
            return None
        if len(self.images) > 1:
            return None  # `only` judges the errors of all images, the predicate those of one
        column = part.frame
        if not (
            isinstance(column, dx.Projection)
            and column.frame._name == self._name
            and column.columns == [self.images[0].error]
            and column.ndim == 1
        ):
            return None
        return "good" if isinstance(part, dx.IsNa) is not negated else "bad"

    def _lower(self) -> dx.Expr | None:
        frame = self.frame
        if (host := moved_on_host(frame)) is not None:
            return DecodeOfMoved(host, *self.operands[1:], backend_of(self._meta).name)
        if isinstance(frame, dx.Partitions):
            # Lowering a head above inserts it; simplified, it becomes an operand of the scan.
            frame = frame.simplify()
        fused = fuse_with_scan(frame, self.images, self.only, self.limit, self.columns)
        return super()._lower() if fused is None else fused

    def _projected(self, parent: dx.Expr, wanted: set[Hashable]) -> dx.Expr | None:
        # A decode that drops rows is needed whatever the columns.
        drops_rows = not self._is_length_preserving
        # An index shares the decode of a mask, so that shards are read once for both.
        needed_by = wanted if isinstance(parent, dx.Index) else parent.columns
        unused = self.added.isdisjoint(needed_by)
        needed_images = tuple(
            image for image in self.images if wanted & image.columns or drops_rows
        )
        if (unused and not drops_rows) or not needed_images:
            return type(parent)(self._undecoded, *parent.operands[1:])
        images = tuple(image.selected(wanted) for image in needed_images)
        # The error of an image needs its reference, too; boxes need their labels.
        wanted = wanted.union(*(image.columns for image in images))
        needed = [name for name in self.frame.columns if name in wanted]
        if needed == self.frame.columns and images == self.images:
            return None
        frame = self.frame if needed == self.frame.columns else self.frame[needed]
        narrower = self.substitute_parameters({"frame": frame, "images": images})
        return type(parent)(narrower, *parent.operands[1:])


class DecodeOfMoved(Decode):
    """Decodes rows that were moved as pandas frames. Made by lowering: nothing goes below it."""

    _parameters: ClassVar = [*Decode._parameters, "backend"]
    _keyword_only: ClassVar = ["backend"]
    backend: BackendName

    step = "decode"

    @functools.cached_property
    def _meta(self) -> DataFrame:
        return decoded_meta(self._undecoded._meta, self.images)

    @property
    def _undecoded(self) -> dx.Expr:
        return Converted(self.frame, self.backend)

    def filtered_by(self, mask: dx.Expr, is_shared: IsShared = never) -> dx.Expr:
        """The rows by a mask over the decoded frames."""
        return filtered(self, mask)


def image_shape(expr: dx.Expr, column: Hashable) -> ImageShape:
    """(height, width, channels) of all images of a column; None for edges that may differ."""
    shapes = [_shape_from(source, name) for source, (name,) in value_sources(expr, (column,))]
    height, width, channels = (
        edges[0] if len(set(edges)) == 1 else None for edges in zip(*shapes, strict=True)
    )
    return height, width, channels


def _shape_from(expr: dx.Expr, column: Hashable) -> ImageShape:
    """Shape of the images that a source expression produces."""
    shape = None
    if isinstance(expr, Decode) and list(expr.columns).count(column) == 1:
        shape = expr.shapes.get(column)
    return shape or (None, None, None)


def unfused(expr: dx.Expr) -> dx.Expr:
    """The query of a frame after ``optimize()``, with scans, decodes and operations apart again."""
    return _unfused(expr, {})


def _unfused(expr: dx.Expr, done: dict[str, dx.Expr]) -> dx.Expr:
    if expr._name not in done:
        done[expr._name] = _separate(expr, done)
    return done[expr._name]


def _separate(expr: dx.Expr, done: dict[str, dx.Expr]) -> dx.Expr:
    if isinstance(expr, dx.Fused):
        return _unfused(expr.exprs[0], done)
    if isinstance(expr, ReadAndDecode):
        decode = Decode(expr.rows, expr.decode.images, expr.decode.only, expr.decode.limit)
        return decode if decode.columns == expr.columns else decode[expr.columns]
    operands = [_unfused(op, done) if isinstance(op, dx.Expr) else op for op in expr.operands]
    same = all(new is old for new, old in zip(operands, expr.operands, strict=True))
    return expr if same else type(expr)(*operands)

"""``write_report``: an HTML page with the results of curation."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field, replace
from html import escape
from os import PathLike
from typing import Any

import numpy as np
import pandas as pd

from dask_image_ingest.arguments import check_frame, check_path, check_storage_options
from dask_image_ingest.curate.quality import BELOW, MAX_CLIPPED_LIGHT, MIN_GRAYSCALE
from dask_image_ingest.curate.ranking import resolve_identity, row_ids
from dask_image_ingest.curate.vectors import check_vectors, valid_vectors
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset import decode_images
from dask_image_ingest.dataset.plan import select_columns
from dask_image_ingest.dataset.references import LOCATION_COLUMNS
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.export import source_options_of
from dask_image_ingest.frames import backend_of, image_columns, pandas_type, reference_columns
from dask_image_ingest.image_counts import reduce_partitions
from dask_image_ingest.ops import small_images
from dask_image_ingest.typedefs import AnyFrame, DataFrame
from dask_image_ingest.url_secrets import without_secrets
from dask_image_ingest.view import (
    Thumbnails,
    columns_chart,
    make_thumbnails,
    marking_widget,
    page,
    refuse_source,
    title_of_shards,
    write_page,
)

_WORST = 12  # images shown of each end of a signal
_DROPPED = 4  # images shown of each rule
_GROUPS = 12
_OPEN_GROUPS = 4  # the others are folded
_ROWS_OF_GROUP = 4
_POINTS = 2000  # of the map
_THUMBNAIL = 120
_BINS = 24
_MANTISSA = 10  # bits of the values that a histogram counts: exact to a tenth of a percent

# Columns that are signals, by name or, with a dot at the end, by prefix; and which of their ends
# are bad: True for the highest values, False for the lowest.
_SIGNALS = {
    "quality.": (False,),
    "fingerprint.pdq_quality": (False,),
    "score": (False, True),
    "score.": (False, True),
    "similarity": (False,),
    "duplicate.distance": (True,),
    "semantic.similarity": (False,),
    "overlap.distance": (False,),
    "overlap.similarity": (True,),
}
_ENDS = {
    "quality.grayscale": (True,),
    "quality.clipped_light": (True,),
    "quality.clipped_dark": (True,),
    "quality.area": (False, True),
}

# Boolean columns, by name or prefix, and the value with which they drop a row.
_RULES = {
    "issue.": True,
    "overlap.found": True,
    "duplicate.keep": False,
    "semantic.keep": False,
}

# Column of group numbers → the column of distances to the kept row, and whether the largest (True)
# or the smallest values are the farthest.
_GROUPED = {
    "duplicate.group": ("duplicate.distance", True),
    "semantic.group": ("semantic.similarity", False),
}

# Signal → the threshold of its issue, and whether values above it (True) or below it are bad.
_THRESHOLDS = {f"quality.{signal}": (least, False) for signal, least in BELOW.values()} | {
    "quality.grayscale": (MIN_GRAYSCALE, True),
    "quality.clipped_light": (MAX_CLIPPED_LIGHT, True),
}

_STYLE = """
h2.dii-part { font-size: 17px; margin: 34px 0 4px; }
h3 { font-size: 13px; margin: 18px 0 8px; }
.dii-columns { display: grid; gap: 18px 28px; align-items: start; margin: 14px 0;
  grid-template-columns: repeat(auto-fill, minmax(min(var(--dii-column), 100%), 1fr)); }
.dii-columns { --dii-column: 330px; } .dii-columns:has(.dii-group) { --dii-column: 520px; }
.dii-columns section:has(> details[open]) { grid-column: 1 / -1; }
.dii-group .dii-sheet { --dii-card: 112px; }  /* four in a row */
.dii-group h3 { margin: 0 0 8px; } summary { cursor: pointer; padding: 4px 0; }
.dii-map { width: 100%; max-width: 820px; height: auto; border-radius: 10px;
  border: 1px solid color-mix(in srgb, currentColor 14%, transparent); }
.dii-map circle { fill: var(--bar); fill-opacity: .55; }
.dii-map .dii-dropped { fill: #d64545; }
@media (max-width: 640px) {  /* rows that are swiped, instead of a page of ten screens */
  .dii-sheet, .dii-charts, .dii-columns:has(> .dii-signal) { grid-template-columns: none;
    grid-auto-flow: column; grid-auto-columns: 132px; overflow-x: auto; padding-bottom: 8px; }
  .dii-charts, .dii-columns:has(> .dii-signal) { grid-auto-columns: 250px; }
  .dii-columns section:has(> details[open]) { grid-column: auto; } }
"""


@dataclass(frozen=True)
class Report:
    """A report. A notebook displays it, and each of its parts.

    Attributes
    ----------
    rules
        A row for each rule: ``rows`` that it drops, their ``share``, and how many no other rule
        drops, ``alone``. The last row is for all rules together.
    signals
        The histogram of each signal.
    worst
        The worst images of each signal.
    groups
        For ``"duplicate"`` and ``"semantic"``, the groups with the largest differences.
    html
        The page.
    """

    rules: pd.DataFrame
    signals: dict[str, ReportPart]
    worst: dict[str, ReportPart]
    groups: dict[str, ReportPart]
    html: str

    def __repr__(self) -> str:
        dropped = self.rules["rows"].iloc[-1]
        return f"<report: all rules drop {dropped:,} rows; shown in a notebook>"

    def _repr_html_(self) -> str:
        return _in_frame(self.html, 700)


@dataclass(frozen=True)
class ReportPart:
    """A part of a report. A notebook displays it."""

    html: str
    height: int = 360

    def __repr__(self) -> str:
        return "<part of a report: shown in a notebook>"

    def _repr_html_(self) -> str:
        return _in_frame(page("Curation", self.html, _STYLE), self.height)

    def widget(self) -> Any:
        """The part as a widget of a notebook, to mark rows in, as `Thumbnails.widget`."""
        return marking_widget(self.html, _STYLE)


def _in_frame(html: str, height: int) -> str:
    # An iframe keeps the page's style from the rest of the notebook.
    return f'<iframe srcdoc="{escape(html)}" width="100%" height="{height}"></iframe>'


def write_report(
    frame: AnyFrame,
    path: str | PathLike[str] | None = None,
    *,
    column: str = "embedding",
    identity: str | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Report:
    """Show the results of curation on one HTML page; computed at once.

    The page has how many rows each rule drops, with four of them; the groups of duplicates with the
    largest differences, side by side; a histogram of each signal, red beyond its threshold, with
    the worst 12 images; and a map of the embeddings. Rows can be marked there, and their keys saved
    as a JSON file.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe with some columns of :func:`measure_quality`,
        :func:`find_issues`, :func:`compute_fingerprints`, :func:`find_duplicates`,
        :func:`find_semantic_duplicates`, :func:`find_overlaps`, :func:`compute_scores` and
        :func:`compute_similarity`, and with the columns ``__url__``, ``offset`` and ``nbytes`` of
        :func:`dask_image_ingest.read_webdataset_images`, or else images or references.
    path
        The file to write, which needs no other file; by default none is written.
    column
        The column of vectors for the map, if the frame has it.
    identity
        A column of unique values that identifies rows, for frames without ``__url__`` and
        ``__key__``.
    storage_options
        For the images of remote shards; by default those of the read.

    Returns
    -------
    Report
        With the table ``rules``, and the mappings ``signals``, ``worst`` and ``groups``; a notebook
        displays each of their parts, and the page.

    Raises
    ------
    ArgumentError
        If the frame has none of these columns, or no images, references or location columns; if
        ``path`` is a file that the frame reads, or exists and is no HTML page.
    ExportError
        If the page can't be written.

    Notes
    -----
    The frame's columns are computed once; if they are not stored, that decodes each image once.
    Then only the images on the page are decoded, by the row's URL, offset and size. In frames
    without these columns, images are found by key and URL; other rows with the same key are then
    decoded too. The map has the first two principal components of up to 2,000 unit vectors, drawn
    by a hash of the row's identity.

    Examples
    --------
    >>> found = curate.find_duplicates(curate.find_issues(ddf))
    >>> curate.write_report(found, "report.html")
    <report: all rules drop 15 rows; shown in a notebook>
    """
    check_frame(frame._meta if isinstance(frame, FrameBase) else frame)
    storage_options = check_storage_options(storage_options)
    id_columns = resolve_identity(frame, identity)
    if column != "embedding":
        check_vectors(frame, column)
    if path is not None:
        check_path("path", path)
        refuse_source(frame, path)
    plan = _plan(frame, column, id_columns)
    if not plan.columns:
        raise ArgumentError(
            "the frame has no column of measure_quality(), find_issues(), compute_fingerprints(), "
            "find_duplicates(), find_semantic_duplicates(), find_overlaps(), compute_scores() or "
            "compute_similarity(): add one"
        )
    if storage_options is None and isinstance(frame, FrameBase):
        storage_options = source_options_of(frame)
    header = [name for name in ("format", "height", "width") if name in frame.columns]
    has_locations = {*LOCATION_COLUMNS, "__key__"} <= set(frame.columns)
    # Height and width are among the columns that tell parts of pictures apart.
    facts = [*dict.fromkeys([*id_columns, *header])]
    locations = [*dict.fromkeys([*facts, *(LOCATION_COLUMNS if has_locations else ())])]
    images = None if has_locations else _images(frame, facts, storage_options)
    summary: Summary = reduce_partitions(
        select_columns(frame, dict.fromkeys([*locations, *plan.columns])),
        functools.partial(_summary, plan=plan),
        functools.partial(_merge, plan=plan),
    )
    rules = _rules(summary, plan)
    grouped = {
        name.partition(".")[0]: (name, _group_rows(frame, name, summary, plan, locations))
        for name in plan.groups
    }
    shown_rows = [
        *summary.worst.values(),
        *summary.dropped.values(),
        *(rows for _, rows in grouped.values()),
    ]
    thumbnails = _RowThumbnails(shown_rows, id_columns, images, storage_options)
    signals = {name: _histogram(name, summary.values[name].sort_index()) for name in plan.signals}
    worst = {name: _worst_part(name, summary, plan, thumbnails) for name in plan.signals}
    groups = {
        kind: _groups_part(name, rows, summary, thumbnails)
        for kind, (name, rows) in grouped.items()
    }
    points, shards = summary.points, sorted(summary.shards)
    title = f"Curation of {title_of_shards(shards)}" if shards else "Curation"
    number = f"{len(shards):,} shards, the first " if len(shards) > 1 else ""
    source = f" of {number}{without_secrets(shards[0])}" if shards else ""
    body = (
        f'<h1>{escape(title)}</h1><p class="dii-lead">{summary.rows:,} rows{escape(source)} · all '
        f"rules drop {rules['rows'].iloc[-1]:,}</p>"
        + _rules_part(rules, summary, thumbnails)
        + "".join(groups.values())
        + _signals_part(signals, worst)
        + (_map_part(points) if points is not None and len(points) > 2 else "")
    )
    html = page(title, body, _STYLE)
    if path is not None:
        write_page(path, html)
    return Report(
        rules,
        {name: ReportPart(chart, 260) for name, chart in signals.items()},
        {name: ReportPart(sheets) for name, sheets in worst.items()},
        {kind: ReportPart(part, 700) for kind, part in groups.items()},
        html,
    )


def _plan(frame: AnyFrame, column: str, identity: tuple[str, ...]) -> ReportPlan:
    meta = frame._meta if isinstance(frame, FrameBase) else frame
    names = [name for name in frame.columns if isinstance(name, str)]
    signals = {
        name: _ENDS.get(name, ends)
        for name in names
        for pattern, ends in _SIGNALS.items()
        if _matches(name, pattern) and pd.api.types.is_numeric_dtype(meta.dtypes[name])
    }
    rules = {
        name: drops
        for name in names
        for pattern, drops in _RULES.items()
        if _matches(name, pattern)
    }
    groups = {name: of for name, of in _GROUPED.items() if {name, of[0]} <= set(names)}
    vectors = column if column in names else None
    return ReportPlan(signals, rules, groups, vectors, identity)


def _matches(name: str, pattern: str) -> bool:
    return name.startswith(pattern) if pattern[-1] == "." else name == pattern


@dataclass(frozen=True)
class ReportPlan:
    """The columns to summarize: signals, rules, groups and vectors as `_SIGNALS` and others say."""

    signals: dict[str, tuple[bool, ...]]
    rules: dict[str, bool]
    groups: dict[str, tuple[str, bool]]
    vectors: str | None
    identity: tuple[str, ...]  # the columns that identify a row, the key first

    @property
    def columns(self) -> list[str]:
        """All columns that are summarized."""
        names = [*self.signals, *self.rules]
        for group, (distance, _) in self.groups.items():
            names += [group, distance]
        return list(dict.fromkeys([*names, *([self.vectors] if self.vectors else [])]))


@dataclass
class Summary:
    """Statistics of one or more partitions.

    Attributes
    ----------
    rows
        Number of rows.
    values
        For each signal, counts by (rounded) value.
    worst
        For each signal and end (True: highest), the worst rows, with the signal as ``value``.
    patterns
        For each set of rules, how many rows exactly these drop.
    dropped
        For each rule, a random sample of the rows that it drops, with ``order``, the hash they were
        drawn by.
    shards
        URLs of the rows' shards.
    groups
        For each column of groups, a table: ``group``, its farthest ``distance``, and the number of
        its dropped ``rows``.
    points
        A random sample for the map: ``key``, ``order`` (the hash it was drawn by), ``vector``,
        ``dropped``.
    """

    rows: int = 0
    values: dict[str, pd.Series] = field(default_factory=dict)
    worst: dict[tuple[str, bool], pd.DataFrame] = field(default_factory=dict)
    patterns: Counter[tuple[str, ...]] = field(default_factory=Counter)
    dropped: dict[str, pd.DataFrame] = field(default_factory=dict)
    shards: set[str] = field(default_factory=set)
    groups: dict[str, pd.DataFrame] = field(default_factory=dict)
    points: pd.DataFrame | None = None


def _summary(frame: DataFrame, plan: ReportPlan) -> Summary:
    """Summarize one partition."""
    backend = backend_of(frame)
    names = [name for name in frame.columns if name != plan.vectors]
    arrow = backend.to_arrow(frame[names])
    table = arrow.to_pandas(types_mapper=pandas_type)
    locations = table[[name for name in names if name not in plan.columns]]
    summary = Summary(rows=len(table))
    if "__url__" in table:
        summary.shards = set(table["__url__"].dropna())
    order = row_ids(arrow, plan.identity)
    for name, ends in plan.signals.items():
        values = pd.Series(table[name].to_numpy(float, na_value=np.nan), table.index)
        values = values[np.isfinite(values)]
        summary.values[name] = _round(values).value_counts()
        valid = locations.loc[values.index].assign(value=values)
        for highest in ends:
            summary.worst[name, highest] = _worst(valid, plan.identity, highest)
    dropped_by = {
        name: table[name].to_numpy(object, na_value=None) == drops
        for name, drops in plan.rules.items()
    }
    dropped = np.zeros(len(table), bool)
    for name, mask in dropped_by.items():
        mask = mask.astype(bool)
        summary.dropped[name] = _drawn(locations[mask].assign(order=order[mask]), _DROPPED)
        dropped |= mask
    summary.patterns = Counter(
        tuple(name for name, mask in dropped_by.items() if mask[row])
        for row in np.flatnonzero(dropped)
    )
    for name, (distance, largest) in plan.groups.items():
        # The kept row of a group has no distance.
        members = table[[name, distance]].dropna()
        group, values = members[name].astype("int64"), members[distance].astype("float64")
        groups = pd.DataFrame({"group": group, "distance": values, "rows": 1})
        summary.groups[name] = _merge_groups(groups, largest)
    if plan.vectors:
        rows, vectors = valid_vectors(frame, plan.vectors)
        points = pd.DataFrame({"key": table[plan.identity[0]].iloc[rows].astype(str).to_numpy()})
        points["order"] = order[rows]
        points["dropped"] = dropped[rows]
        points["vector"] = list(vectors)
        summary.points = _drawn(points, _POINTS)
    return summary


def _drawn(rows: pd.DataFrame, n: int) -> pd.DataFrame:
    """A sample of rows, the same for any partitions."""
    return rows.nsmallest(n, "order")


def _merge(parts: list[Summary], plan: ReportPlan) -> Summary:
    summary = Summary(rows=sum(part.rows for part in parts))
    summary.shards = set().union(*(part.shards for part in parts))
    for name in plan.rules:
        summary.dropped[name] = _drawn(pd.concat([p.dropped[name] for p in parts]), _DROPPED)
    for name, ends in plan.signals.items():
        counts = pd.concat([part.values[name] for part in parts])
        summary.values[name] = counts.groupby(level=0).sum()
        for highest in ends:
            worst = pd.concat([part.worst[name, highest] for part in parts])
            summary.worst[name, highest] = _worst(worst, plan.identity, highest)
    for part in parts:
        summary.patterns.update(part.patterns)
    for name, (_, largest) in plan.groups.items():
        groups = pd.concat([part.groups[name] for part in parts])
        summary.groups[name] = _merge_groups(groups, largest)
    if plan.vectors:
        points = pd.concat([part.points for part in parts if part.points is not None])
        summary.points = _drawn(points, _POINTS)
    return summary


def _worst(rows: pd.DataFrame, identity: tuple[str, ...], highest: bool) -> pd.DataFrame:
    """The worst rows at one end of their ``value``, ties by identity."""
    ascending = [not highest, *(True for _ in identity)]
    return rows.sort_values(["value", *identity], ascending=ascending).head(_WORST)


def _merge_groups(rows: pd.DataFrame, largest: bool) -> pd.DataFrame:
    """One row for each group: the farthest distance and the sum of ``rows``."""
    by_group = rows.groupby("group")
    distance = by_group["distance"].max() if largest else by_group["distance"].min()
    return pd.DataFrame({"distance": distance, "rows": by_group["rows"].sum()}).reset_index()


def _round(values: pd.Series) -> pd.Series:
    """Round to `_MANTISSA` significant bits, so that few distinct values have to be counted."""
    mantissa, exponent = np.frexp(values.to_numpy())
    return pd.Series(np.ldexp(np.round(mantissa * 2**_MANTISSA), exponent - _MANTISSA))


def _images(
    frame: AnyFrame, columns: list[str], storage_options: dict[str, Any] | None
) -> AnyFrame | None:
    """``columns`` of a frame, with small images from its images or references."""
    meta = frame._meta if isinstance(frame, FrameBase) else frame
    names = image_columns(meta)
    if names:
        error = ["error"] if "error" in meta.columns else []
        narrow = select_columns(frame, [*columns, *error, names[0]])
        make = functools.partial(small_images, image=names[0], size=_THUMBNAIL, resize="longer")
        if isinstance(narrow, FrameBase):
            return narrow.map_partitions(make, meta=narrow._meta)
        return make(narrow)
    references = reference_columns(meta)
    if not references:
        raise ArgumentError(
            f"the frame has neither the columns {', '.join(LOCATION_COLUMNS)}, nor images, nor "
            "references: keep what says where its images are, as the read gives it"
        )
    return decode_images(
        select_columns(frame, [*columns, references[0]]),
        size=_THUMBNAIL, resize="longer", storage_options=storage_options,
    )  # fmt: skip


def _rules(summary: Summary, plan: ReportPlan) -> pd.DataFrame:
    rows = {
        name: (
            sum(count for pattern, count in summary.patterns.items() if name in pattern),
            summary.patterns[(name,)],
        )
        for name in plan.rules
    }
    rows["all rules"] = (sum(summary.patterns.values()), 0)
    table = pd.DataFrame.from_dict(rows, orient="index", columns=["rows", "alone"])
    table.insert(1, "share", table["rows"] / max(summary.rows, 1))
    return table


def _rules_part(rules: pd.DataFrame, summary: Summary, thumbnails: _RowThumbnails) -> str:
    rules = rules.drop("all rules").sort_values(["rows", "alone"], ascending=False, kind="stable")
    found = rules[rules["rows"] > 0]
    parts = [
        f'<section class="dii-group"><h3>{escape(name)}: {rows:,} rows ({share:.2%}), of which no '
        f"other rule drops {alone:,}</h3>{thumbnails.sheet(summary.dropped[name])}</section>"
        for name, rows, share, alone in found.itertuples()
    ]
    if idle := rules.index.drop(found.index).tolist():
        parts.append(f'<p class="dii-lead">Nothing found by {escape(", ".join(idle))}.</p>')
    return f'<h2 class="dii-part">Dropped rows by rule</h2>{_columns(parts)}' if parts else ""


def _columns(parts: list[str]) -> str:
    return f'<div class="dii-columns">{"".join(parts)}</div>'


class _RowThumbnails:
    """Thumbnails of the rows on the page, by identity; each is decoded once.

    ``images`` is a frame that contains the rows, with their images; None if the rows have location
    columns.
    """

    def __init__(
        self,
        tables: list[pd.DataFrame],
        identity: tuple[str, ...],
        images: AnyFrame | None,
        storage_options: dict[str, Any] | None,
    ) -> None:
        self._identity = list(identity)
        self._cards: dict[tuple[Any, ...], Any] = {}
        rows = pd.concat(tables) if tables else pd.DataFrame()
        if not len(rows):
            return
        names = [n for n in rows.columns if n not in ("value", "group", "distance", "order")]
        rows = rows[names].drop_duplicates(self._identity).reset_index(drop=True)
        if images is not None:
            for name in self._identity:
                images = images[images[name].isin(rows[name].unique().tolist())]
            rows = images.compute() if isinstance(images, FrameBase) else images
        sheet = make_thumbnails(
            rows, max(len(rows), 1), _THUMBNAIL, identity[:1], storage_options, key=identity[0]
        )
        ids = backend_of(rows).to_arrow(rows[self._identity]).to_pandas(types_mapper=pandas_type)
        self._cards = dict(zip(self._ids(ids), sheet.cards, strict=True))

    def sheet(self, rows: pd.DataFrame, captions: list[str] | None = None) -> str:
        """HTML of the rows' thumbnails, with a caption below each."""
        cards = [self._cards[id_] for id_ in self._ids(rows)]
        if captions is not None:
            cards = [
                replace(card, texts={**card.texts, "": caption})
                for card, caption in zip(cards, captions, strict=True)
            ]
        return Thumbnails(cards, _THUMBNAIL).html(markable=True)

    def _ids(self, rows: pd.DataFrame) -> list[tuple[Any, ...]]:
        # -1 for nulls, which are not equal to themselves.
        return [
            tuple(-1 if pd.isna(value) else value for value in row)
            for row in rows[self._identity].itertuples(index=False)
        ]


def _signals_part(signals: dict[str, str], worst: dict[str, str]) -> str:
    parts = [
        f'<section class="dii-signal">{chart}<details><summary>worst images</summary>{worst[name]}'
        "</details></section>"
        for name, chart in signals.items()
    ]
    return f'<h2 class="dii-part">Signals</h2>{_columns(parts)}' if parts else ""


def _worst_part(name: str, summary: Summary, plan: ReportPlan, thumbnails: _RowThumbnails) -> str:
    sheets = []
    for highest in plan.signals[name]:
        rows = summary.worst[name, highest]
        if len(rows):
            title = f"{len(rows)} {'highest' if highest else 'lowest'}"
            values = [
                f"{value:,.0f}" if 1e4 < value < 1e15 else f"{value:.4g}" for value in rows["value"]
            ]
            sheets.append(f"<h3>{title}</h3>{thumbnails.sheet(rows, values)}")
    return "".join(sheets)


def _histogram(name: str, counts: pd.Series) -> str:
    total = int(counts.sum())
    if not total:
        return columns_chart(name, "no row has a value", {})
    is_logarithmic = name == "quality.area"
    if is_logarithmic:
        counts = counts.set_axis(np.log10(np.maximum(counts.index.to_numpy(), 1)))
    values, share = counts.index.to_numpy(), counts.to_numpy().cumsum() / total
    # The outermost bins are open: a few outliers would leave one bin for all other values.
    low, high = (float(values[np.searchsorted(share, end)]) for end in (0.005, 0.995))
    threshold, above = _THRESHOLDS.get(name, (None, False))
    if threshold is not None:
        # Bins reach beyond the threshold, so that few bad values are not in a bin of good ones.
        bad = values[values > threshold] if above else values[values < threshold]
        if len(bad):
            low, high = min(low, bad.max()), max(high, bad.min(), threshold)
    # Not so narrow that floats don't tell neighbouring edges apart.
    least = 0.01 if is_logarithmic else 1e-12 * max(abs(low), abs(high))
    width = max(_round_width((high - low) / _BINS), least)
    # Align bins with the threshold, so that none is on both sides.
    origin = threshold or 0.0
    numbers = np.arange(np.floor((low - origin) / width), np.floor((high - origin) / width) + 1)
    edges = origin + width * numbers
    bins = np.clip(np.searchsorted(edges, values, "right") - 1, 0, len(edges) - 1)
    heights = np.bincount(bins, counts.to_numpy(), len(edges)).astype(int)
    labels = [_short_number(10**edge) for edge in edges] if is_logarithmic else _labels(edges)
    marked: list[str] = []
    note = f"{total:,} rows" + ("; logarithmic axis" if is_logarithmic else "")
    if threshold is not None:
        bad = edges + width / 2 > threshold if above else edges + width / 2 < threshold
        marked = [label for label, is_bad in zip(labels, bad, strict=True) if is_bad]
        note += f"; red: {'above' if above else 'below'} {threshold:g}"
    return columns_chart(name, note, dict(zip(labels, heights.tolist(), strict=True)), marked)


def _round_width(width: float) -> float:
    """Round up to 1, 2 or 5 times a power of ten; 1 if the width is 0."""
    if not width:
        return 1.0
    power = 10.0 ** np.floor(np.log10(width))
    return float(next(power * step for step in (1, 2, 5, 10) if power * step >= width))


def _labels(edges: np.ndarray) -> list[str]:
    """Labels of bins by their lower edges, with as few digits as keep them different."""
    largest = np.abs(edges).max()
    unit, scale = ("M", 1e6) if largest >= 1e6 else ("k", 1e3) if largest >= 1e4 else ("", 1.0)
    for digits in range(17):
        labels = [f"{round(edge / scale, digits) + 0.0:.{digits}f}{unit}" for edge in edges]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{edge:.17g}" for edge in edges]


def _short_number(value: float) -> str:
    """Three digits, with a unit: 126, 12.6k, 1.26M."""
    value = float(f"{value:.3g}")
    scale, unit = (1e6, "M") if value >= 1e6 else (1e3, "k") if value >= 1e3 else (1, "")
    return f"{value / scale:g}{unit}"


def _group_rows(
    frame: AnyFrame, name: str, summary: Summary, plan: ReportPlan, locations: list[str]
) -> pd.DataFrame:
    """Rows of the groups with the largest differences, the kept row of each group first."""
    distance, largest = _GROUPED[name]
    chosen = summary.groups[name].sort_values(["distance", "group"], ascending=[not largest, True])
    chosen = chosen["group"].head(_GROUPS).tolist()
    narrow = select_columns(frame, [*locations, name, distance])
    rows = narrow[narrow[name].isin(chosen)]
    rows = rows.compute() if isinstance(rows, FrameBase) else rows
    rows = backend_of(rows).to_arrow(rows).to_pandas(types_mapper=pandas_type)
    rows = rows.rename(columns={name: "group", distance: "distance"})
    rows["group"] = pd.Categorical(rows["group"].astype("int64"), chosen, ordered=True)
    rows["distance"] = rows["distance"].astype("float64")
    order = ["group", "distance", *plan.identity]
    ascending = [True, largest, *(True for _ in plan.identity)]
    rows = rows.sort_values(order, ascending=ascending, na_position="first")
    return rows.groupby("group", observed=True).head(_ROWS_OF_GROUP)


def _groups_part(
    name: str, rows: pd.DataFrame, summary: Summary, thumbnails: _RowThumbnails
) -> str:
    groups = summary.groups[name]
    distance, _ = _GROUPED[name]
    measure = distance.partition(".")[2]
    title = f"{name.partition('.')[0].capitalize()} groups"
    if not len(groups):
        return f'<h2 class="dii-part">{title}</h2><p class="dii-lead">None.</p>'
    dropped = dict(zip(groups["group"], groups["rows"], strict=True))
    parts = []
    for group, members in rows.groupby("group", observed=True, sort=True):
        captions = [
            "kept" if np.isnan(value) else f"{measure} {value:.4g}" for value in members["distance"]
        ]
        parts.append(
            f'<section class="dii-group"><h3>Group {group}: {dropped[group] + 1:,} rows</h3>'
            f"{thumbnails.sheet(members, captions)}</section>"
        )
    more = f"<details><summary>{len(parts) - _OPEN_GROUPS} more groups</summary>"
    return (
        f'<h2 class="dii-part">{title}</h2><p class="dii-lead">{len(groups):,} groups; '
        f"{sum(dropped.values()):,} rows are dropped. Shown: the groups with the largest "
        f"differences.</p>{_columns(parts[:_OPEN_GROUPS])}"
        + (f"{more}{_columns(parts[_OPEN_GROUPS:])}</details>" if parts[_OPEN_GROUPS:] else "")
    )


def _map_part(points: pd.DataFrame) -> str:
    points = points.sort_values("order")
    if len({len(vector) for vector in points["vector"]}) > 1:
        raise ArgumentError("the vectors for the map differ in length: take them of one model")
    vectors = np.stack(points["vector"].to_list()).astype(np.float64)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors -= vectors.mean(axis=0)
    _, lengths, axes = np.linalg.svd(vectors, full_matrices=False)
    if len(axes) < 2:
        return ""
    explained = (lengths[:2] ** 2).sum() / max((lengths**2).sum(), 1e-12)
    # The sign of an axis is arbitrary: make its largest component positive, to be repeatable.
    axes = axes[:2]
    axes *= np.sign(axes[np.arange(2), np.abs(axes).argmax(axis=1)])[:, None]
    xy = vectors @ axes.T
    low, high = xy.min(axis=0), xy.max(axis=0)
    xy = 12 + (xy - low) / np.maximum(high - low, 1e-12) * (796, 456)
    circles = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" class="{"dii-dropped" if dropped else ""}">'
        f"<title>{escape(key)}</title></circle>"
        for (x, y), key, dropped in zip(xy, points["key"], points["dropped"], strict=True)
    )
    return (
        '<h2 class="dii-part">Map of the embeddings</h2><p class="dii-lead">'
        f"{len(points):,} rows by their first two principal components, which explain "
        f"{explained:.0%} of the variance. Red: dropped by a rule.</p>"
        f'<svg class="dii-map" viewBox="0 0 820 480" role="img">{circles}</svg>'
    )

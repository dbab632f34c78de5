"""``report``: one page that shows what curation has found."""

from __future__ import annotations

from dataclasses import dataclass, replace
from html import escape
from os import PathLike
from typing import Any

import numpy as np
import pandas as pd

from dask_image_ingest.arguments import check_frame, check_path, check_storage_options
from dask_image_ingest.curate.duplicates.verdicts import check_identity
from dask_image_ingest.curate.pixels.quality import BELOW, LEAST_GRAYSCALE
from dask_image_ingest.curate.report.summary import Plan, Summary, summarize
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset import POINTER
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.export import source_options_of
from dask_image_ingest.frames import backend_of, pandas_type
from dask_image_ingest.view import (
    Thumbnails,
    columns_chart,
    make_thumbnails,
    page,
    refuse_source,
    write_page,
)

_WORST = 12
_GROUPS = 12
_OF_A_GROUP = 8
_POINTS = 2000
_THUMBNAIL = 120
_BINS = 24

# Where columns are signals, and which ends of them are the worst: True is the highest.
_SIGNALS = {
    "quality.": (False,),
    "fingerprint.pdq_quality": (False,),
    "score": (False, True),
    "similarity": (False,),
    "duplicate.distance": (True,),
    "semantic.similarity": (False,),
    "overlap.distance": (False,),
}
_HIGHEST_WORST = "quality.grayscale"

# Columns of truth values, and which of the two takes a row away.
_RULES = {
    "issue.": True,
    "overlap.found": True,
    "duplicate.keep": False,
    "semantic.keep": False,
}

# Groups, what tells how far their rows are from the one that stays, and whether large is far.
_GROUPED = {
    "duplicate.group": ("duplicate.distance", True),
    "semantic.group": ("semantic.similarity", False),
}

# For each signal the threshold of its issue, and whether what is above it is bad.
_THRESHOLDS = {f"quality.{signal}": (least, False) for signal, least in BELOW.values()} | {
    "quality.grayscale": (LEAST_GRAYSCALE, True)
}

_STYLE = """
h2.dii-part { font-size: 17px; margin: 34px 0 4px; }
h3 { font-size: 13px; margin: 18px 0 8px; }
.dii-rules { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.dii-rules th, .dii-rules td { padding: 4px 18px 4px 0; text-align: right; border-bottom:
  1px solid color-mix(in srgb, currentColor 14%, transparent); }
.dii-rules th:first-child { text-align: left; font-weight: 500; }
.dii-signal { display: grid; gap: 14px; margin-bottom: 26px; align-items: start;
  grid-template-columns: minmax(0, 1fr); }
.dii-signal .dii-chart { max-width: 420px; }
.dii-group { margin-bottom: 18px; }
.dii-map { width: 100%; max-width: 820px; height: auto; border-radius: 10px;
  border: 1px solid color-mix(in srgb, currentColor 14%, transparent); }
.dii-map circle { fill: var(--bar); fill-opacity: .55; }
.dii-map .dii-gone { fill: #d64545; }
"""


@dataclass(frozen=True)
class Report:
    """The content of a report; a notebook displays it.

    Attributes
    ----------
    rules
        A row for each rule: ``rows`` that it takes away, their ``share``, and how many it takes
        ``alone``; the last row is that of all rules together.
    """

    rules: pd.DataFrame
    html: str

    def __repr__(self) -> str:
        taken = self.rules["rows"].iloc[-1]
        return f"<report: all rules take {taken:,} rows away; shown in a notebook>"

    def _repr_html_(self) -> str:
        # In a frame of its own: the page's style is not for the notebook.
        return f'<iframe srcdoc="{escape(self.html)}" width="100%" height="700"></iframe>'


def report(
    frame: Any,
    path: str | PathLike[str],
    *,
    column: str = "embedding",
    storage_options: dict[str, Any] | None = None,
) -> Report:
    """Write a page that shows what curation has found; computed at once.

    Histograms of each signal, in red what lies beyond its threshold, with the worst 12 images; what
    each rule takes away; the groups of duplicates whose rows are least alike, side by side; a map
    of the embeddings.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe of :func:`dask_image_ingest.read_webdataset_images` with
        some columns of :func:`quality`, :func:`issues`, :func:`fingerprints`,
        :func:`duplicates`,
        :func:`semantic_duplicates`, :func:`overlaps`, :func:`scores` and :func:`similarity`.
    path
        The page to write; it needs no other file.
    column
        The column of vectors for the map, where the frame has it.
    storage_options
        For the images of remote shards; by default those of the read.

    Returns
    -------
    Report
        With the table ``rules``; a notebook displays the page.

    Raises
    ------
    ArgumentError
        If the frame has none of these columns, or lacks those that say where its images are; if
        ``path`` is a file that the frame reads.
    ExportError
        If the page can't be written.

    Notes
    -----
    The frame's columns are computed once. Only images that are shown are decoded after that, from
    where their rows point to. The map has the first two principal components of up to 2,000
    vectors at length one, drawn by a hash of URL, key and offset.

    Examples
    --------
    >>> found = curate.duplicates(curate.issues(ddf))
    >>> curate.report(found, "report.html")
    <report: all rules take 14 rows away; shown in a notebook>
    """
    check_frame(frame._meta if isinstance(frame, FrameBase) else frame)
    check_path("path", path)
    check_storage_options(storage_options)
    check_identity(frame)
    missing = [name for name in POINTER if name not in frame.columns]
    if missing:
        raise ArgumentError(
            f"the frame has no column {', '.join(map(repr, missing))}, which say where its images "
            "are: keep them, as read_webdataset_images gives them"
        )
    refuse_source(frame, path)
    plan = _plan(frame, column)
    if not plan.columns:
        raise ArgumentError(
            "the frame has no column of quality(), issues(), fingerprints(), duplicates(), "
            "semantic_duplicates(), overlaps(), scores() or similarity(): add one"
        )
    if storage_options is None and isinstance(frame, FrameBase):
        storage_options = source_options_of(frame)
    facts = [name for name in ("format", "height", "width") if name in frame.columns]
    pointers = [*dict.fromkeys(["__key__", *POINTER]), *facts]
    found = summarize(frame, plan, pointers)
    rules = _rules(found, plan)
    groups = {name: _group_rows(frame, name, found, pointers) for name in plan.groups}
    pictures = _Pictures([*found.worst.values(), *groups.values()], storage_options)
    body = (
        f'<h1>Curation</h1><p class="dii-lead">{found.rows:,} rows · all rules take '
        f"{rules['rows'].iloc[-1]:,} away</p>"
        + _rules_part(rules)
        + _signals_part(found, plan, pictures)
        + "".join(_groups_part(name, rows, found, pictures) for name, rows in groups.items())
        + (_map_part(found.points) if found.points is not None and len(found.points) > 2 else "")
    )
    html = page("Curation", body, _STYLE)
    write_page(path, html)
    return Report(rules, html)


def _plan(frame: Any, column: str) -> Plan:
    names = [name for name in frame.columns if isinstance(name, str)]
    signals = {
        name: (True,) if name == _HIGHEST_WORST else ends
        for name in names
        for known, ends in _SIGNALS.items()
        if name == known or (known[-1] == "." and name.startswith(known))
        or (known == "score" and name.startswith("score."))
    }  # fmt: skip
    rules = {
        name: goes
        for name in names
        for known, goes in _RULES.items()
        if name == known or (known[-1] == "." and name.startswith(known))
    }
    groups = {name: about for name, about in _GROUPED.items() if {name, about[0]} <= set(names)}
    vectors = column if column in names else None
    return Plan(signals, rules, groups, vectors, _WORST, _POINTS)


def _rules(found: Summary, plan: Plan) -> pd.DataFrame:
    rows = {
        name: (
            sum(count for pattern, count in found.patterns.items() if name in pattern),
            found.patterns[(name,)],
        )
        for name in plan.rules
    }
    rows["all rules"] = (sum(found.patterns.values()), 0)
    table = pd.DataFrame.from_dict(rows, orient="index", columns=["rows", "alone"])
    table.insert(1, "share", table["rows"] / max(found.rows, 1))
    return table


def _rules_part(rules: pd.DataFrame) -> str:
    if len(rules) == 1:
        return ""
    lines = "".join(
        f"<tr><th>{escape(name)}</th><td>{row.rows:,}</td><td>{row.share:.2%}</td>"
        f"<td>{f'{row.alone:,}' if name != 'all rules' else ''}</td></tr>"
        for name, row in zip(rules.index, rules.itertuples(index=False), strict=True)
    )
    return (
        '<h2 class="dii-part">What the rules take away</h2><table class="dii-rules"><thead><tr>'
        f"<th>rule</th><th>rows</th><th>share</th><th>this one alone</th></tr></thead><tbody>"
        f"{lines}</tbody></table>"
    )


class _Pictures:
    """Thumbnails of rows, each decoded once."""

    def __init__(self, tables: list[pd.DataFrame], storage_options: dict[str, Any] | None) -> None:
        rows = pd.concat(tables) if tables else pd.DataFrame()
        self._cards: dict[tuple[Any, ...], Any] = {}
        if not len(rows):
            return
        names = [name for name in rows.columns if name not in ("value", "group", "distance")]
        rows = rows[names].drop_duplicates(["__url__", "__key__", "offset"])
        sheet = make_thumbnails(
            rows.reset_index(drop=True), len(rows), _THUMBNAIL, ["__key__"], storage_options
        )
        self._cards = dict(zip(map(_place, rows.to_dict("records")), sheet.cards, strict=True))

    def sheet(self, rows: pd.DataFrame, texts: list[str]) -> str:
        """A sheet of these rows, with a text below each."""
        cards = [
            replace(card, texts={**card.texts, "": text})
            for card, text in zip(
                [self._cards[_place(row)] for row in rows.to_dict("records")], texts, strict=True
            )
        ]
        return Thumbnails(cards, _THUMBNAIL).html()


def _place(row: dict[Any, Any]) -> tuple[Any, ...]:
    offset = row["offset"]
    return row["__url__"], row["__key__"], -1 if pd.isna(offset) else offset


def _signals_part(found: Summary, plan: Plan, pictures: _Pictures) -> str:
    parts = []
    for name, ends in plan.signals.items():
        sheets = []
        for highest in ends:
            rows = found.worst[name, highest]
            if len(rows):
                title = f"{len(rows)} {'highest' if highest else 'lowest'}"
                texts = [
                    f"{value:,.0f}" if value > 1e4 else f"{value:.4g}" for value in rows["value"]
                ]
                sheets.append(f"<h3>{title}</h3>{pictures.sheet(rows, texts)}")
        chart = _histogram(name, found.values[name].sort_index())
        parts.append(f'<section class="dii-signal">{chart}{"".join(sheets)}</section>')
    return '<h2 class="dii-part">Signals</h2>' + "".join(parts) if parts else ""


def _histogram(name: str, counts: pd.Series) -> str:
    total = int(counts.sum())
    if not total:
        return columns_chart(name, "no row has a value", {})
    values, share = counts.index.to_numpy(), counts.to_numpy().cumsum() / total
    # A few far away would leave one bin for all others: the outermost bins are open.
    low, high = values[np.searchsorted(share, 0.005)], values[np.searchsorted(share, 0.995)]
    width = _round_width((high - low) / _BINS)
    threshold, above = _THRESHOLDS.get(name, (None, False))
    # The threshold is a border between bins.
    border = threshold or 0.0
    numbers = np.arange(np.floor((low - border) / width), np.floor((high - border) / width) + 1)
    edges = border + width * numbers
    place = np.clip(np.searchsorted(edges, values, "right") - 1, 0, len(edges) - 1)
    filled = np.bincount(place, counts.to_numpy(), len(edges)).astype(int)
    labels = _labels(edges)
    marked: list[str] = []
    note = f"{total:,} rows"
    if threshold is not None:
        bad = edges + width / 2 > threshold if above else edges + width / 2 < threshold
        marked = [label for label, is_bad in zip(labels, bad, strict=True) if is_bad]
        note += f"; red: {'above' if above else 'below'} {threshold:g}"
    return columns_chart(name, note, dict(zip(labels, filled.tolist(), strict=True)), marked)


def _round_width(width: float) -> float:
    """The first of 1, 2, 5, 10 ... that is not smaller; 1 for none."""
    if not width > 0:
        return 1.0
    power = 10.0 ** np.floor(np.log10(width))
    return float(next(power * step for step in (1, 2, 5, 10) if power * step >= width))


def _labels(edges: np.ndarray) -> list[str]:
    """Short texts that tell the edges of bins apart."""
    largest = np.abs(edges).max()
    unit, scale = ("M", 1e6) if largest >= 1e6 else ("k", 1e3) if largest >= 1e4 else ("", 1.0)
    for digits in range(16):
        labels = [f"{round(edge / scale, digits) + 0.0:.{digits}f}{unit}" for edge in edges]
        if len(set(labels)) == len(labels):
            break
    return labels


def _group_rows(frame: Any, name: str, found: Summary, pointers: list[str]) -> pd.DataFrame:
    """The rows of the groups that are least alike, those that stay first."""
    distance, largest = _GROUPED[name]
    chosen = found.groups[name].sort_values(["distance", "group"], ascending=[not largest, True])
    chosen = chosen["group"].head(_GROUPS).tolist()
    narrow = frame[[*pointers, name, distance]]
    rows = narrow[narrow[name].isin(chosen)]
    rows = rows.compute() if isinstance(rows, FrameBase) else rows
    rows = backend_of(rows).to_arrow(rows).to_pandas(types_mapper=pandas_type)
    rows = rows.rename(columns={name: "group", distance: "distance"})
    rows["group"] = pd.Categorical(rows["group"].astype("int64"), chosen, ordered=True)
    rows["distance"] = rows["distance"].astype("float64")
    order = ["group", "distance", "__key__", "__url__", "offset"]
    ascending = [True, largest, True, True, True]
    rows = rows.sort_values(order, ascending=ascending, na_position="first")
    return rows.groupby("group", observed=True).head(_OF_A_GROUP)


def _groups_part(name: str, rows: pd.DataFrame, found: Summary, pictures: _Pictures) -> str:
    groups = found.groups[name]
    distance, _ = _GROUPED[name]
    what = distance.partition(".")[2]
    title = f"{name.partition('.')[0].capitalize()} groups"
    if not len(groups):
        return f'<h2 class="dii-part">{title}</h2><p class="dii-lead">None.</p>'
    gone = dict(zip(groups["group"], groups["rows"], strict=True))
    parts = []
    for group, some in rows.groupby("group", observed=True, sort=True):
        texts = [
            "stays" if np.isnan(apart) else f"{what} {apart:.4g}" for apart in some["distance"]
        ]
        parts.append(
            f'<section class="dii-group"><h3>Group {group}: {gone[group] + 1:,} rows</h3>'
            f"{pictures.sheet(some, texts)}</section>"
        )
    return (
        f'<h2 class="dii-part">{title}</h2><p class="dii-lead">{len(groups):,} groups; '
        f"{sum(gone.values()):,} rows go. Here those whose rows are least alike.</p>"
        + "".join(parts)
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
    told = (lengths[:2] ** 2).sum() / max((lengths**2).sum(), 1e-12)
    # An axis and its opposite are equally good: the one whose largest part is positive.
    axes = axes[:2]
    axes *= np.sign(axes[np.arange(2), np.abs(axes).argmax(axis=1)])[:, None]
    places = vectors @ axes.T
    low, high = places.min(axis=0), places.max(axis=0)
    places = 12 + (places - low) / np.maximum(high - low, 1e-12) * (796, 456)
    circles = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" class="{"dii-gone" if goes else ""}">'
        f"<title>{escape(key)}</title></circle>"
        for (x, y), key, goes in zip(places, points["key"], points["goes"], strict=True)
    )
    return (
        '<h2 class="dii-part">Map of the embeddings</h2><p class="dii-lead">'
        f"{len(points):,} rows by their first two principal components, which tell {told:.0%} of "
        "the variance. Red: some rule takes it away.</p>"
        f'<svg class="dii-map" viewBox="0 0 820 480" role="img">{circles}</svg>'
    )

"""Self-contained HTML: cards of thumbnails, sheets and pages with their style, charts in SVG."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from html import escape
from os import PathLike
from typing import Any

from dask_image_ingest.errors import ArgumentError, MissingDependencyError
from dask_image_ingest.storage.output import PAGE_ADVICE, open_output, translate_write_errors

STYLE = """
.dii-sheet { display: grid; gap: 14px; align-items: start;
  grid-template-columns: repeat(auto-fill,
    minmax(min(var(--dii-card, calc(var(--dii-size) + 22px)), calc(50% - 7px)), 1fr));
  font: 13px/1.4 system-ui, sans-serif; }
.dii-sheet .dii-card { margin: 0; padding: 10px; border-radius: 10px; min-width: 0;
  border: 1px solid color-mix(in srgb, currentColor 14%, transparent);
  background: color-mix(in srgb, currentColor 3%, transparent);
  transition: box-shadow .15s, border-color .15s; }
.dii-sheet .dii-card:hover { border-color: color-mix(in srgb, currentColor 35%, transparent);
  box-shadow: 0 4px 16px rgb(0 0 0 / .16); }
.dii-sheet .dii-picture { height: var(--dii-size); display: grid; place-items: center;
  overflow: hidden; border-radius: 6px; }
.dii-sheet .dii-picture img { display: block; margin: 0; border-radius: 6px; max-width: 100%;
  max-height: 100%; object-fit: contain; transition: transform .15s; }
.dii-sheet .dii-card:hover img { transform: scale(1.04); }
.dii-sheet figcaption { display: grid; gap: 2px; margin-top: 8px; text-align: left; }
.dii-sheet .dii-key { font: 600 12px/1.4 ui-monospace, "SF Mono", Menlo, Consolas, monospace;
  overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.dii-sheet .dii-facts { font-size: 11.5px; opacity: .65; overflow-wrap: anywhere; }
.dii-sheet .dii-text { font-size: 12px; overflow-wrap: anywhere; }
.dii-sheet .dii-text summary { cursor: pointer; list-style: none; }
.dii-sheet .dii-text[open] summary { opacity: .55; }
.dii-sheet .dii-name { font-size: 10.5px; opacity: .55; margin-right: 2px; }
.dii-sheet .dii-name:empty { display: none; }
.dii-sheet .dii-error { box-sizing: border-box; width: 100%; height: 100%; padding: 12px;
  border-radius: 6px; display: flex; flex-direction: column; justify-content: center; gap: 6px;
  text-align: center; overflow: hidden; overflow-wrap: anywhere; font-size: 11.5px;
  border: 1px dashed #d64545; background: rgb(214 69 69 / .1); }
.dii-sheet .dii-error strong { color: #d64545; font-size: 12.5px; }
.dii-sheet label.dii-picture { position: relative; cursor: pointer; }
.dii-sheet .dii-mark { position: absolute; inset: 4px auto auto 4px; margin: 0;
  width: 18px; height: 18px; }
.dii-sheet .dii-card:has(:checked) { outline: 3px solid #d64545; }
.dii-sheet .dii-card:has(:focus-visible) { outline: 3px solid #3b7dd8; }
"""

# A mark is the JSON of its row's key. All pictures of a row are marked together.
_MARK_SCRIPT = """
function watchMarks(root, changed) {
  const boxes = () => [...root.querySelectorAll(".dii-mark")];
  root.addEventListener("change", event => {
    for (const box of boxes())
      if (box.value === event.target.value) box.checked = event.target.checked;
    changed([...new Set(boxes().filter(box => box.checked).map(box => box.value))]);
  });
  root.addEventListener("keydown", event => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const seen = boxes().filter(box => box.offsetParent), at = seen.indexOf(event.target);
    if (!step || at < 0) return;
    event.preventDefault();
    seen[at + step]?.focus();
  });
}
"""

_MARKED = f"""
<div class="dii-marked-bar" hidden><output></output>
<a download="marked.json">Save their keys as JSON</a></div>
<script>{_MARK_SCRIPT}
watchMarks(document.body, marks => {{
  const bar = document.querySelector(".dii-marked-bar");
  bar.hidden = !marks.length;
  bar.querySelector("output").value = marks.length + " marked";
  const file = new Blob(["[" + marks.join(",\\n ") + "]\\n"], {{ type: "application/json" }});
  bar.querySelector("a").href = URL.createObjectURL(file);
}});
</script>"""

_WIDGET_SCRIPT = """
export default { render({ model, el }) {
  el.innerHTML = model.get("sheet");
  for (const box of el.querySelectorAll(".dii-mark"))
    box.checked = model.get("marks").includes(box.value);
  watchMarks(el, marks => { model.set("marks", marks); model.save_changes(); });
} };
"""

_PAGE_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --ground: #fbfcfd; --bar: #3b7dd8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --ground: #14171a; --bar: #5b9bf0; } }
body { margin: 0 auto; padding: 28px clamp(16px, 4vw, 48px) 64px; max-width: 1500px;
  color: var(--ink); background: var(--ground); font: 14px/1.5 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 13px; margin: 0 0 2px; }
.dii-sheet .dii-card { content-visibility: auto;
  contain-intrinsic-size: auto calc(var(--dii-size) + 80px); }
.dii-marked-bar { position: fixed; inset: auto 16px 16px auto; padding: 10px 16px;
  border: 1px solid; border-radius: 10px; background: var(--ground); }
.dii-marked-bar a { color: var(--bar); margin-left: 14px; }
"""

_CHART_STYLE = """
.dii-lead { margin: 0 0 22px; opacity: .7; }
.dii-charts { display: grid; gap: 14px; margin-bottom: 26px;
  grid-template-columns: repeat(auto-fit, minmax(250px, 1fr)); }
.dii-chart { padding: 14px 16px; border-radius: 10px; min-width: 0;
  border: 1px solid color-mix(in srgb, currentColor 14%, transparent); }
.dii-chart p { margin: 0 0 8px; font-size: 11.5px; opacity: .65; }
.dii-chart svg { display: block; width: 100%; max-width: 420px; height: auto; margin: 0 auto; }
.dii-chart svg text { fill: currentColor; font: 10px system-ui, sans-serif; }
.dii-chart svg .dii-quiet { opacity: .65; }
.dii-chart rect { fill: var(--bar, #3b7dd8); }
.dii-chart g:hover rect { filter: brightness(1.2); }
.dii-chart.dii-errors rect, .dii-chart .dii-marked rect { fill: #d64545; }
"""

_WIDTH, _HEIGHT = 320, 150
_BARS = 8


def write_page(path: str | os.PathLike[str], html: str) -> None:
    """Write a page atomically."""
    refuse_no_page(path)
    folder, name = os.path.split(os.path.abspath(path))
    with translate_write_errors(os.fspath(path), PAGE_ADVICE):
        os.stat(folder)  # none is made: its name may be misspelt
    output = open_output(folder, PAGE_ADVICE, None)
    try:
        output.put(name, html.encode())
    finally:
        output.remove_empty_staging()


def refuse_no_page(path: str | os.PathLike[str]) -> None:
    """Refuse to replace a file that is no HTML page, such as a photograph."""
    try:
        with open(path, "rb") as file:
            begin = file.read(64).lstrip().lower()
    except OSError:  # there is none, or it can't be read: the write tells why
        return
    if begin and not begin.startswith((b"<!doctype html", b"<html")):
        raise ArgumentError(f"{os.fspath(path)} is there, and is no page: write to another file")


def page(title: str, body: str, style: str = "") -> str:
    """Wrap ``body`` into a page, which follows the reader's light or dark color scheme."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{_PAGE_STYLE}{_CHART_STYLE}{style}</style></head>"
        f"<body>{body}{_MARKED}</body></html>\n"
    )


def marking_widget(sheet: str, style: str = "") -> Any:
    """An ``anywidget.AnyWidget`` of some HTML: ``marked`` is the list of keys that are marked."""
    try:
        import anywidget
        import traitlets
    except ImportError as error:
        raise MissingDependencyError(
            "a widget needs anywidget: pip install 'dask-image-ingest[widget]'"
        ) from error

    class MarkingWidget(anywidget.AnyWidget):
        _esm = _MARK_SCRIPT + _WIDGET_SCRIPT
        _css = STYLE + _CHART_STYLE + style
        sheet = traitlets.Unicode().tag(sync=True)
        marks = traitlets.List(traitlets.Unicode()).tag(sync=True)

        @property
        def marked(self) -> list[Any]:
            return [json.loads(mark) for mark in self.marks]

    return MarkingWidget(sheet=sheet)


def columns_chart(
    title: str, note: str, counts: Mapping[str, int], marked: Collection[str] = ()
) -> str:
    """Histogram: a column for each bin, without empty bins at the ends; ``marked`` bins are red."""
    bins = list(counts.items())
    filled = [number for number, (_, count) in enumerate(bins) if count]
    if not filled:
        return _chart(title, note, "", "")
    bins = bins[filled[0] : filled[-1] + 1]
    step = min(_WIDTH / len(bins), 60)
    left = (_WIDTH - step * len(bins)) / 2
    most = max(count for _, count in bins)
    label_every = -(-34 // int(max(step, 1))) if step < 34 else 1  # a label is 34 wide
    elements = []
    for number, (label, count) in enumerate(bins):
        x = left + number * step
        height = max(count / most * (_HEIGHT - 40), 1.5 if count else 0)
        top = _HEIGHT - 20 - height
        middle = x + step / 2
        elements.append(
            f'<g class="{"dii-marked" if label in marked else ""}">'
            f"<title>{escape(label)}: {count:,}</title>"
            f'<rect x="{x + step * 0.08:.1f}" y="{top:.1f}" width="{step * 0.84:.1f}" '
            f'height="{height:.1f}" rx="2"/>'
            + _svg_text(middle, top - 4, f"{count:,}" if count and step >= 24 else "", "middle")
            + (_tick(middle, label) if number % label_every == 0 else "")
            + "</g>"
        )
    return _chart(title, note, _svg(_HEIGHT, "".join(elements)), "")


def bars_chart(title: str, note: str, counts: Mapping[str, int], kind: str = "") -> str:
    """Bar chart, the longest bar first; of more than eight counts, the smallest are one bar."""
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    if rest := ordered[_BARS - 1 :] if len(ordered) > _BARS else []:
        ordered[_BARS - 1 :] = [(f"{len(rest)} others", sum(count for _, count in rest))]
    most = max((count for _, count in ordered), default=0)
    elements = []
    for number, (label, count) in enumerate(ordered):
        y = number * 22
        width = max(count / most * 165, 1.5)
        elements.append(
            f"<g><title>{escape(label)}: {count:,}</title>"
            + _svg_text(96, y + 14, label if len(label) < 18 else f"{label[:16]}…", "end")
            + f'<rect x="104" y="{y + 4}" width="{width:.1f}" height="14" rx="2"/>'
            + _svg_text(110 + width, y + 14, f"{count:,}", "start", "dii-quiet")
            + "</g>"
        )
    return _chart(title, note, _svg(max(22 * len(ordered), 1), "".join(elements)), kind)


def _tick(x: float, label: str) -> str:
    """A label below a column, moved inwards where it would leave the drawing."""
    half = 3.0 * len(label)  # half of the estimated width at 10 px
    if x < half:
        return _svg_text(0, _HEIGHT - 6, label, "start", "dii-quiet")
    if x > _WIDTH - half:
        return _svg_text(_WIDTH, _HEIGHT - 6, label, "end", "dii-quiet")
    return _svg_text(x, _HEIGHT - 6, label, "middle", "dii-quiet")


def _chart(title: str, note: str, drawing: str, kind: str) -> str:
    return (
        f'<section class="dii-chart {kind}"><h2>{escape(title)}</h2><p>{escape(note)}</p>'
        f"{drawing}</section>"
    )


def _svg(height: int, content: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{content}</svg>'


def _svg_text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    if not text:
        return ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'
    )


# Texts with more characters are folded; a click shows all.
_FOLDED = 90


class Thumbnails:
    """A sheet of thumbnails. A notebook displays it.

    Attributes
    ----------
    cards : list of Card
        One for each row.
    """

    def __init__(self, cards: list[Card], size: int, above: str = "") -> None:
        self.cards = cards
        self._size = size
        self._above = above  # HTML of facts and charts, or none

    def __len__(self) -> int:
        return len(self.cards)

    def __repr__(self) -> str:
        bad = sum(card.error is not None for card in self.cards)
        count = "1 thumbnail" if len(self) == 1 else f"{len(self)} thumbnails"
        return f"<{count}, {bad} without an image: shown in a notebook, or save()>"

    def _repr_html_(self) -> str:
        return f"<style>{STYLE}{_CHART_STYLE * bool(self._above)}</style>{self._above}{self.html()}"

    def below(self, above: str) -> Thumbnails:
        """The same sheet below some HTML, such as charts."""
        return Thumbnails(self.cards, self._size, above)

    def html(self, markable: bool = False) -> str:
        """HTML of the sheet, without its style; with a box to mark each row that has a key."""
        cards = "".join(card.html(markable) for card in self.cards) or "<p>No rows.</p>"
        return f'<div class="dii-sheet" style="--dii-size: {self._size}px">{cards}</div>'

    def widget(self) -> Any:
        """The sheet as a widget of a notebook, to mark rows in.

        Returns
        -------
        anywidget.AnyWidget
            ``marked`` is the list of the keys of the rows that are marked now.

        Raises
        ------
        MissingDependencyError
            If anywidget is not installed, which the extra ``widget`` brings.
        """
        return marking_widget(self._above + self.html(markable=True))

    def save(self, path: str | PathLike[str], title: str | None = None) -> None:
        """Write the sheet as an HTML page that needs no other file; ``title`` is its heading."""
        heading = "" if title is None else f"<h1>{escape(title)}</h1>"
        write_page(path, page(title or "Images", heading + self._above + self.html(markable=True)))


@dataclass(frozen=True)
class Card:
    """The thumbnail of a row, or its error, with a caption."""

    jpeg: bytes | None
    shape: tuple[int, int] | None  # to show the JPEG at: height, width
    error: str | None
    texts: dict[Any, str]  # by column; the first is the title
    facts: str  # size, format and shard, in words
    key: str | int | None = None  # names the row where it is marked

    def html(self, markable: bool = False) -> str:
        """The card as a ``figure`` element."""
        names = list(self.texts)
        first = escape(self.texts[names[0]]) if names else ""
        picture = f'<div class="dii-picture">{self._picture(first)}</div>'
        if markable and self.key is not None:
            mark = escape(json.dumps(self.key))
            picture = (
                f'<label class="dii-picture">{self._picture(first)}<input class="dii-mark" value='
                f'"{mark}" type="checkbox" autocomplete="off" aria-label="mark {first}"></label>'
            )
        return (
            f'<figure class="dii-card{"" if self.jpeg else " dii-bad"}">{picture}<figcaption>'
            + (f'<span class="dii-key" title="{first}">{first}</span>' if names else "")
            + (f'<span class="dii-facts">{escape(self.facts)}</span>' if self.facts else "")
            + "".join(_text(name, self.texts[name]) for name in names[1:])
            + "</figcaption></figure>"
        )

    def _picture(self, alternative: str) -> str:
        if self.jpeg is None or self.shape is None:
            code, _, detail = (self.error or "no image").partition(": ")
            return (
                f'<div class="dii-error" role="img" aria-label="error"><strong>{escape(code)}'
                f"</strong><span>{escape(detail)}</span></div>"
            )
        height, width = self.shape
        data = base64.b64encode(self.jpeg).decode()
        return (
            f'<img src="data:image/jpeg;base64,{data}" alt="{alternative}" width="{width}" '
            f'height="{height}" loading="lazy" decoding="async">'
        )


def _text(name: object, text: str) -> str:
    label = f'<span class="dii-name">{escape(str(name))}</span>'
    if len(text) <= _FOLDED:
        return f'<span class="dii-text">{label} {escape(text)}</span>'
    return (
        f'<details class="dii-text"><summary>{label} {escape(text[: _FOLDED - 10])}…</summary>'
        f"{escape(text)}</details>"
    )

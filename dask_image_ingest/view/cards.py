"""Thumbnails as HTML: a card for each row, on a sheet that a notebook displays."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from html import escape
from os import PathLike

from dask_image_ingest.view.page import STYLE, page, write_page

# Texts with more characters are folded; a click shows all.
_FOLDED = 90


class Thumbnails:
    """A sheet of thumbnails. A notebook displays it.

    Attributes
    ----------
    cards : list of Card
        One for each row.
    """

    def __init__(self, cards: list[Card], size: int) -> None:
        self.cards = cards
        self._size = size

    def __len__(self) -> int:
        return len(self.cards)

    def __repr__(self) -> str:
        bad = sum(card.error is not None for card in self.cards)
        return f"<{len(self)} thumbnails, {bad} without an image: shown in a notebook, or save()>"

    def _repr_html_(self) -> str:
        return f"<style>{STYLE}</style>{self.html()}"

    def html(self) -> str:
        """HTML of the sheet, without its style."""
        cards = "".join(card.html() for card in self.cards) or "<p>No rows.</p>"
        return f'<div class="dii-sheet" style="--dii-size: {self._size}px">{cards}</div>'

    def save(self, path: str | PathLike[str]) -> None:
        """Write the sheet as an HTML page that needs no other file."""
        write_page(path, page("Images", self.html()))


@dataclass(frozen=True)
class Card:
    """The thumbnail of a row, or its error, with a caption."""

    jpeg: bytes | None
    shape: tuple[int, int] | None  # to show the JPEG at: height, width
    error: str | None
    texts: dict[str, str]  # by column; the first is the title
    facts: str  # size and format, in words

    def html(self) -> str:
        """The card as a ``figure`` element."""
        names = list(self.texts)
        first = escape(self.texts[names[0]]) if names else ""
        return (
            f'<figure class="dii-card{"" if self.jpeg else " dii-bad"}">'
            f'<div class="dii-picture">{self._picture(first)}</div><figcaption>'
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


def _text(name: str, text: str) -> str:
    label = f'<span class="dii-name">{escape(name)}</span>'
    if len(text) <= _FOLDED:
        return f'<span class="dii-text">{label} {escape(text)}</span>'
    return (
        f'<details class="dii-text"><summary>{label} {escape(text[: _FOLDED - 10])}…</summary>'
        f"{escape(text)}</details>"
    )

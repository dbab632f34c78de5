"""The text index that wds2idx writes and DALI reads: a line of each sample's members.

Version 1.2 has for each member its extension, where its content begins, its size and its name, with
blanks between them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_BLANK = re.compile(r"[ \t\n\v\f\r]")


def wds2idx_text(samples: int, members: Iterable[tuple[int, str, int, int, str]]) -> bytes:
    """The text for members: sample, extension, place, size and name of each."""
    lines: list[list[str]] = [[] for _ in range(samples)]
    for sample, extension, place, size, name in members:
        # As tar shows it; the readers of this format use the name for messages alone.
        shown = _BLANK.sub(lambda blank: f"\\{ord(blank[0]):03o}", name)
        lines[sample].append(f"{extension} {place} {size} {shown}")
    return "\n".join([f"v1.2 {samples}", *map(" ".join, lines), ""]).encode()

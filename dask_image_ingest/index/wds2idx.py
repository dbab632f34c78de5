"""The text index of wds2idx, which DALI reads; version 1.2.

A line per sample, with extension, offset, size and name of each member, separated by blanks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_BLANK = re.compile(r"[ \t\n\v\f\r]")


def wds2idx_text(samples: int, members: Iterable[tuple[int, str, int, int, str]]) -> bytes:
    """The text for members: sample, extension, offset, size and name of each."""
    lines: list[list[str]] = [[] for _ in range(samples)]
    for sample, extension, offset, size, name in members:
        # Escaped as by ``tar -t``; readers use the name in messages only.
        shown = _BLANK.sub(lambda blank: f"\\{ord(blank[0]):03o}", name)
        lines[sample].append(f"{extension} {offset} {size} {shown}")
    return "\n".join([f"v1.2 {samples}", *map(" ".join, lines), ""]).encode()

"""The text index that wds2idx writes and DALI reads: a line of each sample's members.

Version 1.2 has for each member its extension, where its content begins, its size and its name, with
blanks between them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from dask_image_ingest.tar import Member

__all__ = ["members_of", "wds2idx_text"]

_BLANK = re.compile(r"[ \t\n\v\f\r]")
_LINE = re.compile(r"[^ ]+ \d+ \d+ [^ ]+(?: [^ ]+ \d+ \d+ [^ ]+)*")


def wds2idx_text(samples: int, members: Iterable[tuple[int, str, int, int, str]]) -> bytes:
    """The text for members: sample, extension, place, size and name of each."""
    lines: list[list[str]] = [[] for _ in range(samples)]
    for sample, extension, place, size, name in members:
        # As tar shows it; the readers of this format use the name for messages alone.
        shown = _BLANK.sub(lambda blank: f"\\{ord(blank[0]):03o}", name)
        lines[sample].append(f"{extension} {place} {size} {shown}")
    return "\n".join([f"v1.2 {samples}", *map(" ".join, lines), ""]).encode()


def members_of(text: bytes) -> list[Member] | None:
    """The members that an index names, None if it names none, or not as the shard does.

    Version 1.1 has no names; a blank or an escape in one is not what stands in the shard.
    """
    try:
        head, *lines = text.decode().split("\n")
    except ValueError:
        return None
    version, _, samples = head.partition(" ")
    lines = [line for line in lines if line]
    if version != "v1.2" or samples.strip() != str(len(lines)) or b"\\" in text:
        return None
    found: list[Member] = []
    for line in lines:
        if not _LINE.fullmatch(line):
            return None
        parts = line.split(" ")
        for extension, offset, size, name in zip(*(parts[n::4] for n in range(4)), strict=True):
            if not name.endswith(extension):
                return None
            found.append((name, int(offset), int(size)))
    return found

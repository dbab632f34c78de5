"""What other tools have written beside a shard: where its members are.

They tell no version of the shard, and some leave out members. So what they say is held against the
shard: its members must follow one another with nothing but headers of one size between them, up to
the end of the archive, and the first, the last and some between must be those that are named. Then
a walk would find the same, but for a shard of which a few members were replaced by others of the
same sizes: so the index must not be much older. Where members have headers of several sizes (long
names), the shard is walked, and so is one that is at hand: to look at all headers is what a walk
does.
"""

from __future__ import annotations

import json
import logging
import math
import random
import zlib
from collections.abc import Iterable
from typing import Any

from dask_image_ingest.errors import ShardError, ShardNotFoundError
from dask_image_ingest.index.find import IndexFile
from dask_image_ingest.index.stored import UnusableIndexError
from dask_image_ingest.index.wds2idx import members_of
from dask_image_ingest.storage import LazyBytes, announce, is_fetched, modified, open_shard
from dask_image_ingest.tar import BLOCK, Member, TarIndex, gc_paused, group, read_plain_header

__all__ = ["index_by_members"]

logger = logging.getLogger("dask_image_ingest")

# A header by itself, and with the PAX header that webdataset's writer puts in front of it.
_HEADERS = (BLOCK, 3 * BLOCK)

# In bytes: a larger file is something else.
_LARGEST = 256 << 20

# In seconds: an index may be older by so much, since it is often uploaded before its shard.
_UPLOAD = 3600

# How many headers are looked at beside the first and the last one.
_LOOKED_AT = 16

# The byte of a header that says what it is, and that of a PAX header.
_KIND, _PAX = 156, b"x"[0]

# What may follow the last member: zeros, up to a whole record of tar.
_LONGEST_END = 20 * BLOCK


def index_by_members(
    content: LazyBytes, index: IndexFile, storage_options: dict[str, Any] | None
) -> TarIndex | None:
    """The samples of an open shard, as a walk through it finds them; None where that isn't sure.

    Raises
    ------
    UnusableIndexError
        If the index is one of another version of the shard.
    """
    if not is_fetched(content):
        return None  # a walk costs no more than to look at its headers
    try:
        with open_shard(index.url, storage_options) as opened:
            text = bytes(opened[:]) if len(opened) <= _LARGEST else b""
            written = modified(opened)
    except (ShardError, ShardNotFoundError) as error:
        raise UnusableIndexError(str(error)) from error
    if (written or math.inf) + _UPLOAD < (modified(content) or 0):
        logger.info("%s is older than its shard, and is not used", index.url)
        return None
    members = members_of(text) if index.kind == "wds2idx" else _listed(text)
    if not members:
        return None
    members.sort(key=lambda member: member[1])
    stop = _end(members)
    if stop is None:
        return None
    if not stop <= len(content) <= stop + _LONGEST_END:
        raise _stale(f"its last member ends at byte {stop}, and the shard at {len(content)}")
    header = members[0][1]
    chosen = _chosen(members, text)
    announce(content, [*((at - header, at) for _, at, _ in chosen), (stop, len(content))])
    for name, offset, size in chosen:
        headers = bytes(content[offset - header : offset])
        if header > BLOCK and headers[_KIND] != _PAX:
            return None  # something else is between members
        if read_plain_header(headers[-BLOCK:]) != (name, size):
            if header > BLOCK:
                return None  # its name may stand in the PAX header
            raise _stale(f"{name!r} is not at byte {offset}")
    if bytes(content[stop : len(content)]).strip(b"\0"):
        return None  # something follows the end
    with gc_paused():
        grouped = group([members])
    return TarIndex(
        grouped.samples,
        interleaved=grouped.interleaved,
        repeated=grouped.repeated,
        members=grouped.members,
        pax=grouped.members if members[0][1] > BLOCK else 0,
    )


def _chosen(members: list[Member], text: bytes) -> list[Member]:
    """The members to look at: the same ones for whoever reads a part of the shard."""
    drawn = random.Random(zlib.crc32(text))
    between = range(1, len(members) - 1)
    few = drawn.sample(between, min(_LOOKED_AT, len(between)))
    return [members[n] for n in sorted({0, *few, len(members) - 1})]


def _stale(why: str) -> UnusableIndexError:
    return UnusableIndexError(f"it is stale: {why}")


def _listed(text: bytes) -> list[Member] | None:
    """The members in a JSON index, as hfutils and webshart write it."""
    try:
        files = json.loads(text)["files"]
        found = [
            (name, entry["offset"], entry["size" if "size" in entry else "length"])
            for name, entry in files.items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # some other JSON
    numbers = (number for _, *place in found for number in place)
    return found if all(type(number) is int and number >= 0 for number in numbers) else None


def _end(members: Iterable[Member]) -> int | None:
    """Where the last member ends, padding included; None if anything else may lie between them."""
    end, header = 0, None
    for _, offset, size in members:
        header = header or offset
        if header not in _HEADERS or offset != end + header:
            return None
        end = offset + (size + BLOCK - 1) // BLOCK * BLOCK
    return end

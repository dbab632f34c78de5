"""Index the first samples of a shard, to infer the schema."""

from __future__ import annotations

from collections.abc import Iterator

from dask_image_ingest.storage import ByteReader, LazyBytes, as_reader
from dask_image_ingest.tar.grouping import Sample, group
from dask_image_ingest.tar.header import BLOCK, checksum_holds
from dask_image_ingest.tar.index import TarIndex, index_tar
from dask_image_ingest.tar.members import Member, plain_name

__all__ = ["index_head"]

# What is fetched of a remote shard at first, and of its end. Images that are larger than that are
# skipped, header by header, until there are some samples.
_FIRST, _LAST = 1 << 20, 128 << 10
_SAMPLES = 4


def index_head(content: LazyBytes, url: str) -> tuple[TarIndex, float]:
    """Find the first samples of a remote shard, or all of one whose bytes are at hand.

    Returns
    -------
    index
        Whole samples. If members of a kind that the first samples don't have are at the end of the
        shard, it is that of all of the shard.
    share
        Which share of the shard's bytes they take up.

    Raises
    ------
    ShardError
        As `index_tar`.
    """
    reader = as_reader(content)
    size = len(reader)
    if not reader.is_remote or size <= 2 * _FIRST:
        return index_tar(reader, url), 1.0
    reader.prefetch([(0, _FIRST), (size - _LAST, size)])
    length = _FIRST
    while length < size:
        index = index_tar(_Beginning(reader, length), url)
        if len(index.samples) > _SAMPLES:
            last = index.samples.pop()
            seen = {extension for sample in index.samples for extension in sample.members}
            if _at_end(reader, size) <= seen | set(last.members):
                return index, min(span[0] for span in last.members.values()) / size
            break
        length *= 4
    return index_tar(reader, url), 1.0


class _Beginning(ByteReader):
    """The first bytes of a shard, as if there were no more."""

    def __init__(self, shard: ByteReader, length: int) -> None:
        self._shard = shard
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice, /) -> bytes | bytearray | memoryview:
        start, stop, _ = part.indices(self._length)
        return self._shard[start:stop]


def _at_end(content: LazyBytes, size: int) -> set[str]:
    """The kinds of members whose headers lie in the last bytes."""
    samples: list[Sample] = group([list(_headers(content, size))]).samples
    return {extension for sample in samples for extension in sample.members}


def _headers(content: LazyBytes, size: int) -> Iterator[Member]:
    start = (size - _LAST) // BLOCK * BLOCK
    end = bytes(content[start:size])
    for offset in range(0, len(end) - BLOCK + 1, BLOCK):
        header = end[offset : offset + BLOCK]
        if header[257:262] == b"ustar" and header[156] in b"0\0" and checksum_holds(header):
            yield plain_name(header), start + offset + BLOCK, 0

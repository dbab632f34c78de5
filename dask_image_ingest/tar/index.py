"""Indexing of a tar: reads its headers and groups its members into samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dask_image_ingest.storage import ByteReader, LazyBytes, as_reader
from dask_image_ingest.tar.grouping import group, links_of_samples
from dask_image_ingest.tar.headers import BLOCK, checksum_holds
from dask_image_ingest.tar.scan import Damage, Member, TarScan, plain_name
from dask_image_ingest.tar.shard_index import ShardIndex, Skipped


def index_tar(content: LazyBytes, url: str = "the shard") -> ShardIndex:
    r"""Find the samples of a shard by reading its tar headers.

    Samples are grouped by webdataset's rule: the key is the path up to the first dot of its last
    part, the rest in lower case is the extension, only regular files count, and names such as
    ``__meta__`` are skipped. Three differences are on purpose. Members whose key reappears later in
    the shard are joined to its sample, where webdataset begins a second one; a second sample begins
    only if the key reappears with an extension that the sample has already. A hard link to an
    earlier file of the shard has its bytes. Files that macOS adds (``._x``, ``.DS_Store``) are
    skipped.

    Like :mod:`tarfile` and webdataset, the scan ends at the first block of zeros. Anything else
    after it, perhaps another tar, is not read but reported as damage.

    Parameters
    ----------
    content
        The bytes of the shard, decompressed. Only headers are read, and bytes after the last one.
    url
        The shard, for errors.

    Returns
    -------
    ShardIndex
        Keys are valid UTF-8, as Arrow requires: an invalid byte of a name becomes ``\xNN``.

    Raises
    ------
    ShardError
        If the shard does not begin with a tar header. Any other problem is ``ShardIndex.damage``.
    """
    reader = as_reader(content)
    reader.prefetch_scan()
    scan = TarScan(reader, url)
    grouped = group(scan)
    skipped = grouped.skipped
    for link in scan.links:
        skipped[link.kind] = skipped.get(link.kind, Skipped(0, link.name)).and_another()
    return ShardIndex(
        grouped.keys,
        grouped.places,
        duplicates=grouped.duplicates,
        sparse=scan.sparse,
        damage=_with_stream_damage(scan.damage, reader),
        interleaved=grouped.interleaved,
        repeated=grouped.repeated,
        members=grouped.members,
        pax=scan.pax,
        skipped=skipped,
        links=links_of_samples(grouped.keys, scan.links),
    )


def _with_stream_damage(damage: Damage | None, reader: ByteReader) -> Damage | None:
    """Combine the damage of a tar with that of the compressed stream it came from."""
    if reader.damage is None:
        return damage
    if damage is None:
        return Damage(len(reader), reader.damage, "truncated-stream")
    return replace(damage, reason=f"{damage.reason}; {reader.damage}")


# Bytes that `index_head` fetches from the begin and the end of a remote shard. It reads on, headers
# only, until there are more than so many samples.
_FIRST, _LAST = 1 << 20, 128 << 10
_SAMPLES = 4


def index_head(content: LazyBytes, url: str) -> tuple[ShardIndex, float]:
    """Index the first samples of a remote shard, to infer the schema; a local or small one whole.

    Returns
    -------
    index
        Whole samples. The index of the whole shard if its end has extensions that the first samples
        have not.
    share
        Fraction of the shard's bytes that these samples take up.

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
        index = index_tar(_Prefix(reader, length), url)
        if len(index) > _SAMPLES:
            if _last_extensions(reader, size) <= set(index.extensions):
                last = len(index) - 1
                spans = index.samples[last].members.values()
                head = index.first(last)
                # A hard link lies where an earlier sample does.
                ends = (head.places(extension).offsets.max() for extension in head.extensions)
                return head, max(min(span[0] for span in spans), *map(int, ends)) / size
            break
        length *= 4
    return index_tar(reader, url), 1.0


class _Prefix(ByteReader):
    """The first bytes of a shard, as a shard of its own."""

    def __init__(self, shard: ByteReader, length: int) -> None:
        self._shard = shard
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice, /) -> bytes | bytearray | memoryview:
        start, stop, _ = part.indices(self._length)
        return self._shard[start:stop]


def _last_extensions(content: LazyBytes, size: int) -> set[str]:
    """Extensions of the members whose headers lie in the last bytes."""
    return set(group([list(_last_members(content, size))]).places)


def _last_members(content: LazyBytes, size: int) -> Iterator[Member]:
    """Members by the blocks in the last bytes that look like headers; with size 0."""
    start = (size - _LAST) // BLOCK * BLOCK
    end = bytes(content[start:size])
    for offset in range(0, len(end) - BLOCK + 1, BLOCK):
        header = end[offset : offset + BLOCK]
        if header[257:262] == b"ustar" and header[156] in b"0\x001" and checksum_holds(header):
            yield plain_name(header), start + offset + BLOCK, 0

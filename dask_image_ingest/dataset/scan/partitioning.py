"""The first shard tells the schema and what others are like; shards become partitions by it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final, TypeAlias

from dask_image_ingest.arguments import number_of_bytes, shown, whole_number
from dask_image_ingest.client import workers
from dask_image_ingest.dataset.read_options import ReadOptions
from dask_image_ingest.dataset.scan.rows import part_of
from dask_image_ingest.dataset.scan.samples import (
    SampleRows,
    first_dot_hint,
    give_up,
    known_samples,
)
from dask_image_ingest.dataset.schema.coerce import LARGEST_JSON, parse_json
from dask_image_ingest.dataset.schema.columns import Schema
from dask_image_ingest.errors import ArgumentError, ShardError, ShardNotFoundError, warn_user
from dask_image_ingest.frames import Backend
from dask_image_ingest.index import IndexedReader, IndexFile, UnusableIndexError, open_stored
from dask_image_ingest.storage import (
    ByteReader,
    Shard,
    is_pipe,
    local_path,
    open_late,
    open_shard,
    request_all,
)
from dask_image_ingest.tar import ShardIndex, index_head, read_member
from dask_image_ingest.url_secrets import UrlHolder, url_identity

# Image headers sampled to estimate the decoded size.
_SAMPLED_HEADERS = 256

# JSON members read at most to find all requested fields.
_MOST_RECORDS = 100

# Empty shards opened at most to find one with samples.
_MOST_EMPTY = 10

# Names listed in a warning at most.
_MOST_NAMES = 20

# Bytes of pixels per partition if the memory of workers is unknown.
_DEFAULT_SIZE = 512 << 20

#: Limits of a partition with ``shards_per_partition="auto"``: samples, bytes of pixels.
_SAMPLES_TOGETHER: Final = 10_000
_PIXELS_TOGETHER: Final = 128 << 20

# Bits of a label that count the rows of a shard. The other 38 of a non-negative int64 are a digest.
_ROW_BITS = 24


@dataclass(frozen=True, slots=True, repr=False)
class ShardSplit(UrlHolder):
    """One of ``parts`` equal parts of a shard; ``part`` counts from 0.

    ``shard`` is the shard as it was listed: a task reads no other version of it or its sidecar.
    ``index`` is its index file, or None; it says nothing of the rows, and is not compared.
    ``first_label`` is the label of the shard's first row. Of an image file, ``part`` is the number
    of its row.
    """

    shard: Shard
    part: int = 0
    parts: int = 1
    index: IndexFile | None = field(default=None, compare=False)
    first_label: int = field(default=0, compare=False)

    @property
    def url(self) -> str:
        """The URL of the shard."""
        return self.shard.url


#: All that a task reads: part of a shard, or several whole ones, or image files.
Partition: TypeAlias = tuple[ShardSplit, ...]


def digest_of_url(url: str) -> int:
    """A number below 2**62 for a file, the same for all URLs that differ in secrets alone."""
    identity = url_identity(url).encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "big") >> 2


def first_labels(urls: Iterable[str]) -> dict[str, int]:
    """The label of the first row of each shard of a read; the next rows have the next labels.

    All reads of a shard agree on it, as it is a digest of the URL. In one of 5,000 reads of 10,000
    shards, two have the same digest: the second by URL then gets the next free number.
    """
    labels: dict[str, int] = {}
    last = -1
    for digest, url in sorted((digest_of_url(url) >> _ROW_BITS, url) for url in urls):
        last = max(digest, last + 1)
        labels[url] = last << _ROW_BITS
    return labels


def known_rows(partition: Partition, counted: Mapping[str, int] | None = None) -> int | None:
    """Number of rows of a partition; None if a shard has no index with its samples counted.

    ``counted`` are those of `count_checked`.
    """
    rows = 0
    for split in partition:
        samples = None if split.index is None else split.index.samples
        samples = (counted or {}).get(split.url) if samples is None else samples
        if samples is None:
            return None
        rows += len(part_of(samples, split.part, split.parts))
    return rows


def count_checked(
    partitions: Iterable[Partition], storage_options: dict[str, Any] | None
) -> dict[str, int]:
    """Number of samples of remote shards by their indexes; without those whose index does not hold.

    Content is checked as by a task, but of many shards at once: a task for each would wait for its
    requests.
    """
    indexes = {
        split.url: split.index
        for split in chain.from_iterable(partitions)
        if split.index is not None and split.index.samples is None and local_path(split.url) is None
    }
    if not indexes:
        return {}
    samples = request_all(lambda index: _checked(index, storage_options), indexes.values())
    return {url: count for url, count in zip(indexes, samples, strict=True) if count is not None}


def _checked(index: IndexFile, storage_options: dict[str, Any] | None) -> int | None:
    try:
        with (
            open_stored(index, storage_options) as stored,
            open_late(index.shard, storage_options, stored.check),
        ):
            return None if stored.damage else len(stored)
    except (UnusableIndexError, ShardError, ShardNotFoundError):
        return None  # a task reads the shard, or tells why it can't


@dataclass(frozen=True, slots=True)
class ShardsTogether:
    """Limits of a partition of several shards; None for no limit."""

    shards: int | None = 1
    samples: int | None = None
    nbytes: int | None = None

    def allows(self, *counts: int) -> bool:
        """True if these counts (shards, samples, bytes of pixels) are within the limits."""
        limits = (self.shards, self.samples, self.nbytes)
        return all(
            limit is None or count <= limit for count, limit in zip(counts, limits, strict=True)
        )


def parse_partition_size(partition_size: object, backend: Backend) -> int | None:
    """The argument ``partition_size=`` in bytes; None for one task per shard."""
    if partition_size is None:
        return None
    if isinstance(partition_size, str) and partition_size == "auto":
        return _automatic(backend)
    nbytes = number_of_bytes(partition_size)
    if nbytes is None:
        raise ArgumentError(
            f"partition_size={shown(partition_size)}: pass bytes, such as '512 MiB', 'auto', or "
            "None for one task per shard"
        )
    return min(nbytes, backend.largest_partition)


def _automatic(backend: Backend) -> int:
    """Size of a partition by the memory of the workers."""
    joined = workers()
    # Without a worker, the memory of this machine says nothing: it may be a login node.
    why = do = ""
    if joined == []:
        why, do = "no worker has joined", "wait before the read: client.wait_for_workers(1)"
    elif joined and backend.device == "cpu" and not any(w["memory_limit"] for w in joined):
        why, do = "no worker has a memory limit", "start them with --memory-limit"
    # Half of the largest: sizes are estimated by the first shard, and others may decode to more.
    size = min(_DEFAULT_SIZE if why else backend.partition_memory(), backend.largest_partition // 2)
    if why:
        warn_user(
            f"{why}, so partition_size='auto' takes {size >> 20} MiB of pixels, a sixteenth of a "
            f"worker of 8 GiB. Pass partition_size=, or {do}"
        )
    return size


def parse_shards_per_partition(shards: object, largest: int | None) -> ShardsTogether:
    """The argument ``shards_per_partition=``, for partitions of at most ``largest`` bytes."""
    if isinstance(shards, str) and shards == "auto":
        most = _PIXELS_TOGETHER if largest is None else min(_PIXELS_TOGETHER, largest)
        return ShardsTogether(None, _SAMPLES_TOGETHER, most)
    advice = f"pass a number from 1 on, or 'auto' for up to about {_SAMPLES_TOGETHER:,} samples"
    most = whole_number("shards_per_partition", shards, 1, advice)
    return ShardsTogether(most, None, largest)


@contextmanager
def open_first(
    shards: Sequence[Shard],
    storage_options: dict[str, Any] | None,
    skip: bool,
    indexes: dict[str, IndexFile],
) -> Iterator[FirstShard]:
    """Open the first shard that has samples; with ``skip``, shards that can't be read are skipped.

    If the first few shards are empty, opens the first of them. An index that can't be used is
    removed from ``indexes``.

    Raises
    ------
    UnusableIndexError
        If that shows only when the shard is read: open it again, without its index.
    """
    reasons: list[str] = []
    empty: list[Shard] = []
    for shard in shards:
        with ExitStack() as opened:
            try:
                first = _open_shard(opened, shard, storage_options, indexes)
            except (ShardError, ShardNotFoundError) as error:
                if not skip:
                    raise
                reasons.append(str(error))
                continue
            if len(first.index):
                with _without_unusable(first, indexes):
                    yield first
                return
        empty.append(shard)
        if len(empty) == _MOST_EMPTY:
            break
    if not empty:
        raise ShardError(f"none of the {len(shards)} shards can be read; the first: {reasons[0]}")
    with ExitStack() as opened:
        yield _open_shard(opened, empty[0], storage_options, indexes)


@contextmanager
def _without_unusable(first: FirstShard, indexes: dict[str, IndexFile]) -> Iterator[None]:
    """Remove the index of a shard, with a warning, if it can't be used after all."""
    try:
        yield
    except UnusableIndexError as error:
        give_up(indexes.pop(first.shard.url), error, warn=True)
        raise


def _open_shard(
    opened: ExitStack,
    shard: Shard,
    storage_options: dict[str, Any] | None,
    indexes: dict[str, IndexFile],
) -> FirstShard:
    index = indexes.get(shard.url)
    stored = known_samples(opened, index, storage_options, warn=True, all_places=True)
    if index is not None and stored is not None:
        try:
            late = opened.enter_context(open_late(shard, storage_options, stored.check))
            if stored.check.is_due:  # now: what is inferred from it would be wrong
                late.open()
            return FirstShard(shard, IndexedReader(stored, late), stored)
        except UnusableIndexError as error:
            give_up(index, error, warn=True)
    content = opened.enter_context(open_shard(shard.url, storage_options, shard))
    indexes.pop(shard.url, None)
    return FirstShard(shard, content, *index_head(content, shard.url))


@dataclass(frozen=True)
class FirstShard:
    """An open shard and the index of its samples.

    Of a remote shard only the first samples are indexed; ``share`` is their share of its bytes.
    """

    shard: Shard
    content: ByteReader
    index: ShardIndex
    share: float = 1.0

    @property
    def samples(self) -> int:
        """Estimated number of samples."""
        return round(len(self.index) / self.share)

    def count_images(self, extensions: Sequence[str]) -> int:
        """Estimated number of samples with an image, a member of one of these extensions."""
        return round(self.index.has(*extensions).true_count / self.share)

    def decoded_bytes(self, options: ReadOptions) -> int:
        """Estimated bytes that all images decode to."""
        step = max(1, len(self.index) // _SAMPLED_HEADERS)
        rows = SampleRows(self.shard.url, self.content, self.index, options)
        return round(rows.decoded_bytes(rows.numbers[::step]) * step / self.share)

    def warn_of_unknown(self, schema: Schema, images: Mapping[str, Sequence[str]]) -> None:
        """Warn of requested members and fields that the shard lacks, which may be misspelt.

        Also of members beyond those that become columns.
        """
        if not len(self.index):
            return
        if schema.inferred:
            others = self.index.not_preferred(*images.values())
            left_out = [e for e in others if e and e not in schema.extensions]
            if left_out:
                warn_user(
                    f"the first shard, {self.shard.url}, has {len(self.index.extensions)} kinds of "
                    f"members, of which the {len(schema.extensions)} most frequent become columns"
                    f"{first_dot_hint(left_out, 0)}. Pass members={{...}} to choose the columns"
                )
        unknown = []
        for name, extensions in images.items():
            if not self.count_images(extensions):
                few = ";".join(extensions[:5])
                more = ";..." if len(extensions) > 5 else ""
                unknown.append(f"no image ({name}={few + more!r})")
        absent = {c.extension for c in schema.member_columns}.difference(self.index.extensions)
        fields = [c.path for c in schema.member_columns if c.path is not None]
        unknown += [f"no member {extension!r}" for extension in sorted(absent)]
        seen = {} if "json" in absent else self._seen_fields(fields)
        missing = [field for field in fields if field not in seen]
        unknown += [f"no field {field!r} in its first json members" for field in missing]
        if not unknown:
            return
        has = f"its members are {_listed(self.index.extensions)}"
        if seen:
            has += f"; the fields of its json are {_listed(seen)}"
        warn_user(
            f"the first shard, {self.shard.url}, has {', '.join(unknown[:_MOST_NAMES])}; "
            f"{has}{first_dot_hint(self.index.extensions)}. What a shard does not have is null"
        )

    def _seen_fields(self, wanted: Sequence[str]) -> dict[str, None]:
        """The fields of the first JSON members, read until all ``wanted`` fields are found."""
        missing, seen = set(wanted), dict[str, None]()
        for span in self.index.first_spans("json", _MOST_RECORDS):
            if not missing:
                break
            if span[1] > LARGEST_JSON:
                continue
            try:
                record = parse_json(bytes(read_member(self.content, self.index, span)))
            except (ValueError, RecursionError):
                continue
            seen.update(dict.fromkeys(_paths(record)))
            missing.difference_update(seen)
        return seen


def _paths(record: object, prefix: str = "", depth: int = 8) -> Iterator[str]:
    """The fields of a record; nested ones with dots between the names."""
    if isinstance(record, dict) and depth:
        for name, value in record.items():
            yield f"{prefix}{name}"
            yield from _paths(value, f"{prefix}{name}.", depth - 1)


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(map(repr, names[:_MOST_NAMES])) + more


def make_partitions(
    shards: Sequence[Shard],
    first: FirstShard,
    options: ReadOptions,
    largest: int | None,
    together: ShardsTogether,
    indexes: Mapping[str, IndexFile],
) -> tuple[Partition, ...]:
    """Make partitions that decode to at most ``largest`` bytes, if all shards are like the first.

    A larger shard is split, at most into one part per image. Consecutive smaller shards share a
    partition as far as ``together`` allows.
    """
    partitions: list[Partition] = []
    group: list[ShardSplit] = []
    samples = nbytes = 0  # of the group
    for split, split_samples, split_bytes in _splits(
        shards, first, options, largest, together, indexes
    ):
        samples, nbytes = samples + split_samples, nbytes + split_bytes
        if group and (split.parts > 1 or not together.allows(len(group) + 1, samples, nbytes)):
            partitions.append(tuple(group))
            group, samples, nbytes = [], split_samples, split_bytes
        group.append(split)
        if split.parts > 1:
            partitions.append((split,))
            group, samples, nbytes = [], 0, 0
    return (*partitions, tuple(group)) if group else tuple(partitions)


def _splits(
    shards: Sequence[Shard],
    first: FirstShard,
    options: ReadOptions,
    largest: int | None,
    together: ShardsTogether,
    indexes: Mapping[str, IndexFile],
) -> Iterator[tuple[ShardSplit, int, int]]:
    """Each shard or part of one, with estimates of its samples and bytes of pixels.

    Samples and bytes are scaled by the size of the shard relative to the first.
    """
    needs_bytes = largest is not None or together.nbytes is not None
    decoded = first.decoded_bytes(options) if needs_bytes else 0
    images = first.count_images(options.images[0].extensions)
    labels = first_labels(shard.url for shard in shards)
    for shard in shards:
        # A shard of unknown size is taken to be as large as the first.
        known = shard.size >= 0 and first.shard.size > 0
        size, first_size = (shard.size, first.shard.size) if known else (1, 1)
        parts = 1
        # A pipe is not split: its command would run once per part.
        if decoded and largest is not None and first.shard.size > 0 and not is_pipe(shard.url):
            parts = _ceil_divide(decoded * size, first_size * largest)
            parts = min(parts, _ceil_divide(images * size, first_size)) or 1
        split = ShardSplit(shard, 0, parts, indexes.get(shard.url), labels[shard.url])
        for part in range(parts):
            samples = first.samples * size // first_size
            yield replace(split, part=part), samples, decoded * size // first_size


def _ceil_divide(whole: int, share: int) -> int:
    return -(-whole // share)

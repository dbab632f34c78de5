"""The first shard, opened to infer the schema and to estimate the size of the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from dask_image_ingest.dataset.read_options import ReadOptions
from dask_image_ingest.dataset.scan.samples import (
    SampleRows,
    first_dot_hint,
    give_up,
    known_samples,
)
from dask_image_ingest.dataset.schema.coerce import LARGEST_JSON, parse_json
from dask_image_ingest.dataset.schema.columns import Schema
from dask_image_ingest.errors import ShardError, ShardNotFoundError, warn_user
from dask_image_ingest.index import IndexedReader, IndexFile, UnusableIndexError
from dask_image_ingest.storage import ByteReader, Shard, open_late, open_shard
from dask_image_ingest.tar import ShardIndex, index_head, read_member

# Image headers sampled to estimate the decoded size.
_SAMPLED_HEADERS = 256

# JSON members read at most to find all requested fields.
_MOST_RECORDS = 100

# Empty shards opened at most to find one with samples.
_MOST_EMPTY = 10

# Names listed in a warning at most.
_MOST_NAMES = 20


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
    if stored is not None:
        late = opened.enter_context(open_late(shard, storage_options, stored.refuse_other))
        return FirstShard(shard, IndexedReader(stored, late), stored)
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
        return round(self._decoded_bytes(step, options) * step / self.share)

    def _decoded_bytes(self, step: int, options: ReadOptions) -> int:
        """Bytes that every ``step``-th sample decodes to, by the headers of its images."""
        url, content = self.shard.url, self.content
        some = np.arange(0, len(self.index), step)
        # If a header column of the index is damaged, read the headers from the images instead.
        with suppress(UnusableIndexError):
            return SampleRows(url, content, self.index, options).decoded_bytes(some)
        places = self.index.first(len(self.index))
        return SampleRows(url, content, places, options).decoded_bytes(some)

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


def _paths(record: Any, prefix: str = "", depth: int = 8) -> Iterator[str]:
    """The fields of a record; nested ones with dots between the names."""
    if isinstance(record, dict) and depth:
        for name, value in record.items():
            yield f"{prefix}{name}"
            yield from _paths(value, f"{prefix}{name}.", depth - 1)


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(map(repr, names[:_MOST_NAMES])) + more

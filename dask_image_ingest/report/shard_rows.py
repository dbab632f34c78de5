"""Samples of a shard for reports, opened lazily."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dask_image_ingest.dataset import (
    ReadOptions,
    SampleRows,
    image_member,
    parse_image_extensions,
)
from dask_image_ingest.decode import MAX_PIXELS, Decoding, Mode, printable
from dask_image_ingest.report.text import listing
from dask_image_ingest.storage import open_shard
from dask_image_ingest.tar import IMAGE_EXTENSIONS, ShardIndex, index_tar


def options_of(image: str = IMAGE_EXTENSIONS, mode: Mode = "RGB") -> ReadOptions:
    """Options of ``read_webdataset_images``, of which two are chosen.

    Raises
    ------
    ArgumentError
    """
    return ReadOptions(parse_image_extensions(image), Decoding(max_pixels=MAX_PIXELS, mode=mode))


#: Those of `read_webdataset_images`, where nothing is said.
OPTIONS = options_of()


@contextmanager
def open_rows(
    url: str, storage_options: dict[str, Any] | None, options: ReadOptions = OPTIONS
) -> Iterator[tuple[SampleRows, ShardIndex]]:
    """Walk a shard, and give all of its samples.

    Raises
    ------
    ShardError, ShardNotFoundError
        If it can't be read.
    """
    with open_shard(url, storage_options) as content:
        index = index_tar(content, url)
        yield SampleRows(url, content, index, options), index


def other_images(index: ShardIndex, options: ReadOptions) -> dict[str, int]:
    """Members with an image's suffix that are not their sample's image: how many of each kind."""
    suffixes = frozenset(parse_image_extensions(IMAGE_EXTENSIONS))
    found: Counter[str] = Counter()
    for sample in index.samples:
        image = image_member(sample, options.image_extensions)
        found.update(
            extension
            for extension in sample.members
            if extension != image and extension.rpartition(".")[2] in suffixes
        )
    return dict(found.most_common())


def others_in_words(others: dict[str, int]) -> str:
    """Images that a report left out, and the option that looks at them."""
    named = {printable(extension): count for extension, count in others.items()}
    return f"{listing(named)}, not looked at: --image {shlex.quote(next(iter(named)))}"

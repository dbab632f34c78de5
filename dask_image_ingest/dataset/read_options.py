"""Options of a read that every task gets, and checks of arguments that all reads share."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from dask_image_ingest.arguments import (
    check_choice,
    check_flag,
    number_of_bytes,
    shown,
)
from dask_image_ingest.dataset.schema.columns import ImageMember
from dask_image_ingest.decode import DecodeSpec
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import Backend, BackendName, choose_backend, get_backend, gpus
from dask_image_ingest.tar import LARGEST_VALUE, MAX_MEMBER_BYTES

ErrorPolicy: TypeAlias = Literal["null", "raise", "drop"]
ShardErrorPolicy: TypeAlias = Literal["raise", "skip"]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of reading and decoding shards; small, because each task carries them.

    Attributes
    ----------
    image_extensions
        Member extensions that are the first image, in order of preference.
    decoding
        How images are decoded.
    errors, shard_errors
        What to do with an image that can't be decoded, and with a shard that can't be read.
    backend
        The name of the dataframe library.
    storage_options
        For the fsspec filesystem of remote shards.
    needs_sidecars
        Whether a sidecar that is missing now, or that no sample can be joined to, is an error.
    max_member_bytes
        Larger members, other than the image, are null.
    other_images
        The further image columns.
    image
        The name of the first image column.
    is_table, key
        Whether the shards are parquet files, whose columns ``image_extensions`` name; and their
        column of keys, or None to number the rows.
    root, classes
        The common root of image files, None for shards; and its folders that are classes.
    """

    image_extensions: tuple[str, ...]
    decoding: DecodeSpec
    errors: ErrorPolicy = "null"
    shard_errors: ShardErrorPolicy = "raise"
    backend: BackendName = "pandas"
    storage_options: dict[str, Any] | None = None
    needs_sidecars: bool = False
    max_member_bytes: int = MAX_MEMBER_BYTES
    other_images: tuple[ImageMember, ...] = ()
    image: str = "image"
    is_table: bool = False
    key: str | None = None
    root: str | None = None
    classes: tuple[str, ...] | None = None

    @property
    def images(self) -> tuple[str, ...]:
        """The image columns."""
        return (self.image, *(each.column for each in self.other_images))

    def get_backend(self) -> Backend:
        """The backend; imports its dataframe library."""
        return get_backend(self.backend)


#: Warning of a process without a GPU that builds a cuDF collection.
NO_GPU_HERE = (
    "this process has no GPU: the collection is made for workers that have one. Columns can be "
    "chosen, and images decoded and mapped in batches; a predicate such as ddf.width > 512 would "
    "ask cuDF here, so pass filters= instead. For all else, to_parquet() and results included, "
    "go on with ddf.to_backend('pandas')"
)


def checked_backend(backend: str | None, errors: Any, decode: Any) -> Backend:
    """Check arguments that all reads share, and choose the backend.

    Raises
    ------
    ArgumentError
    MissingDependencyError
        If the backend's library is not installed.
    """
    chosen = get_backend(choose_backend(backend))
    if chosen.device == "gpu" and not gpus():
        warnings.warn(NO_GPU_HERE, stacklevel=3)
    check_choice("errors", errors, ("null", "raise", "drop"))
    check_flag("decode", decode)
    return chosen


def refuse_decoding(decoding: DecodeSpec, errors: ErrorPolicy) -> None:
    """Raise `ArgumentError` for options of a decode together with ``decode=False``."""
    given = {
        "size": decoding.size is not None,
        "mode": decoding.mode != "RGB",
        "augment": decoding.augment is not None,
        "transform": decoding.transform is not None,
        "errors": errors != "null",
        "scaled_decode": decoding.scaled,
    }
    for name in filter(given.__getitem__, given):
        raise ArgumentError(
            f"decode=False makes no pixels, and {name}= says how: pass it to decode_images()"
        )


def parse_max_member_bytes(value: Any) -> int:
    """The argument ``max_member_bytes=``."""
    if value is None:
        return LARGEST_VALUE
    nbytes = number_of_bytes(value)
    if nbytes is None:
        raise ArgumentError(
            f"max_member_bytes={shown(value)}: pass bytes, such as '1 GiB', or None for as many as "
            "a column can hold"
        )
    return min(nbytes, LARGEST_VALUE)

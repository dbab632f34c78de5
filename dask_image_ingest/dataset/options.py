"""Options of a read that every task gets, whatever the query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from dask_image_ingest.arguments import number_of_bytes, shown
from dask_image_ingest.dataset.schema.image_columns import ImageMember
from dask_image_ingest.decode import DecodeSpec
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import Backend, BackendName, get_backend
from dask_image_ingest.tar import LARGEST_VALUE, MAX_MEMBER_BYTES

ErrorPolicy: TypeAlias = Literal["null", "raise", "drop"]
ShardErrorPolicy: TypeAlias = Literal["raise", "skip"]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of reading and decoding shards; small, because each task carries them.

    Attributes
    ----------
    image_extensions
        Member extensions that are the image, in order of preference.
    decoding
        How images are decoded.
    errors, shard_errors
        What becomes of an image that can't be decoded, and of a shard that can't be read.
    backend
        The name of the dataframe library.
    storage_options
        For the file system of remote shards.
    needs_sidecars
        Whether a shard without the file beside it that it had is an error.
    max_member_bytes
        Members of more bytes, other than the image, are null.
    other_images
        The image columns beside ``image``.
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

    def get_backend(self) -> Backend:
        """The backend, which imports its library."""
        return get_backend(self.backend)


def parse_max_member_bytes(value: Any) -> int:
    """The argument ``max_member_bytes=``.

    Raises
    ------
    ArgumentError
    """
    if value is None:
        return LARGEST_VALUE
    nbytes = number_of_bytes(value)
    if nbytes is None:
        raise ArgumentError(
            f"max_member_bytes={shown(value)}: pass bytes, such as '1 GiB', or None for as many as "
            "a column can hold"
        )
    return min(nbytes, LARGEST_VALUE)

"""What a dataframe library has to do for this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from dask_image_ingest.decode import PixelBuffer, Pixels

BackendName = Literal["cudf", "pandas"]

#: The values of a new column, and its type: an array (n,), for a list type (n, d), or a Python list
#: of strings or bytes.
NewColumn: TypeAlias = tuple[Any, pa.DataType]


class Backend(Protocol):
    """What a dataframe library has to do for this package; ``pandas.py`` and ``cudf.py`` do it."""

    @property
    def name(self) -> BackendName:
        """The name that ``backend=`` takes."""

    @property
    def device(self) -> Literal["cpu", "gpu"]:
        """Where images are decoded."""

    @property
    def largest_partition(self) -> int:
        """The most pixels, in bytes, that the image column of one partition can hold."""

    @property
    def numpy(self) -> Any:
        """The library of its arrays, with NumPy's names: NumPy or CuPy."""

    def holds(self, type_: pa.DataType) -> bool:
        """Whether a column can be of this type, of those that the metadata of a read may have."""

    def thread_setup(self) -> Callable[[], None]:
        """What another thread calls first, to work on the device that this one works on."""

    def pixel_buffer(self, nbytes: int) -> PixelBuffer:
        """A buffer for about ``nbytes`` of pixels."""

    def frame(self, table: pa.Table, index: np.ndarray, pixels: Pixels | None) -> Any:
        """A dataframe of ``table``'s columns, and ``image`` last where there are pixels."""

    def to_arrow(self, frame: Any) -> pa.Table:
        """Metadata columns of a dataframe, on the host."""

    def to_storage(self, frame: Any) -> pa.Table:
        """All columns of a dataframe, and its index, on the host and as files can have them."""

    def from_storage(self, table: pa.Table, meta: Any) -> Any:
        """A dataframe that was stored, or some columns of it; ``meta`` is an empty one like it."""

    def with_images(
        self, frame: Any, pixels: Pixels, image: str = "image", error: str | None = "error"
    ) -> Any:
        """``frame`` with the columns of a late decode, in place of those it has or behind.

        ``image`` and ``error`` are their names, ``error`` None where none is wanted.
        """

    def with_references(
        self, frame: Any, references: pa.Array | pa.ChunkedArray, image: str, error: str | None
    ) -> Any:
        """``frame`` with references in place of images, and nulls in place of errors.

        As with `with_images`; ``references`` are of the type ``REFERENCE``.
        """

    def is_references(self, dtype: Any) -> bool:
        """Whether a column of this dtype holds image references."""

    def meta(self, types: Mapping[str, pa.DataType]) -> Any:
        """An empty dataframe with these columns."""

    def is_images(self, dtype: Any) -> bool:
        """Whether a column of this dtype holds decoded images."""

    def arrays(self, images: Any) -> list[Any]:
        """Views of each image of a column, (height, width, channels), None where there is none."""

    def with_columns(
        self, frame: Any, columns: Mapping[str, NewColumn], rows: Sequence[int]
    ) -> Any:
        """``frame`` with new columns, whose values belong to ``rows``; null in the others."""

    def values(self, series: Any) -> Any:
        """A column as an array: (n,), or (n, d) of lists; strings and bytes as NumPy objects.

        None where nulls, or lists of differing lengths, don't allow that.
        """

    def normalized(self, images: Sequence[Any], scale: np.ndarray, shift: np.ndarray) -> Any:
        """Images of one shape as one array (n, channels, height, width) of float32.

        ``scale`` and ``shift`` are float32, one for each channel or one for all: what each value
        is multiplied by, and what is added then.
        """

    def count_levels(self, images: Sequence[Any]) -> np.ndarray:
        """How many pixels of each channel have each of the 256 values: int64 (channels, 256).

        All images are of as many channels.
        """

    def host(self, array: Any) -> np.ndarray:
        """An array in host memory."""

    def partition_memory(self) -> int:
        """Bytes of pixels that a partition should hold at most, judged by the memory here."""

"""The pandas dtype of decoded images: Arrow structs under a name that pandas finds again.

pandas names an Arrow struct by its fields and can't read that name back, which dask's shuffle
between workers and ``read_parquet`` both ask of it. A dtype with a name can be found, and whoever
unpickles a frame of it imports this module, so that it always is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import pyarrow as pa
from dask.dataframe.extensions import make_array_nonempty

from dask_image_ingest.frames.image_type import IMAGE

# Of an array's own bytes, what may be pickled with it to spare a copy.
_PICKLED_MORE = 1.01


@pd.api.extensions.register_extension_dtype
class ImageDtype(pd.ArrowDtype):
    """Decoded images: Arrow ``struct<data: large_list<uint8>, height, width, channels: int32>``."""

    def __init__(self) -> None:
        super().__init__(IMAGE)

    @property
    def name(self) -> str:
        """How pandas finds this dtype again."""
        return "image"

    @classmethod
    def construct_from_string(cls, string: str) -> ImageDtype:
        """The dtype by its name."""
        if string != "image":
            raise TypeError(f"Cannot construct an ImageDtype from {string!r}")
        return cls()

    def construct_array_type(self) -> type[ImageArray]:
        """The class of columns of this dtype."""
        return ImageArray

    def _get_common_dtype(self, dtypes: list) -> ImageDtype | None:
        return self if all(dtype == self for dtype in dtypes) else None

    def __from_arrow__(self, array: pa.Array | pa.ChunkedArray) -> ImageArray:
        return ImageArray(array.cast(IMAGE))

    def __reduce__(self) -> tuple[type[ImageDtype], tuple[()]]:
        return ImageDtype, ()


class ImageArray(pd.arrays.ArrowExtensionArray):
    """A column of decoded images over Arrow memory."""

    def __init__(self, values: pa.Array | pa.ChunkedArray) -> None:
        super().__init__(values)
        self._dtype = ImageDtype()

    @classmethod
    def _from_sequence(cls, scalars: Sequence, *, dtype: Any = None, copy: bool = False):
        if isinstance(scalars, cls):
            return scalars.copy() if copy else scalars
        return cls(pa.chunked_array([pa.array(scalars, IMAGE, from_pandas=True)]))

    def __reduce__(self) -> tuple[type[ImageArray], tuple[pa.Array | pa.ChunkedArray]]:
        # pandas combines the chunks, which copies the pixels even of one. Only a part of a larger
        # array needs that: it would be pickled with all of it.
        array = self._pa_array
        if array.num_chunks == 1 and array.get_total_buffer_size() <= array.nbytes * _PICKLED_MORE:
            return ImageArray, (array.chunk(0),)
        return ImageArray, (array.combine_chunks(),)

    def _formatter(self, boxed: bool = False) -> Callable[[Any], str]:
        return _shape_of


def _shape_of(image: Any) -> str:
    if image is None or image is pd.NA:
        return "<NA>"
    return f"<{image['height']}×{image['width']}×{image['channels']}>"


@make_array_nonempty.register(ImageDtype)
def _two_images(dtype: ImageDtype) -> ImageArray:
    image = {"data": [0, 0, 0], "height": 1, "width": 1, "channels": 3}
    return ImageArray(pa.chunked_array([pa.array([image, image], IMAGE)]))

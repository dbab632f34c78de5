"""``read_parquet_images``: a column of encoded images in parquet files."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import dask
import dask.dataframe as dd
import pyarrow as pa

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.arguments import check_columns, list_of_names, shown
from dask_image_ingest.dataset.filters import normalize_filters
from dask_image_ingest.dataset.late.headers import HEADERS
from dask_image_ingest.dataset.late.references import carry_images, references_of_bytes
from dask_image_ingest.dataset.options import ErrorPolicy
from dask_image_ingest.dataset.sources.decode_options import decode_options, with_images
from dask_image_ingest.decode import MAX_PIXELS, Mode, Resize
from dask_image_ingest.errors import ArgumentError, ShardError
from dask_image_ingest.frames import pandas_type
from dask_image_ingest.image_frame import ImageDataFrame
from dask_image_ingest.storage import FileKind, find_shards

_PARQUET: Final = FileKind("parquet file", (".parquet", ".parq", ".pq"))

# A JPEG of a photograph decodes to about so many times its bytes.
_EXPANSION = 10

# Encoded bytes of a partition at most: some hundred photographs, the work of a second or less.
_MOST_ENCODED = 32 << 20


def read_parquet_images(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    column: str = "image",
    *,
    columns: Sequence[str] | None = None,
    filters: Sequence[Any] | None = None,
    size: int | tuple[int, int] | None = None,
    resize: Resize = "stretch",
    transform: Callable[..., Any] | None = None,
    mode: Mode = "RGB",
    errors: ErrorPolicy = "null",
    max_pixels: int | None = MAX_PIXELS,
    backend: Literal["cudf", "pandas"] | None = None,
    storage_options: dict[str, Any] | None = None,
    decode: bool = True,
) -> ImageDataFrame:
    """Read parquet files with a column of encoded images as a lazy Dask dataframe.

    Tables of Hugging Face (``struct<bytes, path>``), LAION, Daft and others. One task for some row
    groups; of each those columns are read that the query needs, and images of the rows that are
    left are decoded.

    Parameters
    ----------
    paths
        Parquet files: a path or URL, with braces or globs, a folder, or a list of these. Taken in
        natural order, each once.
    column
        The column of encoded images: ``binary``, ``large_binary``, or ``struct<bytes, path>``. A
        row without bytes is ``missing``: a path alone is not opened.
    columns
        The columns to have, in this order; all by default.
    filters
        Rows to have, as for ``dask.dataframe.read_parquet``, by columns of the files. Row groups of
        which no row can be left are not read.
    size, resize, transform, mode, errors, max_pixels, backend
        As for :func:`read_webdataset_images`.
    storage_options
        For the fsspec filesystem behind remote paths.
    decode
        Whether to decode images. With False ``column`` holds references, of the dtype
        ``image_reference``, which carry the encoded images, and there is no column ``error``.

    Returns
    -------
    dask.dataframe.DataFrame
        The columns of the files, with images in ``column`` in place of bytes: struct<data:
        large_binary, height, width, channels: int32>. Behind them ``error`` (string), ``nbytes``
        (int64), ``format`` (string), ``height``, ``width``, ``channels`` (int32), but for those
        whose name a column of the files has. These are read from the images, where they are asked
        for.

    Raises
    ------
    ShardNotFoundError
        If a path matches nothing.
    ShardError
        If the first file can't be read.
    ArgumentError
        For arguments that are unknown or contradict each other, columns that don't exist, a column
        that holds no encoded images, files with a column ``error`` of their own.
    MissingDependencyError
        If the backend's library is not installed.

    Examples
    --------
    >>> import pyarrow as pa, pyarrow.parquet as pq
    >>> files = [{"bytes": data, "path": None} for data in frame.images.encode("png")[:3]]
    >>> pq.write_table(pa.table({"image": files, "label": [0, 1, 0]}), "photos.parquet")
    >>> photos = read_parquet_images("photos.parquet", size=64)
    >>> photos[photos.label == 0].images.stack().compute().shape
    (2, 64, 64, 3)
    """
    backend_, images = decode_options(
        backend,
        size=size,
        resize=resize,
        transform=transform,
        mode=mode,
        errors=errors,
        max_pixels=max_pixels,
        storage_options=storage_options,
        decode=decode,
    )
    urls = [file.url for file in find_shards(paths, storage_options, _PARQUET)]
    most = min(backend_.partition_memory() // _EXPANSION, _MOST_ENCODED)
    table = _read(urls, None, most, storage_options)
    if normalize_filters(filters, _types(table._meta)):
        table = _read(urls, filters, most, storage_options)
    _check_column(table._meta, column, urls[0])
    if decode and "error" in table.columns:
        if columns is None or "error" in columns:
            raise ArgumentError(
                f"the files have a column 'error' of their own, as {urls[0]} has, and that of a "
                "decode would take its place: pass columns= without it, or decode=False"
            )
        table = table.drop(columns="error")
    if backend_.name != "pandas":
        table = table.to_backend(backend_.name)
    headers = tuple(name for name in ("nbytes", *HEADERS) if name not in table.columns)
    images = replace(images, image=column)
    rows = carry_images(table.expr, column, column, "error" if decode else None)
    frame = with_images(rows, images, headers, decode)
    if columns is None:
        return frame
    selected = list_of_names("columns", columns, "column names")
    check_columns(selected, list(frame.columns), "the frame has")
    return frame[selected]


class ReadEncodedImages(dx.ReadParquetFSSpec):
    """Dask's read of parquet files, whose partitions stay as they are where images are read.

    Dask makes one task of several by the share of columns that are read, as if all columns were of
    one size.
    """

    @functools.cached_property
    def _fusion_compression_factor(self) -> float:
        large = any(map(_is_large, _types(self._meta[self.columns]).values()))
        return 1.0 if large else float(super()._fusion_compression_factor)


def _types(meta: Any) -> dict[str, pa.DataType]:
    return {name: pa.array(meta[name].array).type for name in meta.columns}


def _is_large(type_: pa.DataType) -> bool:
    if pa.types.is_struct(type_):
        return any(_is_large(field.type) for field in type_)
    return bool(pa.types.is_binary(type_) or pa.types.is_large_binary(type_))


def _read(urls: list[str], filters: Any, most: int, storage_options: dict[str, Any] | None) -> Any:
    try:
        # Images are taken out of Arrow's memory, and go to a GPU after that.
        with dask.config.set({"dataframe.backend": "pandas"}):
            table = dd.read_parquet(
                urls,
                filters=filters,
                index=False,
                storage_options=storage_options,
                split_row_groups="adaptive",
                blocksize=most,
                arrow_to_pandas={"types_mapper": pandas_type},
            )
    except (OSError, pa.ArrowException) as error:
        raise ShardError(f"{urls[0]} cannot be read as a parquet file: {error}") from error
    return dx.new_collection(ReadEncodedImages(*table.expr.operands))


def _check_column(meta: Any, column: Any, url: str) -> None:
    if not isinstance(column, str) or column not in meta.columns:
        raise ArgumentError(
            f"column={shown(column)}: {url} has {', '.join(map(repr, meta.columns))}"
        )
    references_of_bytes(meta, column)

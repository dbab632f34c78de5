"""``from_arrow``: a table of another engine as a frame."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pyarrow as pa

from dask_image_ingest.arguments import shown
from dask_image_ingest.dataset.schema.file_columns import column_type
from dask_image_ingest.errors import ArgumentError, warn_user
from dask_image_ingest.frames import (
    Backend,
    as_references,
    as_tensors,
    choose_backend,
    get_backend,
    has_type,
    holds_references,
    is_any_list,
    is_bytes,
)
from dask_image_ingest.typedefs import ArrowTable, DataFrame


def from_arrow(table: ArrowTable, *, backend: Literal["cudf", "pandas"] | None = None) -> DataFrame:
    """Make a frame of a table of another engine, such as Polars, DuckDB, Lance or pyarrow.

    Its columns have the types that the reads of this package give: references that were handed to
    the engine come back as references. So the frame can be merged with a lazy one, and decoded.

    Parameters
    ----------
    table
        Anything with Arrow's stream interface, ``__arrow_c_stream__``: a table or record batches of
        pyarrow, a dataframe of Polars, a relation of DuckDB. It is read to its end. Of a lazy
        query pass the result.
    backend
        As for :func:`read_webdataset_images`.

    Returns
    -------
    pandas.DataFrame or cudf.DataFrame
        In memory, with a new index from 0 on. Texts, categories and enums are strings; lists of one
        length and tensors are arrays of one shape. A struct with the fields of references is a
        column of the dtype ``image_reference``. Columns of other types that a read leaves out, such
        as maps, are left out with a warning.

    Raises
    ------
    ArgumentError
        If ``table`` has no stream or can't be read, or has two columns of one name.
    MissingDependencyError
        If the backend's library is not installed.

    Examples
    --------
    Rows that another engine has chosen, here pyarrow, with the images that they refer to:

    >>> import pyarrow as pa, pyarrow.compute as pc
    >>> rows = read_webdataset_images("train-{000..003}.tar", decode=False).compute()
    >>> cats = pa.table(rows).filter(pc.match_substring(pc.field("txt"), "cat"))
    >>> from_arrow(cats).dtypes["image"]
    image_reference
    >>> decode_images(cats, size=224).images.arrays()[0].shape
    (224, 224, 3)
    """
    if not is_arrow_table(table):
        raise ArgumentError(
            f"table={shown(table)} has no __arrow_c_stream__: pass a table of pyarrow, Polars or "
            "DuckDB; of a lazy query its result, as collect() of Polars gives it"
        )
    try:
        read = table if isinstance(table, pa.Table) else pa.table(table)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise ArgumentError(f"table={shown(table)} can't be read as a table: {error}") from error
    if len(set(read.column_names)) < read.num_columns:
        raise ArgumentError("table= has two columns of one name")
    chosen = get_backend(choose_backend(backend))
    columns: dict[str, pa.ChunkedArray] = {}
    left_out = []
    for name, values in zip(read.column_names, read.columns, strict=True):
        column = _column(values, chosen)
        if column is None:
            left_out.append(f"{name!r} ({values.type})")
        else:
            columns[name] = column
    if left_out:
        warn_user(f"the table has columns of unsupported types, left out: {', '.join(left_out)}")
    return chosen.frame(pa.table(columns), np.arange(read.num_rows), None)


def is_arrow_table(value: object) -> bool:
    """True for a table of another engine; not for a frame of pandas or cuDF, which have streams."""
    library = type(value).__module__.partition(".")[0]
    return hasattr(value, "__arrow_c_stream__") and library not in ("pandas", "cudf")


def _column(values: pa.ChunkedArray, backend: Backend) -> Any:
    """A column in the type that a read gives it; None if no read has such a type."""
    if has_type(values.type, _is_view_dictionary):
        values = values.cast(_without_views(values.type))
    if holds_references(values.type):
        return as_references(values)
    if is_bytes(values.type):
        return values  # one array may hold more than the 2 GiB of the shorter type
    type_ = column_type(values.type, backend)
    if type_ is None:
        return None
    if isinstance(type_, pa.FixedShapeTensorType):
        return pa.chunked_array([as_tensors(values, type_)])
    return values.cast(type_)


def _is_view_dictionary(type_: pa.DataType) -> bool:
    """True for categories and enums of Polars, which Arrow can't decode."""
    return pa.types.is_dictionary(type_) and pa.types.is_string_view(type_.value_type)


def _without_views(type_: pa.DataType) -> pa.DataType:
    """A type with strings for the views in dictionaries."""
    if _is_view_dictionary(type_):
        return pa.dictionary(type_.index_type, pa.string())
    if pa.types.is_struct(type_):
        return pa.struct([field.with_type(_without_views(field.type)) for field in type_])
    if is_any_list(type_):
        return pa.large_list(_without_views(type_.value_type))
    return type_

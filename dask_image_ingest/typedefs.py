"""Types that annotations of many rooms share: frames, columns and arrays of either backend.

Type checkers can't follow pandas, cuDF, CuPy, DALI and Dask's dataframes, which have no type hints
of their own: for values of these, the names here are for readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    import cudf
    import cupy
    import dask.dataframe as dd
    import pandas as pd
    from nvidia.dali.backend import TensorListCPU, TensorListGPU

#: What users write for a type of Arrow: the type or its name, a type of Python or NumPy.
TypeLike: TypeAlias = pa.DataType | str | type | np.dtype

#: A number for all channels of an image, or one for each.
PerChannel: TypeAlias = float | Sequence[float] | np.ndarray

#: Rows in memory; a partition of a lazy frame.
DataFrame: TypeAlias = "pd.DataFrame | cudf.DataFrame"

#: A column in memory.
Series: TypeAlias = "pd.Series | cudf.Series"

#: Rows in memory, or a lazy frame.
AnyFrame: TypeAlias = "pd.DataFrame | cudf.DataFrame | dd.DataFrame"

#: A column in memory, or of a lazy frame.
AnySeries: TypeAlias = "pd.Series | cudf.Series | dd.Series"

#: Type of a column: NumPy's, or an extension type of pandas or cuDF.
Dtype: TypeAlias = "np.dtype | pd.api.extensions.ExtensionDtype"


class ArrowTable(Protocol):
    """Rows of any engine with Arrow's stream interface: pyarrow, Polars, DuckDB."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """A capsule of the stream of record batches."""


#: In host memory, or in that of a GPU.
Array: TypeAlias = "np.ndarray | cupy.ndarray"

#: ``numpy`` or ``cupy``.
ArrayModule: TypeAlias = ModuleType

#: DALI's images of one decode.
TensorList: TypeAlias = "TensorListCPU | TensorListGPU"

#: Images of one decode: DALI's, or a list of arrays, DALI tensors and ``ResizedImage``.
ImageBatch: TypeAlias = "TensorList | list[Any]"

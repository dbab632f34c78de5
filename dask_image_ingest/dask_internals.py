"""The private names of Dask that this package uses: dataframe expressions and graphs.

Check these first when you raise the version bounds of Dask. A test ensures that no other module
imports private names.
"""

# ruff: noqa: I001
# fmt: off
from dask._task_spec import Task, TaskRef, convert_legacy_graph, cull
from dask.dataframe.backends import DataFrameBackendEntrypoint
from dask.dataframe.dask_expr import FrameBase, new_collection
from dask.dataframe.dask_expr._accessor import FunctionMap, PropertyMap
from dask.dataframe.dask_expr._backends import dataframe_creation_dispatch
from dask.dataframe.dask_expr._concat import Concat
from dask.dataframe.dask_expr._expr import (
    EQ, GE, GT, LE, LT, NE, Abs, AddPrefix, And, Apply, Assign, AssignAlign, AsType, Between,
    Binop, Blockwise, ClearDivisions, Clip, Drop, DropnaFrame, DropnaSeries, Elemwise,
    ExplodeFrame, Expr, Fillna, Filter, FilterAlign, Fused, Head, Index, Invert, Isin, IsNa,
    Literal, Map, MapPartitions, Mask, MaybeAlignPartitions, NotNull, Or, Partitions,
    PartitionsFiltered, Projection, Query, RenameAxis, RenameFrame, RenameSeries, Replace,
    ResetIndex, Round, Sample, SetDivisions, Split, SplitTake, Tail, ToBackend, ToFrame,
    ToNumeric, Unaryop, Where, XOr, _DeepCopy, _DelayedExpr, are_co_aligned,
    determine_column_projection, is_filter_pushdown_available, plain_column_projection,
)
from dask.dataframe.dask_expr._groupby import (
    GroupByApply, GroupByUDFBlockwise, groupby_slice_apply,
)
from dask.dataframe.dask_expr._indexing import (
    Loc, LocAlign, LocElement, LocList, LocSlice, LocUnknown,
)
from dask.dataframe.dask_expr._merge import Merge
from dask.dataframe.dask_expr._reductions import (
    DropDuplicates, Len, NFirst, NLargest, NLast, NSmallest,
)
from dask.dataframe.dask_expr._repartition import Repartition
from dask.dataframe.dask_expr._shuffle import (
    AssignPartitioningIndex, BaseSetIndexSortValues, RearrangeByColumn, SetIndex, ShuffleBase,
    SortValues, _get_divisions, divisions_lru,
)
from dask.dataframe.dask_expr.io.io import BlockwiseIO, FromGraph, FromPandas
from dask.dataframe.dask_expr.io.parquet import ReadParquet
from distributed import Worker


def has_worker() -> bool:
    """True if this process has a worker of Dask, before, during and between its tasks."""
    return bool(Worker._instances)

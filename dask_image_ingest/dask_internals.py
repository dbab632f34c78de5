"""What this package uses of Dask that Dask does not promise to keep.

Expressions of its dataframe optimiser, and its graphs. Whoever raises the bounds on dask looks here
first; a test says that nothing else private is used anywhere.
"""

from dask._task_spec import Task, TaskRef, convert_legacy_graph, cull
from dask.dataframe.dask_expr import FrameBase, new_collection
from dask.dataframe.dask_expr._accessor import FunctionMap, PropertyMap
from dask.dataframe.dask_expr._concat import Concat
from dask.dataframe.dask_expr._expr import (
    EQ,
    GE,
    GT,
    LE,
    LT,
    NE,
    Abs,
    AddPrefix,
    And,
    Apply,
    Assign,
    AsType,
    Between,
    Binop,
    Blockwise,
    ClearDivisions,
    Clip,
    Drop,
    DropnaFrame,
    DropnaSeries,
    Elemwise,
    Expr,
    Fillna,
    Filter,
    FilterAlign,
    Fused,
    Head,
    Index,
    Invert,
    Isin,
    IsNa,
    Lengths,
    Literal,
    Map,
    MapPartitions,
    Mask,
    NotNull,
    Or,
    Partitions,
    PartitionsFiltered,
    Projection,
    Query,
    RenameAxis,
    RenameFrame,
    RenameSeries,
    Replace,
    ResetIndex,
    Round,
    Sample,
    SetDivisions,
    Split,
    SplitTake,
    Tail,
    ToFrame,
    ToNumeric,
    Unaryop,
    Where,
    XOr,
    _DelayedExpr,
    determine_column_projection,
    plain_column_projection,
)
from dask.dataframe.dask_expr._groupby import GroupByApply
from dask.dataframe.dask_expr._indexing import LocElement, LocList, LocSlice, LocUnknown
from dask.dataframe.dask_expr._merge import Merge
from dask.dataframe.dask_expr._reductions import (
    DropDuplicates,
    Len,
    NFirst,
    NLargest,
    NLast,
    NSmallest,
)
from dask.dataframe.dask_expr._repartition import Repartition
from dask.dataframe.dask_expr._shuffle import (
    BaseSetIndexSortValues,
    RearrangeByColumn,
    SetIndex,
    ShuffleBase,
    SortValues,
    _get_divisions,
    divisions_lru,
)
from dask.dataframe.dask_expr.io.io import BlockwiseIO, FromGraph


def draws_divisions(expr: BaseSetIndexSortValues) -> bool:
    """Whether a sort's divisions are drawn from a sample of its rows."""
    if isinstance(expr, SetIndex) and expr.operand("user_divisions") is not None:
        return False
    return bool(expr._npartitions_input > 1 and expr.frame.npartitions > 1)


def copy_divisions(expr: BaseSetIndexSortValues, other: BaseSetIndexSortValues) -> None:
    """Have ``other``, which sorts the same rows, fall into the partitions of ``expr``."""
    if isinstance(expr, SortValues):
        column, its = expr.frame[expr.by[0]], other.frame[other.by[0]]
        ascending = expr._divisions_ascending
    else:
        column, its, ascending = expr.other, other.other, expr.ascending
    partitions, upsample = expr._npartitions_input, expr.upsample
    found = _get_divisions(expr.frame, column, partitions, ascending, upsample=upsample)
    divisions_lru[(its._name, partitions, ascending, 128e6, upsample)] = found


__all__ = [
    "EQ",
    "GE",
    "GT",
    "LE",
    "LT",
    "NE",
    "Abs",
    "AddPrefix",
    "And",
    "Apply",
    "AsType",
    "Assign",
    "BaseSetIndexSortValues",
    "Between",
    "Binop",
    "Blockwise",
    "BlockwiseIO",
    "ClearDivisions",
    "Clip",
    "Concat",
    "Drop",
    "DropDuplicates",
    "DropnaFrame",
    "DropnaSeries",
    "Elemwise",
    "Expr",
    "Fillna",
    "Filter",
    "FilterAlign",
    "FrameBase",
    "FromGraph",
    "FunctionMap",
    "Fused",
    "GroupByApply",
    "Head",
    "Index",
    "Invert",
    "IsNa",
    "Isin",
    "Len",
    "Lengths",
    "Literal",
    "LocElement",
    "LocList",
    "LocSlice",
    "LocUnknown",
    "Map",
    "MapPartitions",
    "Mask",
    "Merge",
    "NFirst",
    "NLargest",
    "NLast",
    "NSmallest",
    "NotNull",
    "Or",
    "Partitions",
    "PartitionsFiltered",
    "Projection",
    "PropertyMap",
    "Query",
    "RearrangeByColumn",
    "RenameAxis",
    "RenameFrame",
    "RenameSeries",
    "Repartition",
    "Replace",
    "ResetIndex",
    "Round",
    "Sample",
    "SetDivisions",
    "SetIndex",
    "ShuffleBase",
    "SortValues",
    "Split",
    "SplitTake",
    "Tail",
    "Task",
    "TaskRef",
    "ToFrame",
    "ToNumeric",
    "Unaryop",
    "Where",
    "XOr",
    "_DelayedExpr",
    "convert_legacy_graph",
    "copy_divisions",
    "cull",
    "determine_column_projection",
    "draws_divisions",
    "new_collection",
    "plain_column_projection",
]

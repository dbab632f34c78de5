"""libcudf's functions by Arrow, as far as this package's frames come to them."""

import hashlib
import operator
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pylibcudf as plc

from simulated import strings
from simulated.columns import (
    Column,
    Scalar,
    Table,
    arrow_type,
    from_arrow,
    mask_of,
    one,
    part,
    to_arrow,
    valid_rows,
)
from simulated.counts import count
from simulated.memory import read


def arrow(value):
    """A column or scalar of the device, as Arrow."""
    return value.value if isinstance(value, Scalar) else to_arrow(value)


def numpy(value):
    return arrow(value).to_numpy(zero_copy_only=False)


def columns_of(table):
    return list(map(to_arrow, table.columns()))


def taken(table, rows):
    """The rows of a table by their numbers; a missing number makes a null."""
    rows = pa.array(rows, pa.int64())
    return Table([from_arrow(_take(column, rows)) for column in columns_of(table)])


def _take(array, rows):
    return array.take(rows) if len(array) else pa.nulls(len(rows), array.type)


def keys_of(table):
    """Rows as what Python compares, also nested ones."""
    lists = [column.to_pylist() for column in columns_of(table)]
    return [tuple(map(repr, row)) for row in zip(*lists, strict=True)]


# Rows and parts.


def gather(source, gather_map, policy, stream=None, mr=None):
    rows, length = numpy(gather_map).astype(np.int64), source.num_rows()
    if policy == plc.copying.OutOfBoundsPolicy.DONT_CHECK:
        rows = np.where(rows < 0, rows + length, rows)
    return taken(source, pa.array(rows, mask=(rows < 0) | (rows >= length)))


def slice_(source, indices, stream=None):
    pairs = list(zip(indices[::2], indices[1::2], strict=True))
    if isinstance(source, plc.Table):
        return [Table([part(c, *pair) for c in source.columns()]) for pair in pairs]
    return [part(source, *pair) for pair in pairs]


def split(source, splits, stream=None):
    rows = source.num_rows() if isinstance(source, plc.Table) else source.size()
    return slice_(source, [0, *(edge for edge in splits for _ in range(2)), rows])


def copy_if_else(left, right, mask, stream=None, mr=None):
    return from_arrow(one(pc.if_else(arrow(mask).fill_null(False), arrow(left), arrow(right))))


def get_element(column, index, stream=None, mr=None):
    return Scalar(to_arrow(column)[index])


def scatter(source, scatter_map, target, stream=None, mr=None):
    rows, made = numpy(scatter_map), []
    sources = source if isinstance(source, list) else source.columns()
    for new, array in zip(sources, columns_of(target), strict=True):
        values = array.to_pylist()
        new = [new.value.as_py()] * len(rows) if isinstance(new, Scalar) else arrow(new).to_pylist()
        for row, value in zip(rows, new, strict=True):
            values[row] = value
        made.append(from_arrow(pa.array(values, array.type)))
    return Table(made)


def boolean_mask_scatter(source, target, mask, stream=None, mr=None):
    return scatter(source, from_arrow(pa.array(_where(mask).astype(np.int32))), target)


def empty_like(source, stream=None, mr=None):
    if isinstance(source, plc.Table):
        return Table(list(map(empty_like, source.columns())))
    return from_arrow(to_arrow(source)[:0])


def shift(column, offset, fill, stream=None, mr=None):
    array = to_arrow(column)
    rows = np.arange(len(array)) - offset
    filled = pa.array([fill.value.as_py()], array.type)
    inside = (rows >= 0) & (rows < len(array))
    return from_arrow(pa.concat_arrays([array, filled]).take(np.where(inside, rows, len(array))))


def apply_mask(table, mask, stream=None, mr=None):
    return taken(table, _where(mask))


def _where(mask):
    count("waits")  # for the number of rows
    return np.flatnonzero(arrow(mask).fill_null(False))


def drop_nulls(table, keys, threshold, stream=None, mr=None):
    valid = sum(valid_rows(table.columns()[key]).astype(int) for key in keys)
    return taken(table, np.flatnonzero(valid >= threshold))


def drop_nans(table, keys, threshold, stream=None, mr=None):
    numbers = sum(
        ~pc.is_nan(to_arrow(table.columns()[key])).fill_null(False).to_numpy(False) for key in keys
    )
    return taken(table, np.flatnonzero(numbers >= threshold))


def stable_distinct(input, keys, keep, nulls_equal=None, nans_equal=None, stream=None, mr=None):
    return taken(input, _distinct_rows(Table([input.columns()[key] for key in keys]), keep))


def distinct_indices(table, keep, nulls, nans, stream=None, mr=None):
    return from_arrow(pa.array(_distinct_rows(table, keep), pa.int32()))


def _distinct_rows(table, keep):
    found = {}
    for row, key in enumerate(keys_of(table)):
        found.setdefault(key, []).append(row)
    if keep.name == "KEEP_NONE":
        return [rows[0] for rows in found.values() if len(rows) == 1]
    return sorted(rows[-1 if keep.name == "KEEP_LAST" else 0] for rows in found.values())


def concatenate(objects, stream=None, mr=None):
    objects = list(objects)
    if isinstance(objects[0], plc.Table):
        return Table([concatenate(cs) for cs in zip(*(t.columns() for t in objects), strict=True)])
    return from_arrow(pa.concat_arrays(map(to_arrow, objects)))


def partition(table, numbers, count, stream=None, mr=None):
    numbers = numpy(numbers)
    order = np.argsort(numbers, kind="stable")
    return taken(table, order), np.searchsorted(numbers[order], np.arange(count + 1)).tolist()


def repeat(table, times, stream=None, mr=None):
    times = times if isinstance(times, int) else numpy(times)
    return taken(table, np.repeat(np.arange(table.num_rows()), times))


# Values.


def of_arrow(function):
    """A function of Arrow's as one of libcudf's, of one column."""
    return lambda column, stream=None, mr=None: from_arrow(one(function(to_arrow(column))))


def cast(column, dtype, stream=None, mr=None):
    array, type_ = to_arrow(column), arrow_type(dtype)
    if pa.types.is_floating(array.type) and not pa.types.is_floating(type_):
        array = pa.array(array.fill_null(0).to_numpy().astype(np.int64), mask=~valid_rows(column))
    return from_arrow(array.cast(type_, safe=False))


_UNARY = {
    "NOT": lambda array: pc.invert(array.cast(pa.bool_())),
    "ABS": pc.abs,
    "NEGATE": pc.negate,
    "SQRT": pc.sqrt,
    "FLOOR": pc.floor,
    "CEIL": pc.ceil,
    "EXP": pc.exp,
    "LOG": pc.ln,
}


def unary_operation(column, operator, stream=None, mr=None):
    return from_arrow(_UNARY[plc.unary.UnaryOperator(operator).name](to_arrow(column)))


def _logical(of_flags, of_bits):
    return lambda x, y: (of_flags if pa.types.is_boolean(x.type) else of_bits)(x, y)


def _floats(function):
    return lambda x, y: function(pc.cast(x, pa.float64()), pc.cast(y, pa.float64()))


def _remainder(x, y):
    return pc.subtract(x, pc.multiply(pc.floor(pc.divide(x, y)), y))


_BINARY = {
    "ADD": pc.add,
    "SUB": pc.subtract,
    "MUL": pc.multiply,
    "DIV": pc.divide,
    "TRUE_DIV": _floats(pc.divide),
    "FLOOR_DIV": _floats(lambda x, y: pc.floor(pc.divide(x, y))),
    "MOD": _floats(_remainder),
    "PYMOD": _floats(_remainder),
    "POW": _floats(pc.power),
    "INT_POW": pc.power,
    "EQUAL": pc.equal,
    "NOT_EQUAL": pc.not_equal,
    "LESS": pc.less,
    "GREATER": pc.greater,
    "LESS_EQUAL": pc.less_equal,
    "GREATER_EQUAL": pc.greater_equal,
    "LOGICAL_AND": pc.and_,
    "LOGICAL_OR": pc.or_,
    "NULL_LOGICAL_AND": pc.and_kleene,
    "NULL_LOGICAL_OR": pc.or_kleene,
    "BITWISE_AND": _logical(pc.and_, pc.bit_wise_and),
    "BITWISE_OR": _logical(pc.or_, pc.bit_wise_or),
    "BITWISE_XOR": _logical(pc.xor, pc.bit_wise_xor),
}


def binary_operation(left, right, operator, dtype, stream=None, mr=None):
    name, type_ = plc.binaryop.BinaryOperator(operator).name, arrow_type(dtype)
    left, right = arrow(left), arrow(right)
    if name in ("NULL_EQUALS", "NULL_NOT_EQUALS"):
        same = pc.fill_null(pc.equal(left, right), False)
        both = pc.and_(pc.is_null(left), pc.is_null(right))
        equal = pc.or_(same, both)
        return from_arrow(one(equal if name == "NULL_EQUALS" else pc.invert(equal)))
    if name in ("ADD", "SUB", "MUL"):
        left, right = (pc.cast(value, type_, safe=False) for value in (left, right))
    return from_arrow(one(pc.cast(_BINARY[name](left, right), type_, safe=False)))


class Spread:
    """An aggregation that tells its degrees of freedom, which libcudf's does not."""

    def __init__(self, real, ddof=1):
        self.kind, self.ddof = real(ddof).kind, ddof


_SPREADS = {"STD": pc.stddev, "VARIANCE": pc.variance}


def reduce(column, aggregation, dtype, stream=None, mr=None):
    kind, array = aggregation.kind().name, to_arrow(column)
    if kind in _SPREADS:
        return Scalar(_SPREADS[kind](array, ddof=aggregation.ddof, min_count=aggregation.ddof + 1))
    array = array.cast(pa.bool_()) if kind in ("ANY", "ALL") else array
    value = getattr(pc, kind.lower())(array)
    return Scalar(pa.scalar(value.as_py(), arrow_type(dtype)))


def scan(column, aggregation, inclusive, stream=None, mr=None):
    assert inclusive == plc.reduce.ScanType.INCLUSIVE
    name = {"SUM": "sum", "MIN": "min", "MAX": "max", "PRODUCT": "prod"}[aggregation.kind().name]
    array = to_arrow(column)
    return from_arrow(getattr(pc, f"cumulative_{name}")(array, skip_nulls=True).cast(array.type))


def minmax(column, stream=None, mr=None):
    found = pc.min_max(to_arrow(column))
    return Scalar(found["min"]), Scalar(found["max"])


def distinct_count(column, nulls, nans=None, stream=None):
    count("waits")
    with_nulls = nulls == plc.types.NullPolicy.INCLUDE
    return pc.count_distinct(to_arrow(column), mode="all" if with_nulls else "only_valid").as_py()


def contains(haystack, needles, stream=None, mr=None):
    return from_arrow(pc.is_in(to_arrow(needles), to_arrow(haystack)))


def replace_nulls(column, value, stream=None, mr=None):
    array = to_arrow(column)
    return from_arrow(one(pc.coalesce(array, pc.cast(arrow(value), array.type))))


def clamp(column, low, high, low_for=None, high_for=None, stream=None, mr=None):
    array = to_arrow(column)
    if low.value.is_valid:
        array = pc.max_element_wise(array, low.value, skip_nulls=False)
    if high.value.is_valid:
        array = pc.min_element_wise(array, high.value, skip_nulls=False)
    return from_arrow(one(array))


def round_(column, digits=0, method=None, stream=None, mr=None):
    way = {"HALF_EVEN": "half_to_even", "HALF_UP": "half_towards_infinity"}[method.name]
    return from_arrow(one(pc.round(to_arrow(column), digits, way)))


def murmur(table, seed=0, stream=None, mr=None):
    digests = (hashlib.blake2b(repr(key).encode(), digest_size=4) for key in keys_of(table))
    return from_arrow(pa.array((int(d.hexdigest(), 16) for d in digests), pa.uint32()))


def quantiles(table, shares, interp=None, is_sorted=None, order=None, nulls=None, stream=None):
    rows = numpy(sorted_order(table, order, nulls))
    return taken(table, [int(rows[round(share * (len(rows) - 1))]) for share in shares])


def find_and_replace_all(column, values, replacements, stream=None, mr=None):
    array, values, replacements = map(to_arrow, (column, values, replacements))
    places = pc.index_in(array, values)
    new = pc.take(replacements, places)
    return from_arrow(one(pc.if_else(pc.is_valid(places), new, array)))


def quantile(column, shares, interpolation, ordered=None, exact=True, stream=None, mr=None):
    array = to_arrow(column)
    if ordered is not None:
        array = array.take(to_arrow(ordered))
    name = interpolation.name.lower()
    values = np.quantile(array.drop_null().to_numpy(), shares, method=name) if len(array) else []
    return from_arrow(pa.array(values, pa.float64() if exact else array.type))


def transpose(table, stream=None, mr=None):
    columns = columns_of(table)
    rows = zip(*(column.to_pylist() for column in columns), strict=True)
    return Table([from_arrow(pa.array(row, columns[0].type)) for row in rows])


def sequence(size, init, step=None, stream=None, mr=None):
    step, start = 1 if step is None else step.value.as_py(), init.value.as_py()
    return from_arrow(pa.array(start + step * np.arange(size), init.value.type))


def fill(destination, begin, end, value, stream=None, mr=None):
    array = to_arrow(destination)
    new = pa.repeat(pa.scalar(value.value.as_py(), array.type), end - begin)
    return from_arrow(pa.concat_arrays([array[:begin], new, array[end:]]))


# Masks.


def bools_to_mask(column, stream=None, mr=None):
    count("waits")
    return mask_of(np.asarray(arrow(column).fill_null(False)).astype(np.bool_))


def mask_to_bools(ptr, begin, end, stream=None, mr=None):
    bits = np.unpackbits(read(ptr, (end + 7) // 8), bitorder="little")
    return from_arrow(pa.array(bits[begin:end].astype(np.bool_)))


def column_nans_to_nulls(column, stream=None, mr=None):
    values = to_arrow(column).fill_null(0).to_numpy()
    return column.with_mask(*mask_of(valid_rows(column) & ~np.isnan(values)))


def create_null_mask(size, state=None, stream=None, mr=None):
    return mask_of(np.full(size, state != plc.types.MaskState.ALL_NULL))[0]


def null_count(mask, begin, end, stream=None):
    count("waits")
    bits = np.unpackbits(read(mask.ptr, mask.size), bitorder="little")
    return int(end - begin - bits[begin:end].sum())


def copy_bitmask(column, stream=None, mr=None):
    return mask_of(valid_rows(column))[0]


def bitmask_and(columns, stream=None, mr=None):
    return mask_of(np.logical_and.reduce(list(map(valid_rows, columns))))


# Order and joins.


def sorted_order(table, order, nulls, stream=None, mr=None):
    types = plc.types
    rows = np.arange(table.num_rows())
    keys = table.columns()
    order = order or [types.Order.ASCENDING] * len(keys)
    nulls = nulls or [types.NullOrder.BEFORE] * len(keys)
    for key, way, null in reversed(list(zip(keys, order, nulls, strict=True))):
        descending = way == types.Order.DESCENDING
        values = to_arrow(key).to_pylist()
        missing = [row for row in rows if values[row] is None]
        there = [row for row in rows if values[row] is not None]
        there.sort(key=values.__getitem__, reverse=descending)
        first = (null == types.NullOrder.BEFORE) != descending
        rows = missing + there if first else there + missing
    return from_arrow(pa.array(rows, pa.int32()))


def bound(haystack, needles, order, nulls, stream=None, mr=None, *, side):
    both = concatenate([haystack, needles])
    keys, places = keys_of(both), {}
    for row in numpy(sorted_order(both, order, nulls)):
        places.setdefault(keys[row], len(places))
    places, count = [places[key] for key in keys], haystack.num_rows()
    found = np.searchsorted(places[:count], places[count:], side)
    return from_arrow(pa.array(found, pa.int32()))


def sort_by_key(values, keys, order, nulls, stream=None, mr=None):
    return taken(values, numpy(sorted_order(keys, order, nulls)))


def sort(table, order, nulls, stream=None, mr=None):
    return sort_by_key(table, table, order, nulls)


def is_sorted(table, order, nulls, stream=None):
    return numpy(sorted_order(table, order, nulls)).tolist() == [*range(table.num_rows())]


def full_join(left, right, nulls, stream=None, mr=None):
    first, second = map(numpy, join(left, right, nulls, kind="left"))
    alone = np.setdiff1d(np.arange(right.num_rows()), second)
    nothing = np.full(len(alone), -(2**31))
    rows = (first, nothing), (second, alone)
    return tuple(from_arrow(pa.array(np.concatenate(each).astype(np.int32))) for each in rows)


def join(left, right, nulls, stream=None, mr=None, *, kind):
    places = {}
    for row, key in enumerate(keys_of(right)):
        places.setdefault(key, []).append(row)
    equal = nulls == plc.types.NullEquality.EQUAL
    found = [places.get(key, []) if equal or repr(None) not in key else [] for key in keys_of(left)]
    count("waits")
    if kind in ("semi", "anti"):
        rows = [row for row, there in enumerate(found) if bool(there) == (kind == "semi")]
        return from_arrow(pa.array(rows, pa.int32()))
    missing = [] if kind == "inner" else [-(2**31)]
    pairs = [(row, other) for row, there in enumerate(found) for other in there or missing]
    return tuple(from_arrow(pa.array([pair[n] for pair in pairs], pa.int32())) for n in (0, 1))


class GroupByRequest:
    def __init__(self, values, aggregations):
        self.values, self.aggregations = values, list(aggregations)


_AGGREGATIONS = {
    "SUM": lambda values, there: sum(there),
    "COUNT_VALID": lambda values, there: len(there),
    "COUNT_ALL": lambda values, there: len(values),
    "MIN": lambda values, there: min(there, default=None),
    "MAX": lambda values, there: max(there, default=None),
    "MEAN": lambda values, there: sum(there) / len(there) if there else None,
    "NTH_ELEMENT": lambda values, there: next(iter(there), None),
    "NUNIQUE": lambda values, there: len(set(there)),
    "STD": lambda values, there, ddof: np.std(there, ddof=ddof) if len(there) > ddof else None,
    "VARIANCE": lambda values, there, ddof: np.var(there, ddof=ddof) if len(there) > ddof else None,
    "MEDIAN": lambda values, there: np.median(there) if there else None,
}


class GroupBy:
    """Groups in the order of their keys."""

    def __init__(self, keys, null_handling=None, *args, **options):
        self._keys = keys
        lists = [column.to_pylist() for column in columns_of(keys)]
        self._groups = {}
        for row in numpy(sorted_order(keys, None, None)):
            key = tuple(values[row] for values in lists)
            if null_handling != plc.types.NullPolicy.EXCLUDE or None not in key:
                self._groups.setdefault(repr(key), []).append(row)

    def get_groups(self, values=None, stream=None, mr=None):
        rows = [row for group in self._groups.values() for row in group]
        edges = np.cumsum([0, *map(len, self._groups.values())]).tolist()
        return edges, taken(self._keys, rows), None if values is None else taken(values, rows)

    def aggregate(self, requests, stream=None, mr=None):
        keys = taken(self._keys, [group[0] for group in self._groups.values()])
        return keys, [Table([*self._aggregated(request)]) for request in requests]

    def _aggregated(self, request):
        array = to_arrow(request.values)
        for aggregation in request.aggregations:
            kind, made = aggregation.kind().name, []
            options = {"ddof": aggregation.ddof} if kind in _SPREADS else {}
            for group in self._groups.values():
                values = [array[int(row)].as_py() for row in group]
                there = [value for value in values if value is not None]
                made.append(_AGGREGATIONS[kind](values, there, **options))
            yield from_arrow(pa.array(made, _aggregated_type(kind, array.type)))


def _aggregated_type(kind, type_):
    if kind.startswith("COUNT") or kind == "NUNIQUE":
        return pa.int32()
    if kind in ("MEAN", "STD", "VARIANCE", "MEDIAN"):
        return pa.float64()
    return pa.int64() if kind == "SUM" and pa.types.is_integer(type_) else type_


# Parquet.


def write_parquet(frame, path, *args, index=None, **options):
    """By pyarrow: what libcudf writes of these types is not looked at here."""
    import pyarrow.parquet as pq

    table = frame.to_arrow(preserve_index=index)
    for place, dtype in enumerate(frame.dtypes):
        if hasattr(dtype, "to_arrow"):  # nested, and of nulls where there is no value
            column = table.column(place).cast(dtype.to_arrow())
            table = table.set_column(place, table.column_names[place], column)
    pq.write_table(table, path)


def read_parquet(path, *args, columns=None, **options):
    import cudf
    import pyarrow.parquet as pq

    from dask_image_ingest.frames.cudf.columns import as_stored

    table = pq.read_table(path, columns=columns)
    stored = pa.table([as_stored(one(c)) for c in table.columns], names=table.column_names)
    return cudf.DataFrame.from_arrow(stored.replace_schema_metadata(table.schema.metadata))


_FUNCTIONS = {
    "copying": {
        "gather": gather,
        "slice": slice_,
        "split": split,
        "copy_if_else": copy_if_else,
        "get_element": get_element,
        "scatter": scatter,
        "boolean_mask_scatter": boolean_mask_scatter,
        "shift": shift,
        "empty_like": empty_like,
    },
    "stream_compaction": {
        "apply_retention_mask": apply_mask,
        "apply_boolean_mask": apply_mask,
        "drop_nulls": drop_nulls,
        "drop_nans": drop_nans,
        "stable_distinct": stable_distinct,
        "distinct_indices": distinct_indices,
    },
    "concatenate": {"concatenate": concatenate},
    "unary": {
        "is_null": of_arrow(pc.is_null),
        "is_valid": of_arrow(pc.is_valid),
        "is_nan": of_arrow(lambda array: pc.is_nan(array).fill_null(False)),
        "is_not_nan": of_arrow(lambda array: pc.invert(pc.is_nan(array).fill_null(False))),
        "cast": cast,
        "unary_operation": unary_operation,
    },
    "binaryop": {"binary_operation": binary_operation},
    "reduce": {
        "reduce": reduce,
        "scan": scan,
        "minmax": minmax,
        "distinct_count": distinct_count,
        "unique_count": distinct_count,
    },
    "sorting": {
        "sorted_order": sorted_order,
        "stable_sorted_order": sorted_order,
        "sort_by_key": sort_by_key,
        "stable_sort_by_key": sort_by_key,
        "sort": sort,
        "stable_sort": sort,
        "is_sorted": is_sorted,
    },
    "join": {
        "inner_join": partial(join, kind="inner"),
        "left_join": partial(join, kind="left"),
        "full_join": full_join,
        "left_semi_join": partial(join, kind="semi"),
        "left_anti_join": partial(join, kind="anti"),
    },
    "filling": {"sequence": sequence, "repeat": repeat, "fill": fill},
    "transform": {
        "bools_to_mask": bools_to_mask,
        "mask_to_bools": mask_to_bools,
        "column_nans_to_nulls": column_nans_to_nulls,
    },
    "null_mask": {
        "create_null_mask": create_null_mask,
        "null_count": null_count,
        "copy_bitmask": copy_bitmask,
        "bitmask_and": bitmask_and,
    },
    "lists": {"count_elements": of_arrow(lambda array: array.value_lengths().cast(pa.int32()))},
    "hashing": {"murmurhash3_x86_32": murmur},
    "partitioning": {"partition": partition},
    "search": {
        "contains": contains,
        "lower_bound": partial(bound, side="left"),
        "upper_bound": partial(bound, side="right"),
    },
    "replace": {
        "replace_nulls": replace_nulls,
        "clamp": clamp,
        "find_and_replace_all": find_and_replace_all,
    },
    "round": {"round": round_},
    "aggregation": {
        "std": partial(Spread, plc.aggregation.std),
        "variance": partial(Spread, plc.aggregation.variance),
    },
    "quantiles": {"quantiles": quantiles, "quantile": quantile},
    "transpose": {"transpose": transpose},
    "groupby": {"GroupBy": GroupBy, "GroupByRequest": GroupByRequest},
    **{f"strings.{module}": functions for module, functions in strings.FUNCTIONS.items()},
}


def install():
    """Put these in libcudf's place, before cuDF is imported."""
    for module, functions in _FUNCTIONS.items():
        for name, function in functions.items():
            real = operator.attrgetter(module)(plc)
            assert hasattr(real, name), f"pylibcudf.{module} has no {name}"
            setattr(real, name, function)
    plc.Column, plc.Table, plc.Scalar = Column, Table, Scalar

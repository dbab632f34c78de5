"""What random queries are composed of: each step gives text, or None where it does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from query_text import CONSTANTS, LEFT_OUT, NUMBERS, Query

LOCATION_COLUMNS = {"__url__", "offset", "nbytes"}


class Step(NamedTuple):
    """A part of queries: how often it comes, and whether its text means the same in pandas."""

    text: Callable[[Query], str | None]
    weight: float
    portable: bool


STEPS: list[Step] = []
ENDS: list[Step] = []


def step(weight: float = 1, *, portable: bool = False, among: list[Step] = STEPS) -> Callable:
    """Register what makes another frame or series."""

    def register(text: Callable[[Query], str | None]) -> Callable:
        among.append(Step(text, weight, portable))
        return text

    return register


def end(weight: float = 1, *, portable: bool = False) -> Callable:
    """Register what asks for an answer."""
    return step(weight, portable=portable, among=ENDS)


def add(query: Query, chosen: Step) -> bool:
    """Add a step to a query; False where it does not fit."""
    text = chosen.text(query)
    return text is not None and query.grow(chosen.text.__name__, text, chosen.portable)


def finish(query: Query, chosen: Step) -> bool:
    """Ask a query for an answer; False where there is none."""
    text = chosen.text(query)
    return text is not None and query.finish(chosen.text.__name__, text, chosen.portable)


# Rows and columns.


@step(6, portable=True)
def filter_by_its_own(q: Query) -> str | None:
    a = q.frame()
    predicate = q.predicate(a)
    return predicate and f"{a}[{predicate}]"


@step(3)
def filter_by_another(q: Query) -> str | None:
    predicate = q.predicate(q.frame())
    return predicate and f"{q.frame()}[{predicate}]"


@step(2, portable=True)
def mask(q: Query) -> str | None:
    return q.predicate(q.frame())


@step(20)  # where there is a mask
def filter_by_mask(q: Query) -> str | None:
    masks = [n for n in q.names if "bool" in str(getattr(q.plain[n], "dtype", ""))]
    frames = [n for n in q.names if n not in masks]
    return f"{q.rng.choice(frames)}[{q.rng.choice(masks)}]" if masks else None


@step(3, portable=True)
def filter_by_text(q: Query) -> str | None:
    a = q.frame()
    numbers = [c for c in q.columns(a, *NUMBERS) if c in CONSTANTS]
    if not numbers:
        return None
    column, other = q.rng.choice(numbers), q.rng.choice(numbers)
    constant = q.rng.choice(CONSTANTS[column])
    told = [f"{column} > {constant}", f"{column} * 2 >= {other}"]
    told += [f"not ({column} == {constant}) or {column}.isna()"]
    if "txt" in q.columns(a, "text"):
        told += [f'txt == "cat" and {column} <= {constant}', "txt.str.contains('a')"]
    if "error" in q.columns(a, "text"):
        told += [f"error.isna() and {column} > {constant}"]
    return f"{a}.query({q.rng.choice(told)!r})"


@step(0.5)
def filter_by_text_of_a_partition(q: Query) -> str | None:
    a = q.frame()
    column = q.column(a, *NUMBERS)
    return column and f"{a}.query('{column} > {column}.mean()')"


@step(1, portable=True)
def filter_a_column(q: Query) -> str | None:
    a = q.frame()
    column, predicate = q.column(a), q.predicate(a, 1)
    return predicate and f"{a}[{column!r}][{predicate}]"


@step(4, portable=True)
def projection(q: Query) -> str | None:
    a = q.frame()
    return f"{a}[{q.some(q.columns(a))!r}]"


@step(1, portable=True)
def without_pixels(q: Query) -> str | None:
    a = q.frame()
    made = [c for c in ("image", "error") if c in q.columns(a)]
    return f"{a}.drop(columns={made!r})" if made else None


@step(2, portable=True)
def one_column(q: Query) -> str | None:
    a = q.frame()
    return f"{a}[{q.column(a)!r}]"


@step(2, portable=True)
def rename(q: Query) -> str | None:
    a = q.frame()
    old = q.column(a)
    return None if old is None else f"{a}.rename(columns={{{old!r}: {old + '_new'!r}}})"


@step(0.5, portable=True)
def as_another_type(q: Query) -> str | None:
    a = q.frame()
    column = q.column(a, "int")
    return column and f"{a}.astype({{{column!r}: 'double[pyarrow]'}})"


@step(1, portable=True)
def other_values(q: Query) -> str | None:
    a = q.frame()
    text, number = q.column(a, "text"), q.column(a, "int")
    changed = [f"fillna({{{text!r}: 'none'}})"] * bool(text)
    changed += [f"replace({{{number!r}: {{1: 7}}}})"] * bool(number)
    return f"{a}.{q.rng.choice(changed)}" if changed else None


@step(1)
def optimized(q: Query) -> str | None:
    return f"{q.frame()}.optimize(fuse=False)"


@step(0.5)
def largest(q: Query) -> str | None:
    a = q.frame()
    # Of equal values the first rows count, and after a shuffle any may be these.
    column = None if any("shuffle" in line for line in q.lines) else q.column(a, "int")
    return column and f"{a}.{q.rng.choice(['nlargest', 'nsmallest'])}(3, {column!r})"


@step(0.5, portable=True)
def without_nulls(q: Query) -> str | None:
    a = q.frame()
    key = q.column(a, "int", "text", "float", "image")
    return key and f"{a}.dropna(subset=[{key!r}])"


# New columns, and two frames side by side.


@step(2, portable=True)
def assign_area(q: Query) -> str | None:
    a = q.frame()
    fits = {"height", "width"}.issubset(q.columns(a, "int"))
    return f"{a}.assign(area={a}['height'] * {a}['width'])" if fits else None


@step(3, portable=True)
def assign(q: Query) -> str | None:
    a = q.frame()
    column, other = q.column(a, *NUMBERS), q.column(a, *NUMBERS)
    this = f"{a}[{column!r}]"
    made = q.rng.choice([f"{this} + {a}[{other!r}]", f"{this} * 2", f"{this}.fillna(0)"])
    return column and f"{a}.assign(n={made})"


@step(1, portable=True)
def assign_text(q: Query) -> str | None:
    a = q.frame()
    column = q.column(a, "text")
    return column and f"{a}.assign({q.rng.choice(['txt', 'up'])}={a}[{column!r}].str.upper())"


@step(2)
def assign_of_another(q: Query) -> str | None:
    a, b = q.frame(), q.frame()
    assigned = f"{a}.assign(other={b}[{q.column(b)!r}])"
    return None if _adds_rows(q, a, assigned) else assigned


def _adds_rows(q: Query, frame: str, assigned: str) -> bool:
    """Pandas gives an empty partition the rows of its first column, if that is ever made."""
    try:
        before, after = (
            eval(each, q.plain).map_partitions(len).compute().tolist() for each in (frame, assigned)
        )
    except Exception:
        return False  # makes no sense, as `grow` will find
    return before != after


@step(2)
def assign_of_a_filter(q: Query) -> str | None:
    a = q.frame()
    predicate, column = q.predicate(a, 1), q.column(a)
    return predicate and f"{a}.assign(other={a}[{predicate}][{column!r}])"


@step(2)
def two_columns(q: Query) -> str | None:
    a, b = q.frame(), q.frame()
    left, right = q.column(a, "int"), q.column(b, "int")
    operator = q.rng.choice(["+", "-", "<", "=="])
    return left and right and f"{a}[{left!r}] {operator} {b}[{right!r}]"


@step(1)
def combine_first(q: Query) -> str | None:
    a, b = q.frame(), q.frame()
    left, right = q.column(a, "int"), q.column(b, "int")
    return left and right and f"{a}[{left!r}].combine_first({b}[{right!r}])"


@step(2)
def concat(q: Query) -> str | None:
    a, b = q.frame(), q.frame()
    return f"dd.concat([{a}, {b}])" if _have_the_same_columns(q, a, b) else None


@step(1)
def concat_of_three(q: Query) -> str | None:
    a = q.frame()
    return f"dd.concat([{a}, {a}, d])" if _have_the_same_columns(q, a, "d") else None


def _have_the_same_columns(q: Query, a: str, b: str) -> bool:
    """Dask leaves out a frame that has none of the columns that are asked of a concat."""
    return set(q.columns(a)) == set(q.columns(b))


@step(1)
def merge(q: Query) -> str | None:
    if any("merge" in line for line in q.lines):  # or rows multiply
        return None
    a, b = q.frame(), q.frame()
    keys = [c for c in ("__key__", "cls") if c in q.columns(a) and c in q.columns(b)]
    if not keys:
        return None
    key = q.rng.choice(keys)
    others = [c for c in q.columns(b) if c != key]
    columns = [key, *q.rng.sample(others, min(len(others), q.rng.randint(0, 3)))]
    how = q.rng.choice(["inner", "left", "outer"])
    return f"{a}.merge({b}[{columns!r}], on={key!r}, how={how!r})"


# Pixels.


@step(4, portable=True)
def late_decode(q: Query) -> str | None:
    a = q.frame()
    errors = q.rng.choice(["", "", ", errors='drop'"])
    return f"decode_images({a}{errors})" if LOCATION_COLUMNS.issubset(q.columns(a)) else None


@step(3, portable=True)
def map_over_batches(q: Query) -> str | None:
    a = q.frame()
    return f"map_batches({a})" if len(q.columns(a, "image")) == 1 else None


@step(4, portable=True)
def assign_of_pixels(q: Query) -> str | None:
    a = q.frame()
    if len(q.columns(a, "image")) != 1:
        return None
    light, number = f"map_batches({a})['light']", q.column(a, *NUMBERS)
    made = q.rng.choice([light, f"{light} * 2", f"{light} > 128"])
    if number and q.chance(0.3):
        made = f"{light} + {a}[{number!r}]"
    return f"put({a}, 'lit', {made})" if q.chance(0.3) else f"{a}.assign(lit={made})"


@step(3, portable=True)
def assign_of_masks(q: Query) -> str | None:
    a = q.frame()
    left, right = q.column(a, "bool"), q.column(a, "bool")
    return left and f"{a}.assign(both={a}[{left!r}] {q.rng.choice('&|')} ~{a}[{right!r}])"


@step(3, portable=True)
def issues(q: Query) -> str | None:
    a = q.frame()
    again = any(column.startswith("issue.") for column in q.columns(a))
    return f"find_issues({a})" if len(q.columns(a, "image")) < 2 and not again else None


# Rows by their place, and partitions.


def _is_sorted(q: Query) -> bool:
    """Dask can't give one column of a sorted frame's head: it forgets the one it sorts by."""
    return any("sort_values" in line for line in q.lines)


@step(2)
def head(q: Query) -> str | None:
    if _is_sorted(q):
        return None
    n, partitions = q.rng.choice([0, 1, 2, 3, 5, 7, 40, -1, -2]), q.rng.choice([1, 1, 2, -1])
    # Of a head of a head, dask makes one of as many rows as the lesser number says: -1 is less.
    n = abs(n) if any("head(" in line for line in q.lines) else n
    return f"{q.pick(1, 2)}.head({n}, npartitions={partitions}, compute=False)"


@step(1)
def tail(q: Query) -> str | None:
    if _is_sorted(q):
        return None
    return f"{q.pick(1, 2)}.tail({q.rng.choice([0, 1, 2, 3, 7, 40])}, compute=False)"


@step(3)
def some_partitions(q: Query) -> str | None:
    a = q.pick(1, 2)
    n = q.plain[a].npartitions
    start, stop = sorted(q.rng.sample(range(n + 1), 2))
    chosen = [q.rng.randrange(n) for _ in range(q.rng.randint(1, 3))]
    return f"{a}.partitions[{q.rng.choice([f'{start}:{stop}', f'{start}', repr(chosen)])}]"


@step(1)
def loc(q: Query) -> str | None:
    a = q.frame()
    places = [
        f":{2**61}",
        f"{2**61}:",
        "[1, 2]",
        f":, {q.some(q.columns(a))!r}",
        f"{q.predicate(a, 1)}",
    ]
    return f"{a}.loc[{q.rng.choice(places)}]"


@step(1)
def cumulated(q: Query) -> str | None:
    a = q.frame()
    column = q.column(a, "int")
    return column and f"{a}[{column!r}].{q.rng.choice(['cumsum', 'cummax'])}()"


@step(0.5)
def shifted(q: Query) -> str | None:
    a = q.frame()
    column = q.column(a, "int", "text")
    return column and f"{a}[{column!r}].shift(1)"


@step(1)
def sample(q: Query) -> str | None:
    return f"{q.frame()}.sample(frac={q.rng.choice([0.3, 0.5])}, random_state=1)"


@step(1)
def per_partition(q: Query) -> str | None:
    return f"{q.pick(1, 2)}.map_partitions({q.rng.choice(['first_two', 'first_two', 'rows'])})"


@step(1)
def repartition(q: Query) -> str | None:
    return f"{q.pick(1, 2)}.repartition(npartitions={q.rng.choice([1, 2, 3, 8])})"


@step(1)
def persist(q: Query) -> str | None:
    return f"{q.pick(1, 2)}.persist()"


@step(1)
def persist_two(q: Query) -> str | None:
    return f"*dask.persist({q.pick(1, 2)}, {q.pick(1, 2)})"


# Groups and order.


@step(0.5)
def by_group(q: Query) -> str | None:
    a = q.frame()
    key, number = q.column(a, "int", "text"), q.column(a, "int")
    how = q.rng.choice(["sum", "max", "count"])
    made = f"{a}.groupby({key!r}, dropna=False)[{number!r}].{how}().to_frame()"
    return made if key and number and key != number and not _is_cut_by_values(q) else None


def _is_cut_by_values(q: Query) -> bool:
    """Groups come as they are met, so by partitions, and a filter that goes below moves cuts."""
    return any("sort_values" in line or "set_index" in line for line in q.lines)


@step(1)
def distinct(q: Query) -> str | None:
    a = q.frame()
    key = q.column(a, "int", "text")
    return key and f"{a}.drop_duplicates(subset=[{key!r}])"


@step(1)
def in_order(q: Query) -> str | None:
    a = q.frame()
    column = q.column(a, "int")
    return column and f"{a}.sort_values({column!r})"


@step(0.7)
def indexed(q: Query) -> str | None:
    a = q.frame()
    return f"{a}.set_index('offset')" if "offset" in q.columns(a) else None


@step(2)
def shuffled(q: Query) -> str | None:
    a = q.frame()
    column = q.column(a, "int")
    return column and f"{a}.shuffle({column!r})"


@step(1)
def moved_twice(q: Query) -> str | None:
    a = q.frame()
    first, second = q.column(a, "int", "text"), q.column(a, "int")
    return first and second and f"{a}.shuffle({first!r}).sort_values({second!r})"


@step(0.5)
def split_off(q: Query) -> str | None:
    part = q.rng.randrange(2)
    return f"{q.frame()}.random_split([0.6, 0.4], random_state={q.rng.randrange(9)})[{part}]"


@step(0.5)
def in_groups(q: Query) -> str | None:
    a = q.frame()
    key = q.column(a, "int", "text")
    return key and f"with_group_sizes({a}, {key!r})"


@step(0.7)
def by_their_pixels(q: Query) -> str | None:
    a = q.frame()
    key = q.column(a, "int", "text")
    if key is None or len(q.columns(a, "image")) != 1:
        return None
    how = q.rng.choice(["", ", dropna=False", ", group_keys=False"])
    return f"{q.rng.choice(['with_group_light', 'group_light'])}({a}, {key!r}{how})"


# What asks for an answer.


@end(8, portable=True)
def everything(q: Query) -> str | None:
    return f"compute({q.names[-1]})"


@end(2, portable=True)
def length(q: Query) -> str | None:
    return f"len({q.names[-1]})"


@end(1, portable=True)
def labels(q: Query) -> str | None:
    merged = any("merge" in line for line in q.lines)
    return None if merged else f"compute({q.names[-1]}.index)"


@end(2)
def lengths(q: Query) -> str | None:
    return f"layout({q.names[-1]})"


@end(1)
def in_other_ways(q: Query) -> str | None:
    return f"{q.rng.choice(['by_partition', 'each_partition', 'unfused'])}({q.names[-1]})"


@end(2)
def two_at_once(q: Query) -> str | None:
    return f"compute_both({q.names[-1]}, {q.rng.choice(q.names)})"


@end(2)
def two_columns_at_once(q: Query) -> str | None:
    a = q.frame()
    return f"compute_both({a}[{q.column(a)!r}], {a}[{q.column(a)!r}])"


@end(2)
def first_rows(q: Query) -> str | None:
    if _is_sorted(q):
        return None
    n, partitions = q.rng.choice([1, 3, 7]), q.rng.choice([1, -1])
    return f"{q.names[-1]}.head({n}, npartitions={partitions})"


@end(1)
def last_rows(q: Query) -> str | None:
    if _is_sorted(q):
        return None
    return f"{q.names[-1]}.tail({q.rng.choice([1, 3, 20])})"


@end(1)
def as_array(q: Query) -> str | None:
    a = q.frame()
    column = q.column(a, *NUMBERS)
    return column and f"{a}[[{column!r}]].to_dask_array(lengths=True).compute()"


@end(2, portable=True)
def total(q: Query) -> str | None:
    a = q.frame()
    column = q.column(a, "int")
    return column and f"compute({a}[{column!r}].{q.rng.choice(['sum', 'count', 'nunique'])}())"


@end(1)
def extremes(q: Query) -> str | None:
    # Of no rows, pandas says that they are null and dask that they are NaN.
    a = q.frame()
    column = q.column(a, "int")
    return column and f"compute({a}[{column!r}].{q.rng.choice(['min', 'max'])}())"


@end(2)
def group_sizes(q: Query) -> str | None:
    a = q.frame()
    key = q.column(a, "int", "text", "bool")
    order = ".sort_index()" if _is_cut_by_values(q) else ""
    return key and f"compute({a}.groupby({key!r}).size()){order}"


@end(1)
def counts(q: Query) -> str | None:
    a = q.frame()
    key = q.column(a, "int", "text", "bool")
    return key and f"compute({a}[{key!r}].value_counts(dropna=False))"


@end(0.5)
def without_index(q: Query) -> str | None:
    # An end, since dask moves filters that follow below it, where they find other labels.
    return f"compute({q.names[-1]}.reset_index({q.rng.choice(['', 'drop=True'])}))"


@end(0 if "stack" in LEFT_OUT else 1)
def stacked(q: Query) -> str | None:
    a = q.frame()
    images = f"{a}.dropna(subset=['image']).images.stack()"
    return f"compute({images})" if "image" in q.columns(a, "image") else None

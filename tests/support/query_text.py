"""A random query: lines of Python, each run lazily and over the same rows in memory."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import dask
from dask.dataframe.dask_expr._expr import Filter, FilterAlign, MaybeAlignPartitions
from query_answers import answer, difference, outcome, unlabelled
from query_sources import Source
from query_words import namespaces

# Faults that are known and stand elsewhere: what meets them is left out until they are mended.
LEFT_OUT = {
    "fractions": "an integer column beyond 2**24 against a float constant raises",
    "stack": "stack of partitions of which one is empty has no shape",
}

KINDS = {
    "int": ("int32[pyarrow]", "int64[pyarrow]"),
    "float": ("float[pyarrow]", "double[pyarrow]", "float32", "float64"),
    "text": ("string",),
    "bool": ("bool[pyarrow]", "boolean", "bool"),
    "image": ("image",),
}
NUMBERS = ("int", "float")
COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
CONSTANTS = {
    "quality.aspect": [0.4, 0.7],
    "quality.dark": [0.9, 0.97],
    "quality": [0.1, 0.5],
    "issue": [True, False],
    "lit": [100.0, 250.0],
    "width": [0, 12, 13, 20, 31],
    "height": [8, 16, 20, 24],
    "cls": [0, 1, 2, 3],
    "offset": [512, 3000, 8000],
    "nbytes": [300, 700, 1500],
    "channels": [1, 3],
    "score": [-1.5, 0.25, 0.5, 0.6],
    "txt": ["cat", "dog", "", "b"],
    "name": ["x", "y"],
    "format": ["jpeg", "png"],
    "error": ["missing", "truncated"],
    "flag": [True, False],
    "__key__": ["0003", "0010", "0015"],
    "light": [100.0, 128.0],
    "area": [100, 300],
}
if "fractions" not in LEFT_OUT:
    CONSTANTS |= {"cls": [0, 1.5, 2.0, 2.0**53], "offset": [511.5, 1e6]}

# What moves rows about.
MOVES = re.compile(
    r"shuffle|sort_values|set_index|merge|drop_duplicates|sample|random_split|repartition|largest|smallest|optimize"
    r"|loc|group_sizes\(|group_light\("
)


class Difference(Exception):
    """Two answers to one query."""


@dataclass
class Query:
    """A query in the making: its lines, and the names that they gave to frames and series."""

    rng: random.Random
    source: Source
    lines: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=lambda: ["d"])
    asked: Counter = field(default_factory=Counter)
    # Names that mean the same in pandas.
    portable: set[str] = field(default_factory=lambda: {"d"})

    def __post_init__(self) -> None:
        self.lazy, self.plain, self.whole = namespaces(self.source)

    def grow(self, kind: str, expression: str, portable: bool) -> bool:
        """Add a line that makes a frame or series; False where it makes no sense.

        An expression that begins with ``*`` makes two.
        """
        several = expression.startswith("*")
        name = f"v{len(self.names)}"
        made = [name, f"{name}b"] if several else [name]
        line = f"{', '.join(made)} = {expression.lstrip('*')}"
        try:
            exec(line, self.plain)
            want = [_outline(self.plain[each]) for each in made]
            if any(is_mistaken(self.plain[each]) for each in made):
                return False
        except Exception:
            return False
        self.lines.append(line)
        try:
            exec(line, self.lazy)
            got = [_outline(self.lazy[each]) for each in made]
        except Exception as error:
            if self._is_senseless(lambda names: exec(line, {**names}), error):
                self.lines.pop()
                return False
            raise Difference(f"raises {type(error).__name__}: {error}") from error
        # Dask moves the rows of a read and of what was optimised of it, to pair them: their order
        # is another then.
        if any(_is_aligned(self.lazy[n]) and not _is_aligned(self.plain[n]) for n in made):
            self.lines.pop()
            return False
        if self._is_cut_anew() and _dtypes(got) == _dtypes(want) and got != want:
            self.lines.pop()
            return False
        compare(got, want, "in memory")
        if portable and self._names_in(expression) <= self.portable:
            self.portable.update(made)
        self.names += made
        self.asked[kind] += 1
        return True

    def finish(self, kind: str, expression: str, portable: bool) -> bool:
        """Ask, and compare the answers; False where the query makes no sense."""
        want, error = outcome(lambda: eval(expression, self.plain))
        if error is not None:
            return False
        got, error = outcome(lambda: eval(expression, self.lazy))
        if error is not None and self._is_senseless(lambda names: eval(expression, names), error):
            return False
        self.lines.append(expression)
        if error is not None:
            raise Difference(f"raises {type(error).__name__}: {error}") from error
        if self._is_cut_anew() and got != want:
            self.lines.pop()
            return False
        self._compare(got, want, "in memory")
        self.asked[kind] += 1
        self._compare_moved(expression, got)
        if portable and self._names_in(expression) <= self.portable:
            in_pandas, error = outcome(lambda: self._in_pandas(expression))
            if error is None:
                self._compare(got, in_pandas, "pandas")
                self.asked["pandas"] += 1
        return True

    def _compare_moved(self, expression: str, got: Any) -> None:
        """Where rows were moved, compare with the same query whose pixels are moved with them."""
        if not MOVES.search("\n".join(self.lines)):
            return
        with dask.config.set({"image-ingest.decode-late": False}):
            moved, error = outcome(lambda: eval(expression, self.lazy))
        if error is None:
            self._compare(got, moved, "decoded first")
            self.asked["moved"] += 1

    def _compare(self, got: Any, want: Any, witness: str) -> None:
        """Raise where two answers differ, but for labels that dask gives to joined rows.

        It numbers them anew where it can move a filter of theirs below the merge, else not.
        """
        if any("merge" in line for line in self.lines):
            got, want = unlabelled(got), unlabelled(want)
        compare(got, want, witness)

    def _is_senseless(self, ask: Callable[[dict[str, Any]], Any], error: Exception) -> bool:
        """Whether the answer in memory is an error as well, or there is none where filters stay.

        Dask makes one mask of two filters. A mask that lacks rows of its frame is an error in
        pandas; joined with another it is none. Joined, the second is asked of rows that the first
        leaves out: a null is no number. The length of a filter of a filtered, deduplicated frame
        joins masks of different rows (frames in memory raise the same, as of Dask 2026.8).
        """
        with mock.patch.object(Filter, "_simplify_up", return_value=None):
            _, as_written = outcome(lambda: ask(self.plain))
            _, unjoined = outcome(lambda: ask(self.lazy))
        return type(as_written) is type(error) or unjoined is None

    def _is_cut_anew(self) -> bool:
        """Whether the last line shows partitions of sorted rows, which dask may cut otherwise.

        It cuts where the values that it sorts are, and those are fewer once it has moved a filter
        below the sort. Over a read it moves more filters than in memory.
        """
        sorts = any(re.search("set_index|sort_values", line) for line in self.lines)
        return sorts and bool(re.search(r"optimize|partition|layout", self.lines[-1]))

    def _in_pandas(self, expression: str) -> Any:
        for line in self.lines[:-1]:
            if line.split(" = ")[0] in self.portable:
                exec(line, self.whole)
        return eval(expression, self.whole)

    def _names_in(self, expression: str) -> set[str]:
        return {*re.findall(r"\w+", expression)}.intersection(self.names)

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def pick(self, *ndims: int) -> str | None:
        """A name that was made, rather the last one."""
        fitting = [n for n in self.names if getattr(self.plain[n], "ndim", 0) in ndims]
        if not fitting:
            return None
        return fitting[-1] if self.chance(0.6) else self.rng.choice(fitting)

    def frame(self) -> str:
        return self.pick(2) or "d"

    def columns(self, name: str, *kinds: str) -> list[str]:
        """The columns of a frame that are of some kinds, or all."""
        dtypes = self.plain[name]._meta.dtypes
        wanted = {dtype for kind in kinds for dtype in KINDS[kind]}
        return [c for c, dtype in dtypes.items() if not kinds or str(dtype) in wanted]

    def column(self, name: str, *kinds: str) -> str | None:
        found = self.columns(name, *kinds)
        return self.rng.choice(found) if found else None

    def some(self, columns: list[str]) -> list[str]:
        return self.rng.sample(columns, self.rng.randint(1, len(columns)))

    def condition(self, name: str) -> str | None:
        """What is true for some rows of a frame."""
        column = self.column(name)
        if column is None:
            return None
        this = f"{name}[{column!r}]"
        constant = self.rng.choice(next((v for k, v in CONSTANTS.items() if k in column), [None]))
        if constant is None or self.chance(0.15):
            return self.rng.choice([f"{this}.isna()", f"{this}.notnull()"])
        compared = f"({this} {self.rng.choice(COMPARISONS)} {constant!r})"
        if self.chance(0.6):
            return compared
        others = [f"{this}.isin([{constant!r}])", f"({constant!r} != {this})"]
        if column in self.columns(name, "int"):
            # Of nulls, which are gone where bad images were dropped, there are no such numbers.
            others += [f"({this}.astype('int64') > {constant!r})"]
        if column in self.columns(name, "text"):
            others += [f"{this}.str.contains('a', na=False)", f"({this}.str.len() > 2)"]
        if column in self.columns(name, *NUMBERS):
            other = self.column(name, *NUMBERS)
            others += [f"({this} * 2 > {constant!r})", f"({this} <= {name}[{other!r}])"]
            # No cumulative sums: dask adds up other rows when it joins filters.
            others += [f"({this} > {this}.mean())"]
        return self.rng.choice(others)

    def predicate(self, name: str, depth: int = 2) -> str | None:
        """Conditions on a frame, joined."""
        if depth == 0 or self.chance(0.5):
            return self.condition(name)
        left, right = self.predicate(name, depth - 1), self.predicate(name, depth - 1)
        if left is None or right is None:
            return None
        return self.rng.choice([f"({left} & {right})", f"({left} | {right})", f"~{left}"])


def compare(got: Any, want: Any, witness: str) -> None:
    """Raise where two answers differ."""
    if got != want:
        place, got, want = difference(got, want)
        raise Difference(f"got{place} {got!r:.500}\n  {witness}: {want!r:.500}")


def is_mistaken(made: Any) -> bool:
    """Whether dask answers wrongly of frames in memory too, as far as is known of Dask 2026.8."""
    filters = [node for node in made.expr.walk() if isinstance(node, _FILTERS)]
    return (
        _is_joined_unaligned(filters)
        or any(isinstance(node.predicate, _FILTERS) for node in filters)
        or _has_too_many_divisions(made)
        or _moves_columns(made)
    )


_FILTERS = (Filter, FilterAlign)


def _is_aligned(made: Any) -> bool:
    return any(isinstance(node, MaybeAlignPartitions) for node in made.expr.walk())


def _is_joined_unaligned(filters: list[Any]) -> bool:
    """Whether dask would join a filter with one whose mask it has to align, and align it no more.

    As of ``v = d[mask]``, then ``v[v.w > 2]``. Where the mask is a filter itself it is worse:
    ``d[d.flag[d.text == "a"]]`` is a series.
    """
    return len(filters) > 1 and any(isinstance(node, FilterAlign) for node in filters)


def _has_too_many_divisions(made: Any) -> bool:
    """Whether there are more than for its partitions: ``d.partitions[[1]].repartition(1)``."""
    return len(made.divisions) != made.npartitions + 1


def _moves_columns(made: Any) -> bool:
    """Whether columns are in another order after the optimiser, as of three assigns: a, b and a."""
    return made.ndim == 2 and list(made.optimize(fuse=False).columns) != list(made.columns)


def _dtypes(outlines: list[Any]) -> list[str]:
    return [dtypes for *_, dtypes in outlines]


def _outline(made: Any) -> Any:
    """What is known of a collection without computing it."""
    dtypes = made._meta.dtypes if made.ndim == 2 else made._meta.dtype
    return made.npartitions, answer(made.divisions), str(dtypes)

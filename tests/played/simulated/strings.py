"""libcudf's functions of strings by Python's."""

import re

import pyarrow as pa
import pyarrow.compute as pc
import pylibcudf as plc

from simulated.columns import Scalar, Table, arrow_type, from_arrow, one, to_arrow


def of_text(function, type_):
    """A function of one text as one of libcudf's, of a column; what is null stays so."""

    def of_column(column, *args, stream=None, mr=None):
        args = [arg.value.as_py() if isinstance(arg, Scalar) else arg for arg in args]
        texts = to_arrow(column).to_pylist()
        made = [None if text is None else function(text, *args) for text in texts]
        return from_arrow(pa.array(made, type_))

    return of_column


def of_texts(function):
    return of_text(function, pa.string())


class RegexProgram:
    """A pattern, as Python understands it."""

    def __init__(self, pattern, flags):
        kinds = plc.strings.regex_flags.RegexFlags
        names = [name for name in ("DOTALL", "IGNORECASE", "MULTILINE") if flags & kinds[name]]
        self._pattern = re.compile(pattern, sum(getattr(re, name) for name in names))
        for name in ("search", "match", "findall", "sub", "groups"):
            setattr(self, name, getattr(self._pattern, name))

    create = classmethod(lambda cls, pattern, flags: cls(pattern, flags))


def _strip(text, side, characters):
    strip = {"LEFT": str.lstrip, "RIGHT": str.rstrip, "BOTH": str.strip}[side.name]
    return strip(text, characters or None)


def _parts(text, delimiter, most):
    return text.split(delimiter or None, most if most and most > 0 else -1)


def _parts_from_the_right(text, delimiter, most):
    return text.rsplit(delimiter or None, most if most and most > 0 else -1)


def _table(split):
    """Parts by their number, each in a column; null where a text has fewer."""

    def of_column(column, *args, stream=None, mr=None):
        rows = to_arrow(of_text(split, pa.list_(pa.string()))(column, *args)).to_pylist()
        count = max((len(row) for row in rows if row is not None), default=0)
        parts = [[row[n] if row and n < len(row) else None for row in rows] for n in range(count)]
        return Table([from_arrow(pa.array(each, pa.string())) for each in parts])

    return of_column


def extract(column, program, stream=None, mr=None):
    found = [
        None if text is None else program.search(text) for text in to_arrow(column).to_pylist()
    ]
    groups = range(1, program.groups + 1)
    parts = [[match and match.group(n) for match in found] for n in groups]
    return Table([from_arrow(pa.array(each, pa.string())) for each in parts])


def concatenate(columns, separator, *nulls, stream=None, mr=None):
    assert not any(null.is_valid() for null in nulls if isinstance(null, Scalar))
    arrays = map(to_arrow, columns.columns())
    return from_arrow(pc.binary_join_element_wise(*arrays, separator.value))


def converted(column, dtype, stream=None, mr=None):
    return from_arrow(to_arrow(column).cast(arrow_type(dtype)))


def as_text(column, stream=None, mr=None):
    return from_arrow(one(to_arrow(column).cast(pa.string())))


def integer(text, *args):
    return re.fullmatch(r"[+-]?\d+", text) is not None


FUNCTIONS = {
    "find": {
        "contains": of_text(lambda text, part: part in text, pa.bool_()),
        "starts_with": of_text(str.startswith, pa.bool_()),
        "ends_with": of_text(str.endswith, pa.bool_()),
        "find": of_text(lambda text, part, start, end: text.find(part, start), pa.int32()),
    },
    "contains": {
        "contains_re": of_text(lambda text, program: bool(program.search(text)), pa.bool_()),
        "matches_re": of_text(lambda text, program: bool(program.match(text)), pa.bool_()),
        "count_re": of_text(lambda text, program: len(program.findall(text)), pa.int32()),
    },
    "case": {"to_lower": of_texts(str.lower), "to_upper": of_texts(str.upper)},
    "capitalize": {
        "capitalize": of_texts(lambda text, *args: text.capitalize()),
        "title": of_texts(lambda text, *args: text.title()),
    },
    "attributes": {
        "count_characters": of_text(len, pa.int32()),
        "count_bytes": of_text(lambda text: len(text.encode()), pa.int32()),
    },
    "strip": {"strip": of_texts(_strip)},
    "replace": {"replace": of_texts(lambda text, old, new, most=-1: text.replace(old, new, most))},
    "replace_re": {
        "replace_re": of_texts(
            lambda text, program, new, most=-1: program.sub(lambda _: new, text, max(most, 0))
        ),
    },
    "slice": {
        "slice_strings": of_texts(lambda text, *edges: text[slice(*edges)]),
    },
    "split.split": {
        "split": _table(_parts),
        "rsplit": _table(_parts_from_the_right),
        "split_record": of_text(_parts, pa.list_(pa.string())),
        "rsplit_record": of_text(_parts_from_the_right, pa.list_(pa.string())),
    },
    "extract": {"extract": extract},
    "combine": {"concatenate": concatenate},
    "padding": {"zfill": of_texts(str.zfill)},
    "convert.convert_integers": {
        "to_integers": converted,
        "from_integers": as_text,
        "is_integer": of_text(integer, pa.bool_()),
    },
    "convert.convert_floats": {"to_floats": converted, "from_floats": as_text},
    "regex_program": {"RegexProgram": RegexProgram},
}

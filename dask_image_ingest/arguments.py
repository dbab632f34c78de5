"""Checks of arguments that several public functions share.

Each error names the argument, its value, and what it accepts.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeGuard

import numpy as np
from dask.utils import parse_bytes

from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.typedefs import AnyFrame
from dask_image_ingest.url_secrets import without_secrets

# Longest representation of a value in an error.
_MAX_CHARACTERS = 100


def shown(value: object) -> str:
    """Representation of a value for an error: short, on one line, without passwords."""
    try:
        text = repr(value)
    except Exception:  # of a user's class
        text = object.__repr__(value)
    text = without_secrets(" ".join(text.split()))
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…"


def is_utf8(text: str) -> bool:
    """True if a string can be encoded as UTF-8: it has no lone surrogates."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def check_choice(argument: str, value: object, choices: Sequence[str]) -> None:
    """Refuse a value that is not one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        *first, last = map(repr, choices)
        raise ArgumentError(f"{argument}={shown(value)}; choose {', '.join(first)} or {last}")


def check_flag(argument: str, value: object) -> None:
    """Refuse a value that is not a bool."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{argument}={shown(value)}: pass True or False")


def is_whole(value: object) -> TypeGuard[int]:
    """True for an integer of Python or NumPy; False for a bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_real(value: object) -> TypeGuard[float]:
    """True for a real number of Python or NumPy, NaN included; False for a bool."""
    is_number = isinstance(value, (int, float, np.integer, np.floating))
    return is_number and not isinstance(value, bool)


def is_share(value: object) -> TypeGuard[float]:
    """True for a number from 0 to 1, of Python or NumPy; False for a bool."""
    return is_real(value) and bool(0 <= value <= 1)


def whole_number(
    argument: str, value: object, least: int, advice: str = "", most: float = math.inf
) -> int:
    """Check an integer from ``least`` to ``most``, and return it as an int."""
    number = int(value) if is_whole(value) else least - 1
    if not least <= number <= most:
        advice = advice or f"pass a whole number of at least {least}"
        raise ArgumentError(f"{argument}={shown(value)}: {advice}")
    return number


def number_of_bytes(value: object) -> int | None:
    """Parse a positive number of bytes, or a text such as ``512 MiB``; None if it is neither."""
    nbytes = 0
    with suppress(ValueError, OverflowError):
        if isinstance(value, str):
            nbytes = parse_bytes(value) if value.strip() else 0
        elif is_whole(value) or isinstance(value, (float, np.floating)):
            nbytes = int(value)
    return nbytes if nbytes >= 1 else None


def memory_limit(memory: object) -> int:
    """Check ``memory=``; return bytes."""
    nbytes = number_of_bytes(memory)
    if nbytes is None or nbytes < 64 << 20:
        raise ArgumentError(f"memory={shown(memory)}: pass at least 64 MiB, in bytes or as '2 GiB'")
    return nbytes


def list_of_names(argument: str, value: Iterable[Any], what: str) -> list[str]:
    """Check a list of strings, of any sequence type; ``what`` names its items in the error."""
    # Sets are refused too, since the order matters.
    names = [None] if isinstance(value, (str, bytes, Mapping, set, frozenset)) else list(value)
    if not all(isinstance(name, str) for name in names):
        raise ArgumentError(f"{argument}={shown(value)}: pass a list of {what}")
    return [str(name) for name in names]


def column_names(
    columns: Iterable[Any], known: Iterable[Hashable], argument: str = "columns"
) -> list[Any]:
    """Check ``columns=``, a list of names among the frame's columns ``known``."""
    if isinstance(columns, str):
        raise ArgumentError(f"{argument}={shown(columns)}: pass a list of column names")
    names = list(columns)
    check_columns(names, list(known), "the frame has", argument)
    return names


def check_columns(
    names: Iterable[Hashable], known: Sequence[Hashable], has: str, argument: str = "columns"
) -> None:
    """Refuse names in ``columns=`` that are not ``known``; the error reads ``<has> <known>``."""
    unknown = [name for name in names if name not in known]
    if unknown:
        listed = ", ".join(map(repr, known))
        raise ArgumentError(f"{argument}= names {', '.join(map(repr, unknown))}; {has} {listed}")


def check_unique(names: Iterable[Hashable], known: Iterable[Hashable]) -> None:
    """Refuse names that several columns of a frame have; ``known`` are the frame's columns."""
    counts = Counter(known)
    duplicates = [name for name in dict.fromkeys(names) if counts[name] > 1]
    if duplicates:
        name = duplicates[0]
        raise ArgumentError(
            f"the frame has {counts[name]} columns {name!r}: rename or drop all but one"
        )


def check_frame(value: AnyFrame, argument: str = "frame") -> None:
    """Refuse a value that is not a dataframe of pandas, cuDF or Dask with unique columns."""
    library = type(value).__module__.partition(".")[0]
    if library not in ("pandas", "cudf", "dask", "dask_cudf") or getattr(value, "ndim", None) != 2:
        of_engine = hasattr(value, "__arrow_c_stream__")
        hint = ", which from_arrow() makes of a table of another engine" if of_engine else ""
        raise ArgumentError(
            f"{argument}={shown(value)}: pass a Dask, pandas or cuDF dataframe{hint}"
        )
    if not value.columns.is_unique:
        raise ArgumentError(f"{argument}= has two columns of one name")


def path_text(argument: str, value: str | os.PathLike[str]) -> str:
    """Text of a path, pattern or URL; refuses an empty one, and what no file system can name."""
    text = os.fspath(value)
    if not isinstance(text, str) or not text or "\0" in text or not is_utf8(text):
        raise ArgumentError(
            f"{argument}={shown(value)} is no path: pass a text of valid Unicode, not empty"
        )
    return text


def check_path(argument: str, value: str | os.PathLike[str]) -> None:
    """Refuse a value that is not the path of a file in an existing folder."""
    path = os.fspath(value)
    if os.path.isdir(path) or not os.path.basename(path):
        raise ArgumentError(f"{argument}={shown(value)} is a folder: pass the path of a file")
    if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise ArgumentError(f"{argument}={shown(value)}: its folder does not exist")


class StorageOptions(dict[str, Any]):
    """Options of a file system; reprs have no values, which may be secret."""

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{name!r}: ***" for name in self) + "}"


def check_storage_options(value: object) -> dict[str, Any] | None:
    """Refuse a value that is not a dict of options, and headers with line breaks.

    With such headers a file system would report that the file does not exist.
    """
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ArgumentError(
            f"storage_options is of type {type(value).__name__}: pass a dict of the file system's "
            "options, such as {'anon': True}, or None"
        )
    for options in (value, value.get("http"), value.get("https"), value.get("client_kwargs")):
        headers = options.get("headers") if isinstance(options, dict) else None
        if headers is not None and not all(map(_is_header, dict(headers).items())):
            # The values are secrets: the error does not show them.
            raise ArgumentError(
                "storage_options: headers are names and values of one line, such as "
                "{'Authorization': 'Bearer ...'}: no line break may follow a token"
            )
    return StorageOptions(value)


def _is_header(header: tuple[Any, Any]) -> bool:
    return all(isinstance(text, str) and not {"\r", "\n"} & set(text) for text in header)

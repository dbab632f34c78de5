"""Fields of a JSON object, set in its text: everything else stays byte for byte.

A field is a path of names, as in ``json_fields=`` of a read: ``user.name`` is ``name`` in the
object ``user``, or a field that is called so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

# Numbers are not parsed: they may have any number of digits.
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, strict=False)

_BLANKS = re.compile(r"[ \t\n\r]*")


def with_fields(own: bytes, made: bytes, fields: Sequence[tuple[str, ...]]) -> bytes:
    """A JSON object with some fields of another one, which are replaced or added.

    Raises
    ------
    ValueError
        If it is no JSON object in UTF-8.
    """
    try:
        text, other = own.decode(), made.decode()
        for path in fields:
            value = field_text(other, path)
            if value is not None:
                text = with_field(text, path, value)
        return text.encode()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def field_text(text: str, path: tuple[str, ...]) -> str | None:
    """The text of a field's value; None without it."""
    entries = _entries(text)
    for name, rest in ((".".join(path), ()), (path[0], path[1:])):
        if (entry := entries.get(name)) is not None:
            value = text[entry]
            if not rest or value.startswith("{"):
                return field_text(value, rest) if rest else value
    return None


def with_field(text: str, path: tuple[str, ...], value: str) -> str:
    """A JSON object with a field set to the text of a value."""
    entries = _entries(text)
    whole = ".".join(path)
    name, rest = (whole, ()) if whole in entries else (path[0], path[1:])
    entry = entries.get(name)
    if rest and entry is not None and text[entry.start] != "{":
        name, rest, entry = whole, (), None  # beside a value that is no object
    if entry is not None:
        if rest:
            value = with_field(text[entry], rest, value)
        return text[: entry.start] + value + text[entry.stop :]
    if rest:
        value = with_field("{}", rest, value)
    added = f"{json.dumps(name, ensure_ascii=False)}: {value}"
    begin = text.index("{") + 1
    if not entries:
        return text[:begin] + added + text[begin:]
    # Indented as the first field is.
    indent = text[begin : _after_blanks(text, begin)]
    end = max(entry.stop for entry in entries.values())
    return f"{text[:end]},{indent or ' '}{added}{text[end:]}"


def _entries(text: str) -> dict[str, slice]:
    """Span of each value by its field; of several of one name the last, which readers take.

    Raises
    ------
    ValueError
    """
    entries: dict[str, slice] = {}
    at = _expect(text, text.startswith("\ufeff"), "{")
    at = _after_blanks(text, at)
    if text[at : at + 1] != "}":
        while True:
            name, colon = _DECODER.raw_decode(text, at)
            if not isinstance(name, str) or text[at] != '"':
                raise ValueError("a name of a field is no string")
            start = _after_blanks(text, _expect(text, colon, ":"))
            _, end = _DECODER.raw_decode(text, start)
            entries[name] = slice(start, end)
            at = _after_blanks(text, end)
            if text[at : at + 1] != ",":
                break
            at = _after_blanks(text, at + 1)
    at = _after_blanks(text, _expect(text, at, "}"))
    if at != len(text):
        raise ValueError("more follows the object")
    return entries


def _after_blanks(text: str, at: int) -> int:
    blanks = _BLANKS.match(text, at)
    return at if blanks is None else blanks.end()


def _expect(text: str, at: int, mark: str) -> int:
    """The position after a mark, which may follow blanks."""
    at = _after_blanks(text, at)
    if text[at : at + 1] != mark:
        raise ValueError(f"{mark!r} is missing at character {at}")
    return at + 1

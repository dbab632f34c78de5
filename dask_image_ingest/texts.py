"""Texts from outside, such as messages of exceptions and answers of models, made storable.

Arrow, JSON and pages are UTF-8, which has no lone surrogates. Python's strings may have them: in
names of files that are not UTF-8, and in answers that end in the midst of an emoji.
"""

from __future__ import annotations


def storable(text: str) -> str:
    r"""The text with its lone surrogates as escapes, such as ``\ud83d``."""
    if text.isascii():
        return text
    return text.encode("utf-8", "backslashreplace").decode()


def error_text(error: BaseException) -> str:
    """Type and message of an exception, storable; also if it cannot give its message."""
    try:
        message = str(error)
    except Exception as failed:
        message = f"(no message: its __str__ raised {type(failed).__name__})"
    return storable(f"{type(error).__name__}: {message}")

"""Passwords in URLs, which are for servers and not for whoever reads an error, a log or a repr."""

from __future__ import annotations

import logging
import re
from dataclasses import fields
from typing import Any

# What lies between the user's name and the host; it may have an @ itself.
_PASSWORD = re.compile(r"(\w[\w.+-]*://[^/?#\s:@]*:)[^/?#\s]+@")


def without_passwords(text: str) -> str:
    """A text with ``***`` in place of the password of each URL in it."""
    return _PASSWORD.sub(r"\1***@", text) if "://" in text else text


class UrlHolder:
    """Base of a dataclass with URLs, made with ``repr=False``: workers log what they are given."""

    __slots__ = ()

    def __repr__(self: Any) -> str:
        told = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self))
        return without_passwords(f"{type(self).__name__}({told})")


def _mask(record: logging.LogRecord) -> bool:
    record.msg, record.args = without_passwords(record.getMessage()), ()
    return True


# A filter of a logger is called for what is logged with it, by all modules of this package.
logging.getLogger("dask_image_ingest").addFilter(_mask)

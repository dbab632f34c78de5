"""Mask passwords of URLs in errors, logs and reprs."""

from __future__ import annotations

import logging
import re
from dataclasses import fields
from typing import Any

# Between the user's name and the host; the password itself may contain an @.
_PASSWORD = re.compile(r"(\w[\w.+-]*://[^/?#\s:@]*:)[^/?#\s]+@")


def without_passwords(text: str) -> str:
    """Replace the password of each URL in a text by ``***``."""
    return _PASSWORD.sub(r"\1***@", text) if "://" in text else text


class UrlHolder:
    """Base of dataclasses with URLs, declared with ``repr=False``: Dask logs arguments of tasks."""

    __slots__ = ()

    def __repr__(self: Any) -> str:
        values = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self))
        return without_passwords(f"{type(self).__name__}({values})")


def _mask(record: logging.LogRecord) -> bool:
    record.msg, record.args = without_passwords(record.getMessage()), ()
    return True


# All modules of this package log with this logger, as filters don't apply to child loggers.
logging.getLogger("dask_image_ingest").addFilter(_mask)

"""Columns set in a frame, whatever their names are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["assigned"]


def assigned(frame: Any, columns: Mapping[Any, Any]) -> Any:
    """``frame`` with these columns, as ``assign`` gives it, which takes only names of strings."""
    made = frame.copy(deep=False)
    for name, values in columns.items():
        made[name] = values
    return made

"""Tests of many cases in one item, which collect the failures of all."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def loop_over(arguments: str, cases: Iterable[Any]) -> Callable[[Callable[..., None]], Any]:
    """As ``pytest.mark.parametrize``, but in one item, which is faster.

    Fixtures are shared by the cases.
    """
    names = [name.strip() for name in arguments.split(",")]
    listed = list(cases)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            failures = []
            for case in listed:
                values: Sequence[Any] = case if len(names) > 1 else [case]
                try:
                    test(**fixtures, **dict(zip(names, values, strict=True)))
                except (Exception, pytest.fail.Exception) as error:
                    failures.append(f"{case!r}: {type(error).__name__}: {error}")
            if failures:
                pytest.fail(f"{len(failures)} of {len(listed)} cases:\n" + "\n".join(failures))

        signature = inspect.signature(test)
        fixtures = [p for name, p in signature.parameters.items() if name not in names]
        run.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return run

    return decorate

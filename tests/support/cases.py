"""Many cases in one test: all are tried, and the failures are told together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def check_cases(cases: Iterable[Any], check: Callable[..., Any]) -> None:
    """Call ``check`` with each case, or with the parts of a tuple; raise what failed of all."""
    failures = []
    for case in cases:
        try:
            check(*case) if isinstance(case, tuple) else check(case)
        except (Exception, AssertionError) as error:
            error.add_note(f"case: {case!r}"[:500])
            failures.append(error)
    if failures:
        raise ExceptionGroup(f"{len(failures)} cases", failures)

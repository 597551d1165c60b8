"""Which cases of a test that starts many processes `make test` runs too."""

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["with_few"]


def with_few(few: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Mark `cases` as `e2e` but for a few, which stand for their family in `make test`."""
    few = [*few]
    known = [*cases]
    assert all(case in known for case in few), few
    return [case if case in few else _marked(case) for case in known]


def _marked(case: Any) -> Any:
    values = case if isinstance(case, tuple | list) else (case,)
    return pytest.param(*values, marks=pytest.mark.e2e)

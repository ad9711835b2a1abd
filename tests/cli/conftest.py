"""Commands of a file of tests are forks of one process; it ends with them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.cli import programs
from tests.kit.leftovers import Leftovers


@pytest.fixture(scope="module", autouse=True)
def _forks(leftovers: Leftovers) -> Iterator[None]:
    """It needs `leftovers` so that it has ended before leftovers are looked for."""
    yield
    programs.close_forks()

"""Every engine in a directory beside this file is installed, as far as its entry points say so."""

from __future__ import annotations

import pytest
from tests.catalog.engines.fleet import ENGINES, HERE, PLUGINS


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PLUGINS:
        monkeypatch.syspath_prepend(HERE / name)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)

"""One market for all tests of this directory, and the client libraries installed beside the tests, each once a run."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.clients.api import Api
from tests.clients.driven import Driven, driven
from tests.kit.leftovers import Leftovers
from tests.kit.markets import running_market

HERE = Path(__file__).parent
INSTALL_S = 150.0

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def api(leftovers: Leftovers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """A broker and three workers. It needs `leftovers` so that they are stopped before leftovers are looked for."""
    options = ("--region", "ord", "--region", "mad", "--region", "syd", "--workers", "1")
    # Room for every test's machines at once: what is tested here is not what happens when a worker is full.
    room = ("--cpus", "200", "--memory", "65536", "--machines", "200")
    with running_market(tmp_path_factory.mktemp("market"), options + room) as market:
        yield Api(market.endpoint, market.token)


@pytest.fixture
def new_app(api: Api) -> Iterator[Callable[[], str]]:
    """Makes the name of an app that does not exist yet. The apps of a test go when it ends, with their machines."""
    names: list[str] = []

    def name() -> str:
        names.append(f"test-{next(_numbers)}")
        return names[-1]

    yield name
    for name_ in names:
        reply = api.delete(f"/v1/apps/{name_}?force=true")
        assert reply.status in (202, 404), reply.body


@pytest.fixture
def app(api: Api, new_app: Callable[[], str]) -> str:
    """The name of an app without machines."""
    name = new_app()
    api.create_app(name)
    return name


@pytest.fixture(scope="session")
def sdk(api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driven]:
    """fly-python-sdk, installed into a directory of its own that comes first on the path of its process."""
    packages = tmp_path_factory.mktemp("fly-python-sdk")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    _install([*pip, "--target", str(packages), "--requirement", str(HERE / "sdk/requirements.txt")], packages)
    environment = _environment(api) | {"PYTHONPATH": str(packages)}
    with driven([sys.executable, str(HERE / "sdk/driver.py")], packages, environment) as session:
        yield session


@pytest.fixture(scope="session")
def fly_admin(api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driven]:
    """fly-admin, installed by its lock file into a temporary directory."""
    folder = tmp_path_factory.mktemp("fly-admin")
    for name in ("package.json", "package-lock.json"):
        shutil.copy(HERE / "node" / name, folder)
    _install(["npm", "ci", "--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error"], folder)
    with driven(["node", str(HERE / "node/driver.mjs")], folder, _environment(api)) as session:
        yield session


def _environment(api: Api) -> dict[str, str]:
    """Ours, with the market's address and token. A proxy of the surroundings must not come between."""
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return kept | {"ENDPOINT": api.endpoint, "TOKEN": api.token}


def _install(command: list[str], directory: Path) -> None:
    """Tried again: registries, and the way there, have bad moments."""
    deadline = time.monotonic() + INSTALL_S
    for _ in range(3):
        left_s = deadline - time.monotonic()
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=left_s, check=False)
        if done.returncode == 0:
            return
    raise AssertionError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")

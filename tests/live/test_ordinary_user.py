"""Containers of an ordinary user, who has subordinate ids and crun and nothing else."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit.ordinary import USER, run_as_nobody

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not shutil.which("newuidmap"), reason="needs newuidmap, of uidmap"),
    pytest.mark.skipif(not shutil.which("crun"), reason="needs crun"),
]
PYTEST = """
import os, sys, pytest
os.chdir(sys.argv[1])
options = ["-q", "-p", "no:cacheprovider", "-c", f"{sys.argv[2]}/pyproject.toml", "--rootdir", sys.argv[2]]
sys.exit(pytest.main([*options, f"--basetemp={sys.argv[1]}/tests", *sys.argv[3:]]))
"""
FINGERPRINT = """
import asyncio, os, sys
from pathlib import Path
import msgspec
os.chdir(sys.argv[1])
from tests.live.ordinary_containers import ordinary

async def main():
    driver = ordinary(Path("."))
    print(msgspec.json.encode(await driver.fingerprint()).decode())
    await driver.stop_all(grace_s=0)
    await driver.close()

asyncio.run(main())
"""
PARTICULAR = (
    "exit_code",
    "leaves_behind",
    "program_stands_still",
    "terminal_of_its_own",
    "runs_beside",
    "images_where",
    "has_its_user",
    "fills_its_disk",
    "unless_the_root_is_kept",
    "its_daemon_is_killed",
    "its_supervisor_is_killed",
    "what_is_killed_with_its_supervisor",
    "a_supervisor_killed",
)
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory of the user's own."""
    path = Path(tempfile.mkdtemp(prefix="ordinary-"))
    shutil.chown(path, USER)
    yield path
    shutil.rmtree(path)


@pytest.mark.slow
def test_what_is_particular_to_containers_works_but_for_limits(place: Path) -> None:
    """The rest of the suite goes the same way here as for root."""
    suite = f"{ROOT}/tests/live/ordinary_containers.py"
    process = run_as_nobody(PYTEST, [str(place), str(ROOT), suite, "-k", " or ".join(PARTICULAR)], 65536)
    said, complaint = process.communicate(timeout=55)
    assert process.returncode == 0, said + complaint
    passed = re.search(r"(\d+) passed", said)
    assert passed
    assert int(passed[1]) >= len(PARTICULAR)


@pytest.mark.parametrize(("subs", "healthy"), [(65536, True), (0, False), (1000, False)])
def test_what_an_ordinary_user_lacks_is_said_with_a_remedy(place: Path, subs: int, healthy: bool) -> None:
    process = run_as_nobody(FINGERPRINT, [str(place)], subs)
    said, complaint = process.communicate(timeout=50)
    assert process.returncode == 0, complaint
    assert f'"healthy":{str(healthy).lower()}' in said
    assert healthy or re.search(r"/etc/subuid gives nobody fewer .* usermod --add-subuids", said)
    assert (place / "driver").exists() == healthy

"""What `scripts/test` says on a machine that lacks something, and that it installs nothing twice."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "test"
TOOLS = ("cat", "cksum", "dirname", "id", "rm", "node", "npm", "ip")

OLD = "#!/bin/sh\nexit 1\n"
BARE = f"""#!/bin/sh
case $2 in
    *ensurepip*) exit 1 ;;  # as Debian's python3 without python3-venv
    *) exec {sys.executable} "$@" ;;
esac
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A directory to be the whole PATH: the few tools the script uses, no Python, no apt."""
    path = tmp_path / "bin"
    path.mkdir()
    for tool in TOOLS:
        if found := shutil.which(tool):
            (path / tool).symlink_to(found)
    return path


def install(machine: Path, name: str, script: str) -> None:
    (machine / name).write_text(script)
    (machine / name).chmod(0o755)


def run_script(machine: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(machine), "HAWKER_VENV": str(machine.parent / "venv"), **environment}
    return subprocess.run(
        [SCRIPT, "--version"], env=environment, cwd=machine, capture_output=True, text=True, timeout=50
    )


def test_without_a_new_enough_python_one_sentence_names_the_packages(machine: Path) -> None:
    install(machine, "python3", OLD)
    run = run_script(machine)
    assert run.returncode == 1
    assert run.stderr.count("\n") == 1
    assert "no Python 3.11 or newer" in run.stderr
    assert "python3.11-venv" in run.stderr


def test_without_venv_one_sentence_names_the_package(machine: Path) -> None:
    install(machine, "python3", BARE)
    run = run_script(machine)
    assert run.returncode == 1
    assert run.stderr.count("\n") == 1
    version = "python{}.{}-venv".format(*sys.version_info)
    assert f"python3 cannot make virtual environments; install the package {version}" in run.stderr


def test_an_environment_that_is_up_to_date_is_used_as_it_is(machine: Path) -> None:
    """There is no Python to make another with, so the run succeeds only if it makes none."""
    checksum = subprocess.run(
        ["/bin/sh", "-c", f'root={SCRIPT.parent.parent}; . "$root/scripts/lib/environment.sh"; venv_checksum'],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    venv = machine.parent / "venv"
    (venv / "bin").mkdir(parents=True)
    install(venv / "bin", "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (venv / ".hawker-dev").write_text(checksum)
    run = run_script(machine, HOME=os.environ.get("HOME", "/"))
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("pytest ")


def test_an_environment_made_from_other_requirements_is_not_trusted(machine: Path) -> None:
    venv = machine.parent / "venv"
    (venv / "bin").mkdir(parents=True)
    install(venv / "bin", "python", OLD)
    (venv / ".hawker-dev").write_text("1 2\n")
    run = run_script(machine)
    assert run.returncode == 1
    assert "no Python 3.11 or newer" in run.stderr

"""What a checkout installs is pinned: every package, with the hashes of its files."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINNED = re.compile(r"([A-Za-z0-9._-]+)==[^ ;]+(?: ;[^\\\n]*)? \\\n(?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+")


def pinned(name: str) -> set[str]:
    """The packages that a file pins. Fails where there is anything but comments beside them."""
    text = (ROOT / "scripts" / name).read_text()
    assert re.sub(r"(?m)^#.*\n", "", PINNED.sub("", text)) == ""
    return {_same(found[1]) for found in PINNED.finditer(text)}


def _same(name: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[><=!~;\[ ]", name)[0]).lower()


def test_what_hawker_needs_to_run_and_to_be_built_is_pinned_with_hashes() -> None:
    asked = [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"]]
    assert {_same(each) for each in asked} - pinned("requirements.txt") == set()


def test_the_tools_are_pinned_with_hashes_and_nothing_twice() -> None:
    runtime, tools = pinned("requirements.txt"), pinned("requirements-dev.txt")
    assert {_same(each) for each in PROJECT["dependency-groups"]["dev"]} - (runtime | tools) == set()
    assert runtime & tools == set()

"""Parts chosen by name through Python's entry points: drivers, data planes, the catalog's engines.

Hawker's own are known without a look; those of other installed packages are found under the group's name.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def installed(group: str, ours: Container[str]) -> Mapping[str, EntryPoint]:
    """The entry points that other packages have in this group, by name; a name of `ours` stays Hawker's."""
    if not _others_installed(group):  # what reads entry points takes longer to import than this look
        return {}
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=group) if point.name not in ours}


def _others_installed(group: str) -> bool:
    """Whether an installed package but Hawker names this group."""
    for directory in dict.fromkeys(sys.path):
        for found in Path(directory).glob("*-info/entry_points.txt"):
            if not found.parent.name.startswith("hawker-") and f"[{group}]" in found.read_text(errors="replace"):
                return True
    return False

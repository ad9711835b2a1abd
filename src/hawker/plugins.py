"""Parts chosen by name through Python's entry points: drivers, data planes, the catalog's engines.

Hawker's own are known without a look; those of other installed packages are found under the group's name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Container, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def installed(group: str, ours: Container[str]) -> Mapping[str, EntryPoint]:
    """The entry points that other packages have in this group, by name; a name of `ours` stays Hawker's."""
    if group not in _groups(tuple(sys.path)):  # what reads entry points takes longer to import than this look
        return {}
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=group) if point.name not in ours}


@cache
def _groups(path: tuple[str, ...]) -> frozenset[str]:
    """The groups that installed packages but Hawker name. A start asks for several groups and reads the files once."""
    found = set[str]()
    for directory in dict.fromkeys(path):
        for file in Path(directory).glob("*-info/entry_points.txt"):
            if not file.parent.name.startswith("hawker-"):
                found |= set(re.findall(r"\[([^]\n]+)\]", file.read_text(errors="replace")))
    return frozenset(found)

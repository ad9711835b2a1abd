"""The control groups of a worker's machines as anybody finds them in the file system, of version 1 or 2."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def parents(directory: Path) -> list[Path]:
    """The parent groups of the driver that works in this directory: one, or one for each controller (version 1)."""
    digest = hashlib.blake2b(os.path.realpath(directory).encode(), digest_size=6).hexdigest()
    name = f"hawker-{digest}"
    return [path for path in (ROOT / name, *ROOT.glob(f"*/{name}")) if path.is_dir()]


def machine_groups(directory: Path) -> set[str]:
    """Names of the groups of its machines. Without cgroups there are none."""
    return {group.name for parent in parents(directory) for group in parent.iterdir() if group.is_dir()}

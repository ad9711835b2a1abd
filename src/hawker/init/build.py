"""The small programs that run as PID 1 of a machine, compiled on first use."""

from __future__ import annotations

from pathlib import Path


class NoCompiler(Exception):
    """There is no C compiler here, or it cannot link statically; the text names the packages that are missing."""


def program(name: str, cache: Path) -> Path:
    """The executable made of `<name>.c` beside this file: static, stripped, in `cache`, under a name with the hash of
    its source and its compiler. Compiled where it is not there yet; several may ask at once. Raises `NoCompiler`."""
    raise NotImplementedError

"""The small programs that run as PID 1 of a machine, compiled on first use."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hawker.init.place import alone

COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=gnu11", "-Os", "-static", "-s", "-Wall", "-Wextra")
PRELOADED = ("-std=gnu11", "-Os", "-shared", "-fPIC", "-s", "-Wall", "-Wextra")
PACKAGES = "a C compiler and a static C library (on Debian: apt install gcc libc6-dev)"


class NoCompiler(Exception):
    """There is no C compiler here, or it cannot link statically; the text names the packages that are missing."""


def program(name: str, cache: Path, flags: Sequence[str] = FLAGS) -> Path:
    """The executable made of `<name>.c` beside this file, which includes the files `<name>_*.c`: static, stripped, in
    `cache`, under a name with the hash of its source and its compiler; with other `flags` what they make of it. It is
    compiled where it is not there yet; several may ask at once. Raises `NoCompiler`."""
    here = Path(__file__).parent
    source = here / f"{name}.c"
    digest = hashlib.blake2b(" ".join(flags).encode(), digest_size=8)
    for path in (source, *sorted(here.glob(f"{name}_*.c")), *sorted(here.glob("*.h"))):
        digest.update(path.read_bytes())
    stem = f"{name}-{digest.hexdigest()}"
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        if ready := sorted(cache.glob(f"{stem}-*")):
            return ready[0]
        raise NoCompiler(f"machines need a small init that is compiled once: it takes {PACKAGES}")
    target = cache / f"{stem}-{_identity(compiler)}"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with alone(cache):  # workers that start together let one compile
            if not target.exists():
                _compile(compiler, flags, source, target)
    return target


def _identity(compiler: str) -> str:
    """Another compiler, or a newer one, has another size or time. Asking it for its version would take 2 ms."""
    found = os.stat(compiler)
    text = f"{os.path.realpath(compiler)} {found.st_size} {found.st_mtime_ns}"
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def _compile(compiler: str, flags: Sequence[str], source: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as place:
        made = Path(place) / source.stem
        done = subprocess.run(
            [compiler, *flags, "-o", str(made), str(source)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={**os.environ, "LC_ALL": "C"},
        )
        if done.returncode:
            said = done.stderr.strip().splitlines()
            raise NoCompiler(
                f"{source.name} could not be compiled by {compiler}: {said[-1] if said else 'no word why'}; "
                f"it takes {PACKAGES}"
            )
        made.chmod(0o755)
        os.rename(made, target)

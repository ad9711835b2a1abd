"""Runs Python as an ordinary user, for what root may do and others not: `run_as_nobody(code, arguments, subs)`.

In a mount namespace of its own, the directories that lead to the interpreter are opened to all, and /etc/subuid and
/etc/subgid give the user `subs` ids from `FIRST_SUB` on, or none at all. Nothing of that is seen outside.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

FIRST_SUB = 200_000
USER = "nobody"
CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x0002_0000, 0x1000, 0x4000, 0x4_0000


def run_as_nobody(code: str, arguments: list[str], subs: int) -> subprocess.Popen[str]:
    """`code` finds `arguments` in `sys.argv[1:]`, and the packages of this checkout."""
    argv = [sys.executable, __file__, str(subs), code, *arguments]
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )


def _main(subs: int, code: str, arguments: list[str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)

    def call(result: int) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def bind(source: str, target: str) -> None:
        call(libc.mount(os.fsencode(source), os.fsencode(target), None, MS_BIND | MS_REC, None))

    user = pwd.getpwnam(USER)
    call(libc.unshare(CLONE_NEWNS))
    call(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    with tempfile.NamedTemporaryFile("w") as lines:
        if subs:
            lines.write(f"{USER}:{FIRST_SUB}:{subs}\n")
        lines.flush()
        os.chmod(lines.name, 0o644)
        for file in ("/etc/subuid", "/etc/subgid"):
            if Path(file).exists():
                bind(lines.name, file)
    for path in {os.path.realpath(sys.executable), *(each for each in sys.path if each)}:
        _open_up(path, bind, lambda at: call(libc.mount(b"none", os.fsencode(at), b"tmpfs", 0, b"mode=755")))
    os.setgroups([])
    os.setresgid(user.pw_gid, user.pw_gid, user.pw_gid)
    os.setresuid(user.pw_uid, user.pw_uid, user.pw_uid)
    os.execv(sys.executable, [sys.executable, "-c", code, *arguments])


def _open_up(path: str, bind: Callable[[str, str], None], cover: Callable[[str], None]) -> None:
    """Have the closed directory on the way to a path replaced by one that is open and leads there alone."""
    parts = Path(path).parents
    closed = [parent for parent in reversed(parts) if not parent.stat().st_mode & 0o001]
    if not closed:
        return
    inside = os.listdir(closed[0])
    held = {name: os.open(closed[0] / name, os.O_PATH) for name in inside}
    directories = [name for name in inside if (closed[0] / name).is_dir()]
    cover(str(closed[0]))
    for name in directories:
        (closed[0] / name).mkdir()
        bind(f"/proc/self/fd/{held[name]}", str(closed[0] / name))


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])

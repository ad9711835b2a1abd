"""The further users that a system gives a user for its user namespaces: /etc/subuid and /etc/subgid, subuid(5), and the
tools of Debian's package `uidmap` that map them.

Standard library only: supervisors and the process that unpacks layers load it.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess

TOOLS = (("newuidmap", "/etc/subuid"), ("newgidmap", "/etc/subgid"))


def map_users(pid: int) -> str:
    """In the user namespace of the process `pid`, map root to the calling user, and the users from 1 on to the ids that
    the system gives that user. Only the system's own tools may map those. Returns what went wrong, or ""."""
    for (tool, file), own in zip(TOOLS, (os.getuid(), os.getgid()), strict=True):
        path, given = shutil.which(tool), ranges(file)
        if path is None:
            return f"{tool} is missing"
        if not given:
            return f"{file} gives {user_name()} no ids"
        words, inside = ["0", str(own), "1"], 1
        for first, count in given:
            words += [str(inside), str(first), str(count)]
            inside += count
        done = subprocess.run([path, str(pid), *words], capture_output=True, text=True)
        if done.returncode != 0:
            return done.stderr.strip() or f"{tool} ended with {done.returncode}"
    return ""


def ranges(file: str) -> list[tuple[int, int]]:
    """The ranges (first, count) that a file gives this user, whom it names by name or by number."""
    names = {str(os.getuid()), user_name()}
    found = []
    try:
        with open(file) as lines:
            for line in lines:
                name, _, rest = line.strip().partition(":")
                first, _, count = rest.partition(":")
                if name in names and first.isdigit() and count.isdigit():
                    found.append((int(first), int(count)))
    except OSError:
        return []
    return found


def user_name() -> str:
    """The name of this user, or the number if there is no name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())

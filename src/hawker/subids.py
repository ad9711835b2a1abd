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
    """Map root of the user namespace that the process `pid` made to the user who asks, and its other users, from 1 on,
    to those that the system gives that user. They are the system's to give, so its tools must be asked. Gives what went
    wrong, "" for nothing."""
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
    """(first, count) of what a file gives this user, who may be written as a name or a number."""
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
    """The number where the user has no name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())

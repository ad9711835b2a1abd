"""The users of the host that machines' programs run as: each machine of a supervisor that is root has one of its own.

The user of a machine is the owner of its working directory, and needs no other record: the next supervisor finds it
there, and it is free again once the directory is gone.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable
from typing import Final

MANY: Final = 65536
"""How many users machines share out, counted from the first one, which the daemon names."""
_SET_NO_NEW_PRIVS, _CAPBSET_READ, _CAPBSET_DROP = 38, 23, 24  # <linux/prctl.h>
_KEYCTL = {"x86_64": 250, "aarch64": 219}  # <asm/unistd.h>
_JOIN_SESSION_KEYRING = 1  # <linux/keyctl.h>
_libc = ctypes.CDLL(None, use_errno=True)


class Owners:
    """The users of the machines whose working directories are in `work`: `many` at most."""

    def __init__(self, work: str, many: int = MANY) -> None:
        self._work = work
        self._many = many
        self._first = -1
        self._taken = bytearray()  # a byte for each user; of machines that are gone, too, until they are looked for
        self._next = 0

    def of(self, machine: str, first: int) -> int:
        """One of the users from `first` on. The machine's directory is there; what is in it becomes the user's.
        Raises OSError."""
        directory = f"{self._work}/{machine}"
        owner = os.stat(directory).st_uid
        if first <= owner < first + self._many:
            return owner
        user = self._free(first)
        _give(directory, user)
        return user

    def _free(self, first: int) -> int:
        """Take the numbers in turn: a number that was free a moment ago is the last to be given again."""
        found = self._taken.find(0, self._next) if first == self._first else -1
        if found < 0:
            self._look(first)
            found = self._taken.find(0)
        if found < 0:
            raise OSError(errno.EUSERS, f"all {self._many} users for programs of the host are taken: destroy machines")
        self._taken[found] = 1
        self._next = found + 1
        return first + found

    def _look(self, first: int) -> None:
        self._first, self._taken = first, bytearray(self._many)
        with os.scandir(self._work) as directories:
            for directory in directories:
                number = directory.stat(follow_symlinks=False).st_uid - first
                if 0 <= number < self._many:
                    self._taken[number] = 1


def _give(directory: str, user: int) -> None:
    """The directory is the last, so that what was interrupted is done again. A machine that has run as another user
    has files in it."""
    for _, directories, files, fd in os.fwalk(directory):
        for name in (*directories, *files):
            os.chown(name, user, user, dir_fd=fd, follow_symlinks=False)
    os.chown(directory, user, user)


def give(descriptors: Iterable[int], user: int | None) -> None:
    """Whoever is this user may open them again, as /dev/stdout. Raises OSError."""
    if user is not None:
        for fd in descriptors:
            os.fchown(fd, user, -1)


def refusal(error: BaseException, user: int | None) -> str:
    """Why a program cannot be started as this user."""
    if user is None or not isinstance(error, PermissionError):
        return str(error)
    return f"permission denied to user {user} of this host, whom the machine has: it may not be open to others"


def become(user: int) -> None:
    """Be this user and its group, for ever: in no other group, with no capability and no way to one, without our keys.
    For a process that is about to become a program. Raises OSError."""
    number = 0
    while _libc.prctl(_CAPBSET_READ, number, 0, 0, 0) >= 0:
        _check(_libc.prctl(_CAPBSET_DROP, number, 0, 0, 0), f"capability {number} cannot be given up")
        number += 1
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)  # the kernel takes all capabilities of who was root
    _forget_keys()
    forswear_privileges()


def forswear_privileges() -> None:
    """Gain nothing by the programs that are run. Raises OSError."""
    _check(_libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "new privileges cannot be forsworn")


def _forget_keys() -> None:
    """Leave our session keyring (keyrings(7)): its holder reads its keys as whatever user, so the program would have
    the keys that a login or a service gave us, such as those of encrypted directories."""
    number = _KEYCTL.get(os.uname().machine)
    done = _libc.syscall(number, _JOIN_SESSION_KEYRING, None, 0, 0, 0) if number else 0
    if done < 0 and ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM):  # forbidden by a filter, to the program, too
        _check(done, "a session keyring of its own cannot be made")


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")

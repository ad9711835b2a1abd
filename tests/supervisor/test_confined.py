"""What a program of the host that is not trusted has of its supervisor's: nothing that it was not given."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hawker.supervisor.confined import Confinement
from hawker.supervisor.programs import Launch

CONFINING = """
import ctypes, os, sys
from hawker.supervisor.confined import Confinement
from hawker.supervisor.programs import Launch

keyctl, add_key = {"x86_64": (250, 248), "aarch64": (219, 217)}[os.uname().machine]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.syscall(keyctl, 1, None, 0, 0, 0) > 0, os.strerror(ctypes.get_errno())
key = libc.syscall(add_key, b"user", b"of a login", b"secret", 6, -3)
assert key > 0, os.strerror(ctypes.get_errno())
program, scratch, looking = sys.argv[1:]
argv = [program, "-S", "-c", looking, str(keyctl), str(key)]
os.set_inheritable(os.open("/etc/shadow", os.O_RDONLY), False)
pid = Confinement(user=3 << 20, scratch=scratch).spawn(Launch(program, argv, {}, cwd="/", output=(1, 2)))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""

LOOKING = """
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
secret = ctypes.create_string_buffer(64)
got = libc.syscall(int(sys.argv[1]), 11, int(sys.argv[2]), secret, 64)
print(secret.value.decode() if got >= 0 else errno.errorcode[ctypes.get_errno()])
print(*(fd for fd in sorted(map(int, os.listdir("/proc/self/fd"))) if os.path.lexists(f"/proc/self/fd/{fd}")))
"""


@pytest.mark.root
def test_it_has_neither_the_keys_nor_the_files_of_its_supervisor(tmp_path: Path) -> None:
    program = os.path.realpath(sys.executable)
    argv = [sys.executable, "-c", CONFINING, program, str(tmp_path / "empty"), LOOKING]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (done.stderr, done.stdout.splitlines()) == ("", ["EACCES", "0 1 2"])


GROWING = """
import os, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with open(sys.argv[1], "r+b", buffering=0) as disk:
    disk.write(b"within")
    for offset in (2**20 - 1, 2**20):
        try:
            print(os.pwrite(disk.fileno(), b"x", offset))
        except OSError as error:
            print(os.strerror(error.errno))
"""


@pytest.mark.root
def test_it_cannot_make_its_disk_larger(tmp_path: Path) -> None:
    user = 3 << 20
    disk = tmp_path / "disk"
    disk.touch(mode=0o600)
    os.truncate(disk, 1 << 20)
    os.chown(disk, user, user)
    program = os.path.realpath(sys.executable)
    confinement = Confinement(user=user, own=[str(disk)], scratch=str(tmp_path / "empty"))
    argv = [program, "-S", "-c", GROWING, str(disk)]
    read, write = os.pipe()
    pid = confinement.spawn(Launch(program, argv, {}, cwd="/", output=(write, write)))
    os.close(write)
    with open(read) as said:
        assert said.read().splitlines() == ["1", "File too large"]
    assert os.waitpid(pid, 0)[1] == 0
    assert disk.stat().st_size == 1 << 20

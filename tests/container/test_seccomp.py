"""The filter of system calls: what the program for the kernel answers is what the list says, for every call."""

from __future__ import annotations

import base64
import ctypes
import errno
import os
import platform
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawker.worker.drivers.container import seccomp
from hawker.worker.drivers.container.syscalls import ARCHITECTURES, NUMBERS

EPERM = seccomp.ERRNO | errno.EPERM
ENOSYS = seccomp.ERRNO | errno.ENOSYS


def answer(architecture: str, number: int, arguments: tuple[int, ...] = (), audit: int | None = None) -> int:
    """What a kernel gets that runs the filter: a machine for classic BPF, of the instructions it may have."""
    arguments = (*arguments, *[0] * (6 - len(arguments)))
    audit = ARCHITECTURES[architecture] if audit is None else audit
    data = struct.pack("<IIQ6Q", number, audit, 0, *arguments)
    program = seccomp.program(architecture)
    at = accumulator = 0
    while True:
        code, yes, no, value = program[at]
        at += 1
        match code:
            case seccomp.LOAD:
                accumulator = struct.unpack_from("<I", data, value)[0]
            case seccomp.AND:
                accumulator &= value
            case seccomp.IF_EQUAL:
                at += yes if accumulator == value else no
            case seccomp.IF_AT_LEAST:
                at += yes if accumulator >= value else no
            case seccomp.JUMP:
                at += value
            case seccomp.RETURN:
                return value
            case _:
                raise AssertionError(code)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_every_call_gets_what_the_list_says(architecture: str) -> None:
    for name, number in NUMBERS[architecture].items():
        got = answer(architecture, number)
        if name in seccomp.DENIED:
            assert got == EPERM, name
        elif name in seccomp.ABSENT:
            assert got == ENOSYS, name
        elif name not in seccomp.CONDITIONS:
            assert got == seccomp.ALLOW, name


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@given(number=st.integers(0, 0xFFFFFFFF))
def test_a_call_in_no_list_is_said_not_to_be_there(architecture: str, number: int) -> None:
    if number not in NUMBERS[architecture].values():
        assert answer(architecture, number) == ENOSYS


def test_calls_by_the_numbers_of_another_architecture_are_not_judged_by_this_ones() -> None:
    i386, x32_bit = 0x40000003, 0x40000000
    getpid = NUMBERS["x86_64"]["getpid"]
    assert answer("x86_64", getpid) == seccomp.ALLOW
    assert answer("x86_64", getpid, audit=i386) == seccomp.KILL
    assert answer("x86_64", getpid | x32_bit) == ENOSYS


@pytest.mark.parametrize(
    ("name", "argument", "allowed"),
    [
        ("clone", 17, True),  # a plain fork: SIGCHLD
        ("clone", 0x3D0F00, True),  # a thread
        ("clone", 0x10000000 | 17, False),  # CLONE_NEWUSER
        ("clone", 0x40000000 | 17, False),  # CLONE_NEWNET
        ("unshare", 0x400, True),  # CLONE_FILES
        ("unshare", 0x20000, False),  # CLONE_NEWNS
        ("unshare", 0x80, False),  # CLONE_NEWTIME
        ("personality", 0xFFFFFFFF, True),
        ("personality", 0x0040000, False),  # ADDR_NO_RANDOMIZE
        ("socket", 1, True),
        ("socket", 10, True),
        ("socket", 17, False),  # AF_PACKET
        ("socket", 38, False),  # AF_ALG
        ("socket", 40, False),  # AF_VSOCK
        ("socketpair", 1, True),
        ("socketpair", 2, False),
    ],
)
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_some_calls_are_allowed_by_their_argument(architecture: str, name: str, argument: int, allowed: bool) -> None:
    for above in (0, 1 << 32, 0xFFFFFFFF << 32):  # the kernel drops what is above: it must change nothing
        got = answer(architecture, NUMBERS[architecture][name], (argument | above,))
        assert got == (seccomp.ALLOW if allowed else EPERM)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_jumps_stay_inside_and_the_kernel_would_take_the_program(architecture: str) -> None:
    program = seccomp.program(architecture)
    assert len(program) <= 4096  # BPF_MAXINSNS
    for at, (code, yes, no, value) in enumerate(program):
        assert 0 <= yes < 256
        assert 0 <= no < 256
        if code in (seccomp.IF_EQUAL, seccomp.IF_AT_LEAST):
            assert at + 1 + max(yes, no) < len(program)
        if code == seccomp.JUMP:
            assert at + 1 + value < len(program)
    assert program[-1][0] == seccomp.RETURN
    assert len(base64.b64decode(seccomp.encoded(architecture))) == 8 * len(program)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_the_list_for_runc_says_the_same(architecture: str) -> None:
    listed = seccomp.profile(architecture)
    assert (listed["defaultAction"], listed["defaultErrnoRet"]) == ("SCMP_ACT_ERRNO", errno.EPERM)
    plain = {name for rule in listed["syscalls"] if not rule.get("args") for name in rule["names"]}
    for name, number in NUMBERS[architecture].items():
        rules = [rule for rule in listed["syscalls"] if name in rule["names"]]
        if name in seccomp.DENIED:
            assert not rules
        elif name in seccomp.ABSENT:
            assert [(rule["action"], rule["errnoRet"]) for rule in rules] == [("SCMP_ACT_ERRNO", errno.ENOSYS)]
        elif name in seccomp.CONDITIONS:
            assert name not in plain
            for rule in rules:
                (condition,) = rule["args"]
                assert answer(architecture, number, (condition["valueTwo"],)) == seccomp.ALLOW
        else:
            assert [rule["action"] for rule in rules] == ["SCMP_ACT_ALLOW"]


def test_nothing_is_denied_by_a_name_that_no_architecture_has() -> None:
    known = {name for numbers in NUMBERS.values() for name in numbers}
    assert known >= seccomp.DENIED | seccomp.ABSENT | seccomp.CONDITIONS.keys()


# --- in this kernel ---------------------------------------------------------------------------------------------------

UNDER_THE_FILTER = """
import base64, ctypes, os, sys
filter = base64.b64decode(sys.argv[1])
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, ctypes.byref(Program(len(filter) // 8, filter))) == 0, os.strerror(ctypes.get_errno())
os.execv(sys.executable, [sys.executable, "-c", sys.argv[2]])
"""
EVERY_DAY = """
import asyncio, multiprocessing, os, signal, socket, sqlite3, subprocess, tempfile, threading, time
threads = [threading.Thread(target=time.sleep, args=(0.001,)) for _ in range(8)]
[each.start() for each in threads], [each.join() for each in threads]
assert subprocess.run(["sh", "-c", "echo $((1+1)) | cat"], capture_output=True).stdout == b"2\\n"
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(abs, [-1, 2]) == [1, 2]
async def talk():
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "localhost", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
    assert await reader.read() == b""
    writer.close(), server.close()
    assert await (await asyncio.create_subprocess_exec("true")).wait() == 0
asyncio.run(talk())
with tempfile.TemporaryDirectory() as place:
    database = sqlite3.connect(place + "/db")
    database.execute("pragma journal_mode=wal"), database.execute("create table t(x)"), database.close()
    os.mkfifo(place + "/fifo"), os.link(place + "/db", place + "/link"), os.chmod(place + "/db", 0o600)
    with open(place + "/db") as one, open(place + "/copy", "w") as other:
        os.sendfile(other.fileno(), one.fileno(), 0, 100)
socket.socketpair(), socket.if_nameindex(), os.sched_getaffinity(0), os.getloadavg(), os.memfd_create("x")
os.eventfd(0), os.pidfd_open(os.getpid()), os.getrandom(1), os.nice(1), os.posix_spawn("/bin/true", ["true"], {})
"""
REFUSED = """
import ctypes, errno, sys
libc = ctypes.CDLL(None, use_errno=True)
for name, number, argument in CALLS:
    assert libc.syscall(number, argument, 0, 0, 0, 0) == -1, name
    print(name, errno.errorcode[ctypes.get_errno()])
"""
here = pytest.mark.skipif(platform.machine() not in ARCHITECTURES, reason="no numbers for this architecture")


def under_the_filter(code: str) -> str:
    argv = [sys.executable, "-c", UNDER_THE_FILTER, seccomp.encoded(platform.machine()), code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout


@here
def test_programs_of_every_day_do_not_notice_it() -> None:
    assert under_the_filter(EVERY_DAY) == ""


@here
def test_the_kernel_gives_the_answers_of_the_list() -> None:
    """Calls that are refused for other reasons, too, are left out: their error would prove nothing."""
    numbers = NUMBERS[platform.machine()]
    calls = [
        ("unshare", numbers["unshare"], 0x10000000),
        ("keyctl", numbers["keyctl"], 0),
        ("io_uring_setup", numbers["io_uring_setup"], 1),
        ("personality", numbers["personality"], 0x0040000),
        ("clone3", numbers["clone3"], 0),
        ("none", 999, 0),
    ]
    said = under_the_filter(REFUSED.replace("CALLS", repr(calls)))
    assert said.split("\n")[:-1] == [
        *(f"{name} EPERM" for name in ("unshare", "keyctl", "io_uring_setup", "personality")),
        "clone3 ENOSYS",
        "none ENOSYS",
    ]


@here
def test_the_numbers_are_those_of_this_kernel() -> None:
    """By calls that answer differently from all others: a process asks for its own number."""
    libc = ctypes.CDLL(None, use_errno=True)
    numbers = NUMBERS[platform.machine()]
    assert libc.syscall(numbers["getpid"]) == os.getpid()
    assert libc.syscall(numbers["getppid"]) == os.getppid()
    assert libc.syscall(numbers["getuid"]) == os.getuid()
    fd = libc.syscall(numbers["pidfd_open"], os.getpid(), 0)
    assert os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[pidfd]"
    os.close(fd)

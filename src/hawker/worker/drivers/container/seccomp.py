"""Which system calls a container's programs may make: a list of what is allowed, and a filter of it for the kernel.

Allowed is every call in `syscalls.NUMBERS` that is not in `DENIED`, some of them with certain arguments only
(`CONDITIONS`). A denied call gives EPERM, a call that is in no list (newer than this file) ENOSYS, so that programs use
what they used before it came. A program of another architecture, also a 32-bit one on a 64-bit kernel, is killed by
SIGSYS: those entry points into the kernel are little used and often broken, and `socketcall` hides its arguments.

The kernel checks most of these rights by itself. The filter keeps programs from reaching the code that does, where
faults were found again and again.

crun takes the filter as a program for the kernel, made here in 2 ms once; runc takes the list, and libseccomp makes the
program in 12 ms at every start.
"""

from __future__ import annotations

import base64
import errno
import functools
import struct
from typing import Any, NamedTuple

from hawker.worker.drivers.container.syscalls import ARCHITECTURES, NUMBERS

# Why, and what. What is not there on an architecture is passed over.
_REASONS = {
    "the host itself: its kernel, clock, name, swap, accounts, ports": """
        reboot kexec_load kexec_file_load init_module finit_module delete_module create_module query_module
        get_kernel_syms settimeofday clock_settime clock_adjtime sethostname setdomainname swapon swapoff acct
        quotactl quotactl_fd iopl ioperm syslog vhangup nfsservctl""",
    "mounts and namespaces (clone and unshare have conditions)": """
        mount umount2 pivot_root setns open_tree open_tree_attr move_mount fsopen fsconfig fsmount fspick
        mount_setattr statmount listmount""",
    "files by handle, past the directories that lead to them": "open_by_handle_at",
    # ptrace and its kin are allowed: they reach what the same user runs in the same machine, and debuggers want them.
    "watching the kernel, and programs inside it": """
        bpf perf_event_open fanotify_init fanotify_mark lookup_dcookie userfaultfd""",
    # Libraries do without it when it is denied.
    "work that the kernel does behind the filter's back, by code that had most of the holes of the last years": """
        io_uring_setup io_uring_enter io_uring_register""",
    "keys, which all containers of one host user share": "add_key request_key keyctl",
    "where memory lies on hosts with several memories": """
        mbind move_pages migrate_pages set_mempolicy get_mempolicy set_mempolicy_home_node""",
    "security modules, and what no program of today wants": """
        lsm_get_self_attr lsm_set_self_attr lsm_list_modules modify_ldt uselib ustat sysfs _sysctl afs_syscall tuxcall
        security getpmsg putpmsg vserver epoll_ctl_old epoll_wait_old set_thread_area get_thread_area""",
}
DENIED = frozenset(name for names in _REASONS.values() for name in names.split())

# Its flags are behind a pointer, where no filter sees them; told that there is none, libraries use `clone`.
ABSENT = frozenset({"clone3", "file_getattr", "file_setattr"})

CLONE_NEW = 0x7E020000  # mount, cgroup, uts, ipc, user, pid and network namespaces
CLONE_NEWTIME = 0x80  # for `unshare` only: `clone` has the signal there
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16


class Condition(NamedTuple):
    """Allowed when `argument & mask` is one of `values`. Masks are of the low 32 bits: the kernel looks at no others of
    these arguments."""

    argument: int
    mask: int
    values: tuple[int, ...]


CONDITIONS = {
    "clone": Condition(0, CLONE_NEW, (0,)),
    "unshare": Condition(0, CLONE_NEW | CLONE_NEWTIME, (0,)),
    # Linux, 32-bit names, and asking. Others turn off what protects against exploits.
    "personality": Condition(0, 0xFFFFFFFF, (0, 8, 0xFFFFFFFF)),
    # Not: vsock, by which a virtual machine talks to its host; packets past the network's filters; the kernel's
    # ciphers; and sixty that nobody uses.
    "socket": Condition(0, 0xFFFFFFFF, (AF_UNIX, AF_INET, AF_INET6, AF_NETLINK)),
    "socketpair": Condition(0, 0xFFFFFFFF, (AF_UNIX,)),
}

# <linux/seccomp.h>, <linux/filter.h>
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, RETURN, AND, JUMP, IF_EQUAL, IF_AT_LEAST = 0x20, 0x06, 0x54, 0x05, 0x15, 0x35
AT_NUMBER, AT_ARCHITECTURE, AT_ARGUMENTS = 0, 4, 16
Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, value


def supported(architecture: str) -> bool:
    return architecture in ARCHITECTURES


@functools.cache
def profile(architecture: str) -> dict[str, Any]:
    """The value of `linux.seccomp` in the runtime specification. `architecture` is named as `os.uname().machine` names
    it."""
    known = NUMBERS[architecture]
    allowed = sorted(known.keys() - DENIED - ABSENT - CONDITIONS.keys())
    rules: list[dict[str, Any]] = [
        {"names": allowed, "action": "SCMP_ACT_ALLOW"},
        {"names": sorted(ABSENT & known.keys()), "action": "SCMP_ACT_ERRNO", "errnoRet": errno.ENOSYS},
    ]
    for name, condition in CONDITIONS.items():
        for value in condition.values:
            compare = {"index": condition.argument, "value": condition.mask, "valueTwo": value}
            rules.append(
                {"names": [name], "action": "SCMP_ACT_ALLOW", "args": [{**compare, "op": "SCMP_CMP_MASKED_EQ"}]}
            )
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": errno.EPERM,  # and ENOSYS for calls newer than these, which runc sees to
        "architectures": [f"SCMP_ARCH_{architecture.upper()}"],
        "syscalls": rules,
    }


@functools.cache
def encoded(architecture: str) -> str:
    """`program` in base64."""
    return base64.b64encode(b"".join(struct.pack("=HBBI", *one) for one in program(architecture))).decode()


@functools.cache
def program(architecture: str) -> tuple[Instruction, ...]:
    """The filter as a classic BPF program on `struct seccomp_data`: a search for the number among ranges of numbers
    with the same answer, each answer in its place."""
    answers = {number: _answer(name) for name, number in NUMBERS[architecture].items()}
    starts: list[tuple[int, tuple[Instruction, ...]]] = []
    for number in range(max(answers) + 2):
        answer = answers.get(number, _refuse(errno.ENOSYS))
        if not starts or starts[-1][1] != answer:
            starts.append((number, answer))
    return (
        (LOAD, 0, 0, AT_ARCHITECTURE),
        (IF_EQUAL, 1, 0, ARCHITECTURES[architecture]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, AT_NUMBER),
        *_search(starts),
    )


def _answer(name: str) -> tuple[Instruction, ...]:
    if name in ABSENT:
        return _refuse(errno.ENOSYS)
    if name in DENIED:
        return _refuse(errno.EPERM)
    if (condition := CONDITIONS.get(name)) is None:
        return ((RETURN, 0, 0, ALLOW),)
    count = len(condition.values)
    return (
        (LOAD, 0, 0, AT_ARGUMENTS + 8 * condition.argument),  # its low half: both architectures are little-endian
        (AND, 0, 0, condition.mask),
        *((IF_EQUAL, count - at, 0, value) for at, value in enumerate(condition.values)),
        *_refuse(errno.EPERM),
        (RETURN, 0, 0, ALLOW),
    )


def _refuse(error: int) -> tuple[Instruction, ...]:
    return ((RETURN, 0, 0, ERRNO | error),)


def _search(starts: list[tuple[int, tuple[Instruction, ...]]]) -> list[Instruction]:
    """`starts`: where a range begins, and its answer."""
    if len(starts) == 1:
        return list(starts[0][1])
    middle = len(starts) // 2
    below, above = _search(starts[:middle]), _search(starts[middle:])
    if len(below) < 256:
        return [(IF_AT_LEAST, len(below), 0, starts[middle][0]), *below, *above]
    return [(IF_AT_LEAST, 0, 1, starts[middle][0]), (JUMP, 0, 0, len(below)), *below, *above]

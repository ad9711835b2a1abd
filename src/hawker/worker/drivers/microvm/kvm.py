"""Whether /dev/kvm runs guests on the processor.

There are hosts where it opens, answers, and runs guests by emulating their instructions, without some of them and
slower than QEMU's own emulator. So a guest is run: some instructions of SSE and a short loop in 64-bit mode, for which
a processor takes a millisecond. That is done in a process of its own, which may hang or die.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

LOOPS = 100_000
LONGEST_S = 0.02  # 200,000 instructions; emulating them takes 100 ms
PROBE_S = 3.0

# ioctls and exits of <linux/kvm.h>
_GET_API_VERSION, _CREATE_VM, _GET_VCPU_MMAP_SIZE = 0xAE00, 0xAE01, 0xAE04
_SET_MEMORY, _CREATE_VCPU, _RUN = 0x4020AE46, 0xAE41, 0xAE80
_GET_CPUID, _SET_CPUID = 0xC008AE05, 0x4008AE90
_GET_SREGS, _SET_SREGS, _SET_REGS = 0x8138AE83, 0x4138AE84, 0x4090AE82
_EXIT_IO, _EXIT_HLT = 2, 5
_MEMORY = 2 << 20
_CODE, _STACK = 0x4000, 0x8000
_PROGRAM = (
    b"\x0f\x57\xc0"  # xorps xmm0, xmm0
    b"\xf2\x0f\x58\xc0"  # addsd xmm0, xmm0
    b"\xb9" + struct.pack("<I", LOOPS) + b"\xff\xc9\x75\xfc"  # mov ecx, LOOPS; 1: dec ecx; jnz 1b
    b"\xb0\x42\xe6\xe9\xf4"  # mov al, 0x42; out 0xe9, al; hlt
)


def missing(device: Path = Path("/dev/kvm")) -> str:
    """Why guests cannot run on the processor here; "" when they can. Takes milliseconds, `PROBE_S` at most."""
    if not device.exists():
        return f"no {device}: the processor or the host of this host has no virtualisation, or it is switched off"
    if not os.access(device, os.R_OK | os.W_OK):
        return f"{device} may not be opened: be root or join its group ({device.stat().st_gid})"
    try:
        argv = [sys.executable, "-S", "-E", __file__, str(device)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PROBE_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return f"a guest that {device} ran did not end in {PROBE_S:g} s"
    if done.returncode:
        return done.stdout.strip() or f"the probe of {device} ended with {done.returncode}"
    return ""


def run_guest(device: str) -> None:
    """Raises OSError with what went wrong."""
    kvm = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    if (version := fcntl.ioctl(kvm, _GET_API_VERSION, 0)) != 12:
        raise OSError(f"{device} speaks version {version}, not 12")
    vm = fcntl.ioctl(kvm, _CREATE_VM, 0)
    memory = mmap.mmap(-1, _MEMORY, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    memory[_CODE : _CODE + len(_PROGRAM)] = _PROGRAM
    for at, value in ((0x1000, 0x2003), (0x2000, 0x3003), (0x3000, 0x83)):  # page tables: the first 2 MiB as they are
        struct.pack_into("<Q", memory, at, value)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    fcntl.ioctl(vm, _SET_MEMORY, struct.pack("<IIQQQ", 0, 0, 0, _MEMORY, address))
    cpu = fcntl.ioctl(vm, _CREATE_VCPU, 0)
    shared = mmap.mmap(cpu, fcntl.ioctl(kvm, _GET_VCPU_MMAP_SIZE, 0), flags=mmap.MAP_SHARED)
    features = bytearray(8 + 40 * 256)
    struct.pack_into("<I", features, 0, 256)
    fcntl.ioctl(kvm, _GET_CPUID, features)
    fcntl.ioctl(cpu, _SET_CPUID, features)
    _set_registers(cpu)
    exits: list[int] = []
    began_s = time.perf_counter()
    while len(exits) < 3 and exits[-1:] in ([], [_EXIT_IO]):
        fcntl.ioctl(cpu, _RUN, 0)
        exits.append(struct.unpack_from("<I", shared, 8)[0])
    took_s = time.perf_counter() - began_s
    if exits != [_EXIT_IO, _EXIT_HLT]:
        raise OSError(f"{device} cannot run a guest with SSE instructions (exit reasons {exits})")
    if took_s > LONGEST_S:
        raise OSError(f"{device} emulates: {2 * LOOPS} instructions took {took_s * 1000:.0f} ms")


def _set_registers(cpu: int) -> None:
    """64-bit mode, flat segments, SSE switched on, at the program."""
    sregs = bytearray(312)
    fcntl.ioctl(cpu, _GET_SREGS, sregs)

    def segment(number: int, selector: int, kind: int, long: int) -> None:
        fields = (0, 0xFFFFFFFF, selector, kind, 1, 0, 1 - long, 1, long, 1, 0, 0, 0)
        struct.pack_into("<QIH10B", sregs, 24 * number, *fields)

    segment(0, 8, 11, 1)
    for number in range(1, 6):
        segment(number, 16, 3, 0)
    struct.pack_into("<6Q", sregs, 224, 0x80050033, 0, 0x1000, 0x620, 0, 0x500)  # cr0, cr2, cr3, cr4, cr8, efer
    fcntl.ioctl(cpu, _SET_SREGS, bytes(sregs))
    general = [0] * 6 + [_STACK, 0] + [0] * 8 + [_CODE, 2]
    fcntl.ioctl(cpu, _SET_REGS, struct.pack("<18Q", *general))


if __name__ == "__main__":
    try:
        run_guest(sys.argv[1])
    except OSError as error:
        print(error)
        sys.exit(1)

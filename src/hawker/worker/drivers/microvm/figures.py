"""What a guest tells of its use and its processes: files of its /proc, read here (see `init/guest_figures.c`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv6Address

from hawker.worker.drivers.base import Process, Stats
from hawker.worker.drivers.microvm import frames

TICKS = 100  # a second; the kernel's interface has had this number on every x86 for ever
PAGE = 4096
_LISTEN = "0A"  # TCP_LISTEN
_PER_PROCESS = 5
_NUMBER_MAX = 1 << 50  # a petabyte


def use(payload: bytes) -> Stats:
    """Raises `frames.Malformed`."""
    try:
        numbers = {name: _number(value) for name, value in (line.split() for line in payload.decode().splitlines())}
        return Stats(
            cpu_s=max(0, numbers["cpu_us"]) / 1e6, memory_bytes=numbers["memory"], processes=numbers["processes"]
        )
    except (ValueError, KeyError) as error:
        raise frames.Malformed(f"the guest's use: {error}") from error


def processes(payload: bytes, now_ms: int) -> Sequence[Process]:
    """Raises `frames.Malformed`."""
    found = frames.read_fields(payload)
    try:
        booted_ms = now_ms - _number(float(found[0].split()[0]) * 1000)
        listening = dict(_listening(found[1], found[2]))
        rest = found[3:]
        groups = (rest[i : i + _PER_PROCESS] for i in range(0, len(rest) - _PER_PROCESS + 1, _PER_PROCESS))
        shown = (_process(group, booted_ms, listening) for group in groups)
        return [process for process in shown if process]
    except (ArithmeticError, ValueError, IndexError) as error:
        raise frames.Malformed(f"the guest's processes: {error}") from error


def _number(written: str | bytes | float) -> int:
    """Read a number that no kernel exceeds, so that programs other than Python can take it. Raises ValueError,
    OverflowError."""
    number = int(written)
    if abs(number) > _NUMBER_MAX:
        raise ValueError(f"{number:.3g} is more than any kernel counts")
    return number


def _process(group: Sequence[bytes], booted_ms: int, listening: dict[bytes, str]) -> Process | None:
    """None for one that ended while it was looked at."""
    pid, stat, command, directory, sockets = group
    if b")" not in stat:
        return None
    f = stat[stat.rindex(b")") + 2 :].split()  # the name before it may hold blanks and parentheses
    if f[0] in b"ZX":
        return None
    return Process(
        pid=_number(pid),
        ppid=_number(f[1]),
        started_at_ms=booted_ms + _number(f[19]) * 1000 // TICKS,
        cpu_s=(_number(f[11]) + _number(f[12])) / TICKS,
        rss_bytes=_number(f[21]) * PAGE,
        directory=directory.decode(errors="replace"),
        command=command.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace"),
        listen=sorted({("tcp", listening[inode]) for inode in sockets.split() if inode in listening}),
    )


def _listening(*tables: bytes) -> Iterator[tuple[bytes, str]]:
    """Inode and address of every listening TCP socket."""
    for table in tables:
        for line in table.splitlines()[1:]:
            f = line.split()
            if len(f) > 9 and f[3].decode() == _LISTEN:
                address, _, port = f[1].decode().partition(":")
                yield f[9], f"{_address(address)}:{int(port, 16)}"


def _address(text: str) -> str:
    """/proc/net shows addresses as hexadecimal words of the processor's order."""
    raw = bytes.fromhex(text)
    words = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
    return str(IPv4Address(words)) if len(words) == 4 else f"[{IPv6Address(words)}]"

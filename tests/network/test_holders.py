"""Which program of the host has a port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hawker.network.holders import Holder, holder

MINE = Path("/proc/self/comm").read_text().strip()


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1", "::", "::ffff:127.0.0.1"])
@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_who_takes_what_comes_to_a_port_is_known_by_name(protocol: str, address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM) as taking:
        taking.bind((address, 0))
        port = taking.getsockname()[1]
        if protocol == "tcp":
            taking.listen()
        found = holder(protocol, port)
        assert found == Holder(protocol, port, MINE, os.getpid())
        assert str(found) == f"port {port}/{protocol} of this host is held by {MINE} (process {os.getpid()})"
    assert holder(protocol, port) is None


def test_whoever_only_calls_out_holds_nothing_and_who_is_elsewhere_is_not_in_the_way() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(server.getsockname()) as client:
            assert holder("tcp", client.getsockname()[1]) is None
        assert holder("udp", port) is None
        assert holder("tcp", port, ["127.0.0.0/8"])
        assert holder("tcp", port, ["203.0.113.7"]) is None


WITHOUT_IPV6 = """
import ctypes, os, socket, struct

number = {"x86_64": 41, "aarch64": 198}[os.uname().machine]  # socket(2)
load, equal, give = 0x20, 0x15, 0x06
program = [(load, 0, 0, 0), (equal, 0, 3, number), (load, 0, 0, 16), (equal, 0, 1, socket.AF_INET6)]
program += [(give, 0, 0, 0x50000 | 97), (give, 0, 0, 0x7FFF0000)]  # EAFNOSUPPORT, as without the module
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))) == 0

from hawker.network.holders import holder, is_free
with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
    print(is_free("tcp", port), holder("tcp", port).pid == os.getpid(), is_free("udp", port))
"""


def test_a_host_without_ipv6_is_asked_all_the_same() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_IPV6], capture_output=True, text=True)
    assert (done.stderr, done.stdout) == ("", "False True True\n")


LOW = """
import os, socket
from hawker.network.holders import holder, is_free

for port in range(1, 1024):
    try:
        server = socket.create_server(("127.0.0.1", port))
        break
    except OSError:
        pass
os.setresuid(65534, 65534, 65534)
print(is_free("tcp", port), holder("tcp", port).port == port)
"""


@pytest.mark.root
def test_a_low_port_that_another_has_is_not_free_for_who_may_have_none() -> None:
    done = subprocess.run([sys.executable, "-c", LOW], capture_output=True, text=True)
    assert (done.stderr, done.stdout) == ("", "False True\n")


def test_a_holder_whom_we_may_not_know_is_some_program() -> None:
    assert str(Holder("tcp", 80)) == "port 80/tcp of this host is held by another program of the host"

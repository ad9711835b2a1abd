"""What `hawker doctor` reads of this very host: nothing is left behind, and what is in the way is seen."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from hawker.doctor.facts import gather


def test_this_host_is_read_and_nothing_is_left(tmp_path: Path) -> None:
    facts = gather(tmp_path, [])
    assert facts.system == "Linux"
    assert facts.release > (3, 0)
    assert facts.root == (os.geteuid() == 0)
    assert "mnt" in facts.namespaces
    assert facts.disk.directory == str(tmp_path)
    assert facts.disk.filesystem
    assert 0 < facts.disk.free_bytes <= facts.disk.total_bytes
    assert facts.disk.sync_ms > 0
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there_yet_is_judged_by_what_is_above_it(tmp_path: Path) -> None:
    assert gather(tmp_path / "var" / "lib" / "hawker", []).disk.directory == str(tmp_path)


def test_a_directory_that_cannot_be_written_to_says_why() -> None:
    disk = gather(Path("/proc/self"), []).disk
    assert disk.problem
    assert not disk.xattrs


def test_addresses_that_are_taken_are_told_by_protocol() -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind(("127.0.0.1", 0))
        taken = [f"127.0.0.1:{tcp.getsockname()[1]}", f"127.0.0.1:{udp.getsockname()[1]}"]
        first, second = gather(Path("/"), taken).addresses
    assert first.problem == "TCP: Address already in use"
    assert second.problem == "UDP: Address already in use"
    free = gather(Path("/"), taken).addresses
    assert [address.problem for address in free] == ["", ""]

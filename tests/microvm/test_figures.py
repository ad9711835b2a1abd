"""What a guest tells of itself, read without trust."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawker.worker.drivers.base import Process, Stats
from hawker.worker.drivers.microvm import figures, frames

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
TCP = HEAD + "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 77 1 0\n"
TCP += "   1: 0100007F:1F91 0100007F:0050 01 00000000:00000000 00:00000000 00000000     0        0 78 1 0\n"
TCP6 = HEAD + "   0: 00000000000000000000000001000000:0050 " + "0" * 32 + ":0000 0A 0:0 00:0 0  0  0 79 1 0\n"
STAT = "42 (a ) b) S 1 42 42 0 -1 4194560 97 0 0 0 150 50 0 0 20 0 1 0 500 1000 25 0"


def test_use_is_read() -> None:
    assert figures.use(b"cpu_us 1500000\nmemory 2048\nprocesses 3\n") == Stats(
        cpu_s=1.5, memory_bytes=2048, processes=3
    )


def test_processes_are_shown_with_where_they_listen() -> None:
    payload = frames.fields(["10.5 9.0\n", TCP, TCP6, "42", STAT, "a\0b\0", "/srv", "77\n78\n79\n"])
    assert figures.processes(payload, now_ms=1_000_000) == [
        Process(
            pid=42,
            ppid=1,
            started_at_ms=1_000_000 - 10_500 + 5_000,
            cpu_s=2.0,
            rss_bytes=25 * 4096,
            directory="/srv",
            command="a b",
            listen=[("tcp", "127.0.0.1:8080"), ("tcp", "[::1]:80")],
        )
    ]


def test_what_ended_meanwhile_is_left_out() -> None:
    gone = ["43", "", "", "", ""]
    zombie = ["44", STAT.replace(" S ", " Z "), "", "", ""]
    assert figures.processes(frames.fields(["1 1", "", "", *gone, *zombie]), 0) == []


@given(st.one_of(st.binary(max_size=200), st.lists(st.binary(max_size=60), max_size=9).map(frames.fields)))
def test_nonsense_is_said_to_be_malformed(payload: bytes) -> None:
    for read in (figures.use, lambda data: figures.processes(data, 0)):
        try:
            read(payload)
        except frames.Malformed:
            continue


@pytest.mark.parametrize("number", ["1" + "0" * 30, "-1" + "0" * 30, "1" + "0" * 5000, "inf", "nan", "1e300"])
def test_a_number_that_nobody_else_can_take_is_malformed(number: str) -> None:
    with pytest.raises(frames.Malformed):
        figures.use(f"cpu_us 1\nmemory {number}\nprocesses 3\n".encode())
    with pytest.raises(frames.Malformed):
        figures.processes(frames.fields([f"{number} 1", "", ""]), 0)
    with pytest.raises(frames.Malformed):
        figures.processes(
            frames.fields(["1 1", "", "", "42", STAT.replace(" 1000 25 ", f" 1000 {number} "), "", "", ""]), 0
        )


def test_a_field_that_is_cut_off_is_malformed() -> None:
    with pytest.raises(frames.Malformed):
        figures.processes(b"\xff\xff\xff\xff", 0)

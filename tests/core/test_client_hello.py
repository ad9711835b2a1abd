"""What is read of a client's first words over TLS, which OpenSSL says as real clients do."""

from __future__ import annotations

import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawker.core.client_hello import RECORDS_MOST, BadHello, ClientHello, read_hello


def hello(
    name: str = "web.example", alpn: tuple[str, ...] = (), newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3
) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = bool(name)
    context.verify_mode = ssl.CERT_NONE if not name else ssl.CERT_REQUIRED
    context.maximum_version = newest
    if alpn:
        context.set_alpn_protocols(alpn)
    tls = context.wrap_bio(ssl.MemoryBIO(), outgoing := ssl.MemoryBIO(), server_hostname=name or None)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def in_records(data: bytes, size: int) -> bytes:
    """The same hello in records of so many bytes."""
    body = data[5:]
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part for part in parts)


HELLO = hello(alpn=("h2", "http/1.1"))
READ = ClientHello("web.example", 0x304, (b"h2", b"http/1.1"))


def test_name_version_and_protocols_are_read() -> None:
    assert read_hello(HELLO) == READ
    assert read_hello(hello("", newest=ssl.TLSVersion.TLSv1_2)) == ClientHello("", 0x303, ())
    assert read_hello(hello("WEB.Example")) == ClientHello("web.example", 0x304)


def test_as_long_as_it_is_not_complete_more_is_waited_for() -> None:
    assert [read_hello(HELLO[:cut]) for cut in range(len(HELLO))] == [None] * len(HELLO)


@given(size=st.integers(len(HELLO) // 31, 600), more=st.binary(max_size=20))
def test_it_may_come_in_any_records_with_anything_behind_it(size: int, more: bytes) -> None:
    assert read_hello(in_records(HELLO, size) + more) == READ


def test_a_hello_in_tiny_records_is_refused_before_they_are_many() -> None:
    """Each byte of it could come alone, and make all of what came before be read again."""
    records = in_records(HELLO, 1)
    assert read_hello(records[: 6 * RECORDS_MOST]) is None
    with pytest.raises(BadHello, match="more than 32 records"):
        read_hello(records[: 6 * (RECORDS_MOST + 1)])


@given(at=st.integers(0, len(HELLO) - 1), value=st.integers(0, 255))
def test_damage_is_an_error_or_another_hello_and_nothing_else(at: int, value: int) -> None:
    damaged = HELLO[:at] + bytes([value]) + HELLO[at + 1 :]
    try:
        found = read_hello(damaged)
    except BadHello:
        return
    assert found is None or isinstance(found, ClientHello)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        b"\x16\x02\x00",
        b"\x16\x03\x01\x00\x00",
        b"\x16\x03\x01\x00\x04\x02\x00\x00\x00",
        b"\x16\x03\x01\x00\x04\x01\xff\xff\xff",
        b"\x16\x03\x01\xff\xff",
        HELLO.replace(b"web.example", b"web/example"),
    ],
)
def test_what_is_no_hello_is_refused(data: bytes) -> None:
    with pytest.raises(BadHello):
        read_hello(data)

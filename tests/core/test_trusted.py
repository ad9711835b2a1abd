"""What is believed of what proxies say that are before this one."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawker.core.trusted import Told, Trusted, address_of

TRUSTED = Trusted(["10.0.0.0/8", "192.0.2.1", "2001:db8::/32"])
PEER = b"10.0.0.1"


def told(**fields: str) -> Told:
    return TRUSTED.told(PEER, [(f"x-forwarded-{name}".encode(), value.encode()) for name, value in fields.items()])


def within(start: int, bits: int) -> ipaddress.IPv4Network:
    """A network of 10.0.0.0/22."""
    return ipaddress.IPv4Network((int(ipaddress.IPv4Address("10.0.0.0")) + start, bits), strict=False)


def test_addresses_and_networks_are_trusted_and_nobody_else() -> None:
    for address in (b"10.1.2.3", b"192.0.2.1", b"2001:db8::7", b"::ffff:10.1.2.3"):
        assert address in TRUSTED
    for address in (b"11.0.0.1", b"192.0.2.2", b"2001:db9::7", b"", b"unix:", b"10.0.0"):
        assert address not in TRUSTED
    assert b"10.0.0.1" not in Trusted([])
    with pytest.raises(ValueError, match="host bits"):
        Trusted(["10.0.0.1/8"])


@given(st.lists(st.builds(within, st.integers(0, 1023), st.integers(23, 32)), max_size=6), st.integers(0, 1023))
def test_it_is_so_however_networks_lie_within_each_other(networks: list[ipaddress.IPv4Network], start: int) -> None:
    trusted, address = Trusted(map(str, networks)), within(start, 32).network_address
    assert (str(address).encode() in trusted) is any(address in network for network in networks)
    assert bool(trusted) is bool(networks)


@pytest.mark.parametrize(
    ("chain", "client"),
    [
        ("", "10.0.0.1"),
        ("203.0.113.7", "203.0.113.7"),
        ("1.1.1.1, 203.0.113.7", "203.0.113.7"),
        ("1.1.1.1, 203.0.113.7, 10.0.0.9 ,192.0.2.1", "203.0.113.7"),
        ("10.0.0.3, 10.0.0.2", "10.0.0.3"),
        ("203.0.113.7:4711", "203.0.113.7"),
        ("[2001:db9::1]:443, 2001:db8::1", "2001:db9::1"),
        ("::ffff:203.0.113.7", "203.0.113.7"),
        ("203.0.113.7, unknown, 10.0.0.2", "10.0.0.2"),
        ("203.0.113.7, ", "10.0.0.1"),
    ],
)
def test_the_user_is_the_first_from_the_right_who_is_not_trusted(chain: str, client: str) -> None:
    assert told(**{"for": chain}).client == client.encode()


def test_lines_of_the_field_are_one_list() -> None:
    lines = [(b"x-forwarded-for", b"1.1.1.1"), (b"x-forwarded-for", b"203.0.113.7"), (b"x-forwarded-for", b"10.0.0.2")]
    assert TRUSTED.told(PEER, lines).client == b"203.0.113.7"


@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        ({"proto": "https"}, (b"https", 443, b"")),
        ({"proto": "HTTP", "port": "8080"}, (b"http", 8080, b"")),
        ({"proto": "wss"}, (b"https", 443, b"")),
        ({"proto": "http, https"}, (b"https", 443, b"")),
        ({"proto": "gopher", "port": "http"}, (b"", 0, b"")),
        ({"port": "65536"}, (b"", 0, b"")),
        ({"host": "shop.example:8443"}, (b"", 0, b"shop.example:8443")),
        ({"host": "[2001:db8::1]"}, (b"", 0, b"[2001:db8::1]")),
        ({"host": "shop.example/evil?"}, (b"", 0, b"")),
    ],
)
def test_what_is_said_of_the_way_is_believed_where_it_makes_sense(
    fields: dict[str, str], meant: tuple[bytes, int, bytes]
) -> None:
    found = told(**fields)
    assert (found.proto, found.port, found.host) == meant


@given(st.text(alphabet="0123456789abcdef.:, []%-unkow", max_size=60))
def test_whatever_is_said_the_user_has_an_address(chain: str) -> None:
    client = told(**{"for": chain}).client
    assert str(ipaddress.ip_address(client.decode())) == client.decode()
    assert client in (PEER, *(str(address_of(hop.strip())).encode() for hop in chain.encode().split(b",")))

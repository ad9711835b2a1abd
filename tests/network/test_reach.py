"""What machines reach, and who reaches them: tried from inside, by real connections.

A host with two workers: machines a1, a2 of the first and a3 of the second are in one network, b1 and b2 in another.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator

import pytest
from tests.kit.namespaces import missing_for_namespaces
from tests.kit.site import HOST4, HOST6, INTERNET4, INTERNET6, PORT, Site, Try

from hawker.network import addresses
from hawker.network.base import Settings

pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(missing_for_namespaces()), reason=missing_for_namespaces())]
METADATA = "169.254.169.254"
DENIED4, DENIED6 = "203.0.113.66", "2001:db8::66"
LAN = "10.1.0.9"
ALLOWED = "10.1.0.10"
TRANSLATED, TRANSLATED_METADATA, TRANSLATED_LAN = "64:ff9b::cb00:7142", "64:ff9b::a9fe:a9fe", "64:ff9b::a01:9"
"""As a translator to IPv4 beside the host would have DENIED4, METADATA, LAN."""


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Site() as site:
        site.ip("internet", *(f"addr add {it}/32 dev eth2" for it in (METADATA, DENIED4, ALLOWED)))
        site.ip("host", "-6 route add 64:ff9b::/96 dev eth1")
        for it in (DENIED6, TRANSLATED, TRANSLATED_METADATA, TRANSLATED_LAN):
            site.ip("internet", f"addr add {it}/128 dev eth2 nodad")
        site.ip("host", *(f"route add {it}/32 dev eth1" for it in (METADATA, ALLOWED)))
        site.worker("first", Settings(denied=(DENIED4, "2001:db8::60/124"), allowed=(ALLOWED,)))
        site.worker("second")
        site.machine("a1", "first", 7, (("tcp", PORT, 8001), ("udp", 5300, 5301)))
        site.machine("a2", "first", 7)
        site.machine("a3", "second", 7, (("tcp", PORT, 8003),))
        site.machine("b1", "first", 9)
        site.machine("b2", "second", 9)
        for where in ("host", "internet"):
            site.listen(where)
        yield site


def six(site: Site, name: str) -> str:
    return site.attached[name].address6


def four(site: Site, name: str) -> str:
    return site.attached[name].address4


def all_and_only(site: Site, good: set[Try], bad: set[Try]) -> None:
    reached = site.reached([*good, *bad])
    assert good - reached == set(), "not reached"
    assert reached & bad == set(), "reached"


def test_machines_reach_those_of_their_own_network_and_no_others_also_across_workers(site: Site) -> None:
    names = ["a1", "a2", "a3", "b1", "b2"]
    tries = {(one, other): Try(one, six(site, other)) for one in names for other in names if one != other}
    good = {each for (one, other), each in tries.items() if one[0] == other[0]}
    all_and_only(site, good, set(tries.values()) - good)


def test_machines_see_each_other_and_their_host_under_their_own_addresses(site: Site) -> None:
    listener = site.listen("a2", 9001)
    for by, seen in (("a1", six(site, "a1")), ("a3", six(site, "a3")), ("host", site.managers["first"].own)):
        assert site.reached([Try(by, six(site, "a2"), 9001)])
        connection, caller = listener.accept()
        connection.close()
        assert caller[0] == seen


def test_the_resolver_and_the_gateway_answer_an_echo_under_the_addresses_that_were_asked(site: Site) -> None:
    with site.network.inside("a1"):
        scope = socket.if_nametoindex("eth0")
    for to in ((addresses.RESOLVER, 0), (addresses.GATEWAY6, 0, 0, scope)):
        ping = site.socket("a1", socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6)
        ping.settimeout(5)
        ping.bind((six(site, "a1"), 0))
        ping.sendto(struct.pack("!BBHHH", 128, 0, 0, 7, 7), to)
        message, source = ping.recvfrom(100)
        assert (message[0], source[0].partition("%")[0]) == (129, to[0])


def test_machines_do_not_reach_each_other_by_ipv4(site: Site) -> None:
    all_and_only(site, {Try("host", four(site, "a2"))}, {Try(by, four(site, "a2")) for by in ("a1", "a3", "b1")})


def test_the_host_reaches_its_machines_by_both_families(site: Site) -> None:
    names = ("a1", "a3", "b2")
    all_and_only(site, {Try("host", at(site, name)) for name in names for at in (six, four)}, set())


def test_machines_reach_no_service_of_the_host_at_any_of_its_addresses(site: Site) -> None:
    theirs = [HOST4, HOST6, "10.1.0.1", addresses.GATEWAY4, *map(addresses.worker_address, ("first", "second"))]
    bad = {Try(by, address) for by in ("a1", "b2") for address in [*theirs, addresses.RESOLVER]}
    all_and_only(site, {Try("internet", HOST4), Try("internet", HOST6)}, bad)


def test_machines_reach_the_internet_by_both_families_under_the_hosts_addresses(site: Site) -> None:
    all_and_only(site, {Try(by, it) for by in ("a1", "b2") for it in (INTERNET4, INTERNET6)}, set())
    listener = site.listen("internet", 9000)
    for address, seen in ((INTERNET4, f"::ffff:{HOST4}"), (INTERNET6, HOST6)):
        assert site.reached([Try("a1", address, 9000)])
        connection, caller = listener.accept()
        connection.close()
        assert caller[0] == seen


def test_machines_reach_neither_metadata_nor_private_networks_nor_what_is_denied_but_what_is_allowed(
    site: Site,
) -> None:
    good = {Try("host", it) for it in (METADATA, LAN, DENIED4, DENIED6, ALLOWED)}
    good |= {Try("host", it) for it in (TRANSLATED, TRANSLATED_METADATA, TRANSLATED_LAN)} | {Try("a1", TRANSLATED)}
    good |= {Try("b2", DENIED4), Try("a1", ALLOWED)}  # the second worker denies nothing, the first allows one
    bad = {Try("a1", it) for it in (METADATA, LAN, DENIED4, DENIED6)} | {
        Try("b2", it) for it in (METADATA, LAN, ALLOWED)
    }
    bad |= {Try("a1", it) for it in (TRANSLATED_METADATA, TRANSLATED_LAN)}
    all_and_only(site, good, bad)


def test_nobody_outside_reaches_a_machine_at_its_private_address(site: Site) -> None:
    site.ip("internet", f"-6 route add fdaa::/16 via {HOST6}", f"route add 100.64.0.0/10 via {HOST4}")
    places = [at(site, name) for name in ("a1", "a3") for at in (six, four)]
    all_and_only(site, {Try("host", place) for place in places}, {Try("internet", place) for place in places})


def test_published_ports_answer_others_and_the_host_itself_and_no_machine(site: Site) -> None:
    good = {
        Try(by, address, port) for by in ("internet", "host") for address in (HOST4, HOST6) for port in (8001, 8003)
    } | {Try("host", "127.0.0.1", 8001)}
    bad = {Try(by, address, 8001) for by in ("a2", "b2") for address in (HOST4, HOST6)}
    bad |= {Try("internet", HOST4, 8002), Try("internet", HOST6, 8002)}
    all_and_only(site, good, bad)


def test_a_machine_sees_who_calls_its_published_port(site: Site) -> None:
    listener = site.listen("a1", 5300, socket.SOCK_DGRAM)
    client = site.socket("internet", socket.AF_INET, socket.SOCK_DGRAM)
    client.settimeout(5)
    client.sendto(b"hello", (HOST4, 5301))
    listener.settimeout(5)
    data, caller = listener.recvfrom(100)
    assert (data, caller[0]) == (b"hello", f"::ffff:{INTERNET4}")
    listener.sendto(b"and you", caller)
    assert client.recvfrom(100) == (b"and you", (HOST4, 5301))


def test_forged_source_addresses_go_nowhere(site: Site) -> None:
    device = "dev eth0"
    site.ip("a1", f"addr add fdaa:0:7::99/128 {device} nodad", f"addr add 203.0.113.77/32 {device}")
    site.ip("a1", f"addr add {six(site, 'b1')}/128 {device} nodad")
    target = site.listen("a2", 7000, socket.SOCK_DGRAM)
    target.settimeout(0.3)
    for source in ("fdaa:0:7::99", six(site, "b1")):
        forger = site.socket("a1", socket.AF_INET6, socket.SOCK_DGRAM)
        forger.bind((source, 0))
        forger.sendto(b"forged", (six(site, "a2"), 7000))
    honest = site.socket("a1", socket.AF_INET6, socket.SOCK_DGRAM)
    honest.bind((six(site, "a1"), 0))
    honest.sendto(b"honest", (six(site, "a2"), 7000))
    assert target.recv(100) == b"honest"  # what was sent before it did not come
    with pytest.raises(TimeoutError):
        target.recv(100)
    bad = {Try("a1", INTERNET4, PORT, "203.0.113.77"), Try("a1", six(site, "b2"), PORT, six(site, "b1"))}
    all_and_only(site, {Try("a1", INTERNET4, PORT, four(site, "a1"))}, bad)


def test_a_machine_cannot_play_router_or_neighbour(site: Site) -> None:
    """Advertisements and claims to another's address change nothing on the host, and are not even seen by it."""
    site.ip("a1", "addr add fe80::66/64 dev eth0 nodad")
    before = site.state(), site.state("a2"), learned(site)
    seen = site.socket("host", socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6)
    with site.network.inside("a1"):
        scope = socket.if_nametoindex("eth0")
    router = struct.pack("!BBHBBHII", 134, 0, 0, 64, 0, 1800, 0, 0)
    target = socket.inet_pton(socket.AF_INET6, six(site, "a2"))
    claim = struct.pack("!BBHI", 136, 0, 0, 0x6000_0000) + target + b"\x02\x01" + bytes.fromhex("020000000066")
    echo = struct.pack("!BBHHH", 128, 0, 0, 1, 1)
    for source in (("fe80::66", 0, 0, scope), (six(site, "a1"), 0)):
        raw = site.socket("a1", socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6)
        raw.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
        raw.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, 255)
        raw.bind(source)
        for message in (router, claim, echo):
            for to in ("ff02::1", addresses.GATEWAY6):
                raw.sendto(message, (to, 0, 0, scope))
    forged = site.socket("a1", socket.AF_PACKET, socket.SOCK_RAW)
    forged.bind(("eth0", 0x0806))
    me = bytes.fromhex(site.attached["a1"].mac.replace(":", ""))
    for claimed in (INTERNET4, four(site, "a2"), "198.51.100.1"):
        arp = struct.pack("!HHBBH", 1, 0x0800, 6, 4, 1) + me + socket.inet_aton(claimed) + bytes(6)
        forged.send(b"\xff" * 6 + me + b"\x08\x06" + arp + socket.inet_aton(addresses.GATEWAY4))
    seen.settimeout(0.5)
    theirs = set()
    with contextlib.suppress(TimeoutError):
        while True:
            message, (source, *_) = seen.recvfrom(200)
            if source.partition("%")[0] in ("fe80::66", six(site, "a1")):
                theirs.add(message[0])
    assert theirs == {128}  # the echo
    assert (site.state(), site.state("a2"), learned(site)) == before


def test_a_guest_that_asks_for_its_gateway_is_answered(site: Site) -> None:
    """A microVM's own init tells its kernel; another's may not."""
    for gateway in (addresses.GATEWAY6, addresses.GATEWAY4):
        site.ip("b2", f"neigh del {gateway} dev eth0")
    all_and_only(site, {Try("b2", INTERNET4), Try("b2", INTERNET6), Try("host", six(site, "b2"))}, set())
    assert addresses.GATEWAY_MAC in site.ip("b2", f"neigh show {addresses.GATEWAY6}")
    site.ip("b2", "route replace 203.0.113.200 dev eth0", f"-6 route replace {six(site, 'a1')} dev eth0")
    all_and_only(site, {Try("b2", INTERNET6)}, {Try("b2", "203.0.113.200"), Try("b2", six(site, "a1"))})


def learned(site: Site) -> set[str]:
    """Neighbours of the host's on its machines' links that nobody told it."""
    return {line for line in site.ip("host", "neigh show").splitlines() if addresses.DEVICES in line}


def test_packets_with_options_of_their_own_route_go_nowhere(site: Site) -> None:
    options = bytes([131, 7, 4, *socket.inet_aton(INTERNET4), 0])  # loose source route
    sender = site.socket("a2", socket.AF_INET, socket.SOCK_DGRAM)
    target = site.listen("internet", 7001, socket.SOCK_DGRAM)
    target.settimeout(2)
    sender.setsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, bytes([1, 1, 1, 0]))  # harmless ones
    sender.sendto(b"optional", (INTERNET4, 7001))
    sender.setsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, options)
    sender.sendto(b"routed", (INTERNET4, 7001))
    sender.setsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, b"")
    sender.sendto(b"plain", (INTERNET4, 7001))
    assert target.recv(100) == b"plain"


def test_the_hosts_loopback_of_ipv6_is_its_own(site: Site) -> None:
    """The kernel lets no packet from ::1 leave; who calls a published port there is refused, not kept waiting."""
    caller = site.socket("host", socket.AF_INET6, socket.SOCK_STREAM)
    caller.settimeout(5)
    with pytest.raises(ConnectionRefusedError):
        caller.connect(("::1", 8001))


def test_ports_answer_only_at_the_addresses_they_are_published_on(site: Site) -> None:
    site.worker("third", Settings(publish_on=(HOST4,)))
    site.machine("c1", "third", 11, (("tcp", PORT, 8011),))
    good = {Try("internet", HOST4, 8011), Try("host", HOST4, 8011)}
    all_and_only(
        site, good, {Try("internet", HOST6, 8011), Try("host", "127.0.0.1", 8011), Try("host", "10.1.0.1", 8011)}
    )


def test_a_host_without_a_global_ipv4_address_reaches_its_published_ports_on_loopback() -> None:
    """As a server with IPv6 alone, whose proxy asks its machines at 127.0.0.1."""
    with Site() as site:
        site.ip("host", "-4 addr flush dev eth1 scope global")
        site.worker("first")
        site.machine("a1", "first", 7, (("tcp", PORT, 8001),))
        all_and_only(site, {Try("host", "127.0.0.1", 8001)}, set())

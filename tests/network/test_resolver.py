"""The resolver, asked by machines from their namespaces, and by whoever else can get at it."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.opcode
import dns.query
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.reversename
import dns.rrset
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.namespaces import missing_for_namespaces
from tests.kit.site import HOST6, Site, Try
from tests.kit.waiting import until

from hawker.network import addresses, messages
from hawker.network.forward import Forwarder, Upstream
from hawker.network.names import Machine, Network
from hawker.network.resolver import BURST, FORWARDED_EACH, RATE, Rate, Resolver

T = TypeVar("T")
UPSTREAM = Upstream("127.0.0.1", 5399)
needs_namespaces = pytest.mark.skipif(bool(missing_for_namespaces()), reason=missing_for_namespaces())


def machines(app: str, first: int, count: int, number: int) -> tuple[Machine, ...]:
    return tuple(
        Machine(id=f"{n:014x}", app=app, region="ord", address=f"fdaa:0:{number:x}:1:2:0:{n:x}:2")
        for n in range(first, first + count)
    )


NETWORKS = {
    7: Network(here="ord", machines={"web": machines("web", 1, 3, 7), "many": machines("many", 100, 60, 7), "off": ()}),
    9: Network(here="ord", machines={"other": machines("other", 1, 1, 9)}),
}


def network(number: int) -> Network:
    return NETWORKS.get(number, Network(here="ord", machines={}))


class Elsewhere(asyncio.DatagramProtocol):
    """A resolver of the host's. Names tell it how to behave; it counts what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        query = dns.message.from_wire(data)
        name = str(query.question[0].name)
        self.asked.append(name)
        answer = dns.message.make_response(query)
        if name.startswith("silent."):
            return
        if name.startswith("no."):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        elif name.startswith("long."):
            answer.flags |= dns.flags.TC
        else:
            answer.answer.append(dns.rrset.from_text(name, 60, "IN", "A", "192.0.2.1"))
        assert self._transport is not None
        if name.startswith("forged."):
            lie = dns.message.from_wire(answer.to_wire())
            lie.id ^= 1
            lie.answer = [dns.rrset.from_text(name, 60, "IN", "A", "192.0.2.66")]
            self._transport.sendto(lie.to_wire(), addr)
            self._transport.sendto(b"\x00" * 40, addr)
        self._transport.sendto(answer.to_wire(), addr)

    async def by_tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = int.from_bytes(await reader.readexactly(2), "big")
        query = dns.message.from_wire(await reader.readexactly(size))
        answer = dns.message.make_response(query)
        texts = [f"{n:0250}" for n in range(40)]
        answer.answer.append(dns.rrset.from_text(query.question[0].name, 60, "IN", "TXT", *texts))
        wire = answer.to_wire(max_size=65_535)
        writer.write(len(wire).to_bytes(2, "big") + wire)
        await writer.drain()
        writer.close()
        await writer.wait_closed()


class World:
    """A site with a machine in each network, a resolver, and one elsewhere."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.elsewhere = Elsewhere()

    def asks(self, where: str, name: str, kind: str = "AAAA", *, by: str = "udp", **more: Any) -> dns.message.Message:
        query = dns.message.make_query(name, kind, **more)
        if by == "tcp":
            return self.during(where, lambda: dns.query.tcp(query, addresses.RESOLVER, timeout=8))
        return self.during(where, lambda: dns.query.udp(query, addresses.RESOLVER, timeout=8))

    def during(self, where: str, call: Callable[[], T]) -> T:
        """Call it there in a thread, while the resolver runs."""

        def there() -> T:
            with self.site.network.inside(where):
                return call()

        async def main() -> T:
            async with self.serving():
                return await asyncio.to_thread(there)

        return self.site.run(main())

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        at = (UPSTREAM.address, UPSTREAM.port)
        transport, _ = await loop.create_datagram_endpoint(lambda: self.elsewhere, local_addr=at)
        server = await asyncio.start_server(self.elsewhere.by_tcp, *at)
        rng = random.Random(1)
        resolver = Resolver(self.site.managers["first"].own, network, lambda: Forwarder(rng, [UPSTREAM]), rng)
        await resolver.open()
        try:
            yield
        finally:
            await resolver.close()
            server.close()
            transport.close()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with Site() as site:
        site.worker("first")
        site.machine("a", "first", 7)
        site.machine("b", "first", 9)
        yield World(site)


def found(message: dns.message.Message) -> list[str]:
    return sorted(str(record) for rrset in message.answer for record in rrset)


@pytest.mark.root
@needs_namespaces
@pytest.mark.parametrize("by", ["udp", "tcp"])
def test_a_machine_gets_the_addresses_of_its_network_and_no_other_network_has_the_name(world: World, by: str) -> None:
    mine = world.asks("a", "web.internal", by=by)
    assert found(mine) == ["fdaa:0:7:1:2:0:1:2", "fdaa:0:7:1:2:0:2:2", "fdaa:0:7:1:2:0:3:2"]
    assert (mine.rcode(), mine.answer[0].ttl, bool(mine.flags & dns.flags.AA)) == (dns.rcode.NOERROR, 5, True)
    theirs = world.asks("b", "web.internal", by=by)
    assert (theirs.rcode(), theirs.answer) == (dns.rcode.NXDOMAIN, [])
    assert found(world.asks("b", "OTHER.Internal", by=by)) == ["fdaa:0:9:1:2:0:1:2"]


@pytest.mark.root
@needs_namespaces
def test_an_answer_that_does_not_fit_a_datagram_says_so_and_comes_whole_by_tcp(world: World) -> None:
    assert len(found(world.asks("a", "many.internal", use_edns=0, payload=4096))) == 0  # 60 need 1,700 bytes
    short = world.asks("a", "many.internal")
    assert short.flags & dns.flags.TC
    assert len(found(world.asks("a", "many.internal", by="tcp"))) == 60
    query = dns.message.make_query("many.internal", "AAAA")
    whole, by_tcp = world.during("a", lambda: dns.query.udp_with_fallback(query, addresses.RESOLVER, timeout=5))
    assert by_tcp
    assert len(found(whole)) == 60


@pytest.mark.root
@needs_namespaces
def test_other_names_are_asked_of_the_hosts_resolvers_once_while_the_answer_is_fresh(world: World) -> None:
    def several() -> list[dns.message.Message]:
        query = dns.message.make_query("fresh.example", "A")
        return [dns.query.udp(query, addresses.RESOLVER, timeout=5) for _ in range(3)]

    for answer in world.during("a", several):
        assert found(answer) == ["192.0.2.1"]
    assert world.elsewhere.asked.count("fresh.example.") == 1
    assert world.asks("a", "no.example", "A").rcode() == dns.rcode.NXDOMAIN
    assert len(found(world.asks("a", "long.example", "TXT", by="tcp"))) == 40


@pytest.mark.root
@needs_namespaces
def test_an_answer_to_another_question_is_not_believed_and_silence_is_told_in_time(world: World) -> None:
    assert found(world.asks("a", "forged.example", "A")) == ["192.0.2.1"]
    assert world.asks("a", "silent.example", "A").rcode() == dns.rcode.SERVFAIL


@pytest.mark.root
@needs_namespaces
@pytest.mark.parametrize("name", ["none.internal", "web.flycast", "1.0.0.0.a.a.d.f.ip6.arpa", "internal"])
def test_nobody_else_is_asked_for_private_names(world: World, name: str) -> None:
    before = len(world.elsewhere.asked)
    assert world.asks("a", name).rcode() in (dns.rcode.NXDOMAIN, dns.rcode.NOERROR)
    assert len(world.elsewhere.asked) == before


@pytest.mark.root
@needs_namespaces
def test_neither_the_host_nor_anybody_outside_is_answered(world: World) -> None:
    own = addresses.worker_address("first")
    world.site.ip("internet", f"-6 route replace fdaa::/16 via {HOST6}")
    query = dns.message.make_query("example.com", "A")
    for where in ("host", "internet"):

        def ask() -> None:
            dns.query.udp(query, own, timeout=0.5, port=addresses.RESOLVER_PORT)

        with pytest.raises((dns.exception.Timeout, OSError)):
            world.during(where, ask)
    assert world.site.reached([Try("internet", own, addresses.RESOLVER_PORT)]) == set()
    assert "example.com." not in world.elsewhere.asked


@pytest.mark.root
@needs_namespaces
def test_a_client_that_says_nothing_or_half_a_question_keeps_nobody_waiting(world: World) -> None:
    def talk() -> dns.message.Message:
        with (
            socket.create_connection((addresses.RESOLVER, 53)) as silent,
            socket.create_connection((addresses.RESOLVER, 53)) as half,
        ):
            half.sendall(b"\x00\x40half")
            silent.settimeout(5)
            return dns.query.tcp(dns.message.make_query("web.internal", "AAAA"), addresses.RESOLVER, timeout=5)

    assert len(found(world.during("a", talk))) == 3


# --- without a network ---

ASKER = "fdaa:0:7:1:2:0:1:2"


@pytest.fixture(scope="module")
def answer() -> Iterator[Callable[[bytes, messages.Way], dns.message.Message | None]]:
    rng = random.Random(1)
    resolver = Resolver("::1", network, lambda: Forwarder(rng, resolv_conf=Path("/nonexistent")), rng)
    with asyncio.Runner() as runner:

        def ask(wire: bytes, by: messages.Way) -> dns.message.Message | None:
            made = runner.run(resolver.answer(wire, ASKER, by))
            return None if made is None else dns.message.from_wire(made)

        yield ask


Ask = Callable[[bytes, messages.Way], dns.message.Message | None]


def test_a_name_without_such_records_is_told_from_one_that_is_not_there_both_with_the_zones_authority(
    answer: Ask,
) -> None:
    for name, kind, rcode in (
        ("web.internal", "A", dns.rcode.NOERROR),
        ("off.internal", "AAAA", dns.rcode.NOERROR),
        ("vm.web.internal", "TXT", dns.rcode.NOERROR),
        ("nobody.internal", "AAAA", dns.rcode.NXDOMAIN),
        ("a.b.flycast", "AAAA", dns.rcode.NXDOMAIN),
    ):
        its = answer(dns.message.make_query(name, kind).to_wire(), "udp")
        assert its is not None
        assert (its.rcode(), its.answer) == (rcode, []), name
        assert its.authority[0].rdtype == dns.rdatatype.SOA
        assert its.authority[0].ttl == 5


def test_addresses_have_names_for_those_of_the_network(answer: Ask) -> None:
    for address, names in (("fdaa:0:7:1:2:0:2:2", ["00000000000002.vm.web.internal."]), ("fdaa:0:9:1:2:0:1:2", [])):
        its = answer(dns.message.make_query(dns.reversename.from_address(address), "PTR").to_wire(), "udp")
        assert its is not None
        assert found(its) == names
        assert its.rcode() == (dns.rcode.NOERROR if names else dns.rcode.NXDOMAIN)


def test_what_is_no_plain_question_is_refused_by_its_name(answer: Ask) -> None:
    transfer = dns.message.make_query("internal", "AXFR")
    chaos = dns.message.make_query("version.bind", "TXT", "CH")
    two = dns.message.make_query("web.internal", "AAAA")
    two.question.append(dns.rrset.RRset(dns.name.from_text("off.internal"), dns.rdataclass.IN, dns.rdatatype.AAAA))
    status = dns.message.make_query("web.internal", "AAAA")
    status.set_opcode(dns.opcode.STATUS)
    newer = dns.message.make_query("web.internal", "AAAA", use_edns=1)
    for query, rcode in (
        (transfer, dns.rcode.REFUSED),
        (chaos, dns.rcode.REFUSED),
        (two, dns.rcode.FORMERR),
        (status, dns.rcode.NOTIMP),
        (newer, dns.rcode.BADVERS),
    ):
        its = answer(query.to_wire(), "udp")
        assert its is not None
        assert its.rcode() == rcode


def test_an_answer_is_not_answered(answer: Ask) -> None:
    reply = dns.message.make_response(dns.message.make_query("web.internal", "AAAA"))
    assert answer(reply.to_wire(), "udp") is None


@given(st.binary(max_size=300), st.sampled_from(["udp", "tcp"]))
def test_no_bytes_do_harm(answer: Ask, wire: bytes, by: messages.Way) -> None:
    answer(wire, by)


@given(st.data())
def test_no_damaged_question_does_harm(answer: Ask, data: st.DataObject) -> None:
    wire = bytearray(dns.message.make_query("top3.nearest.of.web.internal", "AAAA", use_edns=0).to_wire())
    for _ in range(data.draw(st.integers(1, 4))):
        wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    answer(bytes(wire[: data.draw(st.integers(0, len(wire)))]), "udp")


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.floats(0, 0.01)), max_size=300))
def test_each_machine_may_ask_at_its_rate_whatever_others_ask(steps: list[tuple[str, float]]) -> None:
    rate, now, allowed = Rate(), 0.0, {"a": 0, "b": 0}
    for _ in range(int(BURST)):
        assert rate.allows("flood", now)
    for asker, later in steps:
        now += later
        allowed[asker] += rate.allows(asker, now)
    assert allowed == {asker: sum(1 for each, _ in steps if each == asker) for asker in allowed}
    flood = sum(rate.allows("flood", now) for _ in range(2000))
    assert flood <= now * RATE + 1


def test_upstreams_are_the_hosts_and_never_a_workers_own(tmp_path: Path) -> None:
    config = tmp_path / "resolv.conf"
    config.write_text(f"nameserver 192.0.2.53\nnameserver {addresses.RESOLVER}\nnameserver 2001:db8::53\n")
    forwarder = Forwarder(random.Random(1), resolv_conf=config)
    assert [each.address for each in forwarder.upstreams()] == ["192.0.2.53", "2001:db8::53"]
    assert Forwarder(random.Random(1), resolv_conf=tmp_path / "none").upstreams() == ()


async def test_a_machine_whose_questions_nobody_answers_leaves_others_their_places() -> None:
    elsewhere, rng = Elsewhere(), random.Random(1)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(lambda: elsewhere, local_addr=("127.0.0.1", 0))
    upstream = Upstream(*transport.get_extra_info("sockname"))
    resolver = Resolver("::1", network, lambda: Forwarder(rng, [upstream]), rng)

    async def asked(name: str, asker: str) -> dns.rcode.Rcode:
        answer = await resolver.answer(dns.message.make_query(name, "A").to_wire(), asker, "udp")
        return dns.message.from_wire(answer or b"").rcode()

    one, other = "fdaa:0:7:1:2:0:1:2", "fdaa:0:9:1:2:0:1:2"
    waiting = [asyncio.ensure_future(asked(f"silent.{n}.example", one)) for n in range(FORWARDED_EACH)]
    await until(lambda: len(elsewhere.asked) == FORWARDED_EACH)
    assert await asked("fine.example", one) == dns.rcode.SERVFAIL
    assert await asked("fine.example", other) == dns.rcode.NOERROR
    for each in waiting:
        each.cancel()
    await asyncio.wait(waiting)
    assert await asked("fine.example", one) == dns.rcode.NOERROR
    await resolver.close()
    transport.close()

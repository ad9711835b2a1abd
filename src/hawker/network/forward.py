"""Names that are not private: asked of the host's own resolvers, for a bounded time, and remembered for a moment.

Each question goes out with a number and from a port that nobody can guess, and only the answer to that very question
counts. Machines that ask the same at the same time share one question.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.resolver
import dns.rrset
import msgspec

from hawker.network.addresses import SPACE6
from hawker.network.messages import UDP_MOST, Query

FIRST_S, WHOLE_S = 1.5, 5.0
"""How long each resolver is waited for, and all of them together."""
KEPT_S, REFUSED_S = 30.0, 5.0
"""The longest that an answer is kept, and one that there is no such thing."""
KEPT = 4096
WAITING = 512
"""Questions under way at a time."""
_Key = tuple[dns.name.Name, int, int]


class Upstream(msgspec.Struct, frozen=True):
    """A resolver to ask."""

    address: str
    port: int = 53


class Forwarder:
    """`upstreams` as configured, none: those of `resolv_conf`, read again when it changes."""

    def __init__(
        self, rng: random.Random, upstreams: Sequence[Upstream] = (), resolv_conf: Path = Path("/etc/resolv.conf")
    ) -> None:
        self._rng = rng
        self._configured = tuple(upstreams)
        self._path = resolv_conf
        self._read: tuple[int, tuple[Upstream, ...]] = (-1, ())
        self._kept: OrderedDict[_Key, tuple[float, float, dns.message.Message]] = OrderedDict()
        self._asking: dict[_Key, asyncio.Task[dns.message.Message | None]] = {}

    async def ask(self, query: Query) -> dns.message.Message | None:
        """The answer, as for `query`. None: nobody answered in time, or too much is asked already."""
        key = self._key(query)
        found = self._remembered(key)
        if found is None:
            task = self._asking.get(key)
            if task is None:
                if len(self._asking) >= WAITING:
                    return None
                task = self._asking[key] = asyncio.create_task(self._ask(key))
                task.add_done_callback(lambda done: self._asking.pop(key, None))
            found = await asyncio.shield(task)
        return None if found is None else _for(query, found)

    async def close(self) -> None:
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def upstreams(self) -> tuple[Upstream, ...]:
        """Whom to ask now. Never a worker's own resolver, which would ask in a circle."""
        if self._configured:
            return self._configured
        try:
            changed = self._path.stat().st_mtime_ns
            if changed != self._read[0]:
                found = dns.resolver.Resolver(str(self._path)).nameservers
                asked = tuple(Upstream(str(each)) for each in found if isinstance(each, str) and _is_other(each))
                self._read = changed, asked
        except (OSError, dns.exception.DNSException):
            return ()
        return self._read[1]

    async def _ask(self, key: _Key) -> dns.message.Message | None:
        with suppress(TimeoutError):
            async with asyncio.timeout(WHOLE_S):
                for upstream in self.upstreams():
                    with suppress(TimeoutError, OSError):
                        async with asyncio.timeout(FIRST_S):
                            found = await self._exchange(upstream, key)
                        if found.rcode() not in (dns.rcode.SERVFAIL, dns.rcode.REFUSED):
                            self._remember(key, found)
                            return found
        return None

    async def _exchange(self, upstream: Upstream, key: _Key) -> dns.message.Message:
        name, kind, bits = key
        question = dns.message.make_query(name, dns.rdatatype.RdataType(kind), use_edns=0, payload=UDP_MOST)
        question.flags = dns.flags.RD | bits & dns.flags.CD
        if bits & dns.flags.DO << 16:
            question.want_dnssec(True)
        question.id = self._rng.getrandbits(16)
        found = await _by_udp(upstream, question)
        return await _by_tcp(upstream, question) if found.flags & dns.flags.TC else found

    def _key(self, query: Query) -> _Key:
        asked = query.question[0]
        bits = int(query.flags & dns.flags.CD) | int(query.ednsflags & dns.flags.DO) << 16
        return asked.name, asked.rdtype, bits

    def _remembered(self, key: _Key) -> dns.message.Message | None:
        now = asyncio.get_running_loop().time()
        made, until, found = self._kept.get(key, (0.0, 0.0, None))
        if found is None or now >= until:
            return None
        self._kept.move_to_end(key)
        return found if now - made < 1 else _aged(found, int(now - made))

    def _remember(self, key: _Key, found: dns.message.Message) -> None:
        seconds = min((rrset.ttl for rrset in found.answer), default=REFUSED_S)
        if found.rcode() not in (dns.rcode.NOERROR, dns.rcode.NXDOMAIN) or seconds <= 0:
            return
        now = asyncio.get_running_loop().time()
        self._kept[key] = now, now + min(seconds, KEPT_S), found
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)


class _Udp(asyncio.DatagramProtocol):
    """Waits for the answer to one question."""

    def __init__(self, question: dns.message.Message) -> None:
        self._question = question
        self.found: asyncio.Future[dns.message.Message] = asyncio.get_running_loop().create_future()

    def datagram_received(self, data: bytes, addr: object) -> None:
        found = _parsed(data, self._question)
        if found is not None and not self.found.done():
            self.found.set_result(found)

    def error_received(self, exc: Exception) -> None:
        if not self.found.done():
            self.found.set_exception(exc)


async def _by_udp(upstream: Upstream, question: dns.message.Message) -> dns.message.Message:
    loop = asyncio.get_running_loop()
    at = (upstream.address, upstream.port)
    transport, waiting = await loop.create_datagram_endpoint(lambda: _Udp(question), remote_addr=at)
    try:
        transport.sendto(question.to_wire())
        return await waiting.found
    finally:
        transport.close()


async def _by_tcp(upstream: Upstream, question: dns.message.Message) -> dns.message.Message:
    reader, writer = await asyncio.open_connection(upstream.address, upstream.port)
    try:
        wire = question.to_wire()
        writer.write(len(wire).to_bytes(2, "big") + wire)
        length = int.from_bytes(await reader.readexactly(2), "big")
        found = _parsed(await reader.readexactly(length), question)
    except asyncio.IncompleteReadError as error:
        raise ConnectionResetError("the answer ended early") from error
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    if found is None:
        raise ConnectionResetError("the answer was to another question")
    return found


def _parsed(data: bytes, question: dns.message.Message) -> dns.message.Message | None:
    try:
        found = dns.message.from_wire(data, ignore_trailing=True)
        return found if question.is_response(found) else None
    except Exception:  # it came from the network; the right one may still come
        return None


def _for(query: Query, found: dns.message.Message) -> dns.message.Message:
    """Make of a found answer the reply to this question."""
    made = dns.message.make_response(query, recursion_available=True, our_payload=UDP_MOST)
    made.set_rcode(found.rcode())
    made.flags |= found.flags & dns.flags.AD
    made.answer, made.authority, made.additional = found.answer, found.authority, found.additional
    return made


def _aged(found: dns.message.Message, seconds: int) -> dns.message.Message:
    """Make a copy of the answer with its times to live reduced by so many seconds."""
    made = dns.message.Message(found.id)
    made.flags = found.flags
    made.set_rcode(found.rcode())
    for of, to in ((found.answer, made.answer), (found.authority, made.authority), (found.additional, made.additional)):
        for rrset in of:
            to.append(dns.rrset.from_rdata_list(rrset.name, max(0, rrset.ttl - seconds), list(rrset)))
    return made


def _is_other(address: str) -> bool:
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return found.version == 4 or found not in SPACE6

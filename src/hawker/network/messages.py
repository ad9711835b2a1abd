"""DNS messages about private names: a question taken apart, and an answer put together (RFC 1035, 2308, 6891).

dnspython has the wire format. Nothing here waits or asks anybody.
"""

from __future__ import annotations

import random
from ipaddress import IPv6Address
from typing import Literal

import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.opcode
import dns.rcode
import dns.rdata
import dns.rdataclass
import dns.rdatatype
import dns.rdtypes.ANY.TXT
import dns.reversename
import dns.rrset

from hawker.network import names
from hawker.network.names import Network

TTL_S = 5
UDP_LEAST, UDP_MOST = 512, 1232
"""Bytes of an answer by UDP: without EDNS, and at most (what passes everywhere unfragmented)."""
TCP_MOST = 65_535
ZONE = dns.name.from_text(names.ZONE)
PROXIED = dns.name.from_text(names.PROXIED)
REVERSE = dns.name.from_text("a.a.d.f.ip6.arpa")
IN = dns.rdataclass.IN
TRANSFERS = (dns.rdatatype.AXFR, dns.rdatatype.IXFR)
Query = dns.message.Message
Way = Literal["udp", "tcp"]


def parse(wire: bytes) -> Query | None:
    """A query with one question, or None for what deserves no answer: it is malformed, or itself an answer."""
    try:
        message = dns.message.from_wire(wire, ignore_trailing=False)
    except Exception:  # whatever a parser makes of what a machine sent, it is dropped
        return None
    if message.flags & dns.flags.QR:
        return None
    return message


def refusal(query: Query) -> dns.rcode.Rcode | None:
    """Why a query is not looked at further, if it is not."""
    if query.opcode() != dns.opcode.QUERY:
        return dns.rcode.NOTIMP
    if len(query.question) != 1:
        return dns.rcode.FORMERR
    if query.edns > 0:
        return dns.rcode.BADVERS
    asked = query.question[0]
    if asked.rdclass != dns.rdataclass.IN or asked.rdtype in TRANSFERS:
        return dns.rcode.REFUSED
    return None


def private(name: dns.name.Name) -> bool:
    """Whether a name is answered here, and never asked of anybody else."""
    return any(name.is_subdomain(zone) for zone in (ZONE, PROXIED, REVERSE))


def response(query: Query, rcode: dns.rcode.Rcode = dns.rcode.NOERROR) -> dns.message.Message:
    """An answer with nothing in it yet."""
    found = dns.message.make_response(query, recursion_available=True, our_payload=UDP_MOST)
    found.set_rcode(rcode)
    return found


def answered(query: Query, network: Network, asker: str, rng: random.Random) -> dns.message.Message:
    """The answer to a question about a private name. Addresses come in any order, so that machines share the load."""
    asked = query.question[0]
    found = response(query)
    found.flags |= dns.flags.AA
    owner = asked.name
    if owner.is_subdomain(REVERSE):
        exists = _reverse(found, asked, network)
    else:
        its = _answer(owner, network, asker)
        exists = its.exists
        if its.kind == "AAAA" and asked.rdtype in (dns.rdatatype.AAAA, dns.rdatatype.ANY):
            addresses = list(its.addresses)
            if not its.ordered:
                rng.shuffle(addresses)
            _add(found, owner, *map(_aaaa, addresses))
        if its.kind == "TXT" and asked.rdtype in (dns.rdatatype.TXT, dns.rdatatype.ANY):
            text = its.text.encode()
            strings = [text[at : at + 255] for at in range(0, len(text), 255)] or [b""]
            _add(found, owner, dns.rdtypes.ANY.TXT.TXT(IN, dns.rdatatype.TXT, strings))
        if owner in (ZONE, PROXIED) and asked.rdtype in (dns.rdatatype.SOA, dns.rdatatype.ANY):
            _add(found, owner, _authority(owner))
    if not found.answer:
        zone = next(zone for zone in (ZONE, PROXIED, REVERSE) if owner.is_subdomain(zone))
        found.authority.append(dns.rrset.from_rdata(zone, TTL_S, _authority(zone)))
        if not exists:
            found.set_rcode(dns.rcode.NXDOMAIN)
    return found


def fitted(message: dns.message.Message, query: Query, by: Way) -> bytes:
    """The bytes of the answer. One that is too long for UDP goes without records and is marked as truncated."""
    most = TCP_MOST
    if by == "udp":
        most = min(max(query.payload, UDP_LEAST), UDP_MOST) if query.edns >= 0 else UDP_LEAST
    try:
        return message.to_wire(max_size=most)
    except dns.exception.TooBig:
        pass
    short = response(query, message.rcode())
    short.flags = message.flags | dns.flags.TC if by == "udp" else message.flags
    if by == "tcp":
        short.set_rcode(dns.rcode.SERVFAIL)
    return short.to_wire()


def _answer(owner: dns.name.Name, network: Network, asker: str) -> names.Answer:
    if not owner.is_subdomain(ZONE):
        return names.NOTHING if owner == PROXIED else names.UNKNOWN
    labels = owner.relativize(ZONE).labels
    try:
        return names.answer(network, tuple(label.decode("ascii").lower() for label in labels), asker)
    except UnicodeDecodeError:
        return names.UNKNOWN


def _reverse(found: dns.message.Message, asked: dns.rrset.RRset, network: Network) -> bool:
    try:
        address = str(IPv6Address(dns.reversename.to_address(asked.name)))
    except (dns.exception.DNSException, ValueError):
        return len(asked.name) < 35  # above addresses: there are names below
    name = names.owner(network, address)
    if name and asked.rdtype in (dns.rdatatype.PTR, dns.rdatatype.ANY):
        _add(found, asked.name, dns.rdata.from_text(IN, dns.rdatatype.PTR, f"{name}.{ZONE}"))
    return bool(name)


def _add(found: dns.message.Message, owner: dns.name.Name, *records: dns.rdata.Rdata) -> None:
    if records:
        found.answer.append(dns.rrset.from_rdata(owner, TTL_S, *records))


def _aaaa(address: str) -> dns.rdata.Rdata:
    return dns.rdata.from_wire(IN, dns.rdatatype.AAAA, IPv6Address(address).packed, 0, 16)


def _authority(zone: dns.name.Name) -> dns.rdata.Rdata:
    return dns.rdata.from_text(IN, dns.rdatatype.SOA, f"{zone} {zone} 1 3600 600 86400 {TTL_S}")

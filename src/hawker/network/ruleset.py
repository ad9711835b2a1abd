"""The part of a worker's filters that does not change: its chains and rules, in the language of nftables.

One table per worker for IP and one for ARP. They judge only what comes from or goes to the worker's own host ends,
whose names begin alike; whatever is not listed in a set is dropped, so a machine has no network before its elements are
there. Machines are elements of sets, never rules. A packet between machines of two workers on one host passes both
workers' tables, and each judges its own side.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from ipaddress import ip_network

from hawker.network.addresses import (
    DEVICES,
    GATEWAY4,
    GATEWAY6,
    RESOLVER,
    RESOLVER_PORT,
    SPACE6,
    device_prefix,
    tag,
    worker_address,
)
from hawker.network.base import Settings

MARK = "made-"
"""An empty chain named this and a digest of the text tells which text the table was made from."""
UNREACHABLE = (
    "0.0.0.0/8",
    "127.0.0.0/8",
    "169.254.0.0/16",  # link-local: clouds serve credentials there
    "224.0.0.0/4",
    "240.0.0.0/4",
    "::/127",
    "::ffff:0.0.0.0/96",
    "64:ff9b::7f00:0/104",  # the same as a translator to IPv4 has them (RFC 6052)
    "64:ff9b::a9fe:0/112",
    "fe80::/10",
    "ff00::/8",
)
"""What no setting lets a machine reach."""
DYNAMIC = frozenset(
    {"sources", "sources4", "solicitors", "networks", "machines", "machines4", "marks", "published4", "published6"}
)
"""The sets and maps that machines are elements of."""
MACHINES = 65_536
"""The most host ends whose connections are counted: the kernel has an element for each that has any, in a set for those
that machines begin and in one for those that they take."""
PRIVATE = (
    *("10.0.0.0/8", "100.64.0.0/10", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7", "fec0::/10"),
    *("64:ff9b::a00:0/104", "64:ff9b::6440:0/106", "64:ff9b::ac10:0/108", "64:ff9b::c0a8:0/112", "64:ff9b:1::/48"),
)
"""What machines reach only where `Settings.allowed` says so (RFC 1918, 6598, 4193, 3879), also by a translator to IPv4
(RFC 6052, 8215)."""


def table(worker: str) -> str:
    """The name of both tables. Names that nftables would not take are told apart by the worker's tag."""
    plain = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "-_.") else "_" for letter in worker)
    return f"hawker-{plain[:64]}-{tag(worker)}"


def text(worker: str, settings: Settings) -> str:
    """Replaces both tables by what they should be, without elements of machines. To be run as one transaction."""
    return removal(worker) + _body(worker, settings).replace("@MARK@", mark(worker, settings))


def removal(worker: str) -> str:
    """Removes both tables, whether they are there or not."""
    return "".join(
        f"add table {family} {table(worker)}\ndelete table {family} {table(worker)}\n" for family in ("inet", "arp")
    )


def sizes(worker: str, settings: Settings) -> dict[tuple[str, str], int]:
    """How many rules each chain has, by family and name: rules that somebody removed or added show in it."""
    found: dict[tuple[str, str], int] = {}
    family = chain = ""
    for line in _body(worker, settings).splitlines():
        words = line.split()
        match words:
            case ["table", family, *_]:
                pass
            case ["chain", chain, *_]:
                pass
            case [first, *_] if line.startswith("    ") and first not in ("type", "#"):
                found[family, chain] = found.get((family, chain), 0) + 1
    return found


def mark(worker: str, settings: Settings) -> str:
    return MARK + blake2b(_body(worker, settings).encode(), digest_size=8).hexdigest()


def _body(worker: str, settings: Settings) -> str:
    name, mine, ours = table(worker), device_prefix(worker), worker_address(worker)
    never4, never6 = _split((*UNREACHABLE, *settings.denied))
    allowed4, allowed6 = _split(settings.allowed)
    private4, private6 = _split(PRIVATE)
    on4, on6 = _split(settings.publish_on)
    # Nowhere given: on all addresses of the host. Given for one family only: not in the other at all.
    at4 = "" if not settings.publish_on else f"ip daddr {_listed(on4)} " if on4 else None
    at6 = "" if not settings.publish_on else f"ip6 daddr {_listed(on6)} " if on6 else None
    published = "".join(
        f"    meta nfproto {proto} {at}fib daddr type local "
        f"dnat {family} to meta l4proto . th dport map @published{family[2:] or '4'};\n"
        for proto, family, at in (("ipv4", "ip", at4), ("ipv6", "ip6", at6))
        if at is not None
    )
    begun = taken = ""
    if most := settings.connections:  # one that is dropped here takes no place among those that the host keeps
        begun = f"    add @begun {{ iifname ct count over {most} }} drop;\n"
        taken = f"    add @taken {{ oifname ct count over {most} }} drop;\n"
    return f"""table inet {name} {{
  chain @MARK@ {{ }}
  set sources {{ type ifname . ipv6_addr; }}
  set sources4 {{ type ifname . ipv4_addr; }}
  set solicitors {{ type ifname . ipv6_addr; }}
  set networks {{ type ifname . ipv6_addr; }}
  set machines {{ type ipv6_addr; }}
  set machines4 {{ type ipv4_addr; }}
  map marks {{ type ifname : mark; }}
  set begun {{ type ifname; size {MACHINES}; flags dynamic; }}
  set taken {{ type ifname; size {MACHINES}; flags dynamic; }}
  map published4 {{ type inet_proto . inet_service : ipv4_addr . inet_service; }}
  map published6 {{ type inet_proto . inet_service : ipv6_addr . inet_service; }}
{_interval("never", "ipv6_addr", never6)}{_interval("never4", "ipv4_addr", never4)}\
{_interval("allowed", "ipv6_addr", allowed6)}{_interval("allowed4", "ipv4_addr", allowed4)}\
{_interval("private", "ipv6_addr", private6)}{_interval("private4", "ipv4_addr", private4)}\

  chain arriving {{
    type filter hook prerouting priority raw; policy accept;
    iifname "{mine}*" jump genuine;
  }}
  chain genuine {{
    # Before connections are tracked: what is forged takes no memory.
    iifname . ip saddr @sources4 ip daddr != 127.0.0.0/8 ip hdrlength 5 return;
    # Of neighbour discovery only questions for the gateway (the target is the 16 bytes at 8). What else there is of it,
    # and whatever is for many, is for the host, which takes none of it below.
    icmpv6 type nd-neighbor-solicit jump solicited;
    iifname . ip6 saddr @sources return;
    drop;
  }}
  chain solicited {{
    ip6 hoplimit 255 iifname . ip6 saddr @solicitors @th,64,128 0xfe800000000000000000000000000001 accept;
    drop;
  }}

  chain destined {{
    type nat hook prerouting priority dstnat; policy accept;
    iifname "{mine}*" ip6 daddr {RESOLVER} meta l4proto {{ tcp, udp }} th dport 53 dnat ip6 to [{ours}]:{RESOLVER_PORT};
    iifname "{mine}*" ip6 daddr {RESOLVER} dnat ip6 to {ours};
    iifname "{DEVICES}*" return;
{published}  }}
  chain calling {{
    type nat hook output priority -100; policy accept;
    ip6 daddr ::1 return;
{published}  }}
  chain leaving {{
    type nat hook postrouting priority srcnat; policy accept;
    oifname "{mine}*" ip saddr 127.0.0.0/8 snat ip to {GATEWAY4};
    oifname "{DEVICES}*" return;
    ip saddr @machines4 masquerade;
    ip6 saddr @machines masquerade;
  }}

  chain forwarded {{
    type filter hook forward priority filter; policy accept;
    iifname "{mine}*" jump outgoing;
    oifname "{mine}*" jump entering;
  }}
  chain entering {{
    ct state established,related return;
    iifname "{DEVICES}*" meta nfproto ipv6 oifname . (ip6 saddr & ffff:ffff:ffff::) @networks goto taking;
    iifname "{DEVICES}*" drop;
    ct status dnat ct mark set oifname map @marks goto taking;
    drop;
  }}
  chain taking {{
{taken}  }}
  chain outgoing {{
    ct state established,related return;
    ct state invalid drop;
    iifname . (ip6 daddr & ffff:ffff:ffff::) @networks oifname "{DEVICES}*" goto beginning;
    oifname "{DEVICES}*" drop;
    ip daddr @never4 drop;
    ip6 daddr @never drop;
    ip6 daddr {SPACE6} drop;
    ct mark set iifname map @marks;
    ip daddr @allowed4 goto beginning;
    ip6 daddr @allowed goto beginning;
    ip daddr @private4 drop;
    ip6 daddr @private drop;
    goto beginning;
  }}
  chain beginning {{
    # Last of all: what is not let through anyway is not counted, or others could use up what one may have.
{begun}  }}

  chain received {{
    type filter hook input priority filter; policy accept;
    iifname "{mine}*" jump knocking;
    ip6 daddr {ours} iifname != "lo" ct state new drop;
  }}
  chain knocking {{
    ct state established,related accept;
    icmpv6 type nd-neighbor-solicit accept;
    ip6 daddr {ours} meta l4proto {{ tcp, udp }} th dport {RESOLVER_PORT} goto asking;
    ip6 daddr {{ {ours}, {GATEWAY6} }} icmpv6 type echo-request goto asking;
    ip daddr {GATEWAY4} icmp type echo-request goto asking;
    drop;
  }}
  chain asking {{
    jump beginning;
    accept;
  }}
}}
table arp {name} {{
  set sources4 {{ type ifname . ipv4_addr; }}
  chain received {{
    type filter hook input priority 0; policy accept;
    iifname "{mine}*" jump genuine;
  }}
  chain genuine {{
    arp operation request iifname . arp saddr ip @sources4 arp daddr ip {GATEWAY4} accept;
    drop;
  }}
}}
"""


def _split(networks: Iterable[str]) -> tuple[list[str], list[str]]:
    """Networks or addresses of each family."""
    found = [ip_network(network, strict=False) for network in networks]
    return [str(net) for net in found if net.version == 4], [str(net) for net in found if net.version == 6]


def _listed(networks: list[str]) -> str:
    return "{ " + ", ".join(networks) + " }"


def _interval(name: str, kind: str, networks: list[str]) -> str:
    elements = f" elements = {_listed(networks)};" if networks else ""
    return f"  set {name} {{ type {kind}; flags interval; auto-merge;{elements} }}\n"

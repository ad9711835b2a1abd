"""The limits of the embedded data plane, each with the reason of its default."""

from __future__ import annotations

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds, sizes in bytes. What a service says itself (`ServicePort`) goes before."""

    region: str = ""
    """This proxy's, told to machines and in request ids."""
    token: str = ""
    """The cluster's, which every request over the backhaul carries. Empty: no backhaul is served."""
    name: str = "hawker"
    """In Via and Proxy-Status."""
    trusted: tuple[str, ...] = ()
    """Addresses and networks of proxies before this one, whose word of who asks is believed."""
    proxy_protocol: tuple[int, ...] = ()
    """Public ports where those speak the PROXY protocol, always."""

    connections: int = 0
    """How many users and other proxies may have at once; more are closed when they come. 0: as many as the process's
    descriptors allow, with two for each, and some to spare (`hawker.core.connection_limits`)."""

    connections_of_one: int = 0
    """How many of them users of one address may have, who may be all users of an office; more are closed when they
    come. 0: a quarter. `trusted` addresses, behind which is everybody, may have any number."""

    access_log: str = ""
    """A file that every request is written to (`hawker.proxy.embedded.access_log`). Empty: none."""

    head_bytes: int = 32 << 10
    """Of a request's or an answer's head, and as much again of its trailers. nginx takes 32 KiB, HAProxy 16, Go 1
    MiB."""
    fields: int = 128
    """Header fields of a head, as HAProxy's 101 and Apache's 100; and trailers."""
    framing_bytes: int = 16 << 10
    """Chunk sizes and extensions of one body, beyond nine times its data."""
    head_timeout_s: float = 10.0
    """From a head's first byte, or the connection's start, to its last. Stops slow attackers."""
    handshake_timeout_s: float = 10.0
    """For a handshake of TLS, as HAProxy's `timeout client-hs` and Go's server advise."""
    idle_timeout_s: float = 60.0
    """Without a request, or without a byte in either direction of one."""
    gone_s: float = 120.0
    """Without a sign of the peer's host, on a connection of a plain TCP service, which may be silent for hours."""
    linger_s: float = 2.0
    """How long what a client still sends is read and dropped after its last answer, so that the answer arrives."""
    half_closed_s: float = 5.0
    """How long an answer may take for a client that has closed its sending side: most of those have left."""
    requests_per_connection: int = 0
    """After which a connection is closed; 0: any number."""

    connect_timeout_s: float = 3.0
    """To a machine: one lost SYN is repeated after a second. And how long a short request that may be made twice stays
    unacknowledged by the machine's host."""
    wait_s: float = 60.0
    """How long a request is held at most until a machine takes it."""
    attempts: int = 90
    """Machines tried for one request, as Fly's proxy does."""
    pool_idle_s: float = 4.0
    """How long an unused connection to a machine is kept: under the 5 seconds after which common servers close."""
    pool_size: int = 128
    """Unused connections kept per address."""
    interim_answers: int = 16
    """1xx answers passed on for one request, together no larger than a head: they wait for nobody who reads slowly."""

    h2_streams: int = 128
    """Requests at once on a connection of HTTP/2, to clients and machines: RFC 9113 advises 100 at least."""
    h2_window_bytes: int = 256 << 10
    """What a peer may send on one stream before it went on. At 50 ms to the peer that is 5 MB/s."""
    h2_connection_window_bytes: int = 1 << 20
    """The same for all streams of a client's connection: the memory that it can fill. To a machine, where the streams
    of a connection are many clients', each has its own window alone."""
    h2_strikes: float = 200.0
    """How much a connection may ask of HTTP/2 itself (resets, pings, settings, empty frames) at once; an answer that
    was taken makes up for one. Against floods such as CVE-2023-44487."""
    h2_strikes_per_s: float = 20.0

    replay_bytes: int = 1 << 20
    """Of a request's body kept until its answer comes, so that it can be sent again."""
    replay_bytes_of_all: int = 256 << 20
    """The same of all requests; each app may have as much of it as is left for the others. Over it, what has a machine
    is kept no more, and what waits for one is not read on."""
    upload_look_s: float = 5.0
    """How often the rate of requests' bodies is looked at."""
    upload_least: float = 240.0
    """Bytes a second of a body whose length is known, as Kestrel and IIS have it: over 20 seconds."""
    upload_crowded: float = 8192.0
    """Bytes a second of a body whose request has a place that others wait for: 64 kbit/s, the least that is still sold
    as a connection."""

    answer_least: float = 240.0
    """Bytes a second of an answer over HTTP/2 that its client takes, over the idle time. To a connection of HTTP/1.1,
    where nothing is told to have been taken before a good part of `window_bytes` was, it is several times as many."""

    replays: int = 10
    """`fly-replay` answers followed for one request."""
    hops: int = 2
    """Proxies in a row on the backhaul."""
    window_bytes: int = 64 << 10
    """Buffered towards a peer before what comes from the other one is no longer read."""
    drain_s: float = 30.0
    """How long what is in flight may take when the proxy ends, or is begun anew."""
    pause_s: float = 5.0
    """How long what has come since then may take when the proxy is begun anew: new connections wait meanwhile."""

"""The limits of the embedded data plane, each with the reason of its default."""

from __future__ import annotations

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Times are in seconds, sizes in bytes. What a service says itself (`ServicePort`) goes before."""

    region: str = ""
    """This proxy's region, told to machines and in request ids."""
    token: str = ""
    """The cluster's token, which every request over the backhaul carries. Empty: no backhaul is served."""
    name: str = "hawker"
    """The proxy's name in Via and Proxy-Status."""
    trusted: tuple[str, ...] = ()
    """Addresses and networks of proxies before this one, whose word of who asks is believed."""
    proxy_protocol: tuple[int, ...] = ()
    """Public ports where those speak the PROXY protocol, always."""

    connections: int = 0
    """How many connections users and other proxies may have at once; more are closed when they come. 0: as many as the
    process's descriptors allow, with two for each, and some to spare (`hawker.core.connection_limits`)."""

    connections_of_one: int = 0
    """How many of them users of one address may have, who may be all users of an office; more are closed when they
    come. 0: a quarter. `trusted` addresses, which bring many users, may have any number."""

    access_log: str = ""
    """A file that every request is written to (`hawker.proxy.embedded.access_log`). Empty: none."""

    head_bytes: int = 32 << 10
    """How large a request's or an answer's head may be, and as much again its trailers. nginx takes 32 KiB, HAProxy 16,
    Go 1 MiB."""
    fields: int = 128
    """How many fields a head may have, like HAProxy's 101 and Apache's 100; and how many trailers."""
    framing_bytes: int = 16 << 10
    """How much framing a chunked body may have, beyond nine times its data."""
    head_timeout_s: float = 10.0
    """How long a head may take from its first byte, or the connection's start, to its last. This stops slow
    attackers."""
    handshake_timeout_s: float = 10.0
    """How long a handshake of TLS may take, as HAProxy's `timeout client-hs` and Go's server advise."""
    idle_timeout_s: float = 60.0
    """How long a connection may have no request, or a request no byte in either direction."""
    gone_s: float = 120.0
    """How long there may be no sign of the peer's host on a connection of a plain TCP service, which may be silent for
    hours."""
    linger_s: float = 2.0
    """How long what a client still sends is read and dropped after its last answer, so that the answer arrives."""
    half_closed_s: float = 5.0
    """How long an answer may take for a client that has closed its sending side: most of those have left."""
    requests_per_connection: int = 0
    """After how many requests a connection is closed; 0: any number."""

    connect_timeout_s: float = 3.0
    """How long a connection to a machine may take: one lost SYN is repeated after a second. For as long a short request
    that may be made twice may stay unacknowledged by the machine's host."""
    wait_s: float = 60.0
    """How long a request is held at most until a machine takes it."""
    attempts: int = 90
    """How many machines are tried for one request, as Fly's proxy does."""
    pool_idle_s: float = 4.0
    """How long an unused connection to a machine is kept: under the 5 seconds after which common servers close."""
    pool_size: int = 128
    """How many unused connections are kept per address."""
    interim_answers: int = 16
    """How many 1xx answers are passed on for one request, together no larger than a head: they are sent even to a
    client that reads slowly."""

    h2_streams: int = 128
    """How many requests a connection of HTTP/2 has at once, to clients and machines: RFC 9113 advises 100 at least."""
    h2_window_bytes: int = 256 << 10
    """How many bytes a peer may send on one stream before they are passed on. At 50 ms to the peer that is 5 MB/s."""
    h2_connection_window_bytes: int = 1 << 20
    """The same for all streams of a client's connection: the memory that it can fill. On a connection to a machine,
    whose streams are many clients', only each stream's own window counts."""
    h2_strikes: float = 200.0
    """How much a connection may ask of HTTP/2 itself (resets, pings, settings, empty frames) at once; an answer that
    was taken makes up for one. Against floods such as CVE-2023-44487."""
    h2_strikes_per_s: float = 20.0

    replay_bytes: int = 1 << 20
    """How many bytes of a request's body are kept until its answer comes, so that it can be sent again."""
    replay_bytes_of_all: int = 256 << 20
    """The same for all requests; each app may have as much of it as is left for the others. Over it, a body that has a
    machine is kept no more, and one that waits for a machine is not read on."""
    upload_look_s: float = 5.0
    """How often the rate of requests' bodies is looked at."""
    upload_least: float = 240.0
    """The least bytes a second of a body whose length is known, as Kestrel and IIS have it: over 20 seconds."""
    upload_crowded: float = 8192.0
    """The least bytes a second of a body whose request has a slot that others wait for: 64 kbit/s, the least that is
    still sold as a connection."""

    answer_least: float = 240.0
    """The least bytes a second of an answer over HTTP/2 that its client must take, over the idle time. On a connection
    of HTTP/1.1, which tells nothing before a good part of `window_bytes` was taken, it is several times as much."""

    replays: int = 10
    """How many `fly-replay` answers are followed for one request."""
    hops: int = 2
    """How many proxies may follow one another on the backhaul."""
    window_bytes: int = 64 << 10
    """How much is buffered towards a peer before what comes from the other one is no longer read."""
    drain_s: float = 30.0
    """How long what is in flight may take when the proxy ends, or restarts."""
    pause_s: float = 5.0
    """How long what has come since then may take when the proxy restarts: new connections wait meanwhile."""

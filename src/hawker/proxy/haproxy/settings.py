"""What an operator says of HAProxy: the table `[proxy.haproxy]`."""

from __future__ import annotations

import msgspec


class HaproxySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of HAProxy, each with the reason of its default."""

    program: str = "haproxy"
    """Version 2.6 or newer, as Debian has it."""
    directory: str = ""
    """Where its configuration and sockets are; "": `haproxy` below the agent's own."""
    user: str = "haproxy"
    """The user that it runs as when the agent is root: the one that Debian's package makes. It is locked into its
    directory."""
    threads: int = 1
    """As measured on two cores, one thread serves more than two that wait for each other."""
    plain: tuple[int, ...] = (80,)
    """Shared public ports without TLS, which HAProxy serves."""
    tls: tuple[int, ...] = (443,)
    """Shared public ports with TLS, where there are certificates. The embedded plane serves all others."""
    backends: int = 64
    """How many apps HAProxy can serve before the first reload; a reload makes room for twice as many."""
    backends_most: int = 8192
    """How many apps HAProxy serves at a time. An idle backend takes about 20 KiB; requests for further apps go through
    the embedded plane."""
    look_s: float = 0.1
    """How often Hawker looks at what is in flight, while there is something; five times as long when there is
    nothing."""
    log: bool = True
    """Whether the access log, if there is one, has also the requests that HAProxy forwards by itself."""
    stays: bool = False
    """Whether HAProxy goes on serving when the agent is stopped in order, as it does when the agent is killed."""

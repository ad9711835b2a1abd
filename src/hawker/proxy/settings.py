"""A proxy's part of the configuration (docs/configuration.md), with what decides how it routes, wakes and stops."""

from __future__ import annotations

import importlib.util
import re

import msgspec

from hawker.core.trusted import Trusted
from hawker.errors import Invalid
from hawker.model.values import host_port
from hawker.plugins import installed
from hawker.proxy.embedded.settings import Settings as Embedded
from hawker.proxy.haproxy.settings import HaproxySettings
from hawker.sockets import Address

GROUP = "hawker.data_planes"
"""The entry point group of data planes (`hawker.proxy.planes`)."""
_PLANES = ("embedded", "haproxy")
NAME = re.compile(r"(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9])?\.)+[a-z0-9-]{2,63}")
"""The name of a server, with a dot at least."""
_DOMAIN = re.compile(r"(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9])?\.)*[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_ADDRESS = re.compile(r"[0-9.]+|\[?[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*\]?|localhost")


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How requests are routed, and machines woken and stopped. Times are in seconds."""

    regions: tuple[str, ...] = ()
    """Other regions, the nearest first. Those that are not named come after them, by how long a round trip there takes,
    and until that is measured, by how they lie on the map."""

    apps: int = 10_000
    """How many apps are kept in memory, beside those with machines of this worker and those with requests under way: an
    app with one machine takes about 6 KiB. The others are read again when they are asked for."""
    queue: int = 4096
    """How many requests of one service are held at a time. A request and its connection take about 10 KiB here."""
    retry_after_s: int = 1
    """How long a refused client is told to wait."""
    start_again_s: float = 5.0
    """How long a machine that could not be started is left alone; twice as long each time, up to a minute."""
    ready_s: float = 60.0
    """How long a program that runs may take to listen."""
    stale_s: float = 30.0
    """How long a row is not believed after its worker's proxy said that it is wrong; a changed row ends that."""
    trouble_s: float = 0.5
    """How long a machine that broke a connection or did not answer is left alone if another one can take the request;
    twice as long each time, up to half a minute."""

    idle_s: float = 300.0
    """How long a machine serves nothing before it may be stopped; Fly says "every few minutes"."""
    drain_s: float = 60.0
    """How long a machine that is one too many gets no requests, before it gets them again because it never came to
    rest."""
    headroom: float = 0.7
    """A machine is one too many if those that stay would be no fuller than this part of their soft limits."""
    idle_look_s: float = 10.0
    """How often machines are looked at; at most one of an app is stopped each time."""

    hung_s: float = 5.0
    """How long another worker's proxy may say nothing at all, before requests that wait there for their answers, and
    may be made twice, are made elsewhere. After two fifths of that it gets no more."""

    gone_s: float = 15.0
    """After how long without any sign of a worker its machines' standbys are started."""


class AcmeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[proxy.acme]`. `directory` is the server's URL, `ca` a file with authorities, for a server of one's
    own. `names` get certificates in any case; with `automatic`, so does `<app>.<domain>` of any app that a user asks
    for over TLS and whose service speaks it."""

    directory: str
    contact: str = ""
    agree_terms: bool = False
    names: tuple[str, ...] = ()
    automatic: bool = True
    ca: str = ""
    orders_per_hour: int = 50

    def check(self) -> None:
        """Raises `Invalid`."""
        if not self.directory.startswith("https://"):
            raise Invalid("proxy.acme.directory", self.directory, "write the URL of an ACME server, https://...")
        if not self.agree_terms:
            raise Invalid("proxy.acme.agree_terms", self.agree_terms, "read the server's terms, and say true")
        for name in self.names:
            if NAME.fullmatch(name) is None:
                raise Invalid("proxy.acme.names", name, "write names in lower case; `*` is only to be had by DNS-01")
        if importlib.util.find_spec("acme") is None:
            raise Invalid("proxy.acme", self.directory, "its libraries are missing: pip install 'hawker[acme]'")


class ProxySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[proxy]`. `listen` are addresses by public port: there apps are told apart by their names, any other
    port belongs to the oldest app that claims it. `worker` is whose machines' door this is, by default that of the same
    agent. `trusted` are addresses and networks of proxies before this one; those say at the public ports of
    `proxy_protocol` where each connection comes from."""

    listen: dict[str, str] = {}
    backhaul: str = ""
    domain: str = "localhost"
    tcp: str = ""
    trusted: tuple[str, ...] = ()
    proxy_protocol: tuple[int, ...] = ()
    certificates: str = ""
    default_certificate: str = ""
    acme: AcmeSettings | None = None
    worker: str = ""
    engine: str = "embedded"
    traces: str = ""
    routing: RouterSettings = RouterSettings()
    embedded: Embedded = Embedded()
    haproxy: HaproxySettings = HaproxySettings()

    def shared_ports(self) -> dict[int, Address]:
        """Raises `Invalid`."""
        field = "proxy.listen"
        return {_port(field, text): host_port(field, at, named=True) for text, at in self.listen.items()}

    def check(self) -> None:
        """Raises `Invalid`."""
        self.shared_ports()
        if self.engine not in _PLANES and self.engine not in (others := installed(GROUP, _PLANES)):
            raise Invalid("proxy.engine", self.engine, f"write {' or '.join([*_PLANES, *others])}")
        for network in self.trusted:
            try:
                Trusted((network,))
            except ValueError:
                raise Invalid("proxy.trusted", network, "write addresses or networks, such as 10.0.0.0/8") from None
        for port in self.proxy_protocol:
            _port("proxy.proxy_protocol", str(port))
        if self.proxy_protocol and not self.trusted:
            raise Invalid("proxy.proxy_protocol", self.proxy_protocol, "say with `trusted` who speaks it there")
        if self.backhaul:
            host_port("proxy.backhaul", self.backhaul, named=True)
        if self.acme is not None:
            self.acme.check()
        if self.tcp and not _ADDRESS.fullmatch(self.tcp):
            raise Invalid("proxy.tcp", self.tcp, "write the address of this host to open them on, such as 0.0.0.0")
        for table, values in ("routing", self.routing), ("embedded", self.embedded), ("haproxy", self.haproxy):
            for name in values.__struct_fields__:
                value = getattr(values, name)
                if isinstance(value, int | float) and not value >= 0:  # nor NaN
                    raise Invalid(f"proxy.{table}.{name}", value, "write 0 or more")
        if self.default_certificate and not self.certificates:
            raise Invalid(
                "proxy.default_certificate",
                self.default_certificate,
                "say with `certificates` in which directory it is",
            )
        if not _DOMAIN.fullmatch(self.domain):
            raise Invalid("proxy.domain", self.domain, "write the name that apps are below of, such as apps.example")


def _port(field: str, text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise Invalid(field, text, "write a public port from 1 to 65535")
    return int(text)

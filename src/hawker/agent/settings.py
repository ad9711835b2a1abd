"""An agent's configuration file, as docs/configuration.md shows it: every table and setting, with its default."""

from __future__ import annotations

import ipaddress
import math
import os
import re
import socket
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from hawker.errors import Invalid
from hawker.images.settings import ImageSettings
from hawker.model.guest import RESOURCES, Resources
from hawker.model.owners import AGENT, SCRAPER
from hawker.model.values import host_port
from hawker.network.base import Settings as Network
from hawker.proxy.settings import ProxySettings
from hawker.telemetry import LOG_LEVELS

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""Of agents and regions: they go into addresses of the API, headers and packets."""
_DISK_SCALE_MAX = 1000.0
_OVERCOMMIT_MAX = 100.0
_SHARED_PER_CORE = 16


class TokenSettings(msgspec.Struct, forbid_unknown_fields=True):
    """`users` are tokens by owner. `metrics` reads `/metrics` and `/health/proxy`; "": the cluster's alone does."""

    cluster: str
    users: dict[str, str] = {}
    metrics: str = ""

    def by_token(self) -> dict[str, str]:
        """Owners."""
        users = {token: owner for owner, token in self.users.items()}
        return {self.cluster: AGENT, **users, **({self.metrics: SCRAPER} if self.metrics else {})}

    def check(self) -> None:
        """Raises `Invalid`, which shows no token."""
        fields = [
            ("tokens.cluster", self.cluster),
            *((f"tokens.users.{name}", self.users[name]) for name in self.users),
        ]
        fields += [("tokens.metrics", self.metrics)] if self.metrics else []
        for n, (field, token) in enumerate(fields):
            if not token.strip() or "," in token:
                remedy = "write a random text without commas, such as `openssl rand -hex 32` prints"
                raise Invalid(field, token and "...", remedy)
            if other := next((other for other, same in fields[:n] if same == token), ""):
                raise Invalid(field, "...", f"it is the same as {other}: nobody could tell who uses it")
        for owner in {AGENT, SCRAPER} & self.users.keys():
            raise Invalid(
                "tokens.users", owner, "give this owner another name: it means an agent, or who reads metrics"
            )


class WorkerRole(msgspec.Struct, forbid_unknown_fields=True):
    """`capacity`: what the worker may sell, by resource; what is left out is what the host has. `cpu_overcommit`: how
    many times over the sixteen shared cpus of each core are sold, where `capacity` does not say. `drivers`: which to
    run, empty for all that this host can run but the process driver. `proxy_port`: where the worker's proxy takes
    requests of other proxies, if it is another process of this host (`proxy.worker` there). `history_s` and
    `history_records` and `validate` as in `WorkerSettings`. `settings` are the drivers' own, by driver."""

    listen: str
    capacity: dict[str, int] = {}
    cpu_overcommit: float = 4.0
    cgroups: bool = True
    ports: str = "20000-29999"
    proxy_port: int = 0
    disk_scale: float = 1.0
    reserve_mib: int = 8
    history_s: float = 86_400.0
    history_records: int = 20_000
    validate: bool = False
    drivers: list[str] = []
    network: Network = msgspec.field(default_factory=Network)
    settings: dict[str, dict[str, Any]] = {}

    def check(self) -> None:
        """Raises `Invalid`."""
        self.port_range()
        for name, amount in self.capacity.items():
            if name not in RESOURCES or amount < 0:
                remedy = f"write how much may be sold of {', '.join(RESOURCES)}, or leave it out"
                raise Invalid(f"worker.capacity.{name}", amount, remedy)
        if not 0.1 <= self.cpu_overcommit <= _OVERCOMMIT_MAX:
            raise Invalid("worker.cpu_overcommit", self.cpu_overcommit, f"write 0.1 to {_OVERCOMMIT_MAX}")
        if not 0 <= self.disk_scale <= _DISK_SCALE_MAX:
            raise Invalid("worker.disk_scale", self.disk_scale, "write a factor such as 2.0, or 0 for no bound")
        if not 0 <= self.history_s < math.inf:
            raise Invalid("worker.history_s", self.history_s, "write seconds, such as 86400 for a day")
        if self.reserve_mib < 0:
            raise Invalid("worker.reserve_mib", self.reserve_mib, "write MiB, such as 8, or 0 for no reserve")
        if self.history_records < 0:
            raise Invalid("worker.history_records", self.history_records, "write how many, such as 20000")

    def resources(self, directory: Path) -> Resources:
        """What the worker sells, with its machines in `directory`."""
        return replace(host_capacity(self.cpu_overcommit, directory), **self.capacity)

    def port_range(self) -> range:
        """Raises `Invalid`."""
        first, _, last = self.ports.partition("-")
        if not (first.isdecimal() and last.isdecimal() and 1024 <= int(first) <= int(last) <= 65535):
            raise Invalid("worker.ports", self.ports, 'write a range of ports from 1024 on, such as "20000-29999"')
        return range(int(first), int(last) + 1)


class BrokerRole(msgspec.Struct, forbid_unknown_fields=True):
    """`workers`: a fixed list; without one the catalog tells which there are. `image_weight`: how much it counts in the
    policy "curve" that a worker has the image; 1 is as much as half of its cpus and memory together. `urls`: where
    users find apps, by public port, "{app}" for the app's name; nothing: as the agent's own proxy serves them."""

    listen: str
    workers: list[str] = []
    policy: str = "curve"
    image_weight: float | None = None
    urls: dict[str, str] = {}

    def check(self) -> None:
        """Raises `Invalid`."""
        for port, url in self.urls.items():
            if not port.isdecimal() or not url.startswith(("http://", "https://")) or "{app}" not in url:
                raise Invalid("broker.urls", {port: url}, 'write { "443" = "https://{app}.apps.example" }')


class CatalogSettings(msgspec.Struct, forbid_unknown_fields=True):
    """`settings` are the engines' own, by engine."""

    engine: str = "gossip"
    listen: str = ""
    join: list[str] = []
    advertise: str = ""
    cluster: str = "hawker"
    keys: list[str] = []
    settings: dict[str, dict[str, Any]] = {}


class AgentSettings(msgspec.Struct, forbid_unknown_fields=True):
    """The configuration file."""

    name: str
    region: str
    directory: Path
    tokens: TokenSettings
    worker: WorkerRole | None = None
    broker: BrokerRole | None = None
    proxy: ProxySettings | None = None
    catalog: CatalogSettings = msgspec.field(default_factory=CatalogSettings)
    images: ImageSettings = msgspec.field(default_factory=ImageSettings)
    stop_machines_on_exit: bool = False
    watchdog_s: float = 10.0
    log_level: str = "info"

    def proxy_port(self) -> int:
        """Where the worker's own proxy takes requests for its machines, 0: nowhere. Raises `Invalid`."""
        if self.worker and self.worker.proxy_port:
            return self.worker.proxy_port
        backhaul = self.proxy.backhaul if self.worker and self.proxy else ""
        return host_port("proxy.backhaul", backhaul)[1] if backhaul else 0

    def urls(self) -> dict[str, str]:
        """Where users find apps, by public port, as far as this agent knows."""
        if self.broker and self.broker.urls:
            return self.broker.urls
        if self.proxy is None:
            return {}
        found = {}
        for port, (_, at) in self.proxy.shared_ports().items():
            scheme, usual = ("https", 443) if port == 443 else ("http", 80)
            found[str(port)] = f"{scheme}://{{app}}.{self.proxy.domain}" + ("" if at == usual else f":{at}")
        return found

    @property
    def roles(self) -> tuple[str, ...]:
        """Those that it enables."""
        return tuple(role for role in ("worker", "broker", "proxy") if getattr(self, role))

    @property
    def listens(self) -> list[str]:
        """The addresses it serves, the worker's first. A proxy alone has one for the catalog."""
        return [role.listen for role in (self.worker, self.broker) if role] or [self.catalog.listen]

    def addresses(self) -> dict[str, tuple[str, int]]:
        """All that it listens at from its beginning on, by the field that says so. Raises `Invalid`."""
        fields = ("worker.listen", self.worker), ("broker.listen", self.broker)
        found = {field: host_port(field, role.listen) for field, role in fields if role}
        if self.catalog.listen:
            found["catalog.listen"] = host_port("catalog.listen", self.catalog.listen)
        if self.proxy:
            found.update((f"proxy.listen.{port}", at) for port, at in self.proxy.shared_ports().items())
            if self.proxy.backhaul:
                found["proxy.backhaul"] = host_port("proxy.backhaul", self.proxy.backhaul)
        return found

    def advertised(self) -> tuple[str, int]:
        """Where other agents reach this one, as a number: every packet goes there, and to look a name up takes time. An
        address that means "every interface" is no address for others: then it is the host's own. Raises `Invalid`."""
        field, text = "catalog.advertise", self.catalog.advertise
        if not text:
            field, text = "listen", self.listens[0]
        name, port = host_port(field, text)
        try:
            return _own_address() if name in ("", "0.0.0.0", "::") else _number_of(name), port
        except (OSError, UnicodeError):
            raise Invalid(
                field, text, "set catalog.advertise to the address where other agents reach this one"
            ) from None


def _own_address() -> str:
    found = socket.gethostbyname(socket.gethostname())
    if found.startswith("127."):  # as Debian writes it into /etc/hosts
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect(("192.0.2.1", 9))  # sends nothing: the system chooses the address that it would send from
            found = str(sock.getsockname()[0])
    return found


def _number_of(name: str) -> str:
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return socket.gethostbyname(name)


def read_settings(path: Path) -> AgentSettings:
    """Raises `Invalid` naming the file and the field."""
    try:
        raw = _by_plugin(tomllib.loads(path.read_text()), "worker", WorkerRole)
        settings = msgspec.convert(_by_plugin(raw, "catalog", CatalogSettings), AgentSettings, dec_hook=_path)
    except FileNotFoundError:
        raise Invalid("config", str(path), "there is no such file") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise Invalid("config", str(path), str(error)) from error
    for field, name in (("name", settings.name), ("region", settings.region)):
        if not NAME.fullmatch(name):
            raise Invalid(field, name, "at most 63 letters, digits, dots, dashes and underscores")
    for n, key in enumerate(settings.catalog.keys):
        if not key or key in settings.catalog.keys[:n]:
            raise Invalid("catalog.keys", key, "each key is a text of its own, and not empty")
    if settings.log_level.lower() not in LOG_LEVELS:
        raise Invalid("log_level", settings.log_level, f"write one of {', '.join(LOG_LEVELS)}")
    if not 0 <= settings.watchdog_s < math.inf:
        raise Invalid("watchdog_s", settings.watchdog_s, "write seconds, or 0 for no watchdog")
    settings.tokens.check()
    settings.images.check()
    if settings.worker:
        settings.worker.check()
    if settings.broker:
        settings.broker.check()
    if settings.proxy:
        _check_proxy(settings, settings.proxy)
    _check_roles(settings)
    return settings


def _check_roles(settings: AgentSettings) -> None:
    field, listen = "catalog.listen", settings.catalog.listen
    if settings.worker or settings.broker:
        if listen:
            raise Invalid(field, listen, "leave it out: members meet this agent where its worker or broker listens")
    elif settings.proxy is None:
        raise Invalid("config", settings.name, "enable a role: [worker], [broker], [proxy], or several")
    elif host_port(field, listen or ":0")[1] == 0:
        raise Invalid(field, listen, "give the address where members of the catalog meet this proxy, by TCP and UDP")


def _check_proxy(settings: AgentSettings, proxy: ProxySettings) -> None:
    proxy.check()
    if settings.broker and settings.broker.workers and settings.worker is None:
        raise Invalid("broker.workers", settings.broker.workers, "a proxy needs the catalog: leave the list out")
    if settings.worker and not proxy.worker and not host_port("proxy.backhaul", proxy.backhaul or ":0")[1]:
        raise Invalid("proxy.backhaul", proxy.backhaul, "give the address where other proxies reach this worker's")


def _by_plugin(raw: dict[str, Any], role: str, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The tables of `[worker]` that are no fields of its own belong to drivers, those of `[catalog]` to engines."""
    table = raw.get(role)
    if not isinstance(table, dict):
        return raw
    fields = kind.__struct_fields__
    theirs = {name: value for name, value in table.items() if name not in fields and isinstance(value, dict)}
    rest = {name: value for name, value in table.items() if name not in theirs}
    return {**raw, role: {**rest, **({"settings": theirs} if theirs else {})}}


def _path(kind: type, value: Any) -> Path:
    """The one type of the settings that is not TOML's. Absolute: a driver changes its working directory."""
    if kind is not Path or not isinstance(value, str):
        raise TypeError(f"expected a path, got {value!r}")
    return Path(value).absolute()


def host_capacity(cpu_overcommit: float, directory: Path) -> Resources:
    """What this host has: the sixteen shared cpus of each core, sold `cpu_overcommit` times over, as most machines wait
    most of the time; half of the cores as dedicated ones besides, which weigh more; three quarters of memory; four
    fifths of what is free of the disk with `directory`, which may not be there yet."""
    cores = os.cpu_count() or 1
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    disk = os.statvfs(next(place for place in (directory, *directory.parents) if place.is_dir()))
    return Resources(
        cpus_shared=int(cores * _SHARED_PER_CORE * cpu_overcommit),
        cpus_dedicated=cores // 2,
        memory_mib=pages * 3 // 4,
        disk_mib=(disk.f_bavail * disk.f_frsize >> 20) * 4 // 5,
        machines=1000,
    )

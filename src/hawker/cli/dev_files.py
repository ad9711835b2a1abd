"""What `hawker dev` writes for its agents: their configurations, their tokens, and the ports that they listen on."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hawker.errors import HawkerError

DRAIN_S = 3.0  # for requests that are under way when the market stops
HTTP_PORT = 8080
PORTS = range(20000, 30000)
"""The ports of the host at which machines are published. The workers share them."""


class Market(NamedTuple):
    """`endpoint` is the broker's, `http` the port of the apps. `configs` has a file for each agent, `ports` the API's
    port of each by its name."""

    endpoint: str
    http: int
    configs: list[Path]
    ports: dict[str, int]
    tokens: dict[str, str]


def write_market(home: Path, regions: Sequence[str], options: dict[str, Any]) -> Market:
    """Write one file for each agent. Raises `HawkerError` for a port that cannot be used."""
    tokens = _kept_tokens(home)
    names = [f"{region}-{n}" for region in regions for n in range(1, options["workers"] + 1)]
    with contextlib.ExitStack() as held:
        port, http = free_port(held, "--port", options["port"]), _http_port(held, options["http"])
        ports = [free_port(held) for _ in names]
        backhauls = [free_port(held) for _ in names]
    joining = [f"127.0.0.1:{port}", f"127.0.0.1:{ports[0]}"]  # any two of them do
    paths = []
    for name, worker_port, backhaul in zip(names, ports, backhauls, strict=True):
        region = name.rpartition("-")[0]
        capacity = {
            "cpus_shared": options["cpus"],
            "cpus_dedicated": options["dedicated"],
            "memory_mib": options["memory"],
            "disk_mib": 1024 * options["machines"],
            "machines": options["machines"],
        }
        role = {
            "listen": f"127.0.0.1:{worker_port}",
            "ports": _ports(names.index(name), len(names)),
            "cgroups": not options["no_cgroups"],
            "capacity": capacity,
            "process": {"own_users": False},  # programs of this host run as whoever started the market
        }
        proxy = _proxy(regions, region, backhaul=f"127.0.0.1:{backhaul}")
        roles = {"worker": role, "proxy": proxy, "catalog": {"join": joining}}
        paths.append(_write_agent(home, name, region, tokens, roles))
    broker = {"listen": f"127.0.0.1:{port}", "policy": options["policy"]}
    edge = _proxy(regions, regions[0], listen={"80": f"127.0.0.1:{http}"})
    roles = {"broker": broker, "proxy": edge, "catalog": {"join": joining[1:]}}
    paths.append(_write_agent(home, "broker", regions[0], tokens, roles))
    return Market(
        endpoint=f"http://127.0.0.1:{port}",
        http=http,
        configs=paths,
        ports={**dict(zip(names, ports, strict=True)), "broker": port},
        tokens=tokens,
    )


def _http_port(held: contextlib.ExitStack, wanted: int | None) -> int:
    if wanted is not None:
        return free_port(held, "--http", wanted)
    try:
        return free_port(held, "--http", HTTP_PORT)
    except HawkerError:
        return free_port(held)


def _proxy(regions: Sequence[str], region: str, **places: Any) -> dict[str, Any]:
    others = [other for other in regions if other != region]
    return {**places, "routing": {"regions": others}, "embedded": {"drain_s": DRAIN_S}}


def _write_agent(home: Path, name: str, region: str, tokens: dict[str, str], roles: dict[str, Any]) -> Path:
    settings = {
        "name": name,
        "region": region,
        "directory": str(home / name),
        "stop_machines_on_exit": True,
        "tokens": {"cluster": tokens["cluster"], "users": {"dev": tokens["user"]}},
        **roles,
    }
    path = home / f"{name}.toml"
    write_private(path, _toml(settings))
    return path


def _kept_tokens(home: Path) -> dict[str, str]:
    path = home / "tokens.json"
    if path.exists():
        kept: dict[str, str] = json.loads(path.read_text())
        return kept
    tokens = {"cluster": secrets.token_hex(32), "user": secrets.token_hex(32)}
    write_private(path, json.dumps(tokens))
    return tokens


def free_port(held: contextlib.ExitStack, option: str = "", port: int = 0) -> int:
    """The port itself if it can be bound, any free one for 0. Nobody else gets it while it is `held`; the kernel might
    give the same one to the next who asks for any. Raises `HawkerError`."""
    try:
        number: int = held.enter_context(socket.create_server(("127.0.0.1", port))).getsockname()[1]
        return number
    except OSError as error:
        raise HawkerError(
            f"port {port} cannot be used: {error.strerror}", hint=f"give another one with {option}, or 0 for any"
        ) from error


def write_private(path: Path, text: str) -> None:
    """For the owner's eyes only: these files hold tokens. Whoever reads one meanwhile finds it whole."""
    new = path.with_name(f"{path.name}.new")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text)
    new.replace(path)


def _toml(settings: dict[str, Any], prefix: str = "") -> str:
    """Settings as TOML. JSON's strings, numbers, booleans and lists are TOML's, too."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items() if not isinstance(value, dict)]
    for key, value in settings.items():
        if isinstance(value, dict):
            lines += ["", f"[{prefix}{key}]", _toml(value, f"{prefix}{key}.")]
    return "\n".join(lines)


def _ports(n: int, of: int) -> str:
    """The n-th part of the ports that workers of this host publish machines on."""
    each = min(1000, len(PORTS) // of)
    first = PORTS[0] + n * each
    return f"{first}-{first + each - 1}"

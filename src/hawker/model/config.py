"""A machine's configuration: checked, with defaults filled in, and everything unknown kept.

An update replaces the whole configuration with what the client read before, so a field we do not know must survive
the round trip. Therefore the raw JSON object is what is stored and given back (`Config.raw`), and the typed attributes
beside it are what Hawker acts on. A field that the public API documents and Hawker does not build is refused by name,
unless it is empty: clients send `"mounts": []` without meaning anything by it.
"""

from __future__ import annotations

import re
import shlex
import signal as signals
from functools import lru_cache
from typing import Any, Literal

import msgspec

from hawker.errors import Invalid, NotBuilt
from hawker.model.checks import Check, check_checks, has_checks, with_written_durations
from hawker.model.guest import ROOT_DISK_MIB, Guest, Resources, check_guest, preset
from hawker.model.inside import (
    File,
    NameService,
    Rootfs,
    Tmpfs,
    check_dns,
    check_env_from,
    check_files,
    check_rootfs,
    check_volumes,
)
from hawker.model.json_fields import check_choice, check_flag, check_int, check_object, string_map
from hawker.model.services import Service, check_services
from hawker.model.values import (
    check_image,
    format_duration,
    is_host_image,
    is_machine_id,
    parse_duration_s,
    parse_signal,
)

CONFIG_BYTES_MAX = 256 * 1024  # four times what the largest deploy seen in the wild sends
STOP_TIMEOUT_S_MAX = 300.0
STANDBYS_MOST = 16
KNOWN_MOST = 256
KNOWN_BYTES_MOST = 8192
"""Configurations above this size are not kept but checked each time, so that the kept ones take little memory."""

RestartPolicy = Literal["no", "on-failure", "always"]

NOT_BUILT = {
    "mounts": "volumes are not built yet",
    "schedule": "scheduled machines are not built yet",
    "containers": "several containers in one machine are not built yet; create one machine each",
    "statics": "static files are not built yet",
    "metrics": "scraping a machine's metrics is not built yet",
}
_NOT_BUILT_IN = {
    "init": {"swap_size_mb": "swap", "kernel_args": "kernel arguments"},
    "guest": {"kernel_args": "kernel arguments", "host_dedication_id": "dedicated hosts"},
}
PROCESS, CONTAINER, MICROVM = "process", "container", "microvm"
_encode = msgspec.json.Encoder().encode
_RUNTIME = re.compile(r"[a-z][a-z0-9-]{0,30}")
_NOT_FOR_THE_HOST = ("files", "volumes", "rootfs")
"""Fields that need a root file system of the machine's own."""


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    policy: RestartPolicy = "on-failure"
    max_retries: int = 10


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """How a machine is stopped: the number of the signal, and the seconds until whatever still runs is killed."""

    signal: int = int(signals.SIGINT)
    timeout_s: float = 5.0


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine runs. `exec` is a whole command line. Without it, `entrypoint` and `cmd` are joined as Docker
    joins them; each replaces the image's."""

    exec: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()

    @property
    def argv(self) -> tuple[str, ...]:
        """The command line without any part of the image's."""
        return self.exec or self.entrypoint + self.cmd


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What Hawker acts on, and `raw`, what the client reads back.

    `runtime`, ours, names the driver that runs it; "process" runs a program of the image, or of the host where the
    image is `host`, without isolation. `max_memory_mb` 0: as much as its cpus may have. `standbys` are the machines
    that this one stands by for: it is started when the worker of one of them is gone.
    """

    raw: dict[str, Any]
    image: str
    runtime: str
    command: Command
    env: dict[str, str]
    guest: Guest
    restart: Restart
    stop: Stop
    auto_destroy: bool
    metadata: dict[str, str]
    tty: bool = False
    user: str = ""
    env_from: tuple[tuple[str, str], ...] = ()
    rootfs: Rootfs = Rootfs()
    files: tuple[File, ...] = ()
    tmpfs: tuple[Tmpfs, ...] = ()
    services: tuple[Service, ...] = ()
    checks: tuple[Check, ...] = ()
    dns: NameService = NameService()
    max_memory_mb: int = 0
    standbys: tuple[str, ...] = ()

    @property
    def argv(self) -> tuple[str, ...]:
        return self.command.argv

    @property
    def of_host(self) -> bool:
        """Whether it runs a program of the host itself, without any image."""
        return is_host_image(self.image)

    def resources(self) -> Resources:
        """What the machine takes of its worker while it runs."""
        return self.guest.resources(max(ROOT_DISK_MIB, self.rootfs.size_gb * 1024))


def usual_runtime(image: str) -> str:
    """The runtime of a configuration that names none."""
    return PROCESS if is_host_image(image) else CONTAINER


def check_config(raw: Any, *, at: str = "config") -> Config:
    """A configuration from decoded JSON. Raises `Invalid` or `NotBuilt`, naming the field, the value and the remedy.

    Checking what this returned in `raw` again gives the same `Config`.
    """
    if not isinstance(raw, dict):
        raise Invalid(at, raw, 'give an object with at least an "image"')
    _refuse_not_built(raw, at)
    image = check_image(f"{at}.image", raw.get("image"))
    if given := raw.get("guest") or {}:
        guest = check_guest(given, f"{at}.guest")
    else:
        guest = preset(raw["size"], f"{at}.size") if raw.get("size") else Guest()
    restart = _restart(raw.get("restart"), f"{at}.restart")
    init = raw.get("init") or {}
    process = _one_process(raw.get("processes"), at)
    env = string_map(f"{at}.env", raw.get("env"), names=True)
    if process:
        env |= string_map(f"{at}.processes[0].env", process.get("env"), names=True)
    runtime = _runtime(raw, image, process, at)
    filled = {
        **raw,
        "guest": {**given, **msgspec.to_builtins(guest)},
        "init": init,
        "restart": {**(raw.get("restart") or {}), **msgspec.to_builtins(restart)},
    }
    if raw.get("stop_config"):
        filled["stop_config"] = _stop_json(raw["stop_config"], f"{at}.stop_config")
    seldom = _seldom(raw, process, given, guest, at)
    if "checks" in seldom:
        filled = with_written_durations(filled)
    return Config(
        raw=filled,
        image=image,
        runtime=runtime,
        command=_command_of(image, init, process, at),
        env=env,
        guest=guest,
        restart=restart,
        stop=_stop(raw.get("stop_config"), f"{at}.stop_config"),
        auto_destroy=check_flag(f"{at}.auto_destroy", raw.get("auto_destroy")),
        metadata=string_map(f"{at}.metadata", raw.get("metadata")),
        tty=check_flag(f"{at}.init.tty", init.get("tty")),
        **seldom,
    )


def known_config(raw: dict[str, Any]) -> Config:
    """`check_config` with a cache, for configurations that are read again and again, such as those of an order or of a
    machine's row. The same content is checked once, as long as it is among the `KNOWN_MOST` used last."""
    content = _encode(raw)
    return _known(content) if len(content) <= KNOWN_BYTES_MOST else check_config(raw)


@lru_cache(KNOWN_MOST)
def _known(content: bytes) -> Config:
    return check_config(msgspec.json.decode(content))


def _seldom(
    raw: dict[str, Any], process: dict[str, Any], given: dict[str, Any], guest: Guest, at: str
) -> dict[str, Any]:
    """The fields that most configurations lack. Only those given are read, because configurations are checked often."""
    found: dict[str, Any] = {}
    if process:
        found["user"] = _user(process.get("user"), f"{at}.processes[0].user")
        found["env_from"] = check_env_from(process.get("env_from"), f"{at}.processes[0].env_from")
    if raw.get("rootfs") or given.get("persist_rootfs") is not None:
        found["rootfs"] = check_rootfs(raw.get("rootfs"), given.get("persist_rootfs"), at)
    if files := raw.get("files"):
        found["files"] = check_files(files, f"{at}.files")
    if volumes := raw.get("volumes"):
        found["tmpfs"] = check_volumes(volumes, f"{at}.volumes")
    if services := raw.get("services"):
        found["services"] = check_services(services, f"{at}.services")
    if has_checks(raw):
        found["checks"] = check_checks(raw, found.get("services", ()), at)
    if dns := raw.get("dns"):
        found["dns"] = check_dns(dns, f"{at}.dns")
    if standbys := raw.get("standbys"):
        found["standbys"] = _standbys(standbys, f"{at}.standbys")
    if (most := given.get("max_memory_mb")) is not None:
        found["max_memory_mb"] = _max_memory(most, guest, f"{at}.guest.max_memory_mb")
    return found


def _standbys(value: Any, at: str) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > STANDBYS_MOST:
        raise Invalid(at, value, f"a list of the ids of at most {STANDBYS_MOST} machines")
    for n, machine in enumerate(value):
        if not isinstance(machine, str) or not is_machine_id(machine):
            raise Invalid(f"{at}[{n}]", machine, "give a machine's id")
    return tuple(dict.fromkeys(value))


def accept_config(raw: Any, *, at: str = "config") -> Config:
    """`check_config` for what a client sends, which must also be small enough to be kept and passed on."""
    config = check_config(raw, at=at)
    check_size(config.raw, at=at)
    return config


def check_size(raw: dict[str, Any], *, at: str = "config") -> None:
    """Raises `Invalid` for a configuration over `CONFIG_BYTES_MAX`. `raw` has its defaults, so that what a client read
    and sends back unchanged is never refused."""
    size = len(_encode(raw))
    if size > CONFIG_BYTES_MAX:
        raise Invalid(at, f"{size} bytes", f"a configuration has at most {CONFIG_BYTES_MAX} bytes as JSON")


def _refuse_not_built(raw: dict[str, Any], at: str) -> None:
    for field, value in raw.items():
        if value and field in NOT_BUILT:
            raise NotBuilt(f"{at}.{field}", value, f"{NOT_BUILT[field]}; leave the field out")
    for outer, fields in _NOT_BUILT_IN.items():
        inner = raw.get(outer)
        if inner is not None and not isinstance(inner, dict):
            raise Invalid(f"{at}.{outer}", inner, "give an object")
        for field, value in (inner or {}).items():
            if value and field in fields:
                what = f"{fields[field]}: not built yet; leave the field out"
                raise NotBuilt(f"{at}.{outer}.{field}", value, what)


def _one_process(raw: Any, at: str) -> dict[str, Any]:
    """The one element of `processes`, which names the program in another way; empty when there is none."""
    if not raw:
        return {}
    if not isinstance(raw, list) or not all(isinstance(p, dict) for p in raw):
        raise Invalid(f"{at}.processes", raw, "give a list of objects")
    if len(raw) > 1:
        raise NotBuilt(f"{at}.processes", raw, "several processes in one machine are not built yet; create one each")
    for field in ("secrets", "ignore_app_secrets"):
        if raw[0].get(field):
            raise NotBuilt(f"{at}.processes[0].{field}", raw[0][field], "not built yet; leave the field out")
    process: dict[str, Any] = raw[0]
    return process


def _runtime(raw: dict[str, Any], image: str, process: dict[str, Any], at: str) -> str:
    runtime = raw.get("runtime") or usual_runtime(image)
    if not isinstance(runtime, str) or not (runtime == PROCESS or _RUNTIME.fullmatch(runtime)):
        raise Invalid(f"{at}.runtime", runtime, f"use {PROCESS}, {CONTAINER} or {MICROVM}")
    if is_host_image(image) and runtime != PROCESS:
        raise Invalid(f"{at}.runtime", runtime, 'the image "host" runs as a process only; name an image')
    if is_host_image(image) and (process or raw.get("files") or raw.get("volumes") or raw.get("rootfs")):
        needs = "needs a root of its own, which the host's programs do not have; name an image"
        given = [*((field, raw.get(field)) for field in _NOT_FOR_THE_HOST), ("processes[0].user", process.get("user"))]
        _refuse(given, needs, at)
    if runtime == PROCESS and isinstance(dns := raw.get("dns"), dict):
        needs = f"a process does not have this; use runtime {CONTAINER} or {MICROVM}"
        fields = ("nameservers", "searches", "options", "hostname")
        _refuse([(f"dns.{field}", dns.get(field)) for field in fields], needs, at)
    return runtime


def _refuse(given: list[tuple[str, Any]], needs: str, at: str) -> None:
    for field, value in given:
        if value:
            raise NotBuilt(f"{at}.{field}", value, needs)


def _command_of(image: str, init: dict[str, Any], process: dict[str, Any], at: str) -> Command:
    command = _command(init, f"{at}.init")
    if not command.argv and process:
        command = _command(process, f"{at}.processes[0]")
    if is_host_image(image) and not (command.argv and command.argv[0]):
        raise Invalid(
            f"{at}.init.exec",
            list(command.argv),
            'the image "host" has no program of its own: give its command line here',
        )
    return command


def _command(raw: dict[str, Any], at: str) -> Command:
    parts: dict[str, tuple[str, ...]] = {}
    for field in ("exec", "entrypoint", "cmd"):
        value = raw.get(field)
        if not value:
            continue
        if isinstance(value, str):
            value = _words(f"{at}.{field}", value)
        if not isinstance(value, list) or not all(isinstance(a, str) and "\0" not in a for a in value):
            raise Invalid(f"{at}.{field}", value, "give a list of strings")
        parts[field] = tuple(value)
    return Command(**parts)


def _user(value: Any, at: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or any(c.isspace() or c == "\0" for c in value) or value.count(":") > 1:
        raise Invalid(at, value, 'give a user of the image, or a number, and a group if you like: "app" or "1000:1000"')
    return value


def _max_memory(value: Any, guest: Guest, at: str) -> int:
    if value is None or (value == 0 and value is not False):
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < guest.memory_mb:
        raise Invalid(at, value, f"give MiB, at least memory_mb, {guest.memory_mb}")
    return value


def _words(field: str, line: str) -> list[str]:
    """Split a command line that a client sent as one string, as a shell would."""
    try:
        return shlex.split(line)
    except ValueError as error:
        raise Invalid(field, line, f"{error}; give a list of strings") from None


def _restart(raw: Any, at: str) -> Restart:
    raw = check_object(at, raw, '{"policy": "on-failure", "max_retries": 10}')
    given = raw.get("policy") or "on-failure"
    if given == "spot-price":
        raise NotBuilt(f"{at}.policy", given, "spot prices are not built yet; use no, on-failure or always")
    policy: RestartPolicy = check_choice(f"{at}.policy", given, "no", "on-failure", "always")
    retries = raw.get("max_retries")
    if retries is None or (retries == 0 and policy != "on-failure"):
        retries = Restart().max_retries
    check_int(f"{at}.max_retries", retries, 0, 1_000_000, "give a count from 0 to 1000000")
    return Restart(policy=policy, max_retries=retries)


def _stop(raw: Any, at: str) -> Stop:
    raw = check_object(at, raw, '{"signal": "SIGTERM", "timeout": "10s"}')
    timeout = Stop().timeout_s if raw.get("timeout") is None else parse_duration_s(f"{at}.timeout", raw["timeout"])
    if timeout > STOP_TIMEOUT_S_MAX:
        raise Invalid(f"{at}.timeout", raw["timeout"], "at most 300s")
    signal = Stop().signal if not raw.get("signal") else parse_signal(f"{at}.signal", raw["signal"])
    return Stop(signal=signal, timeout_s=timeout)


def _stop_json(raw: Any, at: str) -> dict[str, Any]:
    """The client's `stop_config` with the duration as a string, which is how the API always returns it."""
    stop = _stop(raw, at)
    return {**raw, "timeout": format_duration(stop.timeout_s), "signal": signals.Signals(stop.signal).name}

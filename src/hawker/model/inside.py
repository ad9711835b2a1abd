"""What a configuration puts inside a machine: files, memory file systems, its root, its name service.

Each function reads one field of a configuration from decoded JSON and raises `Invalid` or `NotBuilt`, naming the field,
the value and the remedy.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
from typing import Any

import msgspec

from hawker.errors import Invalid, NotBuilt
from hawker.model.json_fields import check_choice, check_flag, check_int, check_object, check_strings, objects

ROOT_GB_MAX = 500
TMPFS_MIB_MAX = 65536
FILE_MODE = 0o644
_MODE_MAX = 0o7777
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?\.?")
_ENV_FROM = ("id", "version", "app_name", "private_ip", "region", "image")


class File(msgspec.Struct, frozen=True, kw_only=True):
    """A file written before the program starts. `path` is absolute, `mode` permission bits."""

    path: str
    content: bytes
    mode: int = FILE_MODE


class Tmpfs(msgspec.Struct, frozen=True, kw_only=True):
    """A file system in memory; it counts towards the memory limit."""

    path: str
    size_mib: int


class Rootfs(msgspec.Struct, frozen=True, kw_only=True):
    """`size_gb` 0: the usual size. `persist`: what was written is there at the next start."""

    size_gb: int = 0
    persist: bool = False


class NameService(msgspec.Struct, frozen=True, kw_only=True):
    """For the machine's resolv.conf. `hostname` "": the machine's id. `registered`: others find it by name."""

    nameservers: tuple[str, ...] = ()
    searches: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    hostname: str = ""
    registered: bool = True


def check_path(field: str, value: Any) -> str:
    """An absolute path inside the machine, in its shortest form."""
    parts = value.split("/") if isinstance(value, str) else []
    if not parts or parts[0] or "\0" in value or ".." in parts or not any(part not in ("", ".") for part in parts):
        raise Invalid(field, value, 'give an absolute path without "..", such as /etc/app.conf')
    return "/" + "/".join(part for part in parts if part not in ("", "."))


def check_files(value: Any, at: str) -> tuple[File, ...]:
    files: dict[str, File] = {}
    for n, raw in enumerate(objects(at, value)):
        here = f"{at}[{n}]"
        for field, what in (
            ("secret_name", "secrets are"),
            ("image_config", "files from an image's configuration are"),
        ):
            if raw.get(field):
                raise NotBuilt(f"{here}.{field}", raw[field], f"{what} not built yet; use raw_value")
        path = check_path(f"{here}.guest_path", raw.get("guest_path"))
        if path in files:
            raise Invalid(f"{here}.guest_path", path, "give each file once")
        text = raw.get("raw_value")
        text = "" if text is None else text
        try:
            content = base64.b64decode(text, validate=True)
        except (TypeError, ValueError, binascii.Error):
            raise Invalid(f"{here}.raw_value", text, "give the content in base64") from None
        mode = raw.get("mode")
        mode = FILE_MODE if mode is None or (mode == 0 and mode is not False) else mode
        remedy = f"give permission bits as a number, such as {FILE_MODE} (0644 in octal)"
        files[path] = File(path=path, content=content, mode=check_int(f"{here}.mode", mode, 1, _MODE_MAX, remedy))
    return tuple(files.values())


def check_volumes(value: Any, at: str) -> tuple[Tmpfs, ...]:
    """`volumes` with a `temp_dir` in memory. Where it goes is `path`, ours: the public API says that of containers in a
    machine only."""
    found: dict[str, Tmpfs] = {}
    for n, raw in enumerate(objects(at, value)):
        here = f"{at}[{n}]"
        temp = raw.get("temp_dir")
        if raw.get("image") or not isinstance(temp, dict):
            raise NotBuilt(here, raw, 'only temporary directories are built: give "path" and "temp_dir"')
        storage = temp.get("storage_type")
        if storage == "disk":
            raise NotBuilt(f"{here}.temp_dir.storage_type", storage, "use memory, or write to the machine's own root")
        check_choice(f"{here}.temp_dir.storage_type", storage, "memory")
        remedy = f"give MiB, from 1 to {TMPFS_MIB_MAX}"
        size = check_int(f"{here}.temp_dir.size_mb", temp.get("size_mb"), 1, TMPFS_MIB_MAX, remedy)
        path = check_path(f"{here}.path", raw.get("path"))
        if path in found:
            raise Invalid(f"{here}.path", path, "give each directory once")
        found[path] = Tmpfs(path=path, size_mib=size)
    return tuple(found.values())


def check_rootfs(value: Any, persist_of_guest: Any, at: str) -> Rootfs:
    """`rootfs`, and `guest.persist_rootfs`, which says the same in another place."""
    if not value:
        return Rootfs(persist=_persist(persist_of_guest, f"{at}.guest.persist_rootfs"))
    value = check_object(f"{at}.rootfs", value, '{"persist": "always", "size_gb": 4}')
    size = value.get("size_gb")
    remedy = f"give GiB, from 1 to {ROOT_GB_MAX}"
    size = check_int(f"{at}.rootfs.size_gb", 0 if size is None else size, 0, ROOT_GB_MAX, remedy)
    persist = value.get("persist") or persist_of_guest
    return Rootfs(size_gb=size, persist=_persist(persist, f"{at}.rootfs.persist"))


def _persist(value: Any, field: str) -> bool:
    if value == "restart":
        raise NotBuilt(field, value, "a root that only an update renews is not built yet; use always or never")
    return value not in (None, "") and bool(check_choice(field, value, "always", "never") == "always")


def check_dns(value: Any, at: str) -> NameService:
    if not value:
        return NameService()
    if not isinstance(value, dict):
        raise Invalid(at, value, "give an object")
    for field in ("dns_forward_rules", "hostname_fqdn"):
        if value.get(field):
            raise NotBuilt(f"{at}.{field}", value[field], "not built yet; leave the field out")
    servers = check_strings(f"{at}.nameservers", value.get("nameservers"))
    for n, server in enumerate(servers):
        try:
            ipaddress.ip_address(server)
        except ValueError:
            raise Invalid(f"{at}.nameservers[{n}]", server, "give an IP address") from None
    searches = check_strings(f"{at}.searches", value.get("searches"))
    for n, domain in enumerate(searches):
        if not _NAME.fullmatch(domain):
            raise Invalid(f"{at}.searches[{n}]", domain, "give a domain such as example.com")
    options: list[str] = []
    for n, raw in enumerate(objects(f"{at}.options", value.get("options"))):
        name, setting = raw.get("name"), raw.get("value")
        if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9-]+", name):
            raise Invalid(f"{at}.options[{n}].name", name, "give the name of an option of resolv.conf, such as ndots")
        if setting not in (None, "") and not (isinstance(setting, str | int) and str(setting).isdecimal()):
            raise Invalid(f"{at}.options[{n}].value", setting, "give a number as text, or leave it out")
        options.append(f"{name}:{setting}" if setting not in (None, "") else name)
    hostname: Any = value.get("hostname") or ""
    if hostname and (not isinstance(hostname, str) or not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9-]{0,62})", hostname)):
        raise Invalid(f"{at}.hostname", hostname, "at most 63 letters, digits and dashes")
    skipped = check_flag(f"{at}.skip_registration", value.get("skip_registration"))
    return NameService(
        nameservers=servers, searches=searches, options=tuple(options), hostname=hostname, registered=not skipped
    )


def check_env_from(value: Any, at: str) -> tuple[tuple[str, str], ...]:
    """(variable, what of the machine it holds) of `processes[0].env_from`."""
    found = []
    for n, raw in enumerate(objects(at, value)):
        name, of = raw.get("env_var"), raw.get("field_ref")
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise Invalid(f"{at}[{n}].env_var", name, "give the name of a variable")
        if of not in _ENV_FROM:
            raise Invalid(f"{at}[{n}].field_ref", of, f"use {', '.join(_ENV_FROM)}")
        found.append((name, of))
    return tuple(found)

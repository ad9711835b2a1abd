"""How a host fetches and keeps images: the table `[images]` of an agent's configuration (docs/configuration.md)."""

from __future__ import annotations

import os
import platform
import ssl
from collections.abc import Mapping

import msgspec

from hawker.errors import Invalid
from hawker.model.image import IMAGE_TIMEOUT_S, Platform
from hawker.model.values import ImageRef

MIB = 1 << 20


class RegistrySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One registry or mirror, by its `host` or `host:port`.

    `insecure`: plain HTTP; None is True for loopback and False elsewhere. `ca`: a PEM file with authorities to trust
    besides the system's, in what is asked of this registry, and of where it leads for a blob or a token. `token`: an
    identity token in place of a password (OAuth2, as some clouds give).
    """

    username: str = ""
    password: str = ""
    token: str = ""
    mirrors: tuple[str, ...] = ()
    insecure: bool | None = None
    ca: str = ""

    def __repr__(self) -> str:
        return f"RegistrySettings(username={self.username!r}, mirrors={self.mirrors!r})"  # secrets go into no log


class ImageSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`docker_config`: a file as `docker login` writes it, for credentials that are not here, or with the helpers that
    have them; None is where Docker has it, "" is nowhere. `offline`: no registry is ever asked. `attempts` counts tries
    without a byte of progress. Blobs longer than `upload_chunk_bytes` are pushed in such parts. A source that brings
    fewer than 64 KiB a second over `slow_timeout_s` is left where another may have the blob. A machine whose image is
    not here `timeout_s` after it was wanted does not start, unless its order says another time."""

    registries: dict[str, RegistrySettings] = {}
    docker_config: str | None = None
    offline: bool = False
    parallel: int = 3
    unpack_parallel: int = 2
    keep_mib_max: int = 40960
    keep_mib_least: int = 30720
    free_mib_least: int = 512
    upload_chunk_bytes: int = 32 << 20
    attempts: int = 5
    backoff_s: float = 0.5
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 30.0
    slow_timeout_s: float = 10.0
    timeout_s: float = IMAGE_TIMEOUT_S

    def registry(self, host: str) -> RegistrySettings:
        """Docker's registry goes by all its names."""
        found = self.registries.get(host)
        if found is None and host == _DOCKER:
            found = next((self.registries[name] for name in _DOCKER_NAMES if name in self.registries), None)
        return found or _PLAIN

    def check(self) -> None:
        """Raises `Invalid`."""
        for name, value, least in (
            ("images.parallel", self.parallel, 1),
            ("images.unpack_parallel", self.unpack_parallel, 1),
            ("images.attempts", self.attempts, 1),
            ("images.upload_chunk_bytes", self.upload_chunk_bytes, 1),
            ("images.keep_mib_least", self.keep_mib_least, 0),
            ("images.free_mib_least", self.free_mib_least, 0),
            ("images.slow_timeout_s", self.slow_timeout_s, 0.1),
            ("images.timeout_s", self.timeout_s, 1.0),
        ):
            if value < least:
                raise Invalid(name, value, f"at least {least}")
        if self.keep_mib_max < self.keep_mib_least:
            raise Invalid("images.keep_mib_max", self.keep_mib_max, "at least keep_mib_least")
        for host, registry in self.registries.items():
            ImageRef.checked(f"{host}/name", "images.registries")
            for mirror in registry.mirrors:
                ImageRef.checked(f"{mirror}/name", f'images.registries."{host}".mirrors')
            if registry.password and not registry.username:
                raise Invalid(f'images.registries."{host}".username', "", "a password needs a user name")
            if registry.ca:
                try:
                    ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(registry.ca)
                except OSError as error:
                    remedy = f"a file with PEM certificates: {error.strerror or error}"
                    raise Invalid(f'images.registries."{host}".ca', registry.ca, remedy) from None


_PLAIN = RegistrySettings()
_DOCKER = "registry-1.docker.io"
_DOCKER_NAMES = ("docker.io", "index.docker.io")

_MACHINES: Mapping[str, tuple[str, str]] = {
    "x86_64": ("amd64", ""),
    "aarch64": ("arm64", "v8"),
    "armv7l": ("arm", "v7"),
    "armv6l": ("arm", "v6"),
    "i686": ("386", ""),
    "ppc64le": ("ppc64le", ""),
    "s390x": ("s390x", ""),
    "riscv64": ("riscv64", ""),
    "loongarch64": ("loong64", ""),
}


def host_platform() -> Platform:
    """What images must be made for to run here."""
    machine = platform.machine()
    architecture, variant = _MACHINES.get(machine, (machine, ""))
    return Platform(architecture=architecture, variant=variant)


def docker_config_path(settings: ImageSettings) -> str:
    """The file with Docker's credentials, or ""."""
    if settings.docker_config is not None:
        return settings.docker_config
    directory = os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker")
    return os.path.join(directory, "config.json")

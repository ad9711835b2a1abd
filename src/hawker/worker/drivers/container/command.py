"""What a machine runs: its command line, environment and directory, from its specification and its image."""

from __future__ import annotations

import posixpath

import msgspec

from hawker.model.image import ImageConfig
from hawker.worker.drivers.base import TERMINAL, InstanceSpec

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """`argv[0]` is looked up in PATH by the init. `cwd` is absolute, without "." and "..". `user` still is as
    written."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    user: str


class NoCommand(Exception):
    """There is nothing that could be run: neither the configuration nor the image says what, or they say it wrongly."""


def resolve(spec: InstanceSpec, image: ImageConfig, *, home: str = "/") -> Command:
    """Join the words as Docker does; see `InstanceSpec`. `HOME`, `HOSTNAME`, `PATH` and, with a terminal, `TERM` are
    set where nobody sets them. Raises `NoCommand`."""
    argv = _argv(spec, image)
    env = {"PATH": DEFAULT_PATH, "HOME": home, "HOSTNAME": spec.hostname or spec.machine}
    if spec.tty:
        env["TERM"] = "xterm"
    env |= dict(_pairs(image.env)) | dict(spec.env)
    for what, texts in (("command", argv), ("environment", (*env, *env.values()))):
        if any("\0" in text for text in texts):
            raise NoCommand(f"the {what} of {spec.image} holds a NUL character")
    return Command(argv=argv, env=env, cwd=_cwd(image.working_dir, spec.image), user=spec.user or image.user)


def terminal_options(spec: InstanceSpec) -> list[str]:
    """Options for the init of a container: it gives the program a terminal if the specification asks for one."""
    return ["--terminal", "x".join(map(str, TERMINAL))] if spec.tty else []


def _argv(spec: InstanceSpec, image: ImageConfig) -> tuple[str, ...]:
    if spec.argv:
        return tuple(spec.argv)
    entrypoint = spec.entrypoint or image.entrypoint
    cmd = spec.cmd or (() if spec.entrypoint else image.cmd)
    if argv := (*entrypoint, *cmd):
        return argv
    raise NoCommand(f"{spec.image} names no program to run: set config.init.exec, entrypoint or cmd")


def _pairs(env: tuple[str, ...]) -> list[tuple[str, str]]:
    """Entries of an image without "=" or without a name say nothing."""
    split = (entry.partition("=") for entry in env)
    return [(name, value) for name, equals, value in split if name and equals]


def _cwd(written: str, image: str) -> str:
    """Relative ones are from the root. Not below /proc: there a link to a directory of the host may be open while the
    runtime works (CVE-2024-21626)."""
    cwd = posixpath.normpath(f"/{written}").replace("//", "/")
    if "\0" in cwd or cwd == "/proc" or cwd.startswith("/proc/"):
        raise NoCommand(f"{image}: its working directory {written!r} cannot be used")
    return cwd

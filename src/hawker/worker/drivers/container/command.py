"""What a machine runs: its command line, environment and directory, from its specification and its image."""

from __future__ import annotations

import msgspec

from hawker.model.image import ImageConfig
from hawker.worker.drivers.base import InstanceSpec

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """`argv[0]` is looked up in PATH by the init. `user` still is as written."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    user: str


class NoCommand(Exception):
    """Neither the configuration nor the image says what to run."""


def resolve(spec: InstanceSpec, image: ImageConfig, *, home: str = "/") -> Command:
    """As Docker joins them; see `InstanceSpec`. `HOME`, `HOSTNAME`, `PATH` and, with a terminal, `TERM` are set where
    nobody sets them. Raises `NoCommand`."""
    raise NotImplementedError

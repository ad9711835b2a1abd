"""Who a machine's program runs as: names of users and groups looked up in the image's own files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec


class User(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers inside the machine. `home` is an absolute path, "/" where the image names none."""

    uid: int = 0
    gid: int = 0
    groups: tuple[int, ...] = ()
    home: str = "/"


class UnknownUser(Exception):
    """The image has no such user or group; the text names it."""


def resolve_user(layers: Sequence[Path], user: str) -> User:
    """Look up `name|uid[:group|gid]` ("" is root) in /etc/passwd and /etc/group of the layers, the topmost first, as
    Docker does: a number needs no entry; without a group it is the user's own, with the groups that list the user.

    Raises `UnknownUser`. Links are followed inside the tree only."""
    raise NotImplementedError

"""What a driver finds on its host, and what it can do there. Workers tell brokers of it."""

from __future__ import annotations

import msgspec


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What this driver can do on this host. A call outside them is refused by name, never ignored."""

    suspend: bool = False
    exec: bool = False
    limits: bool = False  # cpu, memory and process limits are enforced by the kernel
    images: bool = False  # runs OCI images; False: runs the host's own programs
    terminal: bool = False  # `terminal` works
    resize: bool = False  # `resize` works while the program runs
    network: bool = False  # gives machines their own address


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver found on this host. `healthy` False keeps the worker from offering it; `problem` says why."""

    driver: str
    healthy: bool
    problem: str = ""
    capabilities: Capabilities = Capabilities()
    attributes: dict[str, str] = {}

"""What an operator may set about microVMs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kernel` is a directory with `boot` and `lib/modules` of a guest kernel, "" to look for one. `accelerator` "auto"
    takes the processor where a probe shows that it runs guests, and emulates it otherwise. `vmm` "auto" takes
    Firecracker where it is here and the processor runs guests, and QEMU otherwise. `templates` False boots every
    machine."""

    kernel: str = ""
    accelerator: Literal["auto", "kvm", "tcg"] = "auto"
    vmm: Literal["auto", "qemu", "firecracker"] = "auto"
    templates: bool = True
    cgroups: bool = True

    @classmethod
    def of(cls, table: Mapping[str, Any], *, cgroups: bool) -> Settings:
        """Read the settings from a table of the configuration. Raises TypeError with what is wrong in it."""
        try:
            return msgspec.convert({**table, "cgroups": cgroups}, cls)
        except msgspec.ValidationError as error:
            raise TypeError(str(error)) from error

"""What an operator may set about microVMs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """`kernel` is a directory with `boot` and `lib/modules` of a guest kernel, None to look for one. `accelerator`
    "auto" takes the processor where a probe shows that it runs guests, and emulates it otherwise. `templates` False
    boots every machine."""

    kernel: Path | None = None
    accelerator: Literal["auto", "kvm", "tcg"] = "auto"
    templates: bool = True
    cgroups: bool = True

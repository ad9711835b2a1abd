"""What a worker is told when it is made."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from hawker.model.guest import Resources
from hawker.model.image import IMAGE_TIMEOUT_S
from hawker.worker.ports import PORTS

Way = Literal["", "adopt", "discard"]


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One worker: its name, region, what it may give out, where it keeps its state, where others reach it.

    `disk_scale` as in `limits_of`, `image_timeout_s` as in `ImageSettings.timeout_s`. The worker keeps what is over for
    `history_s`, and at most `history_records` records of the log. `recover` says how a person decided about a database
    that has lost something (`worker.lost_database`). With `validate` the worker checks what every change leaves
    (`worker.invariants`)."""

    name: str
    region: str
    directory: Path
    capacity: Resources
    host: str = "127.0.0.1"
    port: int = 0
    ports: range = PORTS  # of the host, for what machines publish
    proxy_port: int = 0  # of the proxy that leads to its machines
    disk_scale: float = 1.0
    recover: Way = ""
    reserve_mib: int = 8
    history_s: float = 86_400.0
    history_records: int = 20_000
    image_timeout_s: float = IMAGE_TIMEOUT_S
    validate: bool = False

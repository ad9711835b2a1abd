"""What a driver is asked to run: a machine's row and configuration in the words of the driver contract."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from hawker.core.disks import disk_speed
from hawker.model.config import PROCESS, Config, known_config
from hawker.model.guest import Guest
from hawker.model.rows import MachineRow
from hawker.model.values import pinned
from hawker.network.addresses import number
from hawker.worker.drivers.base import Dns, InstanceSpec, Limits, Network, Root

SHARED_CPU_MILLIS = 62  # a sixteenth of a core, the share that upstream documents for one shared cpu
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

NOTED = (
    *("app", "name", "region", "version", "config", "resources", "created_at_ms", "private_ip", "generation"),
    *("order", "driver", "image_digest", "ports"),
)
"""The fields of a machine's row that stay as they are from before its program starts until it ends."""
NOTE_MOST = 64 << 10


def reference_of(machine: MachineRow) -> str:
    """The image: once it is known which bytes the reference means, those."""
    return pinned(str(machine.config["image"]), machine.image_digest)


def limits_of(guest: Guest, disk_scale: float = 1.0) -> Limits:
    """`disk_scale`: how fast this worker's disks are shared out, beside what upstream documents; 0 is without bound."""
    dedicated = guest.cpu_kind == "performance"
    speed = disk_speed(guest, disk_scale)
    return Limits(
        cpu_millis=guest.cpus * (1000 if dedicated else SHARED_CPU_MILLIS),
        memory_mib=guest.memory_mb,
        dedicated=dedicated,
        disk_bytes=speed.bytes,
        disk_operations=speed.operations,
    )


def instance_spec(machine: MachineRow, key: str, disk_scale: float = 1.0) -> InstanceSpec:
    """The machine's command line, its environment with ours on top, its limits, and what is put into it."""
    config = known_config(machine.config)
    command = config.command
    return InstanceSpec(
        key=key,
        machine=machine.id,
        driver=machine.driver,
        image=reference_of(machine),
        argv=config.argv if config.of_host else command.exec,
        entrypoint=() if config.of_host else command.entrypoint,
        cmd=() if config.of_host else command.cmd,
        env=_environment(machine, config),
        limits=limits_of(config.guest, disk_scale),
        user=config.user,
        tty=config.tty,
        hostname=config.dns.hostname or machine.id,
        root=Root(size_mib=config.rootfs.size_gb * 1024, persist=config.rootfs.persist),
        files=config.files,
        tmpfs=config.tmpfs,
        network=None
        if config.runtime == PROCESS
        else Network(number=number(machine.private_ip), address=machine.private_ip, publish=machine.ports),
        dns=Dns(nameservers=config.dns.nameservers, searches=config.dns.searches, options=config.dns.options),
        listens=machine.ports if config.runtime == PROCESS else (),
        note=_note(machine),
    )


def _note(machine: MachineRow) -> dict[str, Any]:
    """What makes the machine's row anew, beside what its program shows. Nothing where that would be too much, as with
    long files in the configuration."""
    note = {name: getattr(machine, name) for name in NOTED}
    return cast(dict[str, Any], msgspec.to_builtins(note)) if len(msgspec.json.encode(note)) <= NOTE_MOST else {}


def _environment(machine: MachineRow, config: Config) -> dict[str, str]:
    fields = {
        "id": machine.id,
        "version": machine.version,
        "app_name": machine.app,
        "private_ip": machine.private_ip,
        "region": machine.region,
        "image": config.image,
    }
    # The host is no image that names a path to look in.
    return {
        **({"PATH": PATH} if config.of_host else {}),
        **config.env,
        **{variable: fields[of] for variable, of in config.env_from},
        "FLY_APP_NAME": machine.app,
        "FLY_MACHINE_ID": machine.id,
        "FLY_ALLOC_ID": machine.id,
        "FLY_REGION": machine.region,
        "FLY_IMAGE_REF": reference_of(machine),
        "FLY_MACHINE_VERSION": machine.version,
        "FLY_PRIVATE_IP": machine.private_ip,
        "FLY_PROCESS_GROUP": config.metadata.get("fly_process_group", "app"),
        "FLY_VM_MEMORY_MB": str(config.guest.memory_mb),
        "PRIMARY_REGION": config.env.get("PRIMARY_REGION", machine.region),
    }

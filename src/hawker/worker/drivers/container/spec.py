"""The OCI runtime specification (1.0.2) of a container: the one document that crun and runc run it by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from hawker.supervisor.mounts import IdMap
from hawker.worker.drivers.base import InstanceSpec
from hawker.worker.drivers.container.command import Command
from hawker.worker.drivers.container.users import User

INIT = "/dev/.hawker-init"  # in the machine's own /dev, so that nothing of it is in the root file system
STATUS_FD = 3


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a container's things are on the host.

    `rootfs` is its mounted overlay, `init` the compiled init, `cgroup` its group below each hierarchy's root, as
    `/hawker-…/name`. `files` maps absolute paths in the machine to files of the host shown there (config.files,
    /etc/resolv.conf, /etc/hosts, /etc/hostname); in a user namespace they must be owned by `ids.outside(0)`.
    `mounts` maps volumes' sources as `InstanceSpec.mounts` names them to what is to be shown instead (an idmapped bind
    of the same); missing: the source itself.
    """

    rootfs: str
    init: str
    cgroup: str
    files: Mapping[str, str] = {}
    mounts: Mapping[str, str] = {}


def runtime_spec(
    instance: InstanceSpec,
    command: Command,
    user: User,
    place: Place,
    *,
    ids: IdMap | None,
    hard_limits: Mapping[str, int],
    runtime: Literal["crun", "runc"],
    cgroups: Literal["v1", "v2", ""],
    architecture: str,
) -> dict[str, Any]:
    """The `config.json`. The init gets the status file as descriptor `STATUS_FD` (`--preserve-fds 1`).

    `ids` None: no user namespace. `hard_limits` are the host's by name as in `RLIMIT_NOFILE`, for nothing above them
    can be set without CAP_SYS_RESOURCE. `cgroups` "": none can be used, so no limits. `architecture` as in
    `os.uname().machine`."""
    raise NotImplementedError


def resources(instance: InstanceSpec, cgroups: Literal["v1", "v2"]) -> dict[str, Any]:
    """The kernel limits, `linux.resources`, without the rules for devices: also what `update --resources -` takes."""
    raise NotImplementedError

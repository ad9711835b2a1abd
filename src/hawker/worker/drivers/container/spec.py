"""The OCI runtime specification (1.0.2) of a container: the one document that crun and runc run it by."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from hawker.supervisor.mounts import IdMap
from hawker.worker.drivers.base import InstanceSpec, Limits
from hawker.worker.drivers.container import seccomp
from hawker.worker.drivers.container.command import Command
from hawker.worker.drivers.container.users import User

INIT = "/dev/.hawker-init"  # in the machine's own /dev, so that nothing of it is in the root file system
STATUS_FD = 3
CPU_PERIOD_US = 100_000
OPEN_FILES = 65536

# What root may do in a container. Docker's list without MKNOD, which no program in a container needs (the runtime makes
# the devices), and without NET_RAW: with it a machine could send what it likes into its network, such as another's
# address. `ping` works without (see SYSCTLS). SYS_CHROOT, SETFCAP, AUDIT_WRITE: sshd, package managers, su.
CAPABILITIES = (
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_NET_BIND_SERVICE",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
)

# Of the machine's own network: every user may ping and listen on every port.
SYSCTLS = {"net.ipv4.ping_group_range": "0 65535", "net.ipv4.ip_unprivileged_port_start": "0"}

# What the kernel says or lets be changed beyond the namespaces. The lists are Docker's, by what they do.
MASKED = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
)
READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")

# (major, minor) of character devices: null, zero, full, random, urandom, tty, console, ptmx, and terminals.
DEVICES = ((1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 1), (5, 2), (136, None))

_KERNEL_TREES = ("/proc", "/sys", "/dev")  # the runtime's own mounts; /dev/shm may be replaced


class BadSpec(Exception):
    """The configuration asks for what a container cannot have; the text names it."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a container's things are on the host.

    `rootfs` is its mounted overlay, `init` the compiled init, `cgroup` its group below each hierarchy's root, as
    `/hawker-…/name`. `files` maps absolute paths in the machine to files of the host shown there, read-only
    (config.files, /etc/resolv.conf, /etc/hosts, /etc/hostname); in a user namespace they must be readable for
    `ids.outside(0)`. `mounts` maps volumes' sources as `InstanceSpec.mounts` names them to what is to be shown instead
    (an idmapped bind of the same); missing: the source itself.
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
    swap: bool = True,
) -> dict[str, Any]:
    """The `config.json`. The init gets the status file as descriptor `STATUS_FD` (`--preserve-fds 1`).

    `ids` None: no user namespace. `hard_limits` are the host's by name as in `RLIMIT_NOFILE`, for nothing above them
    can be set without CAP_SYS_RESOURCE. `cgroups` "": none can be used, so no limits. `architecture` as in
    `os.uname().machine`. `swap` False: the kernel does not count swap, so it cannot be limited.

    Raises `BadSpec`."""
    # A terminal of the runtime's would end with the supervisor that it is given to. The init makes the program's own.
    program = process(command, user, tty=False, ids=ids, hard_limits=hard_limits)
    program["args"] = [INIT, "--status-fd", str(STATUS_FD), "--", *command.argv]
    linux: dict[str, Any] = {
        "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network", "cgroup")],
        "maskedPaths": list(MASKED),
        "readonlyPaths": list(READ_ONLY),
        "sysctl": dict(SYSCTLS),
        "rootfsPropagation": "rprivate",
    }
    if ids:
        linux["namespaces"].append({"type": "user"})
        mapping = {"containerID": 0, "hostID": ids.base, "size": ids.count}
        linux["uidMappings"] = [mapping]
        linux["gidMappings"] = [mapping]
    if cgroups:
        linux["cgroupsPath"] = place.cgroup
        linux["resources"] = {**resources(instance.limits, swap=swap), "devices": _devices()}
    if not seccomp.supported(architecture):
        raise BadSpec(f"{architecture}: there is no list of its system calls, without which no container is run")
    annotations = {}
    if runtime == "crun":  # takes the filter as it is; making one of the profile would be most of a start's time
        annotations["run.oci.seccomp_bpf_data"] = seccomp.encoded(architecture)
    else:
        linux["seccomp"] = seccomp.profile(architecture)
    return {
        "ociVersion": "1.0.2",
        "process": program,
        "root": {"path": place.rootfs, "readonly": instance.root.read_only},
        "hostname": instance.hostname or instance.machine,
        "mounts": [*_own_mounts(place), *_wanted_mounts(instance, place)],
        "annotations": annotations,
        "linux": linux,
    }


def process(
    command: Command,
    user: User,
    *,
    tty: bool,
    ids: IdMap | None,
    hard_limits: Mapping[str, int],
) -> dict[str, Any]:
    """A `process` object, also for `exec --process`."""
    numbers = (user.uid, user.gid, *user.groups)
    if ids and (beyond := [number for number in numbers if number >= ids.count]):
        raise BadSpec(f"user or group {beyond[0]}: a container here has ids up to {ids.count - 1}")
    able = list(CAPABILITIES)
    return {
        "terminal": tty,
        "user": {"uid": user.uid, "gid": user.gid, "additionalGids": list(user.groups)},
        "args": list(command.argv),
        "env": [f"{name}={value}" for name, value in command.env.items()],
        "cwd": command.cwd,
        # Nothing inheritable: a file's capabilities would add to it (CVE-2022-24769).
        "capabilities": {
            "bounding": able,
            "effective": able if user.uid == 0 else [],
            "permitted": able if user.uid == 0 else [],
        },
        "noNewPrivileges": True,
        "rlimits": _rlimits(hard_limits),
    }


def resources(limits: Limits, *, swap: bool = True) -> dict[str, Any]:
    """The kernel limits, `linux.resources`, without the rules for devices: also what `update --resources -` takes.
    Runtimes translate them for version 2 of cgroups."""
    size = limits.memory_mib << 20
    cpu: dict[str, int] = {"shares": max(2, limits.cpu_millis * 1024 // 1000), "period": CPU_PERIOD_US}
    if limits.dedicated:  # otherwise there is none; crun 1.8 fails on -1
        cpu["quota"] = limits.cpu_millis * CPU_PERIOD_US // 1000
    memory = {"limit": size, "swap": size} if swap else {"limit": size}  # memory and swap together: no swap
    return {"cpu": cpu, "memory": memory, "pids": {"limit": limits.pids}}


def _rlimits(hard_limits: Mapping[str, int]) -> list[dict[str, Any]]:
    files = min(OPEN_FILES, hard_limits.get("RLIMIT_NOFILE", OPEN_FILES))
    return [
        {"type": "RLIMIT_NOFILE", "soft": files, "hard": files},
        {"type": "RLIMIT_CORE", "soft": 0, "hard": 0},
    ]


def _devices() -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = [{"allow": False, "access": "rwm"}]
    for major, minor in DEVICES:
        rule = {"allow": True, "type": "c", "major": major, "access": "rw"}
        rules.append(rule if minor is None else {**rule, "minor": minor})
    return rules


def _own_mounts(place: Place) -> list[dict[str, Any]]:
    return [
        _mount("/proc", "proc", "nosuid", "noexec", "nodev"),
        _mount("/dev", "tmpfs", "nosuid", "strictatime", "mode=755", "size=65536k"),
        _mount("/dev/pts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"),
        _mount("/dev/shm", "tmpfs", "nosuid", "noexec", "nodev", "mode=1777", "size=65536k"),
        _mount("/dev/mqueue", "mqueue", "nosuid", "noexec", "nodev"),
        _mount("/sys", "sysfs", "nosuid", "noexec", "nodev", "ro"),
        _mount("/sys/fs/cgroup", "cgroup", "nosuid", "noexec", "nodev", "relatime", "ro"),
        _bind(place.init, INIT, "ro"),
    ]


def _wanted_mounts(instance: InstanceSpec, place: Place) -> list[dict[str, Any]]:
    """What the configuration asks for, outer directories before those inside them, files last."""
    wanted: dict[str, dict[str, Any]] = {}
    for mount in instance.mounts:
        source = place.mounts.get(mount.source, mount.source)
        path = _target(mount.path, "a volume")
        wanted[path] = _bind(source, path, "ro" if mount.read_only else "rw")
    for tmpfs in instance.tmpfs:
        path = _target(tmpfs.path, "a tmpfs")
        wanted[path] = _mount(path, "tmpfs", "nosuid", "nodev", "mode=1777", f"size={tmpfs.size_mib}m")
    files = {_target(path, "a file"): source for path, source in place.files.items()}
    for path in files.keys() & wanted.keys():
        raise BadSpec(f"{path}: is to be a file and a volume or tmpfs at once")
    outer_first = sorted(wanted.items(), key=lambda item: item[0].count("/"))
    return [mount for _, mount in outer_first] + [_bind(source, path, "ro") for path, source in sorted(files.items())]


def _target(written: str, what: str) -> str:
    path = posixpath.normpath(written).replace("//", "/")
    if not path.startswith("/") or path == "/" or "\0" in path:
        raise BadSpec(f"{written!r}: {what} needs an absolute path below the root")
    for tree in _KERNEL_TREES:
        if (path == tree or path.startswith(f"{tree}/")) and path != "/dev/shm":
            raise BadSpec(f"{written!r}: {what} cannot be in {tree}, which is the kernel's")
    return path


def _mount(path: str, kind: str, *options: str) -> dict[str, Any]:
    return {"destination": path, "type": kind, "source": kind, "options": list(options)}


def _bind(source: str, path: str, access: Literal["ro", "rw"]) -> dict[str, Any]:
    options: Sequence[str] = ("rbind", "rprivate", "nosuid", "nodev", access)
    return {"destination": path, "type": "bind", "source": source, "options": list(options)}

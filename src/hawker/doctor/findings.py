"""What the facts about a host mean for an agent. Pure.

A finding is `ok`; `limited`: it works, but less than it could; or `missing`: something does not work. `remedy` says
what to do about the latter two. `needed` findings keep an agent from working at all.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from hawker.doctor.facts import Facts
from hawker.model.config import PROCESS
from hawker.worker.drivers.base import Fingerprint

State = Literal["ok", "limited", "missing"]

PYTHON = (3, 11)
KERNEL = (5, 4)  # pidfds with waitid
IDMAPPED = (5, 19)  # overlayfs takes idmapped layers
CONTROLLERS = ("cpu", "memory", "pids")
OPEN_FILES = 65_536
FREE_BYTES = 5 << 30
SYNC_MS = 10.0


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report."""

    what: str
    state: State
    found: str
    remedy: str = ""
    needed: bool = False


def findings(facts: Facts) -> list[Finding]:
    """Everything that the facts tell, in the order of the report."""
    return [
        _python(facts),
        _kernel(facts),
        _user(facts),
        _cgroups(facts),
        _namespaces(facts),
        _overlay(facts),
        _compiler(facts),
        _haproxy(facts),
        _open_files(facts),
        _clock(facts),
        _disk(facts),
        _sync(facts),
        *_addresses(facts),
    ]


def of_driver(fingerprint: Fingerprint) -> Finding:
    """A driver's own word."""
    can = [
        name
        for name in ("images", "limits", "network", "suspend", "exec", "terminal", "resize")
        if getattr(fingerprint.capabilities, name)
    ]
    found = ", ".join([*can, *(f"{name}: {value}" for name, value in sorted(fingerprint.attributes.items()))])
    what = f"driver {fingerprint.driver}"
    if fingerprint.driver == PROCESS:
        return _process(fingerprint, found)
    if not fingerprint.healthy:
        return Finding(what=what, state="missing", found="cannot run here", remedy=fingerprint.problem)
    state: State = "limited" if fingerprint.problem else "ok"
    return Finding(what=what, state=state, found=found or "works", remedy=fingerprint.problem)


def _process(fingerprint: Fingerprint, found: str) -> Finding:
    """It needs nothing of the host, and gives all of it away."""
    what = f"driver {fingerprint.driver}"
    if not fingerprint.healthy:
        return Finding(what=what, state="ok", found="off", remedy=fingerprint.problem)
    remedy = (
        "it runs commands of any user of the API on this host, and nothing but their user of the host keeps them from "
        "it: leave it out of worker.drivers"
    )
    return Finding(what=what, state="limited", found=found or "works", remedy=remedy)


def can_work(found: list[Finding]) -> bool:
    """Whether an agent can work here at all."""
    return not any(finding.needed and finding.state == "missing" for finding in found)


def _python(facts: Facts) -> Finding:
    version = ".".join(map(str, facts.python))
    new = facts.python[:2] >= PYTHON
    remedy = "" if new else "install Python 3.11 or newer"
    return Finding(what="python", state="ok" if new else "missing", found=version, remedy=remedy, needed=True)


def _kernel(facts: Facts) -> Finding:
    major, minor = facts.release
    found = f"{facts.system} {major}.{minor} on {facts.architecture}, {facts.cores} cores, {facts.memory_mib} MiB"
    if facts.system != "Linux" or facts.release < KERNEL:
        remedy = f"run Linux {KERNEL[0]}.{KERNEL[1]} or newer"
        return Finding(what="kernel", state="missing", found=found, remedy=remedy, needed=True)
    if facts.release < IDMAPPED:
        remedy = f"from Linux {IDMAPPED[0]}.{IDMAPPED[1]} on, root in a container is nobody on the host"
        return Finding(what="kernel", state="limited", found=found, remedy=remedy)
    return Finding(what="kernel", state="ok", found=found)


def _user(facts: Facts) -> Finding:
    if facts.root:
        return Finding(what="user", state="ok", found="root")
    remedy = "machines' networks and limits need root; machines themselves do without"
    return Finding(what="user", state="limited", found="an ordinary user", remedy=remedy)


def _cgroups(facts: Facts) -> Finding:
    absent = [name for name in CONTROLLERS if name not in facts.controllers]
    found = f"{facts.cgroups}, controllers {', '.join(sorted(facts.controllers)) or 'none'}"
    if not absent:
        return Finding(what="cgroups", state="ok", found=found)
    remedy = f"without {', '.join(absent)}, limits of machines are counted but not enforced; " + (
        "mount cgroup2 at /sys/fs/cgroup" if facts.cgroups == "none" else "run as root, or delegate them to this user"
    )
    return Finding(what="cgroups", state="limited", found=found, remedy=remedy)


def _namespaces(facts: Facts) -> Finding:
    absent = sorted({"pid", "mnt", "net", "ipc", "uts", "user", "cgroup"} - facts.namespaces)
    if absent:
        remedy = f"the kernel lacks {', '.join(absent)}: containers cannot be isolated"
        return Finding(what="namespaces", state="missing", found=f"without {', '.join(absent)}", remedy=remedy)
    if facts.user_namespaces <= 0:
        remedy = "set the sysctl user.max_user_namespaces, or kernel.unprivileged_userns_clone=1"
        return Finding(what="namespaces", state="limited", found="no user namespaces", remedy=remedy)
    if not facts.root and not facts.subordinate_ids:
        remedy = "install uidmap and give this user ranges in /etc/subuid and /etc/subgid: containers need them"
        return Finding(what="namespaces", state="limited", found="no subordinate ids", remedy=remedy)
    return Finding(what="namespaces", state="ok", found="all, user namespaces among them")


def _overlay(facts: Facts) -> Finding:
    if "overlay" in facts.filesystems:
        return Finding(what="overlayfs", state="ok", found="in the kernel")
    remedy = "load the kernel's module: modprobe overlay"
    return Finding(what="overlayfs", state="missing", found="not in /proc/filesystems", remedy=remedy)


def _compiler(facts: Facts) -> Finding:
    if facts.compiler:
        return Finding(what="c compiler", state="ok", found=facts.compiler)
    remedy = "apt install gcc libc6-dev: what is process 1 in a machine is compiled once"
    return Finding(what="c compiler", state="missing", found="no cc in PATH", remedy=remedy)


def _haproxy(facts: Facts) -> Finding:
    if facts.haproxy:
        return Finding(what="haproxy", state="ok", found=facts.haproxy)
    remedy = "apt install haproxy, if a proxy of this host is to have it as its engine"
    return Finding(what="haproxy", state="missing", found="no haproxy in PATH", remedy=remedy)


def _open_files(facts: Facts) -> Finding:
    found = f"at most {facts.open_files}"
    if facts.open_files < 0 or facts.open_files >= OPEN_FILES:  # -1: no limit
        return Finding(what="open files", state="ok", found=found if facts.open_files >= 0 else "no limit")
    remedy = f"raise the hard limit to {OPEN_FILES} (LimitNOFILE= of the service) for more than some thousand machines"
    return Finding(what="open files", state="limited", found=found, remedy=remedy)


def _clock(facts: Facts) -> Finding:
    if facts.clock_synchronised is None:
        return Finding(what="clock", state="limited", found="the kernel does not say", remedy="run an NTP client")
    if facts.clock_synchronised:
        return Finding(what="clock", state="ok", found="synchronised")
    remedy = "apt install chrony, or timedatectl set-ntp true: leases and the newest writer go by the clock"
    return Finding(what="clock", state="limited", found="not synchronised", remedy=remedy)


def _disk(facts: Facts) -> Finding:
    disk = facts.disk
    found = f"{disk.directory}: {disk.filesystem}, {disk.free_bytes >> 30} of {disk.total_bytes >> 30} GiB free"
    if disk.problem:
        remedy = f"give the agent a directory it can write to: {disk.problem}"
        return Finding(what="disk", state="missing", found=disk.directory, remedy=remedy, needed=True)
    if disk.free_bytes < FREE_BYTES:
        return Finding(what="disk", state="limited", found=found, remedy="images and machines want more room")
    if not disk.xattrs:
        remedy = f"{disk.filesystem} keeps no extended attributes, which images have: use ext4, xfs or btrfs"
        return Finding(what="disk", state="limited", found=found, remedy=remedy)
    return Finding(what="disk", state="ok", found=found)


def _sync(facts: Facts) -> Finding:
    if facts.disk.problem:
        return Finding(what="sync", state="missing", found="not tried", remedy="see disk")
    found = f"{facts.disk.sync_ms:.2f} ms to make a record durable"
    if facts.disk.sync_ms > SYNC_MS:
        remedy = "every order waits for it: an SSD with power-loss protection takes a tenth of a millisecond"
        return Finding(what="sync", state="limited", found=found, remedy=remedy)
    return Finding(what="sync", state="ok", found=found)


def _addresses(facts: Facts) -> list[Finding]:
    return [
        Finding(what=f"port {address.text}", state="ok", found="free")
        if not address.problem
        else Finding(
            what=f"port {address.text}",
            state="missing",
            found=address.problem,
            remedy="stop what listens there, or choose another address in the configuration",
            needed=True,
        )
        for address in facts.addresses
    ]

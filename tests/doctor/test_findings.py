"""What `hawker doctor` makes of a host: each fact alone, and that nobody is left without a remedy."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hawker.doctor.facts import Address, Disk, Facts
from hawker.doctor.findings import Finding, can_work, findings, of_driver
from hawker.worker.drivers.base import Capabilities, Fingerprint

GOOD_DISK = Disk(
    directory="/var/lib/hawker",
    filesystem="ext4",
    free_bytes=100 << 30,
    total_bytes=200 << 30,
    sync_ms=0.2,
    xattrs=True,
)
GOOD = Facts(
    python=(3, 12, 1),
    system="Linux",
    release=(6, 12),
    architecture="x86_64",
    root=True,
    cores=8,
    memory_mib=32768,
    open_files=1 << 20,
    filesystems=frozenset({"ext4", "overlay"}),
    namespaces=frozenset({"pid", "mnt", "net", "ipc", "uts", "user", "cgroup"}),
    user_namespaces=1000,
    cgroups="v2",
    controllers=frozenset({"cpu", "memory", "pids", "io"}),
    compiler="/usr/bin/cc",
    haproxy="/usr/sbin/haproxy",
    subordinate_ids=True,
    clock_synchronised=True,
    addresses=(Address(text="127.0.0.1:4281", problem=""),),
    disk=GOOD_DISK,
)


def found(**changes: Any) -> dict[str, Finding]:
    return {finding.what: finding for finding in findings(replace(GOOD, **changes))}


def test_a_host_with_everything_is_told_so() -> None:
    assert {f.state for f in findings(GOOD)} == {"ok"}
    assert can_work(findings(GOOD))


@pytest.mark.parametrize(
    ("changes", "what", "state", "remedy"),
    [
        ({"python": (3, 10, 2)}, "python", "missing", "Python 3.11"),
        ({"release": (4, 19)}, "kernel", "missing", "Linux 5.4"),
        ({"release": (5, 10)}, "kernel", "limited", "5.19"),
        ({"root": False}, "user", "limited", "need root"),
        ({"controllers": frozenset({"cpu", "pids"})}, "cgroups", "limited", "memory"),
        ({"cgroups": "none", "controllers": frozenset()}, "cgroups", "limited", "mount cgroup2"),
        ({"namespaces": GOOD.namespaces - {"net"}}, "namespaces", "missing", "net"),
        ({"user_namespaces": 0}, "namespaces", "limited", "max_user_namespaces"),
        ({"root": False, "subordinate_ids": False}, "namespaces", "limited", "uidmap"),
        ({"filesystems": frozenset({"ext4"})}, "overlayfs", "missing", "modprobe overlay"),
        ({"compiler": ""}, "c compiler", "missing", "gcc"),
        ({"haproxy": ""}, "haproxy", "missing", "engine"),
        ({"open_files": 1024}, "open files", "limited", "LimitNOFILE"),
        ({"clock_synchronised": False}, "clock", "limited", "chrony"),
        ({"clock_synchronised": None}, "clock", "limited", "NTP"),
        ({"disk": replace(GOOD_DISK, problem="Read-only file system")}, "disk", "missing", "Read-only"),
        ({"disk": replace(GOOD_DISK, free_bytes=1 << 30)}, "disk", "limited", "more room"),
        ({"disk": replace(GOOD_DISK, xattrs=False)}, "disk", "limited", "extended attributes"),
        ({"disk": replace(GOOD_DISK, sync_ms=30.0)}, "sync", "limited", "SSD"),
        ({"addresses": (Address(text="0.0.0.0:4281", problem="in use"),)}, "port 0.0.0.0:4281", "missing", "another"),
    ],
)
def test_what_a_host_lacks_is_named_with_what_to_do(
    changes: dict[str, Any], what: str, state: str, remedy: str
) -> None:
    finding = found(**changes)[what]
    assert finding.state == state
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    "changes",
    [
        {"python": (3, 10, 2)},
        {"release": (4, 19)},
        {"disk": replace(GOOD_DISK, problem="Permission denied")},
        {"addresses": (Address(text="127.0.0.1:1", problem="Permission denied"),)},
    ],
)
def test_only_what_no_agent_can_do_without_keeps_one_from_working(changes: dict[str, Any]) -> None:
    assert not can_work(findings(replace(GOOD, **changes)))


def test_an_ordinary_user_on_a_bare_host_can_run_an_agent() -> None:
    bare = replace(
        GOOD,
        root=False,
        compiler="",
        haproxy="",
        cgroups="none",
        controllers=frozenset(),
        filesystems=frozenset({"ext4"}),
        user_namespaces=0,
    )
    assert can_work(findings(bare))


@given(
    release=st.tuples(st.integers(2, 9), st.integers(0, 30)),
    root=st.booleans(),
    open_files=st.integers(-1, 1 << 21),
    user_namespaces=st.integers(0, 2),
    subordinate_ids=st.booleans(),
    clock_synchronised=st.sampled_from([True, False, None]),
    controllers=st.frozensets(st.sampled_from(["cpu", "memory", "pids", "io"])),
    filesystems=st.frozensets(st.sampled_from(["ext4", "overlay"])),
    compiler=st.sampled_from(["", "/usr/bin/cc"]),
    haproxy=st.sampled_from(["", "/usr/sbin/haproxy"]),
)
def test_whatever_is_short_has_a_remedy_and_whatever_is_not_has_none(**changes: Any) -> None:
    for finding in found(**changes).values():
        assert bool(finding.remedy) == (finding.state != "ok"), finding


def test_a_driver_speaks_for_itself() -> None:
    can = Capabilities(suspend=True, images=True)
    works = of_driver(Fingerprint(driver="container", healthy=True, capabilities=can, attributes={"runtime": "crun"}))
    assert (works.state, works.found, works.remedy) == ("ok", "images, suspend, runtime: crun", "")
    cannot = of_driver(Fingerprint(driver="microvm", healthy=False, problem="apt install qemu-system-x86"))
    assert (cannot.state, cannot.remedy, cannot.needed) == ("missing", "apt install qemu-system-x86", False)

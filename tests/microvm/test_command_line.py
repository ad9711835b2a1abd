"""QEMU's command line."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from hawker.supervisor.calls import Confined
from hawker.worker.drivers.microvm import qemu
from hawker.worker.drivers.microvm.kernel import Kernel
from hawker.worker.drivers.microvm.qemu import Memory, Vm

KERNEL = Kernel(vmlinux="/k/vmlinux", initrd="/k/initrd", version="6.1", digest="d")
VM = Vm(
    binary="/usr/bin/qemu-system-x86_64",
    accelerator="tcg",
    cpus=1,
    memory_mib=256,
    kernel=KERNEL,
    tsc_khz=2_596_128,
    image="/d/image.erofs",
    disk="/m/disk",
)


def options(vm: Vm, name: str) -> list[str]:
    argv = qemu.command(vm)
    return [argv[i + 1] for i, word in enumerate(argv) if word == f"-{name}"]


def line(**changed: Any) -> str:
    return " ".join(qemu.command(replace(VM, **changed)))


def test_an_emulated_processor_is_told_its_rate_and_a_real_one_is_not() -> None:
    assert "tsc_early_khz=2596128" in line()
    assert options(VM, "accel") == ["tcg,tb-size=64,thread=single"]
    assert "tsc_early_khz" not in line(accelerator="kvm")
    assert options(replace(VM, accelerator="kvm"), "cpu") == ["host"]
    assert options(replace(VM, cpus=2), "accel") == ["tcg,tb-size=64,thread=multi"]


def test_the_image_cannot_be_written_to_and_the_machines_disk_can() -> None:
    image, disk = options(VM, "drive")
    assert "file=/d/image.erofs," in image
    assert "readonly=on" in image
    assert "file=/m/disk," in disk
    assert "readonly=off" in disk


def test_what_a_guest_reads_and_writes_is_bounded_over_all_its_disks() -> None:
    bounded = options(replace(VM, disk_bytes=1 << 20, disk_operations=500), "drive")
    for drive in bounded:
        found = dict(option.split("=", 1) for option in drive.split(",") if option.startswith("throttling."))
        assert found.pop("throttling.group") == "disks"
        assert found == {
            f"throttling.{unit}-{way}{kind}": str(number * times)
            for unit, number in (("bps", 1 << 20), ("iops", 500))
            for way in ("read", "write")
            for kind, times in (("", 1), ("-max", qemu.MARGIN_S))
        }
    assert len(bounded) == 2
    assert "throttling" not in line()
    assert "throttling" not in line(image="", disk="", disk_bytes=1)  # a template, whose disks are nothing


def test_a_machine_may_change_its_disk_and_no_file_that_others_have() -> None:
    bare = replace(VM, user=7, preload="/p/reading")
    assert qemu.confined(bare) == Confined(
        sockets=["qmp", "agent"],
        user=7,
        shown=["/k/vmlinux", "/k/initrd", "/d/image.erofs"],
        own=["/m/disk"],
        devices=[],
    )
    assert qemu.confined(replace(bare, accelerator="kvm")).devices == ["/dev/kvm"]
    restored = replace(bare, memory=Memory(file="/t/memory"))
    assert qemu.confined(restored).shown[-2:] == ["/t/memory", "/p/reading"]
    assert qemu.environment(restored)["HAWKER_READ_ONLY"] == "/t/memory"
    making = replace(bare, image="", disk="", memory=Memory(file="/t/memory", shared=True))
    assert qemu.confined(making).own == ["/t/memory"]
    assert "LD_PRELOAD" not in qemu.environment(making)


def test_without_a_user_of_its_own_it_sees_what_its_worker_sees() -> None:
    assert qemu.confined(VM) == Confined(sockets=["qmp", "agent"])


def test_a_path_may_hold_what_separates_options() -> None:
    assert "file=/d/a,,b=c," in options(replace(VM, image="/d/a,b=c"), "drive")[0]


def test_a_template_has_disks_of_the_same_size_behind_which_there_is_nothing() -> None:
    for drive in options(replace(VM, image="", disk=""), "drive"):
        assert f"file.driver=null-co,file.size={64 << 30}" in drive


@pytest.mark.parametrize(
    ("tap", "netdev"),
    [
        ("", []),
        ("-", ["hubport,id=net,hubid=0"]),
        ("hkabc", ["tap,id=net,fd={tap}"]),
    ],
)
def test_its_network_interface_is_made_for_it_and_ends_with_it(tap: str, netdev: list[str]) -> None:
    assert options(replace(VM, tap=tap), "netdev") == netdev
    assert qemu.confined(replace(VM, tap=tap)).tap == tap.strip("-")
    assert line(tap=tap).count("virtio-net-device") == len(netdev)


def test_two_that_can_be_restored_from_each_other_have_the_same_devices_in_the_same_order() -> None:
    template = replace(VM, image="", disk="", output=False, memory=Memory(file="/t/memory", shared=True))
    machine = replace(VM, memory=Memory(file="/t/memory"), incoming=True)
    assert options(template, "device") == options(machine, "device")
    assert options(template, "machine") == options(machine, "machine")
    assert options(template, "object")[0].replace("share=on", "share=off") == options(machine, "object")[0]


def test_what_the_guest_says_goes_where_the_supervisor_listens_or_nowhere() -> None:
    backends = dict(entry.split(",")[1::-1] for entry in options(VM, "chardev"))
    assert backends == {
        "id=qmp": "socket",
        "id=agent": "socket",
        "id=out": "file",
        "id=err": "file",
        "id=status": "file",
    }
    assert "path=/proc/self/fd/{status}" in line()
    assert "{status}" not in line(output=False)


def test_it_may_start_no_other_program() -> None:
    assert options(VM, "sandbox") == ["on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"]


def test_the_rate_of_the_processor_is_read() -> None:
    assert qemu.host_tsc_khz("processor\t: 0\ncpu MHz\t\t: 2596.128\nprocessor\t: 1\ncpu MHz\t\t: 1.0\n") == 2_596_128
    assert qemu.host_tsc_khz("") == 1_000_000

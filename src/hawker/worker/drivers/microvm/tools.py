"""What microVMs need of their host: a hypervisor, a kernel, the tools that make disks, a compiler for the
guest's init."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from hawker.init.build import PRELOADED, NoCompiler, program
from hawker.worker.drivers.microvm import disk, firecracker_api, kernel, kvm, qemu
from hawker.worker.drivers.microvm.settings import Settings


class Found(msgspec.Struct, frozen=True, kw_only=True):
    vmm: Literal["qemu", "firecracker"]
    binary: str
    jailer: str
    why_not_firecracker: str
    why_not_jailed: str
    accelerator: Literal["kvm", "tcg"]
    why_tcg: str
    tsc_khz: int
    preload: str  # of QEMU
    kernel: kernel.Kernel


class Missing(Exception):
    """What this host lacks, and how to get it."""


class Tools:
    """Looked for once; what was missing is looked for again."""

    def __init__(
        self, cache: Path, settings: Settings, no_kvm: Callable[[], str] = kvm.missing, programs: Path | None = None
    ) -> None:
        self._cache = cache
        self._programs = programs
        self._settings = settings
        self._probe = no_kvm
        self._found: Found | None = None
        self.needed: set[str] = set()  # files of kernels that machines were started with
        self._lock = asyncio.Lock()

    async def found(self) -> Found:
        """Raises `Missing`."""
        async with self._lock:
            if self._found is None:
                self._found = await asyncio.to_thread(self._look)
            return self._found

    def _look(self) -> Found:
        why = self._no_kvm()
        why_not = self._no_firecracker(why)
        if why_not and self._settings.vmm == "firecracker":
            raise Missing(f"the hypervisor is set to firecracker, and {why_not}")
        binary, jailer = (qemu.binary(), "") if why_not else firecracker_api.binaries()
        packages = [*([] if binary else [qemu.PACKAGE]), *disk.missing_tools()]
        if packages:
            raise Missing(f"microVMs need Debian's packages {' '.join(packages)}: apt install {' '.join(packages)}")
        try:
            source = kernel.find(Path(self._settings.kernel) if self._settings.kernel else None)
            programs = self._programs or self._cache
            made = kernel.prepare(source, program("guest", programs), self._cache, self._programs)
            preload = str(program("reading", programs, PRELOADED))
        except (kernel.NoKernel, NoCompiler) as error:
            raise Missing(str(error)) from error
        kernel.forget_others(self._cache, {*self.needed, made.vmlinux, made.initrd})
        return Found(
            vmm="qemu" if why_not else "firecracker",
            jailer=jailer,
            why_not_firecracker=why_not,
            why_not_jailed="" if why_not or jailer else f"{firecracker_api.JAILER} is not in PATH, or we are not root",
            binary=binary,
            accelerator="tcg" if why else "kvm",
            why_tcg=why,
            tsc_khz=qemu.host_tsc_khz(Path("/proc/cpuinfo").read_text()),
            preload=preload,
            kernel=made,
        )

    def _no_firecracker(self, no_kvm: str) -> str:
        if self._settings.vmm == "qemu":
            return "so configured"
        binary, _ = firecracker_api.binaries()
        if not binary:
            return f"{firecracker_api.BINARY} is not in PATH"
        if no_kvm:
            return f"it needs a processor that runs guests: {no_kvm}"
        return firecracker_api.too_old(binary)

    def _no_kvm(self) -> str:
        if self._settings.accelerator == "tcg":
            return "so configured"
        why = self._probe()
        if why and self._settings.accelerator == "kvm":
            raise Missing(f"the accelerator is set to kvm, and {why}")
        return why

"""Whether the processor runs guests."""

from __future__ import annotations

import time
from pathlib import Path

from hawker.worker.drivers.microvm import kvm


def test_a_host_without_kvm_is_told_so(tmp_path: Path) -> None:
    assert kvm.missing(tmp_path / "kvm").startswith(f"no {tmp_path}/kvm")


def test_what_only_has_its_name_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "kvm").touch()
    assert kvm.missing(tmp_path / "kvm")


def test_the_answer_comes_soon_and_is_the_same_again() -> None:
    """Also on hosts where a guest would hang."""
    began = time.monotonic()
    assert bool(kvm.missing()) == bool(kvm.missing())
    assert time.monotonic() - began < 2 * kvm.PROBE_S + 1

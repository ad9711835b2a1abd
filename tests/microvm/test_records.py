"""What is kept of each machine on disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import resource, sys
from pathlib import Path
from msgspec.structs import replace
from hawker.worker.drivers.base import Limits, Stats
from hawker.worker.drivers.microvm.kernel import Kernel
from hawker.worker.drivers.microvm.qemu import Vm
from hawker.worker.drivers.microvm.records import Record, Records

kernel = Kernel(version="1", vmlinux="v", initrd="i", digest="d")
vm = Vm(binary="qemu", accelerator="tcg", cpus=1, memory_mib=128, kernel=kernel)
record = Record(key="r/launch", machine="m", image="sha256:0", vm=vm, limits=Limits(cpu_millis=100, memory_mib=128))
records = Records(Path(sys.argv[1]))
records.open()
records.write(record)
whole = (records.directory(record.key) / "record").stat().st_size
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (whole // 2, hard))  # as a disk with so much room left
try:
    records.write(replace(record, suspended=Stats(cpu_s=1, memory_bytes=1, processes=1)))
except OSError as error:
    print(error.strerror)
print(records.open() == [record])
"""


def test_a_record_that_the_disk_has_no_room_for_leaves_the_one_that_is_there(tmp_path: Path) -> None:
    """One that cannot be read is taken for a start that was cut off, and removed with the machine's disk."""
    out = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines() == ["File too large", "True"]

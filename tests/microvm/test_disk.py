"""Disks of images and of machines."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from hawker.errors import ImageError
from hawker.model.image import Image, ImageConfig, Platform
from hawker.worker.drivers.microvm.disk import DEVICE_BYTES, DiskError, Disks, copy_sparse, missing_tools

pytestmark = pytest.mark.skipif(bool(missing_tools()), reason=f"needs {' '.join(missing_tools())}")

IMAGE = Image(digest="sha256:" + "a" * 64, platform=Platform(), config=ImageConfig(), layers=())


@pytest.fixture
def disks(tmp_path: Path) -> Disks:
    made = Disks(tmp_path / "disks")
    made.open()
    return made


def tree(root: Path, seed: int) -> list[Path]:
    """Two layers with the same files, made in another order for another seed."""
    draw = random.Random(seed)
    files = [f"d{n % 7}/file{n}" for n in range(150)]
    draw.shuffle(files)
    for name in files:
        path = root / "low" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name * 100)
        path.chmod(0o640 if name.endswith("3") else 0o755)
    links = [(f"d1/link{n}", f"d{n % 7}/file{n}") for n in range(30)]
    draw.shuffle(links)
    for link, target in links:
        os.link(root / "low" / target, root / "low" / link)
    (root / "high/d2").mkdir(parents=True)
    (root / "high/d2/file2").write_text("from above")
    os.mknod(root / "high/d2/file9", 0o600 | stat.S_IFCHR, os.makedev(0, 0))  # a whiteout
    os.symlink("d1", root / "high/pointer")
    attributes = [("user.a", b"1"), ("user.b", b"2")]
    draw.shuffle(attributes)
    for name, value in attributes:
        os.setxattr(root / "high/d2/file2", name, value)
    for directory, _, names in os.walk(root, topdown=False):
        for name in names:
            os.utime(Path(directory, name), (1e9, 1e9), follow_symlinks=False)
        os.utime(directory, (2e9, 2e9))
    return [root / "high", root / "low"]


def digest(path: Path) -> str:
    """Of what is no hole at its end: a disk is sparse up to the size that it seems to have."""
    with open(path, "rb") as file:
        end = os.lseek(file.fileno(), 0, os.SEEK_HOLE)
        return hashlib.sha256(file.read(end)).hexdigest()


@pytest.mark.root
async def test_the_same_image_gives_the_same_bytes_wherever_it_is_made(tmp_path: Path) -> None:
    digests = set()
    for seed in (1, 2):
        here = Disks(tmp_path / f"disks{seed}")
        here.open()
        digests.add(digest(await here.of_image(IMAGE, tree(tmp_path / f"host{seed}", seed))))
        await here.close()
    assert len(digests) == 1


@pytest.mark.root
async def test_the_disk_holds_the_layers_as_overlayfs_joins_them(disks: Disks, tmp_path: Path) -> None:
    path = await disks.of_image(IMAGE, tree(tmp_path / "host", 1))
    assert path.stat().st_size == DEVICE_BYTES
    out = subprocess.run(  # noqa: ASYNC221
        ["fsck.erofs", "--extract=" + str(tmp_path / "out"), str(path)], capture_output=True, text=True
    )
    assert out.returncode == 0, out.stderr
    there = tmp_path / "out"
    assert (there / "d2/file2").read_text() == "from above"
    assert not (there / "d2/file9").exists()
    assert os.readlink(there / "pointer") == "d1"
    assert (there / "d3/file3").read_text() == "d3/file3" * 100
    assert (there / "d3/file3").stat().st_mode & 0o777 == 0o640
    assert int((there / "d3/file3").stat().st_mtime) == 10**9
    assert sorted(p.name for p in there.iterdir()) == [*(f"d{n}" for n in range(7)), "pointer"]


@pytest.mark.root
async def test_it_is_made_once_however_many_ask(disks: Disks, tmp_path: Path) -> None:
    layers = tree(tmp_path / "host", 1)
    paths = await asyncio.gather(*(disks.of_image(IMAGE, layers) for _ in range(5)))
    assert len(set(paths)) == 1
    made = paths[0].stat().st_ino
    assert (await disks.of_image(IMAGE, layers)).stat().st_ino == made
    assert disks.made() == [IMAGE.digest]
    disks.forget(IMAGE.digest)
    disks.forget(IMAGE.digest)
    assert disks.made() == []


async def test_what_cannot_be_made_is_refused_and_leaves_nothing(disks: Disks, tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="no disk could be made"):
        await disks.of_image(IMAGE, [tmp_path / "no-such-layer"])
    with pytest.raises(ImageError, match="no layers"):
        await disks.of_image(IMAGE, [])
    assert list((tmp_path / "disks").iterdir()) == []


def test_what_a_kill_left_half_made_is_removed(disks: Disks, tmp_path: Path) -> None:
    (tmp_path / "disks/.making-x").write_text("half")
    disks.open()
    assert list((tmp_path / "disks").iterdir()) == []


async def test_a_machines_disk_is_an_empty_file_system_of_its_size_that_takes_little(
    disks: Disks, tmp_path: Path
) -> None:
    path = tmp_path / "disk"
    await disks.empty(path, 300, journal=True)
    about = path.stat()
    assert about.st_size == 300 << 20, "what its root writes past the file system takes nothing of the host"
    assert about.st_blocks * 512 < 16 << 20
    tool = shutil.which("dumpe2fs") or "/usr/sbin/dumpe2fs"
    shown = subprocess.run([tool, "-h", str(path)], capture_output=True, text=True, check=True).stdout  # noqa: ASYNC221
    facts = dict(line.split(":", 1) for line in shown.splitlines() if ":" in line)
    blocks, size = int(facts["Block count"]), int(facts["Block size"])
    assert blocks * size == 300 << 20
    assert "has_journal" in facts["Filesystem features"]
    with pytest.raises(DiskError, match=r"root\.size_mib 65537"):
        await disks.empty(path, 65_537, journal=False)


async def test_machines_that_are_the_first_at_once_get_their_disks(disks: Disks, tmp_path: Path) -> None:
    paths = [tmp_path / f"machine{n}" for n in range(4)]
    await asyncio.gather(*(disks.empty(path, 300, journal=False) for path in paths))
    sizes = {path.stat().st_size for path in paths}
    assert sizes == {300 << 20}
    assert [path.name for path in (tmp_path / "disks").iterdir()] == ["empty-300.ext4"]


def test_holes_stay_holes_in_a_copy(tmp_path: Path) -> None:
    source = tmp_path / "a"
    with open(source, "wb") as file:
        for at in (0, 1 << 20, 3 << 20):
            file.seek(at)
            file.write(b"data" * 2000)
        file.truncate(8 << 20)
    copy_sparse(source, tmp_path / "b", 16 << 20)
    copied = (tmp_path / "b").read_bytes()
    assert copied[: 8 << 20] == source.read_bytes()
    assert not any(copied[8 << 20 :])
    assert (tmp_path / "b").stat().st_blocks * 512 < 1 << 20

"""The process that unpacks: what it may still do, what becomes of its work when it is killed, and who may start it."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.kit.oci import character_device, directory, file, layer, opaque, whiteout
from tests.kit.ordinary import FIRST_SUB, USER, run_as_nobody
from tests.kit.trees import picture
from tests.kit.waiting import eventually, wait_until

from hawker.errors import DiskFull
from hawker.images.tree import confine
from hawker.images.tree.unpacking import LayerRefused, TreeLimits, remove, sweep, unpack

pytestmark = pytest.mark.root
MADE = layer([directory("d"), file("d/f", b"x" * 5000)], compression="")


class Waiting:
    """A blob that comes byte by byte: `write` as much of it as there is to be, look at the process, `end`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self._fd = os.open(path, os.O_RDWR)  # so that nobody waits for the other end to be opened

    def write(self, data: bytes) -> None:
        os.write(self._fd, data)

    def end(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@pytest.fixture
def blob(tmp_path: Path) -> Iterator[Waiting]:
    waiting = Waiting(tmp_path / "blob")
    yield waiting
    waiting.end()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir(mode=0o700)
    return tmp_path / "store"


def unpacker(parent: int) -> int | None:
    """The process that reads the blob: the child of the child, once it has given up its powers."""
    for child in _children(parent):
        for grandchild in _children(child):
            if "NoNewPrivs:\t1" in Path(f"/proc/{grandchild}/status").read_text():
                return grandchild
    return None


def _children(pid: int) -> list[int]:
    try:
        return [
            int(each)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for each in (task / "children").read_text().split()
        ]
    except FileNotFoundError:
        return []


def runs(pid: int) -> bool:
    """Zombies do not: what they did is over."""
    return Path(f"/proc/{pid}/root").exists()


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def read(path: str) -> str:
    return Path(path).read_text()


async def begun(blob: Waiting, store: Path, **more: Any) -> tuple[asyncio.Task[Any], int]:
    task = asyncio.create_task(unpack(blob.path, "tar", MADE.diff_id, store / "tree", limits=TreeLimits(**more)))
    await eventually(lambda: asyncio.to_thread(unpacker, os.getpid()), "it reads the blob")
    return task, unpacker(os.getpid()) or 0


async def test_it_has_given_up_what_it_does_not_need_before_it_reads_a_byte(blob: Waiting, store: Path) -> None:
    task, pid = await begun(blob, store, bytes=1 << 30, cpu_s=77)
    about = dict(line.split(":\t", 1) for line in read(f"/proc/{pid}/status").splitlines() if ":\t" in line)
    kept = f"{sum(1 << capability for capability in confine.KEPT):016x}"
    assert {about[name] for name in ("CapPrm", "CapEff", "CapBnd")} == {kept}
    assert {about[name] for name in ("CapInh", "CapAmb")} == {"0" * 16}
    assert Path(os.readlink(f"/proc/{pid}/root")).parent == store
    for namespace in ("mnt", "net", "pid", "ipc", "uts"):
        assert os.readlink(f"/proc/{pid}/ns/{namespace}") != os.readlink(f"/proc/self/ns/{namespace}")
    limits = read(f"/proc/{pid}/limits")
    assert "Max cpu time              77                   77" in limits
    assert f"Max file size             {1 << 30}           {1 << 30}" in limits
    files = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    assert str(blob.path) in files
    assert all(each == str(blob.path) or each.startswith(("pipe:", "socket:")) for each in files)
    blob.write(MADE.blob)
    blob.end()
    assert (await task).entries == 2


PROBE = """
import ctypes, os, socket, sys
from hawker.images.tree import confine
outside = sys.argv[1]
above = os.getppid()
confine.enter_namespaces()
os.chdir(sys.argv[2])
os.chroot(".")
confine.give_up_powers(60, 1 << 30, 1000)
libc = ctypes.CDLL(None, use_errno=True)
def tried(what, attempt):
    try:
        result = attempt()
    except OSError as error:
        print(what, "refused", error.strerror)
    else:
        print(what, "refused" if result == -1 else f"DONE {result!r}")
tried("reading a file outside", lambda: open(outside).read())
tried("climbing out", lambda: open("/../../../../../.." + outside).read())
tried("leaving the root", lambda: os.chroot("/"))
tried("mounting", lambda: libc.mount(b"none", b"/", b"proc", 0, None))
tried("signalling others", lambda: os.kill(above, 9))
tried("connecting", lambda: socket.socket().connect(("127.0.0.1", 1)))
tried("a raw socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
tried("a new user namespace's powers over this one", lambda: libc.setns(0, 0x10000000))
tried("entering the host's mounts", lambda: os.open("/proc/1/ns/mnt", 0))
tried("a large file", lambda: os.write(os.open("large", os.O_WRONLY | os.O_CREAT), bytes(1)) and
      os.pwrite(os.open("large", os.O_WRONLY), b"x", 5000))
tried("loading a module", lambda: libc.syscall(313, -1, b"", 0))
tried("setting the clock", lambda: libc.settimeofday(b"\\0" * 16, None))
tried("another's memory", lambda: libc.ptrace(16, 1, 0, 0))
tried("making a file", lambda: os.close(os.open("made", os.O_WRONLY | os.O_CREAT)))
"""


def test_from_inside_nothing_but_its_own_tree_is_in_reach(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (tmp_path / "tree").mkdir()
    argv = [sys.executable, "-c", PROBE, str(secret), str(tmp_path / "tree")]
    done = subprocess.run(argv, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert lines[-1] == "making a file DONE None"
    assert len(lines) == 14, done.stderr
    assert all("refused" in line for line in lines[:-1]), lines


async def test_when_it_is_killed_the_layer_is_refused_and_nothing_is_left(blob: Waiting, store: Path) -> None:
    task, pid = await begun(blob, store)
    blob.write(MADE.blob[:2000])
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(LayerRefused, match="SIGKILL"):
        await task
    assert names(store) == []


async def test_when_it_is_cancelled_nothing_is_left_and_nothing_runs(blob: Waiting, store: Path) -> None:
    task, pid = await begun(blob, store)
    blob.write(MADE.blob[:2000])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert names(store) == []
    assert not runs(pid)


PARENT = """
import asyncio, sys
from pathlib import Path
from hawker.images.tree.unpacking import TreeLimits, unpack
asyncio.run(unpack(Path(sys.argv[1]), "tar", sys.argv[2], Path(sys.argv[3]) / "tree", limits=TreeLimits()))
"""


def test_when_its_parent_is_killed_it_ends_and_the_next_sweep_removes_what_it_made(blob: Waiting, store: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(blob.path), MADE.diff_id, str(store)])
    wait_until(lambda: unpacker(parent.pid) is not None, "it reads the blob")
    pid = unpacker(parent.pid) or 0
    blob.write(MADE.blob[:2000])
    wait_until(lambda: any(store.glob("*/d/f")), "it has begun a file")
    parent.kill()
    parent.wait()
    wait_until(lambda: not runs(pid), "it has ended")
    assert names(store) != []
    (store / "other").mkdir()
    asyncio.run(sweep(store))
    assert names(store) == ["other"]


async def test_a_tree_deeper_than_any_path_is_removed(store: Path) -> None:
    deep = store / "tree"
    deep.mkdir()
    here = os.open(deep, os.O_RDONLY | os.O_DIRECTORY)
    for number in range(3000):
        os.mkdir("d", 0o700 if number % 2 else 0o000, dir_fd=here)
        below = os.open("d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=here)
        os.close(here)
        here = below
    os.mkdir("0", dir_fd=here)
    os.symlink("/", "out", dir_fd=here)
    os.close(here)
    await remove(deep)
    await remove(deep)  # it is gone
    assert names(store) == []


async def test_a_tree_that_is_there_stays_as_it_is(tmp_path: Path, store: Path) -> None:
    (tmp_path / "blob").write_bytes(MADE.blob)
    (store / "tree").mkdir()
    with pytest.raises(FileExistsError):
        await unpack(tmp_path / "blob", "tar", MADE.diff_id, store / "tree", limits=TreeLimits())
    assert names(store) == ["tree"]


async def test_an_encrypted_layer_is_refused_by_its_media_type(tmp_path: Path, store: Path) -> None:
    kind = "application/vnd.oci.image.layer.v1.tar+gzip+encrypted"
    with pytest.raises(LayerRefused, match="which is no tar that can be read here"):
        await unpack(tmp_path / "blob", kind, MADE.diff_id, store / "tree", limits=TreeLimits())


FULL = """
import asyncio, ctypes, os, sys
from pathlib import Path
from hawker.images.tree.unpacking import DiskFull, TreeLimits, unpack
libc = ctypes.CDLL(None)
assert libc.unshare(0x20000) == 0
assert libc.mount(b"none", b"/", None, 0x44000, None) == 0
assert libc.mount(b"none", os.fsencode(sys.argv[3]), b"tmpfs", 0, sys.argv[4].encode()) == 0
limits = TreeLimits(free=int(sys.argv[5]))
try:
    asyncio.run(unpack(Path(sys.argv[1]), "tar", sys.argv[2], Path(sys.argv[3]) / "tree", limits=limits))
except DiskFull as error:
    print(error.message, os.listdir(sys.argv[3]))
"""


@pytest.mark.parametrize(("size", "free"), [("size=256k", 0), ("size=64m", 60 << 20)], ids=["full", "kept free"])
def test_a_full_disk_is_told_apart_from_a_bad_layer_and_nothing_is_left_on_it(
    tmp_path: Path, store: Path, size: str, free: int
) -> None:
    made = layer([file("small"), file("large", os.urandom(1 << 20 if not free else 20 << 20))])
    (tmp_path / "blob").write_bytes(made.blob)
    argv = [sys.executable, "-c", FULL, str(tmp_path / "blob"), made.diff_id, str(store), size, str(free)]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.stdout == "there is no room to unpack a layer []\n", done.stderr
    assert DiskFull.code == "disk_full"


# --- an ordinary user -----------------------------------------------------------------------------------------------

AS_USER = """
import asyncio, json, os, sys
from pathlib import Path
import msgspec
from hawker.images.tree.unpacking import LayerRefused, TreeLimits, remove, merge, sweep, unpack
work = Path(sys.argv[1])
async def main():
    trees, told = [], []
    for number, diff_id in enumerate(sys.argv[2:]):
        tree = work / f"l{number}"
        try:
            unpacked = await unpack(work / f"blob{number}", "tar", diff_id, tree, limits=TreeLimits())
        except LayerRefused as refused:
            told.append(refused.reason)
            continue
        await merge(tree, unpacked, trees)
        trees.insert(0, tree)
        told.append(msgspec.to_builtins(unpacked))
    print(json.dumps(told), flush=True)
    sys.stdin.readline()
    for tree in trees:
        await remove(tree)
    await sweep(work)
asyncio.run(main())
"""
LAYERS = [
    [
        directory("d", 0o700, uid=5, gid=6),
        file("d/f", b"1", 0o4755, uid=5, gid=6),
        file("d/g"),
        file("e/h", uid=0),
        directory("shut", 0o000, uid=7),
        character_device("null", 1, 3),
    ],
    [whiteout("d/f"), opaque("e"), file("e/new"), file("d/n")],
    [file("../out")],
]


@pytest.fixture
def work() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="hawker-test-"))
    user = pwd.getpwnam(USER)
    os.chown(path, user.pw_uid, user.pw_gid)
    yield path
    shutil.rmtree(path)


def as_user(work: Path, subs: int) -> tuple[list[Any], list[dict[str, Any]]]:
    """What unpacking the `LAYERS` told, and pictures of the trees."""
    made = [layer(entries) for entries in LAYERS]
    for number, one in enumerate(made):
        (work / f"blob{number}").write_bytes(one.blob)
        (work / f"blob{number}").chmod(0o644)
    process = run_as_nobody(AS_USER, [str(work), *(one.diff_id for one in made)], subs)
    with process:
        assert process.stdout is not None
        assert process.stdin is not None
        line = process.stdout.readline()
        if not line:
            process.wait()
            assert process.stderr is not None
            raise AssertionError(process.stderr.read())
        pictures = [picture(work / f"l{number}") for number in range(2)]
        marks = {name: os.listxattr(work / "l1" / name) for name in ("e",)}
        assert marks == {"e": ["user.overlay.opaque"]}
        process.stdin.write("\n")
        process.stdin.close()
    assert process.returncode == 0
    assert sorted(path.name for path in work.iterdir()) == ["blob0", "blob1", "blob2"]
    return json.loads(line), pictures


@pytest.mark.skipif(shutil.which("newuidmap") is None, reason="needs newuidmap (Debian: uidmap)")
def test_an_ordinary_user_gets_the_same_tree_with_the_users_that_are_his(work: Path) -> None:
    told, (base, top) = as_user(work, subs=1000)
    user = pwd.getpwnam(USER)
    assert base["d/f"]["mode"] == "0o104755"
    assert base["d/f"]["owner"] == f"{FIRST_SUB + 4}:{FIRST_SUB + 5}"
    assert base["e/h"]["owner"] == f"{user.pw_uid}:{user.pw_gid}"
    assert base["shut"] | {"mtime_ns": 0} == {
        "mode": "0o40000",
        "owner": f"{FIRST_SUB + 6}:{user.pw_gid}",
        "mtime_ns": 0,
    }
    assert top["d"] == base["d"]  # only implied by the upper layer
    assert top["d/f"]["mode"] == "0o20000"  # hidden
    assert told[0]["collapsed"] is False
    assert told[0]["left_out"] == ["'null': only root can make device nodes"]
    assert "would leave the root" in told[2]


def test_an_ordinary_user_without_others_owns_all_files_and_is_told_so(work: Path) -> None:
    told, (base, _) = as_user(work, subs=0)
    user = pwd.getpwnam(USER)
    assert {about["owner"] for about in base.values()} == {f"{user.pw_uid}:{user.pw_gid}"}
    assert base["d"]["mode"] == "0o40700"
    assert told[0]["collapsed"] is True
    assert "'d/f': no user 5:6 to give it to" in told[0]["left_out"]

"""File systems of machines, mounted by a child process in a mount namespace of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from hawker.supervisor.mounts import IdMap

pytestmark = pytest.mark.root
IDS = IdMap(1 << 20)


class Place:
    """Directories to mount, and children that do."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.target = root / "target"
        self.target.mkdir()

    def layer(self, name: str, **files: str) -> str:
        tree = self.root / name
        tree.mkdir()
        for file, text in files.items():
            (tree / file).write_text(text)
        return str(tree)

    def run(self, code: str) -> Any:
        """Runs it with `mounts`, `P` (this place) and `IDS` at hand. Gives the JSON of what it assigns to `result`."""
        before = f"""
            import contextlib, json, os, stat, subprocess
            from pathlib import Path
            from hawker.supervisor import mounts
            P, IDS, result = Path({str(self.root)!r}), mounts.IdMap({IDS.base}), None
            T = str(P / "target")
            mounts.private_namespace()
        """
        whole = textwrap.dedent(before) + textwrap.dedent(code) + "\nprint(json.dumps(result))\n"
        done = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_what_is_mounted_is_seen_by_the_child_only_and_ends_with_it(place: Place) -> None:
    inside = place.run("""
        mounts.mount_tmpfs(T, size_bytes=1 << 20)
        (P / "target" / "x").write_text("here")
        result = sorted(os.listdir(T))
    """)
    assert inside == ["x"]
    assert list(place.target.iterdir()) == []
    assert str(place.target) not in Path("/proc/self/mountinfo").read_text()


def test_where_both_versions_of_cgroups_are_mounted_the_second_is_taken_off_for_the_child(place: Place) -> None:
    kinds = place.run("result = sorted({kind for kind, _ in mounts._mounted() if kind.startswith('cgroup')})")
    text = Path("/proc/self/mountinfo").read_text()
    assert kinds == (["cgroup"] if " - cgroup " in text else ["cgroup2"])


def test_an_overlay_shows_its_layers_and_keeps_what_is_written_beside_them(place: Place) -> None:
    top, base = place.layer("top", both="top", upper="u"), place.layer("base", both="base", lower="l")
    os.chmod(top, 0o711)
    os.chown(top, 3, 4)
    seen = place.run(f"""
        mounts.mount_overlay([{top!r}, {base!r}], str(P / "up"), str(P / "work"), T)
        (P / "target" / "lower").write_text("changed")
        about = os.stat(T)
        result = {{p.name: p.read_text() for p in (P / "target").iterdir()}}, about.st_mode & 0o777, about.st_uid
    """)
    assert seen == [{"both": "top", "upper": "u", "lower": "changed"}, 0o711, 3]
    assert (Path(base) / "lower").read_text() == "l"
    assert [path.name for path in (place.root / "up").iterdir()] == ["lower"]


@pytest.mark.parametrize("ids", ["None", "IDS"])
def test_many_layers_with_long_and_odd_names_can_be_mounted(place: Place, ids: str) -> None:
    directory = place.root / ("a,b:c\\" + "x" * 200)
    directory.mkdir()
    layers = [directory / f"{n:0200d}" for n in range(127)]  # as many as an image may have
    for number, layer in enumerate(layers):
        layer.mkdir()
        (layer / f"f{number}").write_text("")
    names = [str(layer) for layer in layers]
    code = f"""
        mounts.mount_overlay({names!r}, str(P / "up"), str(P / "work"), T, ids={ids})
        result = len(os.listdir(T))
    """
    assert place.run(code) == 127


def test_with_ids_files_of_the_layers_are_the_machines_and_stay_as_they_are(place: Place) -> None:
    layer = place.layer("layer", root="", user="", beyond="")
    os.chown(f"{layer}/user", 1000, 1001)
    os.chown(f"{layer}/beyond", 70000, 70000)
    seen = place.run(f"""
        mounts.mount_overlay([{layer!r}], str(P / "up"), str(P / "work"), T, ids=IDS)
        os.chmod(P / "target" / "user", 0o600)  # brings it up
        result = {{name: os.stat(f"{{T}}/{{name}}").st_uid for name in ("", "root", "user", "beyond")}}
        mounted = [target for _, target in mounts._mounted() if target.startswith(str(P))]
        assert mounted == [T], mounted  # nothing of the scaffold is left
    """)
    assert seen == {"": IDS.base, "root": IDS.base, "user": IDS.base + 1000, "beyond": 65534}
    assert os.stat(f"{layer}/user").st_uid == 1000
    assert os.stat(place.root / "up" / "user").st_uid == IDS.base + 1000


def test_what_a_machine_wrote_is_there_the_next_time_unless_it_is_volatile(place: Place) -> None:
    layer = place.layer("layer", f="old")
    mount = f"mounts.mount_overlay([{layer!r}], str(P / 'up'), str(P / 'work'), T, ids=IDS"
    place.run(f"{mount})\n(P / 'target' / 'f').write_text('new')")
    assert place.run(f"{mount})\nresult = (P / 'target' / 'f').read_text()") == "new"
    place.run(f"{mount}, volatile=True)")
    refused = place.run(f"""
        with contextlib.suppress(OSError):
            {mount}, volatile=True)
            result = "mounted twice"
    """)
    assert refused is None


def test_an_image_without_layers_is_an_empty_root(place: Place) -> None:
    seen = place.run("""
        mounts.mount_overlay([], str(P / "up"), str(P / "work"), T, ids=IDS)
        (P / "target" / "x").write_text("")
        result = os.listdir(T), os.stat(T).st_uid
    """)
    assert seen == [["x"], IDS.base]


def test_layers_cannot_point_at_one_another_by_their_attributes(place: Place) -> None:
    base = place.layer("base", secret="x")
    top = Path(place.layer("top"))
    (top / "renamed").mkdir()
    os.setxattr(top / "renamed", "trusted.overlay.redirect", b"/")
    seen = place.run(f"""
        mounts.mount_overlay([{str(top)!r}, {base!r}], str(P / "up"), str(P / "work"), T)
        result = os.listdir(T + "/renamed") if os.access(T + "/renamed", os.R_OK) else []
    """)
    assert seen == []


def test_device_nodes_of_layers_open_nothing(place: Place) -> None:
    layer = Path(place.layer("layer"))
    os.mknod(layer / "zero", 0o20666, os.makedev(1, 5))
    seen = place.run(f"""
        mounts.mount_overlay([{str(layer)!r}], str(P / "up"), str(P / "work"), T)
        try:
            os.open(T + "/zero", os.O_RDONLY)
        except OSError as error:
            result = error.errno
    """)
    assert seen == 13


@pytest.mark.parametrize("ids", ["None", "IDS"])
def test_a_bind_shows_a_directory_or_a_file_and_may_be_read_only(place: Place, ids: str) -> None:
    source = place.layer("source", f="text")
    os.chown(f"{source}/f", 5, 5)
    seen = place.run(f"""
        (P / "file").write_text("")
        mounts.bind({source!r}, T, ids={ids})
        mounts.bind({source!r} + "/f", str(P / "file"), read_only=True, ids={ids})
        text, owner = (P / "file").read_text(), os.stat(T + "/f").st_uid
        flags = os.statvfs(P / "file").f_flag
        there = os.open(T, os.O_PATH)
        os.setegid({ids}.base if {ids} else 0)
        os.seteuid({ids}.base if {ids} else 0)
        os.close(os.open("new", os.O_CREAT, dir_fd=there))
        result = text, owner, bool(flags & os.ST_RDONLY), bool(flags & os.ST_NOSUID)
    """)
    assert seen == ["text", IDS.base + 5 if ids == "IDS" else 5, True, True]
    assert (Path(source) / "new").stat().st_uid == 0


def test_a_plain_bind_takes_what_is_mounted_below_with_it_all_of_it_read_only(place: Place) -> None:
    source = place.layer("source")
    seen = place.run(f"""
        os.mkdir({source!r} + "/below")
        mounts.mount_tmpfs({source!r} + "/below", size_bytes=1 << 20)
        Path({source!r}, "below", "x").write_text("")
        mounts.bind({source!r}, T, read_only=True)
        result = os.listdir(T + "/below"), bool(os.statvfs(T + "/below").f_flag & os.ST_RDONLY)
    """)
    assert seen == [["x"], True]


def test_a_tmpfs_has_a_size_a_mode_and_an_owner(place: Place) -> None:
    seen = place.run("""
        mounts.mount_tmpfs(T, size_bytes=1 << 20, mode=0o1777, ids=IDS)
        about, room = os.stat(T), os.statvfs(T)
        result = stat.S_IMODE(about.st_mode), about.st_uid, room.f_blocks * room.f_frsize
    """)
    assert seen == [0o1777, IDS.base, 1 << 20]


def test_unmounting_takes_all_off_and_may_be_repeated(place: Place) -> None:
    seen = place.run("""
        for _ in range(3):
            mounts.mount_tmpfs(T, size_bytes=1 << 20)
        held = os.open(T, os.O_RDONLY)  # in use
        mounts.unmount(T)
        mounts.unmount(T)
        mounts.unmount(str(P / "nowhere"))
        result = [target for _, target in mounts._mounted() if target == T]
    """)
    assert seen == []


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("mounts.mount_overlay([str(P / 'no')], str(P / 'up'), str(P / 'work'), T)", "/no"),
        ("mounts.mount_overlay([str(P)], str(P / 'up'), '/proc/work', T)", "/proc/work"),
        ("mounts.mount_overlay([str(P)], str(P / 'up'), str(P / 'work'), str(P / 'no'))", "overlay of 1 layers.*/no"),
        ("mounts.mount_overlay(['/proc'], str(P / 'up'), str(P / 'work'), T, ids=IDS)", "/proc:.*no idmapped mounts"),
        ("mounts.bind(str(P / 'no'), T)", "/no: cannot be shown"),
        ("mounts.bind(str(P), str(P / 'no'))", "cannot be mounted at .*/no"),
        ("mounts.mount_tmpfs(str(P / 'no'), size_bytes=1)", "tmpfs cannot be mounted at .*/no"),
    ],
)
def test_what_cannot_be_mounted_is_named_and_leaves_nothing(place: Place, call: str, says: str) -> None:
    seen = place.run(f"""
        try:
            {call}
        except OSError as error:
            result = str(error), [target for _, target in mounts._mounted() if target.startswith(str(P))]
    """)
    assert seen is not None
    assert re.search(says, seen[0]), seen[0]
    assert seen[1] == []


def test_a_user_namespace_has_the_machines_map_and_leaves_no_process(place: Place) -> None:
    seen = place.run("""
        fd = mounts.user_namespace(IDS)
        kind = os.readlink(f"/proc/self/fd/{fd}")
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        inside = subprocess.run(["nsenter", f"--user=/proc/self/fd/{fd}", "cat", "/proc/self/uid_map"],
            pass_fds=[fd], capture_output=True, text=True).stdout
        result = kind.startswith("user:["), children, inside.split()
    """)
    assert seen == [True, "", ["0", str(IDS.base), str(IDS.count)]]


def test_ids_outside_the_range_are_refused() -> None:
    assert IDS.outside(7) == IDS.base + 7
    for number in (-1, 65536):
        with pytest.raises(ValueError, match=str(number)):
            IDS.outside(number)

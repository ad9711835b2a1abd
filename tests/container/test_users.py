"""Users and groups by name, from the files of an image whose layers lie in directories of the host."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawker.worker.drivers.container.users import MAX_BYTES, UnknownUser, User, resolve_user

PASSWD = """root:x:0:0:root:/root:/bin/sh
web:x:33:44:Web:/srv/www:/bin/false
bad:x:many:1::/:/bin/sh
short:x:5
two:x:7:7:::
two:x:8:8::/late:/bin/sh
1000:x:55:66:a number for a name:/n:/bin/sh
"""
GROUP = """root:x:0:
www:x:44:web
video:x:50:web,other
audio:x:51:other,web
loud:x:51:web
broken:x:none:web
"""


def layer(place: Path, name: str, files: Mapping[str, str]) -> Path:
    root = place / name
    for path, text in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if text.startswith("-> "):
            target.symlink_to(text[3:])
        else:
            target.write_text(text)
    root.mkdir(exist_ok=True)
    return root


@pytest.fixture
def image(tmp_path: Path) -> list[Path]:
    return [layer(tmp_path, "only", {"etc/passwd": PASSWD, "etc/group": GROUP})]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("", User(home="/root")),
        ("root", User(home="/root")),
        ("web", User(uid=33, gid=44, groups=(50, 51), home="/srv/www")),
        ("33", User(uid=33, gid=44, groups=(50, 51), home="/srv/www")),
        ("web:video", User(uid=33, gid=50, home="/srv/www")),
        ("web:7", User(uid=33, gid=7, home="/srv/www")),
        ("9999", User(uid=9999, gid=0)),  # a number needs no entry
        ("9999:9998", User(uid=9999, gid=9998)),
        (":44", User(gid=44, home="/root")),
        ("two", User(uid=7, gid=7)),  # the first of two, and its home is none
        ("1000", User(uid=55, gid=66, home="/n")),  # a name before a number
    ],
)
def test_names_and_numbers_are_looked_up_as_docker_does(image: list[Path], written: str, expected: User) -> None:
    assert resolve_user(image, written) == expected


@pytest.mark.parametrize("written", ["nobody", "bad", "short", "web:none", "4294967295", "-1", "1" * 30, "²"])
def test_who_is_not_there_is_named(image: list[Path], written: str) -> None:
    with pytest.raises(UnknownUser, match=written.rpartition(":")[2]):
        resolve_user(image, written)


def test_without_files_only_numbers_are_known(tmp_path: Path) -> None:
    assert resolve_user([], "5:6") == User(uid=5, gid=6)
    with pytest.raises(UnknownUser, match="web"):
        resolve_user([layer(tmp_path, "bare", {})], "web")


def test_the_topmost_layer_that_has_the_file_counts(tmp_path: Path) -> None:
    top = layer(tmp_path, "top", {"etc/passwd": "new:x:1:1::/new:\n"})
    base = layer(tmp_path, "base", {"etc/passwd": PASSWD, "etc/group": GROUP})
    assert resolve_user([top, base], "new") == User(uid=1, gid=1, home="/new")
    with pytest.raises(UnknownUser):
        resolve_user([top, base], "web")
    assert resolve_user([layer(tmp_path, "empty", {"etc/x": ""}), base], "web").uid == 33


@pytest.mark.root
def test_what_a_layer_took_away_is_gone(tmp_path: Path) -> None:
    base = layer(tmp_path, "base", {"etc/passwd": PASSWD})
    for name in ("etc/passwd", "etc"):
        top = layer(tmp_path, f"without-{name.replace('/', '-')}", {"x": ""})
        (top / name).parent.mkdir(exist_ok=True)
        os.mknod(top / name, 0o20000, 0)
        with pytest.raises(UnknownUser):
            resolve_user([top, base], "web")
    hiding = layer(tmp_path, "hiding", {"etc/hosts": ""})
    os.setxattr(hiding / "etc", "trusted.overlay.opaque", b"y")
    with pytest.raises(UnknownUser):
        resolve_user([hiding, base], "web")
    assert resolve_user([layer(tmp_path, "above", {"etc/passwd": PASSWD}), hiding, base], "web").uid == 33


def test_links_lead_through_all_layers_and_never_out(tmp_path: Path) -> None:
    outside = layer(tmp_path, "outside", {"passwd": "web:x:666:666::/:\n"})
    base = layer(tmp_path, "base", {"data/real/passwd": PASSWD, "data/group": GROUP, "a/b/x": ""})
    for target in ("/data/real/passwd", "../data/real/passwd", "../../../../data/real/passwd", "/a/b/../../link"):
        top = layer(tmp_path, target.replace("/", "_"), {"etc/passwd": f"-> {target}", "link": "-> data/real/passwd"})
        assert resolve_user([top, base], "web").uid == 33
    through = layer(tmp_path, "through", {"etc": "-> /data/real", "data/real/group": "-> ../group"})
    assert resolve_user([through, base], "web").groups == (50, 51)
    for target in (
        f"{outside}/passwd",
        f"../../../../..{outside}/passwd",
        "passwd",
        "/etc/passwd",
        "/proc/self/environ",
    ):
        top = layer(tmp_path, f"out{target.replace('/', '_')}", {"etc/passwd": f"-> {target}"})
        with pytest.raises(UnknownUser):
            resolve_user([top], "web")


def test_what_is_no_file_or_too_long_does_no_harm(tmp_path: Path) -> None:
    waiting = layer(tmp_path, "waiting", {"etc/x": ""})
    os.mkfifo(waiting / "etc/passwd")
    (waiting / "etc/group").mkdir()
    assert resolve_user([waiting], "3") == User(uid=3)
    long = layer(tmp_path, "long", {})
    (long / "etc").mkdir()
    with open(long / "etc/passwd", "wb") as file:
        file.truncate(1 << 40)
        file.seek(MAX_BYTES + 10)
        file.write(b"\nlate:x:1:1::/:\n")
    with pytest.raises(UnknownUser):
        resolve_user([long], "late")
    binary = layer(tmp_path, "binary", {})
    (binary / "etc").mkdir()
    (binary / "etc/passwd").write_bytes(b"\xff\xfe\x00:x:1:1\nweb:x:33:44::/w\x00:\xff\n")
    assert resolve_user([binary], "web") == User(uid=33, gid=44)


@given(st.text(), st.text())
def test_any_text_is_a_user_or_is_refused(tmp_path_factory: pytest.TempPathFactory, passwd: str, written: str) -> None:
    root = tmp_path_factory.getbasetemp() / "any" / "etc"
    root.mkdir(parents=True, exist_ok=True)
    (root / "passwd").write_text(passwd, errors="surrogateescape", newline="")
    try:
        user = resolve_user([root.parent], written)
    except UnknownUser:
        return
    assert 0 <= user.uid < 2**32 - 1
    assert 0 <= user.gid < 2**32 - 1
    assert user.home.startswith("/")

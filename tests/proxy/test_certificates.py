"""Certificates from files: which one a name gets, and what happens while files change."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from tests.kit.authority import Authority
from tests.kit.waiting import until

import hawker.host
from hawker.core.metrics import Registry
from hawker.proxy.certificates import Certificate, Certificates

AUTHORITY = Authority()


def certificates(*directories: Path, default: str = "") -> Certificates:
    return Certificates(directories, hawker.host.live(), default=default)


def names(found: Certificate | None) -> tuple[str, ...]:
    return () if found is None else found.names


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ("www.example", "www.example"),
        ("a.apps.example", "*.apps.example"),
        ("web.apps.example", "web.apps.example"),
        ("a.b.apps.example", ""),
        ("apps.example", ""),
        ("example", ""),
        ("", ""),
    ],
)
async def test_a_name_gets_its_own_certificate_or_that_of_its_parent(tmp_path: Path, asked: str, given: str) -> None:
    for name in ("www.example", "*.apps.example", "web.apps.example"):
        AUTHORITY.write(tmp_path, name)
    found = certificates(tmp_path)
    await found.look()
    assert names(found.find(asked)) == ((given,) if given else ())


async def test_without_a_name_the_default_one_is_shown(tmp_path: Path) -> None:
    AUTHORITY.write(tmp_path, "www.example")
    AUTHORITY.write(tmp_path, "other.example")
    found = certificates(tmp_path, default="www.example")
    await found.look()
    assert names(found.find("nobody.example")) == names(found.find("")) == ("www.example",)
    assert names(found.find("other.example")) == ("other.example",)


async def test_a_default_one_that_is_not_there_is_told_of(tmp_path: Path) -> None:
    found = certificates(tmp_path, default="www.example")
    await found.look()
    assert "no such certificate" in found.problems["www.example"]


async def test_certificates_are_found_as_certbot_keeps_them(tmp_path: Path) -> None:
    archive, live = tmp_path / "archive", tmp_path / "live" / "www.example"
    archive.mkdir()
    live.mkdir(parents=True)
    (tmp_path / "live" / "README").write_text("about this directory")
    for name, data in zip(("fullchain", "privkey"), AUTHORITY.pair("www.example"), strict=True):
        (archive / f"{name}1.pem").write_bytes(data)
        (live / f"{name}.pem").symlink_to(archive / f"{name}1.pem")
    found = certificates(tmp_path / "live")
    await found.look()
    assert names(found.find("www.example")) == ("www.example",)
    for name, data in zip(("fullchain", "privkey"), AUTHORITY.pair("new.example"), strict=True):
        (archive / f"{name}2.pem").write_bytes(data)
        (live / f"{name}.pem").unlink()
        (live / f"{name}.pem").symlink_to(archive / f"{name}2.pem")
    await found.look()
    assert names(found.find("new.example")) == ("new.example",)
    assert found.find("www.example") is None


async def test_a_pair_that_does_not_fit_is_told_of_and_the_old_one_kept(tmp_path: Path) -> None:
    AUTHORITY.write(tmp_path, "www.example")
    found = certificates(tmp_path)
    await found.look()
    before = found.find("www.example")
    (tmp_path / "www.example.key").write_bytes(AUTHORITY.pair("www.example")[1])
    await found.look()
    assert "the key is not the certificate's" in found.problems["www.example"]
    await found.look()
    assert "the key is not the certificate's" in found.problems["www.example"]
    assert found.find("www.example") is before
    AUTHORITY.write(tmp_path, "www.example")
    await found.look()
    assert not found.problems
    assert found.find("www.example") is not before


@pytest.mark.parametrize("damage", ["no key", "no certificate", "an encrypted key", "no PEM"])
async def test_what_cannot_be_read_is_told_of_by_its_name(tmp_path: Path, damage: str) -> None:
    AUTHORITY.write(tmp_path, "www.example")
    AUTHORITY.write(tmp_path, "fine.example")
    if damage == "no key":
        (tmp_path / "www.example.key").unlink()
    elif damage == "no certificate":
        (tmp_path / "www.example.crt").write_bytes((tmp_path / "www.example.key").read_bytes())
    elif damage == "no PEM":
        (tmp_path / "www.example.key").write_text("hello")
    else:
        from cryptography.hazmat.primitives import serialization as s

        key = s.load_pem_private_key((tmp_path / "www.example.key").read_bytes(), None)
        hidden = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.BestAvailableEncryption(b"x"))
        (tmp_path / "www.example.key").write_bytes(hidden)
    found = certificates(tmp_path)
    await found.look()
    assert list(found.problems) == ["www.example"]
    assert names(found.find("fine.example")) == ("fine.example",)


async def test_a_certificate_that_ends_in_three_weeks_is_warned_of(tmp_path: Path) -> None:
    AUTHORITY.write(tmp_path, "soon.example", days=20)
    AUTHORITY.write(tmp_path, "ended.example", days=-2)
    AUTHORITY.write(tmp_path, "later.example", days=22)
    found = certificates(tmp_path)
    await found.look()
    assert found.problems == {
        "ended.example": "the certificate ended 2 days ago",
        "soon.example": "the certificate ends in 19 days",
    }
    registry = Registry()
    registry.register(found)
    ends = registry.value("hawker_proxy_certificate_expiry_timestamp_seconds", name="later.example")
    assert ends is not None
    left = datetime.datetime.fromtimestamp(ends, datetime.UTC) - datetime.datetime.now(datetime.UTC)
    assert left.days == 21


async def test_of_two_for_one_name_that_which_lasts_longer_is_shown(tmp_path: Path) -> None:
    for directory, days in (("a", 30), ("b", 60), ("c", 40)):
        AUTHORITY.write(tmp_path / directory, "www.example", f"{directory}.example", days=days)
        (tmp_path / directory / "www.example.crt").rename(tmp_path / directory / f"{directory}.crt")
        (tmp_path / directory / "www.example.key").rename(tmp_path / directory / f"{directory}.key")
    found = certificates(*(tmp_path / name for name in "abc"))
    await found.look()
    assert "b.example" in names(found.find("www.example"))


async def test_files_that_come_later_are_found(tmp_path: Path) -> None:
    found = Certificates((tmp_path / "later",), hawker.host.live(), look_s=0.01)
    await found.open()
    try:
        AUTHORITY.write(tmp_path / "later", "www.example")
        await until(lambda: found.find("www.example") is not None)
        (tmp_path / "later" / "www.example.crt").unlink()
        await until(lambda: found.find("www.example") is None)
    finally:
        await found.close()

"""HAProxy's configuration follows from what it is to serve, and HAProxy takes it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.authority import Authority

from hawker.errors import Invalid
from hawker.model.services import ReplayCache
from hawker.proxy.base import ServicePort
from hawker.proxy.embedded.settings import Settings
from hawker.proxy.haproxy.config import PLAIN, TIME_MOST_S, USUAL, Config, Frontend, Kind, Server, carries
from hawker.proxy.haproxy.config_text import (
    ERRORS,
    PLAIN_FIELDS,
    PLAIN_READING,
    PLAIN_TARGET,
    TARGET_MOST,
    error_file,
    text,
)
from hawker.proxy.haproxy.process import program
from hawker.proxy.haproxy.settings import HaproxySettings
from hawker.proxy.settings import ProxySettings

GOLDEN = Path(__file__).with_name("haproxy.cfg")
RICH = ServicePort(
    handlers=("http",), idle_timeout_s=5.0, set_headers=((b"x-own", b"a b"),), removed_headers=frozenset((b"x-gone",))
)


def config(
    directory: str = "/var/lib/hawker/haproxy", *, root: bool = True, service: ServicePort = RICH, joined: bool = True
) -> Config:
    return Config(
        directory=directory,
        root=root,
        user="haproxy",
        threads=1,
        connections=1000,
        region="ams",
        prefix="01ABC",
        frontends=(
            Frontend(public=80, host="127.0.0.1", port=8080),
            Frontend(public=443, host="127.0.0.1", port=8443, tls=True),
        ),
        kinds=(
            Kind(number=0, public=80, service=PLAIN, count=2),
            Kind(number=1, public=80, service=service, count=1),
            Kind(number=2, public=443, service=USUAL, count=1),
        ),
        servers={"k0b0": (Server(machine="m1", host="fdaa::1", port=8080, slots=19),)},
        times=Settings(region="ams", token="secret"),
        sockets={"80": 7},
        logged=True,
        joined=joined,
    )


def test_the_configuration_is_as_it_was() -> None:
    """After a change that is meant: write it anew, and read the difference."""
    assert text(config()) == GOLDEN.read_text()


def test_the_clusters_token_is_not_in_it() -> None:
    assert "secret" not in text(config())


def taken(directory: Path, service: ServicePort = RICH, *, joined: bool = True) -> str:
    """What HAProxy says against it."""
    for name in ("maps", "errors", "tls", "certs"):
        (directory / name).mkdir(exist_ok=True)
    for name in ("80", "80w", "443", "443w", "443n"):
        (directory / "maps" / f"{name}.map").write_text("web.example k0b0\n")
    (directory / "certs" / "one.pem").write_bytes(b"".join(Authority().pair("web.example")))
    (directory / "certs" / "all.list").write_text(f"{directory}/certs/one.pem web.example\n")
    for status in ERRORS:
        (directory / "errors" / f"{status}.http").write_bytes(error_file(status, "hawker"))
    import hawker.proxy.haproxy as package

    (directory / "replay.lua").write_bytes((Path(package.__file__).parent / "replay.lua").read_bytes())
    (directory / "haproxy.cfg").write_text(text(config(str(directory), root=False, service=service, joined=joined)))
    argv = [shutil.which("haproxy") or "haproxy", "-c", "-q", "-f", str(directory / "haproxy.cfg")]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stderr


@pytest.mark.skipif(shutil.which("haproxy") is None, reason="the program haproxy is not installed")
@pytest.mark.parametrize(
    "service",
    [
        RICH,
        ServicePort(handlers=("http",), pristine=True),
        ServicePort(handlers=("http",), removed_headers=frozenset((b"via", b"server", b"fly-request-id"))),
        ServicePort(handlers=("http",), idle_timeout_s=TIME_MOST_S),
        ServicePort(handlers=("http",), set_headers=((b"content-security-policy", b"default-src *; a=(b) <c>?!@"),)),
    ],
)
def test_haproxy_takes_it_without_a_word(tmp_path: Path, service: ServicePort) -> None:
    assert carries(service)
    assert taken(tmp_path, service) == ""


@pytest.mark.skipif(shutil.which("haproxy") is None, reason="the program haproxy is not installed")
def test_versions_that_are_not_known_get_a_rule_for_each_field(tmp_path: Path) -> None:
    assert taken(tmp_path, joined=False) == ""
    written = (tmp_path / "haproxy.cfg").read_text()
    assert r"\r\n" not in written.replace(PLAIN_FIELDS, "").replace(PLAIN_READING, "")
    assert '  http-request add-header fly-region "ams"' in written


def test_a_target_that_haproxy_would_not_keep_as_a_whole_is_not_carried() -> None:
    """It is told to the activator when an answer hands the request on."""
    assert re.search(PLAIN_TARGET, "/" + "a" * TARGET_MOST)
    assert not re.search(PLAIN_TARGET, "/" + "a" * (TARGET_MOST + 1))
    assert f"tune.http.logurilen {TARGET_MOST + 500}" in text(config())


HARMLESS = st.text(st.characters(codec="ascii", exclude_characters="\0"), max_size=30)


@given(name=HARMLESS, value=HARMLESS)
def test_no_field_of_a_service_says_anything_else_to_haproxy(name: str, value: str) -> None:
    """What could be read as more than a name and a value is left to the embedded plane."""
    service = ServicePort(handlers=("http",), set_headers=((name.encode(), value.encode()),))
    if carries(service):
        lines = text(config(service=service)).splitlines()
        assert f'  http-response set-header {name} "{value}"' in lines
        assert len(lines) <= len(text(config()).splitlines())
        assert not set("\"'\\$%#{}[]\n") & set(name + value)


@pytest.mark.parametrize(
    "service",
    [
        ServicePort(),
        ServicePort(handlers=("tls",)),
        ServicePort(handlers=("tls", "http")),
        ServicePort(handlers=("http",), force_https=True),
        ServicePort(handlers=("http",), h2_backend=True),
        ServicePort(handlers=("http",), compress=True),
        ServicePort(
            handlers=("http",), replay_cache=(ReplayCache(path_prefix="/", ttl_s=60, type="cookie", name="s"),)
        ),
        ServicePort(handlers=("http",), set_headers=((b"x-own", b'a"\n  server evil'),)),
        ServicePort(handlers=("http",), set_headers=((b"x-own", b"%[env(SECRET)]"),)),
        ServicePort(handlers=("http",), removed_headers=frozenset((b"x own",))),
        ServicePort(handlers=("http",), idle_timeout_s=TIME_MOST_S + 1),
    ],
)
def test_what_haproxy_cannot_do_is_the_embedded_planes(service: ServicePort) -> None:
    assert not carries(service)


def test_a_missing_program_is_named_with_the_package_to_install() -> None:
    with pytest.raises(Invalid, match="package haproxy"):
        program(HaproxySettings(program="haproxy-that-is-not-there"))


def test_another_engine_is_refused() -> None:
    with pytest.raises(Invalid, match="embedded or haproxy"):
        ProxySettings(engine="envoy").check()

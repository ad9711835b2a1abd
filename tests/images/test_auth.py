"""Who we are to a registry: challenges, credentials, tokens, and how long they hold."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.images import settings

from hawker.errors import Invalid
from hawker.images.auth import Challenge, Credentials, Tokens, read_challenges, read_token
from hawker.images.docker import HelperFailed, credentials_for, docker_credentials
from hawker.images.settings import RegistrySettings, docker_config_path


@pytest.mark.parametrize(
    ("header", "challenges"),
    [
        ("", []),
        ('Basic realm="a b"', [Challenge("basic", {"realm": "a b"})]),
        ("Basic realm=a", [Challenge("basic", {"realm": "a"})]),
        (
            'Bearer realm="https://auth.example/token",service="a",scope="repository:a/b:pull,push"',
            [
                Challenge(
                    "bearer",
                    {"realm": "https://auth.example/token", "service": "a", "scope": "repository:a/b:pull,push"},
                )
            ],
        ),
        (
            'bearer Realm = "x" , Service="y", BASIC realm="z"',
            [Challenge("bearer", {"realm": "x", "service": "y"}), Challenge("basic", {"realm": "z"})],
        ),
        ('Basic realm="say \\"hi\\""', [Challenge("basic", {"realm": 'say "hi"'})]),
        ("Negotiate, Basic", [Challenge("negotiate"), Challenge("basic")]),
    ],
)
def test_challenges_are_read_as_http_writes_them(header: str, challenges: list[Challenge]) -> None:
    assert read_challenges(header) == challenges


@given(st.text(max_size=200) | st.text(alphabet='Bearer ="\\,abc', max_size=60))
def test_any_header_is_read_without_end_or_error(header: str) -> None:
    read_challenges(header)


@pytest.mark.parametrize(
    ("body", "token"),
    [
        (b'{"token":"a"}', ("a", 60.0)),
        (b'{"access_token":"b","expires_in":300}', ("b", 300.0)),
        (b'{"token":"a","expires_in":1}', ("a", 60.0)),
        (b'{"token":"a","expires_in":-1}', ("a", 60.0)),
        (b'{"token":"a","expires_in":1e300}', ("a", 86400.0)),
        (b'{"token":"a","expires_in":1%s}' % (b"0" * 400), ("a", 86400.0)),
        (b'{"token":"a","expires_in":null,"issued_at":"2026-01-01T00:00:00Z"}', ("a", 60.0)),
        (b"{}", None),
        (b'{"token":"a\\r\\nX-Evil: 1"}', None),
        (b"<html>", None),
        (b"\xff", None),
    ],
)
def test_a_token_is_read_with_the_time_it_holds(body: bytes, token: tuple[str, float] | None) -> None:
    assert read_token(body) == token


def test_a_token_is_for_one_registry_and_scope_and_ends_before_it_expires() -> None:
    tokens = Tokens()
    tokens.put("https://a", "repository:x:pull", "Bearer t", 160.0)
    assert tokens.get("https://a", "repository:x:pull", 100.0) == "Bearer t"
    assert tokens.get("https://b", "repository:x:pull", 100.0) is None
    assert tokens.get("https://a", "repository:x:pull,push", 100.0) is None
    assert tokens.get("https://a", "repository:x:pull", 156.0) is None
    tokens.drop("https://a", "repository:x:pull")
    assert tokens.get("https://a", "repository:x:pull", 100.0) is None


async def test_credentials_are_those_of_the_host_and_the_configuration_s_come_first(tmp_path: Path) -> None:
    def of(user: str) -> dict[str, str]:
        return {"auth": base64.b64encode(f"{user}:secret".encode()).decode()}

    docker = tmp_path / "config.json"
    docker.write_text(
        json.dumps(
            {
                "auths": {
                    "https://index.docker.io/v1/": of("hub"),
                    "ghcr.io": of("cat"),
                    "cloud.example": {"identitytoken": "token"},
                    "broken.example": {"auth": "%%%"},
                    "helped.example": {},
                }
            }
        )
    )
    mine = {"ghcr.io": RegistrySettings(username="me", password="mine")}
    given = settings(docker_config=str(docker), registries=mine)
    assert await credentials_for(given, "registry-1.docker.io") == Credentials("hub", "secret")
    assert await credentials_for(given, "ghcr.io") == Credentials("me", "mine")
    assert await credentials_for(given, "cloud.example") == Credentials(token="token")
    for host in ("ghcr.io:444", "broken.example", "helped.example", "docker.io.evil.example"):
        assert not await credentials_for(given, host)
    docker.write_text("{")
    assert not await credentials_for(given, "registry-1.docker.io")


HELPER = """#!/bin/sh
read -r server
case "$1 $server" in
"get ghcr.io") echo '{"ServerURL":"ghcr.io","Username":"cat","Secret":"of the key ring"}' ;;
"get https://index.docker.io/v1/") echo '{"Username":"<token>","Secret":"identity"}' ;;
"get silent.example") sleep 600 & sleep 600 ;;
"get odd.example") echo 'a secret, but no JSON' ;;
"get locked.example") echo 'the key ring is locked'; exit 1 ;;
*) echo 'credentials not found in native keychain'; exit 1 ;;
esac
"""


@pytest.fixture
def helped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Docker's file, where all registries but one have the helper above."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "docker-credential-ring").write_text(HELPER)
    (programs / "docker-credential-ring").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    docker = tmp_path / "config.json"
    auths = {"in.example": {"username": "of", "password": "file"}, "silent.example": {}}
    docker.write_text(json.dumps({"auths": auths, "credsStore": "ring", "credHelpers": {"ecr.example": "none"}}))
    return docker


async def test_docker_s_credential_helpers_are_asked_first_and_the_file_for_what_they_do_not_have(helped: Path) -> None:
    assert await docker_credentials(helped, "ghcr.io") == Credentials("cat", "of the key ring")
    assert await docker_credentials(helped, "registry-1.docker.io") == Credentials(token="identity")
    assert await docker_credentials(helped, "in.example") == Credentials("of", "file")
    assert not await docker_credentials(helped, "unknown.example")


@pytest.mark.parametrize(
    ("host", "problem"),
    [
        ("locked.example", "docker-credential-ring for locked.example: the key ring is locked"),
        ("odd.example", "docker-credential-ring for odd.example: its answer is no credentials"),
        ("ecr.example", "docker-credential-none, which .*config.json names, is not in PATH"),
        ("silent.example", "docker-credential-ring gave no answer for silent.example within 0.3 s"),
    ],
)
async def test_what_is_wrong_with_a_credential_helper_is_said_and_shows_no_secret(
    helped: Path, host: str, problem: str
) -> None:
    with pytest.raises(HelperFailed, match=problem) as failed:
        await docker_credentials(helped, host, limit_s=0.3)
    assert "secret" not in str(failed.value)


def test_docker_s_file_is_where_docker_has_it_or_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    assert docker_config_path(settings(docker_config=None)) == str(tmp_path / "config.json")
    monkeypatch.delenv("DOCKER_CONFIG")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert docker_config_path(settings(docker_config=None)) == str(tmp_path / ".docker" / "config.json")
    assert docker_config_path(settings(docker_config="")) == ""


def test_secrets_are_in_no_text_of_an_object() -> None:
    assert "secret" not in repr(Credentials("user", "secret", "secret"))
    assert "secret" not in repr(RegistrySettings(username="user", password="secret", token="secret"))
    assert "secret" not in repr(settings(registries={"a": RegistrySettings(password="secret")}))
    tokens = Tokens()
    tokens.put("https://a", "x", "Bearer secret", 1.0)
    assert "secret" not in repr(tokens)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"parallel": 0}, "images.parallel"),
        ({"attempts": 0}, "images.attempts"),
        ({"slow_timeout_s": 0}, "images.slow_timeout_s"),
        ({"keep_mib_max": 10, "keep_mib_least": 11}, "images.keep_mib_max"),
        ({"registries": {"https://x": RegistrySettings()}}, "images.registries"),
        ({"registries": {"x.example": RegistrySettings(ca="/nonexistent/ca.pem")}}, r"ca.*No such file"),
        ({"registries": {"x.example": RegistrySettings(ca="/dev/null")}}, r"ca.*PEM certificates"),
        ({"registries": {"x.example": RegistrySettings(mirrors=("http://y",))}}, "mirrors"),
        ({"registries": {"x.example": RegistrySettings(password="p")}}, "a password needs a user name"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(Invalid, match=problem):
        settings(**changes).check()


def test_docker_s_registry_goes_by_all_its_names() -> None:
    mirrors = RegistrySettings(mirrors=("m.example",))
    for name in ("docker.io", "index.docker.io", "registry-1.docker.io"):
        given = settings(registries={name: mirrors})
        given.check()
        assert given.registry("registry-1.docker.io") is mirrors

"""How options become the configuration that the API takes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import click
import pytest

from hawker.cli.orders import configure
from hawker.errors import Invalid
from hawker.model.config import check_config

NOTHING: dict[str, Any] = {
    **dict.fromkeys(("guest", "cpus", "memory", "cpu_kind", "restart", "max_retries", "config")),
    **dict.fromkeys(("runtime", "user", "rootfs_persist", "tty")),
    **dict.fromkeys(("autostart", "autostop", "min_running", "concurrency", "soft_limit", "hard_limit")),
    **dict.fromkeys(("check_interval", "check_timeout", "check_grace")),
    **dict.fromkeys(("env", "metadata", "ports", "checks", "files"), ()),
}


def made(base: dict[str, Any], *command: str, **given: Any) -> dict[str, Any]:
    return configure(base, command, {**NOTHING, **given})


def test_without_options_a_configuration_stays_as_it_is() -> None:
    base = {"image": "host", "init": {"exec": ["ls"]}, "unknown": {"kept": 1}}
    assert made(base) == base


def test_a_command_takes_the_place_of_every_other_form_of_one() -> None:
    base = {"init": {"entrypoint": ["a"], "cmd": ["b"], "kept": True}}
    assert made(base, "ls", "-l") == {"init": {"exec": ["ls", "-l"], "kept": True}}
    assert base == {"init": {"entrypoint": ["a"], "cmd": ["b"], "kept": True}}, "what was read is not changed"


@pytest.mark.parametrize(
    ("before", "given", "guest"),
    [
        ({}, {"guest": "performance-2x"}, {"cpu_kind": "performance", "cpus": 2, "memory_mb": 4096}),
        ({}, {"guest": "shared-cpu-1x", "memory": 512}, {"cpu_kind": "shared", "cpus": 1, "memory_mb": 512}),
        ({}, {"cpus": 2}, {"cpus": 2}),
        ({"cpu_kind": "shared", "cpus": 1, "memory_mb": 256}, {"memory": 512},
         {"cpu_kind": "shared", "cpus": 1, "memory_mb": 512}),
        ({"cpu_kind": "shared", "cpus": 1, "memory_mb": 256}, {"cpus": 8}, {"cpu_kind": "shared", "cpus": 8}),
        ({"cpu_kind": "shared", "cpus": 1, "memory_mb": 256}, {"cpu_kind": "performance"},
         {"cpu_kind": "performance", "cpus": 1}),
    ],
)  # fmt: skip
def test_a_size_is_named_or_given_and_memory_goes_by_the_cpus_when_they_change(
    before: dict[str, Any], given: dict[str, Any], guest: dict[str, Any]
) -> None:
    config = made({"guest": before} if before else {}, **given)
    assert config["guest"] == guest
    check_config({**config, "image": "host", "init": {"exec": ["ls"]}})  # raises when the market would refuse it


def test_variables_and_metadata_are_added_to_those_there_are() -> None:
    config = made({"env": {"A": "1", "B": "2"}}, env=("B=3", "C=x=y", "D="), metadata=("role=web",))
    assert config == {"env": {"A": "1", "B": "3", "C": "x=y", "D": ""}, "metadata": {"role": "web"}}


def test_a_restart_policy_keeps_what_is_not_given() -> None:
    assert made({"restart": {"policy": "no"}}, max_retries=3)["restart"] == {"policy": "no", "max_retries": 3}
    assert made({}, restart="always")["restart"] == {"policy": "always"}


def test_options_change_what_a_file_says() -> None:
    file = io.BytesIO(b'{"env": {"A": "1"}, "stop_config": {"timeout": "3s"}}')
    config = made({}, config=file, env=("B=2",))
    assert config == {"env": {"A": "1", "B": "2"}, "stop_config": {"timeout": "3s"}}


def test_a_runtime_a_user_a_terminal_and_a_root_that_stays_are_said_where_the_api_has_them() -> None:
    config = made({"image": "app:1"}, runtime="microvm", user="app", tty=True, rootfs_persist=True)
    assert config == {
        "image": "app:1",
        "runtime": "microvm",
        "processes": [{"user": "app"}],
        "rootfs": {"persist": "always"},
        "init": {"tty": True},
    }
    checked = check_config(config)
    assert (checked.runtime, checked.user, checked.tty, checked.rootfs.persist) == ("microvm", "app", True, True)


def test_ports_are_published_as_services() -> None:
    config = made({"image": "app:1"}, ports=("8080", "80:8081", "53/udp"))
    services = check_config(config).services
    assert [(s.protocol, s.ports[0].first, s.internal_port) for s in services] == [
        ("tcp", 8080, 8080),
        ("tcp", 80, 8081),
        ("udp", 53, 53),
    ]


def test_ports_of_the_web_speak_http_and_any_other_what_it_says() -> None:
    config = made({"image": "app:1"}, ports=("80:8080", "443:8080", "5432/tcp:pg_tls", "9000/tcp:tls:http", "80:1/tcp"))
    services = check_config(config).services
    assert [(s.internal_port, [(p.first, p.handlers) for p in s.ports]) for s in services] == [
        (8080, [(80, ("http",)), (443, ("tls", "http"))]),
        (5432, [(5432, ("pg_tls",))]),
        (9000, [(9000, ("tls", "http"))]),
        (1, [(80, ())]),
    ]


def test_what_a_proxy_does_is_said_of_the_ports_that_are_given() -> None:
    before = {"protocol": "tcp", "internal_port": 1, "ports": [{"port": 1}]}
    config = made(
        {"image": "app:1", "services": [before]},
        ports=("80:8080",),
        autostop="suspend",
        autostart=False,
        min_running=1,
        concurrency="requests",
        soft_limit=5,
        hard_limit=9,
        checks=("/up", "tcp"),
        check_interval="5s",
        check_grace="10s",
    )
    first, second = config["services"]
    assert first == before
    assert second == {
        "protocol": "tcp",
        "internal_port": 8080,
        "ports": [{"port": 80, "handlers": ["http"]}],
        "autostart": False,
        "autostop": "suspend",
        "min_machines_running": 1,
        "concurrency": {"type": "requests", "soft_limit": 5, "hard_limit": 9},
        "checks": [
            {"type": "http", "path": "/up", "interval": "5s", "grace_period": "10s"},
            {"type": "tcp", "interval": "5s", "grace_period": "10s"},
        ],
    }
    check_config(config)


def test_without_a_port_it_is_said_of_those_there_are() -> None:
    before = {"internal_port": 1, "concurrency": {"type": "requests", "soft_limit": 5}, "checks": [{"type": "tcp"}]}
    config = made({"image": "app:1", "services": [before]}, autostop="stop", hard_limit=9)
    assert config["services"] == [
        {**before, "autostop": "stop", "concurrency": {"type": "requests", "soft_limit": 5, "hard_limit": 9}}
    ]
    assert before["concurrency"] == {"type": "requests", "soft_limit": 5}, "what was read is not changed"


def test_what_is_about_ports_needs_one() -> None:
    with pytest.raises(click.UsageError, match="it has none"):
        made({}, autostop="stop")
    with pytest.raises(click.UsageError, match="are of checks"):
        made({}, ports=("80",), check_grace="1s")
    with pytest.raises(Invalid, match="--check"):
        made({}, ports=("80",), checks=("up",))


@pytest.mark.parametrize("text", ["", "web", "80:web", "80/sctp", ":80", "80/tcp:", "80/tcp:https"])
def test_what_is_no_port_is_refused_by_name(text: str) -> None:
    with pytest.raises(Invalid, match="--port"):
        made({}, ports=(text,))


def test_a_local_file_goes_into_the_configuration_with_its_mode(tmp_path: Path) -> None:
    local = tmp_path / "run.sh"
    local.write_bytes(b"#!/bin/sh\n\0")
    local.chmod(0o750)
    config = made({"image": "app:1", "files": [{"guest_path": "/run.sh"}]}, files=(f"{local}:/run.sh",))
    (file,) = check_config(config).files
    assert (file.path, file.content, file.mode) == ("/run.sh", b"#!/bin/sh\n\0", 0o750)
    for wrong in (str(local), f"{local}:run.sh", ":/run.sh"):
        with pytest.raises(Invalid, match="--file-local"):
            made({}, files=(wrong,))


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", pytest.param(b'{"a":' + b"[" * 100_000, id="deep")])
def test_a_file_that_is_no_json_object_is_refused_by_name(content: bytes) -> None:
    file = io.BytesIO(content)
    file.name = "/some/where/machine.json"
    with pytest.raises(Invalid, match=r'--config: "/some/where/machine.json" is not valid: give a JSON object'):
        made({}, config=file)

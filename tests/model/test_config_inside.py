"""What a configuration says of machines with a root of their own: runtime, files, root, services, name service."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.model.test_config import json_values, refusal_of

from hawker.errors import Invalid, NotBuilt
from hawker.model.config import check_config
from hawker.model.guest import ROOT_DISK_MIB, Guest
from hawker.model.inside import File, NameService, Rootfs, Tmpfs
from hawker.model.services import published

APP: dict[str, Any] = {"image": "app:1"}
HOST: dict[str, Any] = {"image": "host", "init": {"exec": ["true"]}}
FIELDS = ("runtime", "files", "volumes", "rootfs", "services", "dns", "processes", "init", "guest")


@given(st.dictionaries(st.sampled_from(FIELDS), json_values))
def test_whatever_is_given_is_accepted_and_kept_or_refused_by_name(fields: dict[str, Any]) -> None:
    if error := refusal_of({**APP, **fields}):
        assert isinstance(error, Invalid)
        assert error.field.startswith("config.")
        assert error.remedy
        return
    raw = check_config({**APP, **fields}).raw
    for name in set(fields) - {"init", "guest"}:
        assert raw[name] == fields[name]


# --- runtime ---


def test_the_runtime_goes_by_the_image_unless_it_is_named() -> None:
    assert check_config(HOST).runtime == "process"
    assert check_config(APP).runtime == "container"
    assert check_config({**APP, "runtime": "microvm"}).runtime == "microvm"
    assert check_config({**APP, "runtime": "elses-own-2"}).runtime == "elses-own-2", "third parties have drivers, too"


def test_one_word_chooses_how_an_image_is_run() -> None:
    found = {runtime: check_config({**APP, "runtime": runtime}) for runtime in ("process", "container", "microvm")}
    assert {name: (config.runtime, config.of_host) for name, config in found.items()} == {
        name: (name, False) for name in found
    }
    assert check_config(HOST).of_host


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"files": [{"guest_path": "/a"}]}, "files"),
        ({"volumes": [{"path": "/a", "temp_dir": {"storage_type": "memory", "size_mb": 1}}]}, "volumes"),
        ({"rootfs": {"size_gb": 1}}, "rootfs"),
        ({"processes": [{"user": "app"}]}, "processes[0].user"),
    ],
)
def test_what_needs_a_root_of_its_own_is_for_images(change: dict[str, Any], field: str) -> None:
    with pytest.raises(NotBuilt, match="name an image") as refused:
        check_config({**HOST, **change})
    assert refused.value.field == f"config.{field}"
    check_config({**APP, "runtime": "process", **change})


@pytest.mark.parametrize("base", [HOST, {**APP, "runtime": "process"}])
def test_what_a_process_cannot_have_is_refused_and_the_remedy_is_another_runtime(base: dict[str, Any]) -> None:
    with pytest.raises(NotBuilt, match="use runtime container or microvm") as refused:
        check_config({**base, "dns": {"nameservers": ["::1"]}})
    assert refused.value.field == "config.dns.nameservers"


@pytest.mark.parametrize("base", [HOST, {**APP, "runtime": "process"}, APP])
def test_any_program_may_have_a_terminal(base: dict[str, Any]) -> None:
    assert check_config({**base, "init": {"exec": ["true"], "tty": True}}).tty
    assert not check_config({**base, "init": {"exec": ["true"]}}).tty


# --- the program ---


def test_exec_entrypoint_and_cmd_stay_apart_for_the_image_to_join_them() -> None:
    command = check_config({**APP, "init": {"entrypoint": ["/run"], "cmd": "a 'b c'"}}).command
    assert (command.exec, command.entrypoint, command.cmd) == ((), ("/run",), ("a", "b c"))
    command = check_config({**APP, "processes": [{"cmd": ["serve"]}]}).command
    assert (command.entrypoint, command.cmd) == ((), ("serve",))
    assert check_config(APP).command.argv == ()


def test_variables_may_hold_what_the_machine_is() -> None:
    given_from = [{"env_var": "ME", "field_ref": "id"}, {"env_var": "WHERE", "field_ref": "region"}]
    config = check_config({**APP, "processes": [{"env_from": given_from, "user": "1000:1000"}]})
    assert config.env_from == (("ME", "id"), ("WHERE", "region"))
    assert config.user == "1000:1000"


# --- what is inside ---


def test_files_are_decoded_and_their_modes_kept() -> None:
    files = [
        {"guest_path": "/etc/app.conf", "raw_value": base64.b64encode(b"a\0b").decode()},
        {"guest_path": "//run//app/./key", "raw_value": "", "mode": 0o600},
    ]
    assert check_config({**APP, "files": files}).files == (
        File(path="/etc/app.conf", content=b"a\0b", mode=0o644),
        File(path="/run/app/key", content=b"", mode=0o600),
    )


def test_a_memory_file_system_has_a_path_and_a_size() -> None:
    volume = {"name": "scratch", "path": "/scratch", "temp_dir": {"storage_type": "memory", "size_mb": 64}}
    assert check_config({**APP, "volumes": [volume]}).tmpfs == (Tmpfs(path="/scratch", size_mib=64),)


def test_a_root_that_stays_is_said_in_either_place() -> None:
    assert check_config(APP).rootfs == Rootfs(size_gb=0, persist=False)
    assert check_config({**APP, "rootfs": {"persist": "always", "size_gb": 4}}).rootfs == Rootfs(
        size_gb=4, persist=True
    )
    assert check_config({**APP, "guest": {"persist_rootfs": "always"}}).rootfs.persist
    assert not check_config(
        {**APP, "rootfs": {"persist": "never"}, "guest": {"persist_rootfs": "always"}}
    ).rootfs.persist


def test_a_larger_root_takes_more_of_its_worker() -> None:
    assert check_config(APP).resources() == Guest().resources(ROOT_DISK_MIB)
    assert check_config({**APP, "rootfs": {"size_gb": 4}}).resources().disk_mib == 4096


def test_name_service_is_written_as_resolv_conf_has_it() -> None:
    dns = {
        "nameservers": ["fdaa::3", "1.1.1.1"],
        "searches": ["example.com", "internal."],
        "options": [{"name": "ndots", "value": "1"}, {"name": "rotate"}],
        "hostname": "web-1",
        "skip_registration": True,
    }
    assert check_config({**APP, "dns": dns}).dns == NameService(
        nameservers=("fdaa::3", "1.1.1.1"),
        searches=("example.com", "internal."),
        options=("ndots:1", "rotate"),
        hostname="web-1",
        registered=False,
    )


def test_services_are_read_with_their_ports_and_published_once_each() -> None:
    web = {
        "protocol": "tcp",
        "internal_port": 8080,
        "autostop": "suspend",
        "autostart": True,
        "min_machines_running": 0,
        "ports": [{"port": 443, "handlers": ["tls", "http"]}, {"start_port": 8000, "end_port": 8099}],
        "concurrency": {"type": "requests", "soft_limit": 20, "hard_limit": 25},
        "force_instance_key": None,
    }
    config = check_config({**APP, "services": [web, {"internal_port": 8080}, {"protocol": "udp", "internal_port": 53}]})
    assert [(service.protocol, service.internal_port) for service in config.services] == [
        *(("tcp", 8080), ("tcp", 8080), ("udp", 53))
    ]
    assert published(config.services) == (("tcp", 8080), ("udp", 53))
    assert config.raw["services"][0] == web


@pytest.mark.parametrize(
    ("change", "field", "remedy"),
    [
        ({"image": "Upper/case"}, "image", "lower-case"),
        ({"image": "app@sha256:12"}, "image", "64 lower-case hexadecimal digits"),
        ({"image": "app:" + "t" * 129}, "image", "at most 128"),
        ({"runtime": "Container"}, "runtime", "use process, container or microvm"),
        ({"runtime": 1}, "runtime", "use process, container or microvm"),
        ({"image": "host", "runtime": "container"}, "runtime", "runs as a process only"),
        ({"image": "host"}, "init.exec", "give its command line here"),
        ({"files": {}, "init": {"tty": "yes"}}, "init.tty", "give true or false"),
        ({"files": {"a": "b"}}, "files", "give a list of objects"),
        ({"files": [{}]}, "files[0].guest_path", "absolute path"),
        ({"files": [{"guest_path": "/a/../b"}]}, "files[0].guest_path", "absolute path"),
        ({"files": [{"guest_path": "/"}]}, "files[0].guest_path", "absolute path"),
        ({"files": [{"guest_path": "/a"}, {"guest_path": "//a"}]}, "files[1].guest_path", "each file once"),
        ({"files": [{"guest_path": "/a", "raw_value": "?"}]}, "files[0].raw_value", "base64"),
        ({"files": [{"guest_path": "/a", "mode": 0o10000}]}, "files[0].mode", "permission bits"),
        ({"files": [{"guest_path": "/a", "secret_name": "s"}]}, "files[0].secret_name", "secrets are not built yet"),
        ({"files": [{"guest_path": "/a", "image_config": "c"}]}, "files[0].image_config", "not built yet"),
        ({"volumes": [{"path": "/a", "image": "b"}]}, "volumes[0]", "only temporary directories"),
        ({"volumes": [{"temp_dir": {"storage_type": "disk"}}]}, "volumes[0].temp_dir.storage_type", "use memory"),
        ({"volumes": [{"temp_dir": {"storage_type": "memory"}}]}, "volumes[0].temp_dir.size_mb", "give MiB"),
        ({"rootfs": {"size_gb": -1}}, "rootfs.size_gb", "give GiB"),
        ({"rootfs": {"persist": "restart"}}, "rootfs.persist", "use always or never"),
        ({"rootfs": {"persist": "maybe"}}, "rootfs.persist", "use always or never"),
        ({"guest": {"persist_rootfs": "maybe"}}, "guest.persist_rootfs", "use always or never"),
        ({"guest": {"memory_mb": 512, "max_memory_mb": 256}}, "guest.max_memory_mb", "at least memory_mb, 512"),
        ({"services": [{}]}, "services[0].internal_port", "from 1 to 65535"),
        ({"services": [{"internal_port": True}]}, "services[0].internal_port", "from 1 to 65535"),
        ({"services": [{"internal_port": 1, "protocol": "sctp"}]}, "services[0].protocol", "use tcp or udp"),
        ({"services": [{"internal_port": 1, "ports": [{}]}]}, "services[0].ports[0].start_port", "from 1 to 65535"),
        ({"services": [{"internal_port": 1, "ports": [{"start_port": 2, "end_port": 1}]}]},
         "services[0].ports[0].end_port", "2 or more"),
        ({"services": [{"internal_port": 1, "ports": [{"port": 1, "handlers": ["ftp"]}]}]},
         "services[0].ports[0].handlers", "a list of http"),
        ({"services": [{"internal_port": 1, "autostop": "sometimes"}]}, "services[0].autostop", "use off"),
        ({"services": [{"internal_port": 1, "concurrency": {"type": "cpu"}}]}, "services[0].concurrency.type",
         "use connections or requests"),
        ({"dns": {"nameservers": ["one"]}}, "dns.nameservers[0]", "an IP address"),
        ({"dns": {"searches": ["a b"]}}, "dns.searches[0]", "a domain"),
        ({"dns": {"options": [{"name": "a b"}]}}, "dns.options[0].name", "resolv.conf"),
        ({"dns": {"options": [{"name": "ndots", "value": "1\n"}]}}, "dns.options[0].value", "a number"),
        ({"dns": {"hostname": "a.b"}}, "dns.hostname", "letters, digits and dashes"),
        ({"dns": {"hostname_fqdn": "a.b"}}, "dns.hostname_fqdn", "not built yet"),
        ({"processes": [{"user": "a b"}]}, "processes[0].user", "a user of the image"),
        ({"processes": [{"env_from": [{"env_var": "A", "field_ref": "host"}]}]}, "processes[0].env_from[0].field_ref",
         "use id, version"),
        ({"mounts": [{"volume": "v", "path": "/data"}]}, "mounts", "volumes are not built yet"),
    ],
)  # fmt: skip
def test_an_error_names_the_field_and_the_remedy(change: dict[str, Any], field: str, remedy: str) -> None:
    with pytest.raises(Invalid) as refused:
        check_config({**APP, **change})
    assert refused.value.field == f"config.{field}"
    assert remedy in refused.value.message

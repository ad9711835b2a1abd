"""An agent's configuration: what is wrong is named before anything starts, and others are told an address."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest
from msgspec.structs import replace

from hawker.agent.settings import AgentSettings, BrokerRole, CatalogSettings, TokenSettings, read_settings
from hawker.errors import Invalid
from hawker.model.guest import Resources

CONFIG = """
name = "{name}"
region = "{region}"
directory = "/var/lib/hawker"
[tokens]
cluster = "token"
[broker]
listen = "127.0.0.1:4280"
[catalog]
keys = {keys}
"""


def written(path: Path, *, name: str = "ord-1", region: str = "ord", keys: str = "[]") -> Path:
    file = path / "agent.toml"
    file.write_text(CONFIG.format(name=name, region=region, keys=keys))
    return file


def announcing(listen: str, advertise: str = "") -> AgentSettings:
    return AgentSettings(
        name="ord-1",
        region="ord",
        directory=Path("/var/lib/hawker"),
        tokens=TokenSettings(cluster="token"),
        broker=BrokerRole(listen=listen),
        catalog=CatalogSettings(advertise=advertise),
    )


@pytest.mark.parametrize("name", ["", "a b", "ör-1", "-a", "a" * 64, "a/b", "a,b"])
@pytest.mark.parametrize("field", ["name", "region"])
def test_a_name_that_others_could_not_pass_on_is_refused(field: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=f"{field}: "):
        read_settings(written(tmp_path, **{field: name}))


@pytest.mark.parametrize("keys", ['["one", "two", "one"]', '[""]'])
def test_a_key_that_is_no_key_of_its_own_is_refused(keys: str, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"catalog\.keys: "):
        read_settings(written(tmp_path, keys=keys))


def test_keys_that_differ_are_taken(tmp_path: Path) -> None:
    assert read_settings(written(tmp_path, keys='["one", "two"]')).catalog.keys == ["one", "two"]


@pytest.mark.parametrize(
    ("tokens", "field"),
    [
        ('cluster = ""', "tokens.cluster"),
        ('cluster = "a,b"', "tokens.cluster"),
        ('cluster = "secret"\nusers = { alice = " " }', "tokens.users.alice"),
        ('cluster = "secret"\nusers = { alice = "secret" }', "tokens.users.alice"),
        ('cluster = "secret"\nusers = { alice = "a", bob = "a" }', "tokens.users.bob"),
        ('cluster = "secret"\nusers = { agent = "a" }', "tokens.users"),
        ('cluster = "secret"\nusers = { metrics = "a" }', "tokens.users"),
        ('cluster = "secret"\nmetrics = "secret"', "tokens.metrics"),
    ],
)
def test_a_token_that_would_be_anybodys_or_more_than_it_says_is_refused_and_not_shown(
    tokens: str, field: str, tmp_path: Path
) -> None:
    file = written(tmp_path)
    file.write_text(file.read_text().replace('cluster = "token"', tokens))
    with pytest.raises(Invalid) as caught:
        read_settings(file)
    assert caught.value.field == field
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("listen", "advertise", "announced"),
    [
        ("10.0.0.1:4280", "", ("10.0.0.1", 4280)),
        ("0.0.0.0:4280", "10.0.0.7:4281", ("10.0.0.7", 4281)),
        ("[::1]:4280", "", ("::1", 4280)),
        ("localhost:4280", "", ("127.0.0.1", 4280)),
    ],
)
def test_others_are_told_an_address_and_never_a_name(listen: str, advertise: str, announced: tuple[str, int]) -> None:
    assert announcing(listen, advertise).advertised() == announced


def test_behind_a_wildcard_the_hosts_own_address_is_announced() -> None:
    address, port = announcing("0.0.0.0:4280").advertised()
    assert port == 4280
    assert not ipaddress.ip_address(address).is_unspecified


@pytest.mark.parametrize("name", ["a..b", "a" * 64 + ".b"])
def test_a_name_that_has_no_address_is_refused(name: str) -> None:
    with pytest.raises(Invalid, match=r"catalog\.advertise: .*set catalog\.advertise to the address"):
        announcing("0.0.0.0:4280", f"{name}:4281").advertised()


WORKER = """
name = "ord-1"
region = "ord"
directory = "/var/lib/hawker"
[tokens]
cluster = "token"
[worker]
listen = "127.0.0.1:4281"
{worker}
[worker.container]
runtime = "crun"
[worker.network]
publish_on = ["203.0.113.7"]
[images]
keep_mib_max = 50000
[images.registries."registry.example:5000"]
mirrors = ["mirror.example"]
insecure = true
"""


def of_worker(path: Path, worker: str = "") -> AgentSettings:
    file = path / "agent.toml"
    file.write_text(WORKER.format(worker=worker))
    return read_settings(file)


def test_a_table_of_the_worker_that_is_not_its_own_is_a_drivers(tmp_path: Path) -> None:
    settings = of_worker(tmp_path, 'drivers = ["process", "container"]')
    assert settings.worker
    assert settings.worker.settings == {"container": {"runtime": "crun"}}
    assert settings.worker.network.publish_on == ("203.0.113.7",)
    assert settings.worker.drivers == ["process", "container"]
    assert settings.images.keep_mib_max == 50_000
    assert settings.images.registries["registry.example:5000"].mirrors == ("mirror.example",)


def test_the_ports_of_a_worker_are_a_range_with_both_its_ends(tmp_path: Path) -> None:
    ports = of_worker(tmp_path, 'ports = "20100-20199"').worker
    assert ports
    assert ports.port_range() == range(20100, 20200)


@pytest.mark.parametrize("ports", ["", "20000", "20000-", "80-90", "30000-20000", "20000-70000", "a-b"])
def test_what_is_no_range_of_ports_is_refused(ports: str, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"worker\.ports: .*write a range of ports"):
        of_worker(tmp_path, f'ports = "{ports}"')


def test_disks_are_shared_out_as_the_operator_says(tmp_path: Path) -> None:
    for text, scale in (("", 1.0), ("disk_scale = 2", 2.0), ("disk_scale = 0.5", 0.5), ("disk_scale = 0", 0)):
        worker = of_worker(tmp_path, text).worker
        assert worker
        assert worker.disk_scale == scale
    for text in ("-1", "inf", "nan", "1e9"):
        with pytest.raises(Invalid, match=r"worker\.disk_scale: .*0 for no bound"):
            of_worker(tmp_path, f"disk_scale = {text}")


@pytest.mark.parametrize("field", ['listens = "a"', 'images = "b"'])
def test_a_field_that_a_worker_does_not_have_is_refused(field: str, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="unknown field"):
        of_worker(tmp_path, field)


@pytest.mark.parametrize(
    ("proxy", "urls", "told"),
    [
        ("", "", {}),
        ('listen = { "80" = "0.0.0.0:80", "443" = "0.0.0.0:443" }\ndomain = "apps.example"', "",
         {"80": "http://{app}.apps.example", "443": "https://{app}.apps.example"}),
        ('listen = { "80" = "127.0.0.1:8080" }', "", {"80": "http://{app}.localhost:8080"}),
        ('listen = { "80" = "127.0.0.1:8080" }', 'urls = { "443" = "https://{app}.example" }',
         {"443": "https://{app}.example"}),
    ],
)  # fmt: skip
def test_a_broker_tells_where_apps_are_as_its_proxy_serves_them_or_its_operator_says(
    proxy: str, urls: str, told: dict[str, str], tmp_path: Path
) -> None:
    assert read_settings(with_proxy(tmp_path, proxy, urls)).urls() == told


@pytest.mark.parametrize("urls", ['{ "web" = "http://{app}.a" }', '{ "80" = "{app}.a" }', '{ "80" = "http://a" }'])
def test_where_no_app_can_be_is_refused_by_name(urls: str, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"broker\.urls: "):
        read_settings(with_proxy(tmp_path, "", f"urls = {urls}"))


def with_proxy(path: Path, proxy: str, urls: str) -> Path:
    file = written(path)
    text = file.read_text().replace("[broker]\n", f"[broker]\n{urls}\n")
    file.write_text(text + (f"[proxy]\n{proxy}\n" if proxy else ""))
    return file


def test_what_a_capacity_leaves_out_is_what_the_host_has(tmp_path: Path) -> None:
    def capacity(text: str) -> Resources:
        worker = of_worker(tmp_path, text).worker
        assert worker
        return worker.resources(tmp_path)

    host = capacity("")
    assert replace(capacity("capacity = { memory_mib = 4096 }"), disk_mib=0) == replace(
        host, memory_mib=4096, disk_mib=0
    ), "the disk that is free may change between the two"
    assert capacity("cpu_overcommit = 8").cpus_shared == 2 * host.cpus_shared
    assert capacity("cpu_overcommit = 8\ncapacity = { cpus_shared = 7 }").cpus_shared == 7


def test_the_disk_of_a_worker_is_the_one_that_its_directory_is_on(tmp_path: Path) -> None:
    worker = of_worker(tmp_path).worker
    assert worker
    assert worker.resources(tmp_path / "not" / "yet").disk_mib > 0
    assert worker.resources(Path("/proc/self")).disk_mib == 0, "which has no room at all"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("capacity = { cpus = 7 }", r"worker\.capacity\.cpus: "),
        ("capacity = { memory_mib = -1 }", r"worker\.capacity\.memory_mib: "),
        ("cpu_overcommit = 0", r"worker\.cpu_overcommit: "),
        ("cpu_overcommit = nan", r"worker\.cpu_overcommit: "),
    ],
)
def test_what_is_no_capacity_is_refused_by_name(text: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=named):
        of_worker(tmp_path, text)

"""The table `[proxy]` of an agent's configuration: what it may stand beside, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hawker.agent.settings import AgentSettings, read_settings
from hawker.errors import Invalid

WORKER = '[worker]\nlisten = "127.0.0.1:4281"\n'
BROKER = '[broker]\nlisten = "127.0.0.1:4280"\n'


def read(directory: Path, roles: str) -> AgentSettings:
    path = directory / "agent.toml"
    path.write_text(f'name = "a"\nregion = "ord"\ndirectory = "{directory}"\n[tokens]\ncluster = "c"\n{roles}')
    return read_settings(path)


def refused(directory: Path, roles: str) -> Invalid:
    with pytest.raises(Invalid) as caught:
        read(directory, roles)
    return caught.value


def test_other_proxies_learn_where_the_door_to_a_workers_machines_is(tmp_path: Path) -> None:
    assert read(tmp_path, f'{WORKER}[proxy]\nbackhaul = "0.0.0.0:4290"\n').proxy_port() == 4290


def test_the_door_may_be_another_process_of_the_host(tmp_path: Path) -> None:
    assert read(tmp_path, f"{WORKER}proxy_port = 4291\n").proxy_port() == 4291
    edge = read(tmp_path, f'{BROKER}[proxy]\nworker = "ord-1"\nbackhaul = "0.0.0.0:4291"\n')
    assert edge.proxy is not None
    assert (edge.proxy.worker, edge.proxy_port()) == ("ord-1", 0)


def test_an_edge_needs_no_backhaul(tmp_path: Path) -> None:
    edge = read(tmp_path, f'{BROKER}[proxy]\nlisten = {{ "80" = "0.0.0.0:8080" }}\n').proxy
    assert edge is not None
    assert edge.shared_ports() == {80: ("0.0.0.0", 8080)}


@pytest.mark.parametrize("backhaul", ["", "0.0.0.0:0"])
def test_a_worker_whose_door_others_could_not_find_is_refused(tmp_path: Path, backhaul: str) -> None:
    assert refused(tmp_path, f'{WORKER}[proxy]\nbackhaul = "{backhaul}"\n').field == "proxy.backhaul"


def test_a_proxy_alone_says_where_the_catalog_finds_it(tmp_path: Path) -> None:
    proxy = '[proxy]\nlisten = { "80" = "0.0.0.0:80" }\n'
    assert refused(tmp_path, proxy).field == "catalog.listen"
    assert read(tmp_path, f'{proxy}[catalog]\nlisten = "127.0.0.1:4282"\n').advertised() == ("127.0.0.1", 4282)
    beside = f'{BROKER}{proxy}[catalog]\nlisten = "127.0.0.1:4282"\n'
    assert refused(tmp_path, beside).field == "catalog.listen"
    assert "[proxy]" in str(refused(tmp_path, ""))


def test_a_proxy_needs_the_catalog(tmp_path: Path) -> None:
    broker = f'{BROKER}workers = ["ord-1@ord=127.0.0.1:4281"]\n'
    assert refused(tmp_path, f'{broker}[proxy]\nlisten = {{ "80" = "0.0.0.0:80" }}\n').field == "broker.workers"


@pytest.mark.parametrize("listen", ['{ "http" = "0.0.0.0:80" }', '{ "80" = "80" }', '{ "0" = "0.0.0.0:80" }'])
def test_what_is_no_port_or_address_is_refused_by_its_field(tmp_path: Path, listen: str) -> None:
    assert refused(tmp_path, f"{BROKER}[proxy]\nlisten = {listen}\n").field == "proxy.listen"


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ('trusted = ["10.0.0.1/8"]', "proxy.trusted"),
        ('trusted = ["balancer.example"]', "proxy.trusted"),
        ('trusted = ["10.0.0.0/8"]\nproxy_protocol = [0]', "proxy.proxy_protocol"),
        ("proxy_protocol = [80]", "proxy.proxy_protocol"),
    ],
)
def test_who_is_trusted_must_be_clear(tmp_path: Path, said: str, field: str) -> None:
    assert refused(tmp_path, f'{BROKER}[proxy]\nlisten = {{ "80" = "0.0.0.0:80" }}\n{said}\n').field == field


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ('domain = "apps .example"', "proxy.domain"),
        ('domain = "Apps.example"', "proxy.domain"),
        ('domain = ".example"', "proxy.domain"),
        ('tcp = "everywhere"', "proxy.tcp"),
        ("embedded = { wait_s = -1 }", "proxy.embedded.wait_s"),
        ("embedded = { wait_s = nan }", "proxy.embedded.wait_s"),
        ("routing = { queue = -1 }", "proxy.routing.queue"),
        ("haproxy = { threads = -1 }", "proxy.haproxy.threads"),
    ],
)
def test_what_no_proxy_could_work_with_is_refused_by_its_field(tmp_path: Path, said: str, field: str) -> None:
    assert refused(tmp_path, f"{BROKER}[proxy]\n{said}\n").field == field


@pytest.mark.parametrize(
    "said", ['domain = "localhost"', 'tcp = "::"', 'tcp = "0.0.0.0"', "routing = { idle_s = inf }"]
)
def test_what_is_unusual_and_makes_sense_is_taken(tmp_path: Path, said: str) -> None:
    assert read(tmp_path, f"{BROKER}[proxy]\n{said}\n").proxy

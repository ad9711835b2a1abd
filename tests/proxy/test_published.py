"""What a proxy reads of the catalog's rows of services."""

from __future__ import annotations

from typing import Any

import pytest

from hawker.model.services import Concurrency, ReplayCache, catalog_json, check_services
from hawker.proxy.base import ServicePort
from hawker.proxy.catalog_view.published import served, service_port

NOTHING = {
    "machine": "0123456789abcd",
    "app": "web",
    "process_group": "app",
    "protocol": "tcp",
    "internal_port": 80,
    "host_port": 0,
    "ports": "[]",
    "concurrency": "{}",
    "autostart": 0,
    "autostop": "",
    "min_machines_running": 0,
}


def row_of(**service: Any) -> dict[str, Any]:
    (read,) = check_services([{"internal_port": 80, **service}], "services")
    return {
        **NOTHING,
        "ports": catalog_json(read.ports),
        "concurrency": catalog_json(read.concurrency),
        "autostart": int(read.autostart),
        "autostop": read.autostop,
    }


def test_a_row_says_what_its_worker_published() -> None:
    found = served(row_of(ports=[{"port": 80, "handlers": ["http"]}], autostop="stop", concurrency={"hard_limit": 9}))
    assert (found.machine, found.autostart, found.autostop) == ("0123456789abcd", True, "stop")
    assert found.concurrency == Concurrency(soft_limit=9, hard_limit=9)


def test_a_row_of_a_worker_that_knows_no_proxies_starts_and_stops_nothing() -> None:
    found = served(NOTHING)
    assert (found.ports, found.autostart, found.autostop) == ((), False, "off")
    assert found.concurrency == Concurrency()


def test_what_a_newer_worker_says_is_passed_over() -> None:
    row = {**NOTHING, "ports": '[{"first": 80, "last": 80, "new": 1}]', "autostop": "hibernate"}
    found = served(row)
    assert found.ports[0].first == 80
    assert found.autostop == "off"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"ports": "[1]"}, "Expected `object`"),
        ({"ports": "[{"}, "truncated"),
        ({"ports": '[{"first": 80}]'}, "missing required field `last`"),
        ({"ports": '[{"first": 80, "last": 65536}]'}, "<= 65535"),
        ({"concurrency": "[]"}, "Expected `object`"),
        ({"concurrency": '{"soft_limit": 0}'}, ">= 1"),
        ({"protocol": "sctp"}, "protocol 'sctp' is not known"),
        ({"ports": '[{"first": 80, "last": 80, "http": {"set_headers": [["x-own", "☃"]]}}]'}, "latin-1"),
        (
            {"ports": f'[{{"first": 80, "last": 80, "http": {{"idle_timeout_s": {10**400}}}}}]'},
            "too large|out of range",
        ),
    ],
)
def test_a_bad_row_is_told_from_a_good_one(change: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        served({**NOTHING, **change})


def test_a_public_port_is_found_within_its_range() -> None:
    found = served(row_of(ports=[{"port": 80}, {"start_port": 8000, "end_port": 8002, "handlers": ["tls"]}]))
    assert [port for port in range(7990, 8010) if found.at(port)] == [8000, 8001, 8002]
    assert found.at(8001) == found.ports[1]


def test_a_data_plane_is_told_what_a_configuration_says_and_the_usual_where_it_says_nothing() -> None:
    assert service_port(served(row_of(ports=[{"port": 80, "handlers": ["http"]}])).ports[0]) == ServicePort(
        handlers=("http",)
    )
    options = {
        "compress": True,
        "h2_backend": True,
        "idle_timeout": 120,
        "headers_read_timeout": 3,
        "response": {"pristine": True, "headers": {"X-A": "\u00e9", "Server": False}},
        "replay_cache": [{"path_prefix": "/", "ttl_seconds": 10, "type": "cookie", "name": "sid"}],
    }
    port = {
        "port": 443,
        "handlers": ["tls", "http", "proxy_proto"],
        "force_https": True,
        "http_options": options,
        "tls_options": {"alpn": ["http/1.1"], "versions": ["TLSv1.3"]},
        "proxy_proto_options": {"version": "v2"},
    }
    assert service_port(served(row_of(ports=[port])).ports[0]) == ServicePort(
        handlers=("tls", "http", "proxy_proto"),
        force_https=True,
        h2_backend=True,
        proxy_protocol="v2",
        idle_timeout_s=120.0,
        headers_read_timeout_s=3.0,
        pristine=True,
        compress=True,
        set_headers=((b"x-a", b"\xe9"),),
        removed_headers=frozenset({b"server"}),
        alpn=("http/1.1",),
        tls_versions=("TLSv1.3",),
        replay_cache=(ReplayCache(path_prefix="/", ttl_s=10, type="cookie", name="sid"),),
    )


def test_equal_ports_of_many_machines_are_one_value() -> None:
    row = row_of(ports=[{"port": 80, "handlers": ["http"]}])
    assert served(row).ports is served({**row, "machine": "m2"}).ports

"""What a configuration's services say of a proxy's part: limits, starting and stopping by load, public ports."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawker.errors import Invalid
from hawker.model.services import (
    PUBLISHED_MOST,
    Concurrency,
    Http,
    PublicPort,
    ReplayCache,
    Service,
    Tls,
    catalog_json,
    check_services,
    least_aggressive,
    merged,
    read_ports,
)


def of(**fields: Any) -> Service:
    return check_services([{"internal_port": 8080, **fields}], "services")[0]


def of_port(**fields: Any) -> PublicPort:
    return of(ports=[{"port": 443, "handlers": ["tls", "http"], **fields}]).ports[0]


def test_a_service_that_says_little_has_the_documented_defaults() -> None:
    assert of() == Service(
        protocol="tcp",
        internal_port=8080,
        ports=(),
        concurrency=Concurrency(type="connections", soft_limit=20, hard_limit=0),
        autostart=True,
        autostop="off",
        min_machines_running=0,
    )


def test_a_service_says_how_it_is_loaded_started_and_stopped() -> None:
    service = of(
        autostart=False,
        autostop="suspend",
        min_machines_running=2,
        concurrency={"type": "requests", "soft_limit": 5, "hard_limit": 8},
    )
    assert (service.autostart, service.autostop, service.min_machines_running) == (False, "suspend", 2)
    assert service.concurrency == Concurrency(type="requests", soft_limit=5, hard_limit=8)


@pytest.mark.parametrize(
    ("said", "meant"),
    [(None, "off"), ("", "off"), (False, "off"), (True, "stop"), ("stop", "stop"), ("suspend", "suspend")],
)
def test_autostop_is_a_word_or_as_older_clients_say_it_true_or_false(said: object, meant: str) -> None:
    assert of(autostop=said).autostop == meant


def test_a_soft_limit_that_is_not_given_is_never_above_the_hard_one() -> None:
    assert of(concurrency={"hard_limit": 10}).concurrency.soft_limit == 10
    assert of(concurrency={"hard_limit": 50, "soft_limit": 0}).concurrency.soft_limit == 20


def test_a_public_port_says_what_is_done_with_its_connections() -> None:
    assert of(ports=[{"start_port": 8000, "end_port": 8099}]).ports == (PublicPort(first=8000, last=8099),)
    port = of_port(
        force_https=True,
        tls_options={"alpn": ["h2"], "versions": ["TLSv1.3"], "default_self_signed": True},
        http_options={
            "compress": True,
            "h2_backend": True,
            "idle_timeout": 120,
            "headers_read_timeout": 5,
            "response": {
                "pristine": True,
                "headers": {"X-Frame-Options": "DENY", "Set-Cookie": ["a=1", "b=2"], "X-Powered-By": False},
            },
            "replay_cache": [
                {"path_prefix": "/", "ttl_seconds": 60, "type": "cookie", "name": "Sid", "allow_bypass": True}
            ],
        },
    )
    assert port == PublicPort(
        first=443,
        last=443,
        handlers=("tls", "http"),
        force_https=True,
        tls=Tls(alpn=("h2",), versions=("TLSv1.3",), default_self_signed=True),
        http=Http(
            compress=True,
            h2_backend=True,
            pristine=True,
            idle_timeout_s=120,
            headers_read_timeout_s=5,
            set_headers=(("x-frame-options", "DENY"), ("set-cookie", "a=1"), ("set-cookie", "b=2")),
            removed_headers=("x-powered-by",),
            replay_cache=(ReplayCache(path_prefix="/", ttl_s=60, type="cookie", name="Sid", allow_bypass=True),),
        ),
    )


def test_the_proxy_protocol_is_spoken_only_where_its_handler_is() -> None:
    assert of_port().proxy_protocol == ""
    assert of_port(proxy_proto_options={"version": "v2"}).proxy_protocol == ""
    assert of_port(handlers=["proxy_proto"]).proxy_protocol == "v1"
    assert of_port(handlers=["proxy_proto"], proxy_proto_options={"version": "v2"}).proxy_protocol == "v2"


def test_services_of_one_port_inside_are_one_that_bears_them_all() -> None:
    services = check_services(
        [
            {
                "internal_port": 80,
                "ports": [{"port": 80, "handlers": ["http"]}],
                "autostop": "stop",
                "autostart": False,
                "concurrency": {"type": "requests", "soft_limit": 10},
            },
            {
                "internal_port": 80,
                "ports": [{"port": 5000}],
                "autostop": "suspend",
                "min_machines_running": 1,
                "concurrency": {"soft_limit": 15, "hard_limit": 30},
            },
            {"internal_port": 53, "protocol": "udp"},
        ],
        "services",
    )
    assert list(merged(services)) == [("tcp", 80), ("udp", 53)]
    assert merged(services)["tcp", 80] == Service(
        protocol="tcp",
        internal_port=80,
        ports=(PublicPort(first=80, last=80, handlers=("http",)), PublicPort(first=5000, last=5000)),
        concurrency=Concurrency(type="requests", soft_limit=10, hard_limit=30),
        autostart=True,
        autostop="suspend",
        min_machines_running=1,
    )


def test_of_several_services_the_least_aggressive_says_how_a_machine_stops() -> None:
    assert least_aggressive(["stop", "suspend"]) == "suspend"
    assert least_aggressive(["stop", "off", "suspend"]) == "off"
    assert least_aggressive([]) == "off"


PORT = {"port": 80, "handlers": ["http"]}


@pytest.mark.parametrize(
    ("change", "field", "remedy"),
    [
        ({"autostop": 0}, "autostop", "use off, stop or suspend"),
        ({"autostop": {"a": 1}}, "autostop", "use off, stop or suspend"),
        ({"autostart": "yes"}, "autostart", "true or false"),
        ({"min_machines_running": -1}, "min_machines_running", "a count"),
        ({"min_machines_running": True}, "min_machines_running", "a count"),
        ({"concurrency": [1]}, "concurrency", "an object such as"),
        ({"concurrency": {"type": "cpu"}}, "concurrency.type", "connections or requests"),
        ({"concurrency": {"soft_limit": 1.5}}, "concurrency.soft_limit", "a count"),
        ({"concurrency": {"soft_limit": 30, "hard_limit": 25}}, "concurrency.soft_limit", "at most the hard limit, 25"),
        ({"ports": [{**PORT, "handlers": ["ftp"]}]}, "ports[0].handlers", "a list of http, tls"),
        ({"ports": [{**PORT, "handlers": [{}]}]}, "ports[0].handlers", "a list of http, tls"),
        ({"ports": [{"port": 80, "force_https": True}]}, "ports[0].force_https", "the handler http"),
        ({"ports": [{**PORT, "force_https": 1}]}, "ports[0].force_https", "true or false"),
        ({"ports": [{**PORT, "tls_options": []}]}, "ports[0].tls_options", "an object such as"),
        ({"ports": [{**PORT, "tls_options": {"alpn": ["h3"]}}]}, "ports[0].tls_options.alpn", "a list of h2, http/1.1"),
        ({"ports": [{**PORT, "tls_options": {"versions": ["SSLv3"]}}]}, "ports[0].tls_options.versions", "TLSv1.2"),
        ({"ports": [{**PORT, "http_options": 1}]}, "ports[0].http_options", "an object such as"),
        ({"ports": [{**PORT, "http_options": {"compress": "gzip"}}]}, "ports[0].http_options.compress", "true or"),
        ({"ports": [{**PORT, "http_options": {"idle_timeout": "9s"}}]}, "ports[0].http_options.idle_timeout", "count"),
        ({"ports": [{**PORT, "http_options": {"idle_timeout": 90000}}]}, "ports[0].http_options.idle_timeout", "86400"),
        ({"ports": [{**PORT, "http_options": {"response": {"headers": {"a b": "c"}}}}]},
         "ports[0].http_options.response.headers.a b", "the name of a header"),
        ({"ports": [{**PORT, "http_options": {"response": {"headers": {"a": "b\r\nc: d"}}}}]},
         "ports[0].http_options.response.headers.a", "one line"),
        ({"ports": [{**PORT, "http_options": {"response": {"headers": {"a": "\u20ac"}}}}]},
         "ports[0].http_options.response.headers.a", "Latin-1"),
        ({"ports": [{**PORT, "http_options": {"response": {"headers": {"a": True}}}}]},
         "ports[0].http_options.response.headers.a", "false to remove"),
        ({"ports": [{**PORT, "http_options": {"response": {"headers": {"Content-Length": "1"}}}}]},
         "ports[0].http_options.response.headers.Content-Length", "leave it out"),
        ({"ports": [{**PORT, "http_options": {"replay_cache": [{"path_prefix": "a"}]}}]},
         "ports[0].http_options.replay_cache[0].path_prefix", "the start of a path"),
        ({"ports": [{**PORT, "http_options": {"replay_cache": [{"path_prefix": "/", "type": "query"}]}}]},
         "ports[0].http_options.replay_cache[0].type", "cookie or header"),
        ({"ports": [{**PORT, "http_options": {"replay_cache": [{"path_prefix": "/", "type": "header"}]}}]},
         "ports[0].http_options.replay_cache[0].name", "the name of a header"),
        ({"ports": [{**PORT, "http_options": {"replay_cache": [
            {"path_prefix": "/", "type": "header", "name": "a", "ttl_seconds": 9}]}}]},
         "ports[0].http_options.replay_cache[0].ttl_seconds", "at least 10"),
        ({"ports": [{**PORT, "proxy_proto_options": {"version": "v3"}}]},
         "ports[0].proxy_proto_options.version", "v1 or v2"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_with_its_field_and_the_remedy(
    change: dict[str, Any], field: str, remedy: str
) -> None:
    with pytest.raises(Invalid) as refused:
        of(**change)
    assert refused.value.field == f"services[0].{field}"
    assert remedy in refused.value.message


def test_ports_that_would_not_fit_the_catalog_are_refused() -> None:
    def headers(characters: int) -> dict[str, Any]:
        return {**PORT, "http_options": {"response": {"headers": {"a": "x" * characters}}}}

    assert len(catalog_json(of(ports=[headers(3900)]).ports)) <= PUBLISHED_MOST
    with pytest.raises(Invalid, match="set fewer headers"):
        of(ports=[headers(PUBLISHED_MOST)])
    with pytest.raises(Invalid, match="set fewer headers"):
        check_services([{"internal_port": 80, "ports": [headers(2500)]}] * 2, "services")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = [
    *("protocol", "internal_port", "autostop", "autostart", "min_machines_running", "concurrency", "type"),
    *("soft_limit", "hard_limit", "ports", "port", "start_port", "end_port", "handlers", "force_https", "tls_options"),
    *("alpn", "versions", "http_options", "compress", "response", "headers", "pristine", "idle_timeout"),
    *("replay_cache", "path_prefix", "ttl_seconds", "name", "proxy_proto_options", "version"),
]
PARTS = st.recursive(
    JSON | st.sampled_from(["tcp", "udp", "http", "tls", "v2", "stop", "h2", "requests", "cookie", "/", 80, 443]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=15,
)


@given(st.lists(st.dictionaries(st.sampled_from(FIELDS), PARTS, max_size=5), max_size=2) | PARTS)
def test_whatever_is_given_is_read_or_refused(value: object) -> None:
    try:
        services = check_services(value, "services")
    except Invalid:
        return
    for service in services:
        assert read_ports(catalog_json(service.ports)) == service.ports

"""Health checks as configurations have them: what may be left out, what is given back, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawker.errors import Invalid
from hawker.model.checks import Check, has_checks
from hawker.model.config import check_config

APP: dict[str, Any] = {"image": "host", "init": {"exec": ["sleep", "60"]}}


def with_service_checks(*checks: dict[str, Any], port: int = 8080) -> dict[str, Any]:
    return {**APP, "services": [{"internal_port": port, "checks": list(checks)}]}


def with_named(**checks: Any) -> dict[str, Any]:
    return {**APP, "checks": checks}


def test_a_check_says_only_its_type_and_gets_the_usual_times() -> None:
    (check,) = check_config(with_service_checks({"type": "http"})).checks
    assert check == Check(
        name="servicecheck-00-http-8080",
        kind="service",
        type="http",
        port=8080,
        service="tcp/8080",
        interval_s=15.0,
        timeout_s=2.0,
        grace_s=1.0,
        method="GET",
        path="/",
    )
    assert check.gates


def test_everything_that_the_api_documents_is_read() -> None:
    given = {
        "type": "http",
        "port": 9000,
        "interval": "30s",
        "timeout": "1m30s",
        "grace_period": 5 * 10**9,
        "method": "head",
        "path": "/up?full=1",
        "protocol": "https",
        "tls_skip_verify": True,
        "tls_server_name": "app.example",
        "headers": [{"name": "Host", "values": ["app.example"]}, {"name": "X-Two", "values": ["1", "2"]}],
        "kind": "readiness",
    }
    (check,) = check_config(with_named(up=given)).checks
    assert check == Check(
        name="up",
        kind="readiness",
        type="http",
        port=9000,
        interval_s=30.0,
        timeout_s=90.0,
        grace_s=5.0,
        method="HEAD",
        path="/up?full=1",
        tls=True,
        tls_verify=False,
        tls_server_name="app.example",
        headers=(("Host", "app.example"), ("X-Two", "1"), ("X-Two", "2")),
    )


def test_checks_of_services_are_numbered_through_and_named_as_clients_know_them() -> None:
    services = [
        {"internal_port": 8080, "checks": [{"type": "tcp"}, {"type": "http", "port": 9000}]},
        {"internal_port": 53, "protocol": "udp"},
        {"internal_port": 53, "checks": [{"type": "tcp"}]},
    ]
    checks = check_config({**APP, "services": services, "checks": {"disk": {"type": "tcp", "port": 1}}}).checks
    assert [(check.name, check.kind, check.service) for check in checks] == [
        ("servicecheck-00-tcp-8080", "service", "tcp/8080"),
        ("servicecheck-01-http-9000", "service", "tcp/8080"),
        ("servicecheck-02-tcp-53", "service", "tcp/53"),
        ("disk", "informational", ""),
    ]


def test_a_named_check_is_informational_unless_it_says_readiness() -> None:
    plain, ready = check_config(
        with_named(plain={"type": "tcp", "port": 1}, ready={"type": "tcp", "port": 1, "kind": "readiness"})
    ).checks
    assert (plain.kind, plain.gates) == ("informational", False)
    assert (ready.kind, ready.gates) == ("readiness", True)


@pytest.mark.parametrize("empty", [None, [], {}, ""])
def test_none_may_be_said_in_any_way(empty: Any) -> None:
    config = check_config({**APP, "checks": empty, "services": [{"internal_port": 1, "checks": empty}]})
    assert config.checks == ()
    assert config.raw["checks"] == empty
    assert not has_checks(config.raw)


def test_durations_come_out_as_strings_and_all_else_as_it_came() -> None:
    service = {"type": "http", "interval": 10**10, "timeout": "2s", "ours": {"to": "keep"}}
    given = with_service_checks(service) | {"checks": {"up": {"type": "tcp", "port": 1, "grace_period": 500_000_000}}}
    raw = check_config(given).raw
    assert raw["services"][0]["checks"] == [{**service, "interval": "10s"}]
    assert raw["checks"] == {"up": {"type": "tcp", "port": 1, "grace_period": "500ms"}}
    assert service["interval"] == 10**10, "what the caller gave is left alone"


durations = st.one_of(st.none(), st.integers(10**8, 10**11), st.sampled_from(["1s", "1m0s", "100ms", "2.5s"]))
header = st.fixed_dictionaries(
    {"name": st.sampled_from(["Host", "x-a"])},
    optional={"values": st.lists(st.text("aä 1", max_size=5), max_size=2)},
)
check = st.fixed_dictionaries(
    {"type": st.sampled_from(["http", "tcp"]), "port": st.integers(1, 65535)},
    optional={
        "interval": durations,
        "timeout": durations,
        "grace_period": durations,
        "path": st.sampled_from([None, "", "/", "/a/b?c=d"]),
        "protocol": st.sampled_from([None, "", "http", "https"]),
        "tls_skip_verify": st.sampled_from([None, True, False]),
        "headers": st.one_of(st.none(), st.lists(header, max_size=2)),
        "kind": st.sampled_from([None, "informational", "readiness"]),
    },
)


@given(named=st.dictionaries(st.sampled_from(["a", "b", "c d"]), check, max_size=3), of=st.lists(check, max_size=3))
def test_what_was_given_back_reads_as_the_same_again(named: dict[str, Any], of: list[dict[str, Any]]) -> None:
    first = check_config({**with_service_checks(*of), "checks": named})
    assert check_config(first.raw) == first
    assert len(first.checks) == len({check.name for check in first.checks}) == len(named) + len(of)


@pytest.mark.parametrize(
    ("config", "field", "remedy"),
    [
        (with_service_checks({}), "services[0].checks[0].type", "use http or tcp"),
        (with_service_checks({"type": "script"}), "services[0].checks[0].type", "use http or tcp"),
        (with_service_checks({"type": "tcp", "port": 65536}), "services[0].checks[0].port", "from 1 to 65535"),
        ({**APP, "services": [{"internal_port": 1, "checks": {"a": 1}}]}, "services[0].checks", "a list of objects"),
        ({**APP, "checks": [{"type": "tcp"}]}, "checks", "an object of checks by name"),
        (with_named(up=[]), "checks.up", 'an object such as {"type"'),
        (with_named(up={"type": "tcp"}), "checks.up.port", "from 1 to 65535"),
        (with_named(up={"type": "tcp", "port": True}), "checks.up.port", "from 1 to 65535"),
        (with_named(up={"type": "tcp", "port": 1, "kind": "liveness"}), "checks.up.kind", "informational or readiness"),
        ({**APP, "checks": {"": {"type": "tcp", "port": 1}}}, "checks", "1 to 200 printable"),
        ({**APP, "checks": {"servicecheck-00-tcp-1": {"type": "tcp", "port": 1}}}, "checks", "servicecheck-"),
        (with_service_checks({"type": "tcp", "interval": "fast"}), "services[0].checks[0].interval", "such as"),
        (with_service_checks({"type": "tcp", "interval": 0}), "services[0].checks[0].interval", "from 100ms to 1h0m0s"),
        (with_service_checks({"type": "tcp", "timeout": "1ms"}), "services[0].checks[0].timeout", "from 10ms to 5m0s"),
        (with_service_checks({"type": "tcp", "grace_period": "2h"}), "services[0].checks[0].grace_period", "from 0s"),
        (with_service_checks({"type": "http", "path": "up"}), "services[0].checks[0].path", "begin it with /"),
        (with_service_checks({"type": "http", "path": "/a b"}), "services[0].checks[0].path", "without spaces"),
        (with_service_checks({"type": "http", "method": "G T"}), "services[0].checks[0].method", "GET or HEAD"),
        (with_service_checks({"type": "http", "protocol": "h2"}), "services[0].checks[0].protocol", "http or https"),
        (with_service_checks({"type": "http", "tls_skip_verify": 1}), "services[0].checks[0].tls_skip_verify", "true"),
        (with_service_checks({"type": "http", "tls_server_name": "a b"}), "services[0].checks[0].tls_server_name",
         "the name that the certificate is for"),
        (with_service_checks({"type": "http", "headers": {"a": "b"}}), "services[0].checks[0].headers", "a list"),
        (with_service_checks({"type": "http", "headers": [{"name": "a:"}]}), "services[0].checks[0].headers[0].name",
         "the name of a header"),
        (with_service_checks({"type": "http", "headers": [{"name": "a", "values": ["x\r\nb: c"]}]}),
         "services[0].checks[0].headers[0].values", "one line each"),
        (with_service_checks(*[{"type": "tcp"}] * 33), "checks", "at most 32"),
    ],
)  # fmt: skip
def test_an_error_names_the_field_and_the_remedy(config: dict[str, Any], field: str, remedy: str) -> None:
    with pytest.raises(Invalid) as refused:
        check_config(config)
    assert refused.value.field == f"config.{field}"
    assert remedy in refused.value.message

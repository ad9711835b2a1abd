"""Ids, addresses, durations, times and image references, and how they are written."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawker.errors import Invalid
from hawker.host import Host
from hawker.model.values import (
    ImageRef,
    check_app_name,
    check_label,
    format_duration,
    host_port,
    is_host_image,
    is_machine_id,
    parse_duration_s,
    read_ulid,
    rfc3339,
    ulid,
)

HOUR_NS = 3600 * 10**9


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("0s", 0),
        ("15s", 15),
        ("1m0s", 60),
        ("1m30s", 90),
        ("1h2m3s", 3723),
        ("1.5h", 5400),
        (".5s", 0.5),
        ("1.s", 1),
        ("1h1h", 7200),
        ("100ms", 0.1),
        ("2us", 2e-6),
        ("2µs", 2e-6),  # U+00B5
        ("2\u03bcs", 2e-6),
        ("7ns", 7e-9),
        ("1.9ns", 1e-9),  # Go cuts parts of a nanosecond off
        ("1s500ms", 1.5),
    ],
)
def test_the_forms_of_go_are_read(text: str, seconds: float) -> None:
    assert parse_duration_s("timeout", text) == seconds


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0s"),
        (1, "1ns"),
        (1_100, "1.1µs"),
        (500_000, "500µs"),
        (2_200_000, "2.2ms"),
        (500_000_000, "500ms"),
        (10**9, "1s"),
        (3_300_000_000, "3.3s"),
        (60 * 10**9, "1m0s"),
        (245_001_000_000, "4m5.001s"),
        (HOUR_NS, "1h0m0s"),
        (1_000 * HOUR_NS + 61 * 10**9, "1000h1m1s"),
        (59_999_900_000, "59.9999s"),
    ],
)
def test_durations_are_written_as_go_writes_them(ns: int, text: str) -> None:
    assert format_duration(parse_duration_s("timeout", ns)) == text


def test_a_negative_duration_reads_as_one() -> None:
    assert (format_duration(-3), format_duration(-3661.5)) == ("-3s", "-1h1m1.5s")


@given(st.integers(0, 300 * 10**9) | st.integers(0, 1000 * HOUR_NS))
def test_a_duration_survives_being_written_and_read(ns: int) -> None:
    seconds = parse_duration_s("timeout", ns)
    assert parse_duration_s("timeout", format_duration(seconds)) == seconds
    assert seconds == ns / 1e9


@pytest.mark.parametrize(
    "value",
    [
        *("", " ", "5", "-5s", "5 s", "s", ".s", ".", "1.2.3s", "5S", "5sec", "1m2", "٣s", "1e3s", "inf", "nan"),
        *(True, False, None, 1.5, [], {}, -1, 2**63, 10**400, "9223372037s", "9" * 400 + "s"),
    ],
)
def test_what_is_no_duration_is_refused_with_its_field(value: Any) -> None:
    with pytest.raises(Invalid, match="timeout: ") as caught:
        parse_duration_s("timeout", value)
    assert caught.value.field == "timeout"


# --- ids ---


times = st.integers(0, 2**48 - 1)
bits = st.integers(0, 2**80 - 1)


@given(times, bits, times, bits)
def test_ulids_sort_by_time_and_then_by_their_random_part(a_ms: int, a: int, b_ms: int, b: int) -> None:
    one, other = ulid(a_ms, a), ulid(b_ms, b)
    assert (one < other) == ((a_ms, a) < (b_ms, b))
    assert len(one) == 26


def test_a_ulid_is_written_as_its_specification_says() -> None:
    assert ulid(1469918176385, 0)[:10] == "01ARYZ6S41"  # the example of github.com/ulid/spec
    assert ulid(2**48 - 1, 2**80 - 1) == "7" + "Z" * 25


def test_the_ulids_of_a_host_grow_though_its_clock_stands_or_goes_back() -> None:
    clock = iter([5.0, 5.0, 4.0, 5.001, 1.0, 9.0])
    host = Host(lambda: next(clock), random.Random(1))
    made = [host.ulid() for _ in range(6)]
    assert all(a < b for a, b in pairwise(made))


@given(times, bits)
def test_a_ulid_is_read_as_it_was_written(at_ms: int, random_bits: int) -> None:
    assert read_ulid(ulid(at_ms, random_bits)) == (at_ms, random_bits)


def test_the_ulids_of_a_host_go_on_after_one_that_was_made_when_the_clock_was_ahead() -> None:
    host = Host(lambda: 5.0, random.Random(1))
    ahead = ulid(9000, 7)
    host.go_on_after(ahead)
    assert ahead < host.ulid() < host.ulid()


@given(st.integers(0, 2**32))
def test_machine_ids_are_14_hexadecimal_digits(seed: int) -> None:
    assert is_machine_id(Host(lambda: 0.0, random.Random(seed)).machine_id())


@pytest.mark.parametrize(
    "text", ["", "148ed21a0e7d8", "148ed21a0e7d890", "148ED21A0E7D89", "148ed21a0e7d8g", "1" * 14 + "\n"]
)
def test_what_is_no_machine_id(text: str) -> None:
    assert not is_machine_id(text)


@pytest.mark.parametrize("name", ["a", "web", "0", "my-app-2", "a" * 63, "148ed21a0e7d8", "148ed21a0e7d8-"])
def test_app_names(name: str) -> None:
    assert check_app_name(name) == name


@pytest.mark.parametrize("name", ["", "-a", "Web", "my_app", "a.b", "a" * 64, "ä", "a\n", " a"])
def test_what_is_no_app_name(name: str) -> None:
    with pytest.raises(Invalid, match="lower-case letters, digits and dashes"):
        check_app_name(name)


@given(st.integers(0, 2**56 - 1))
def test_no_app_is_named_like_a_machine(number: int) -> None:
    with pytest.raises(Invalid, match="would read as a machine id"):
        check_app_name(f"{number:014x}")


# --- addresses, times and images ---


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.1:80", "10.0.0.1", 80),
        ("worker.example:0", "worker.example", 0),
        ("[fdaa::3]:65535", "fdaa::3", 65535),
        ("::1:80", "::1", 80),
    ],
)
def test_addresses_with_their_ports(text: str, host: str, port: int) -> None:
    assert host_port("listen", text) == host_port("listen", text, named=True) == (host, port)


@pytest.mark.parametrize("text", ["", "host", "host:", "host:http", "host:65536", "host:-1"])
def test_what_is_no_address_is_refused_by_its_field(text: str) -> None:
    with pytest.raises(Invalid, match=r"catalog\.join: .*write host:port"):
        host_port("catalog.join", text)


@pytest.mark.parametrize("text", [":80", "80"])
def test_no_host_is_every_address_unless_one_has_to_be_named(text: str) -> None:
    assert host_port("listen", text) == ("", 80)
    with pytest.raises(Invalid, match="write host:port"):
        host_port("proxy.backhaul", text, named=True)


def test_times_are_utc_with_milliseconds() -> None:
    assert rfc3339(0) == "1970-01-01T00:00:00.000Z"
    assert rfc3339(1_763_689_445_007) == "2025-11-21T01:44:05.007Z"


@pytest.mark.parametrize(
    ("text", "registry", "repository", "tag", "digest"),
    [
        ("nginx", "registry-1.docker.io", "library/nginx", "latest", ""),
        ("nginx:1.27", "registry-1.docker.io", "library/nginx", "1.27", ""),
        ("flyio/hellofly:latest", "registry-1.docker.io", "flyio/hellofly", "latest", ""),
        ("docker.io/nginx", "registry-1.docker.io", "library/nginx", "latest", ""),
        ("index.docker.io/library/nginx:1", "registry-1.docker.io", "library/nginx", "1", ""),
        ("ghcr.io/owner/image:v1", "ghcr.io", "owner/image", "v1", ""),
        ("localhost/image", "localhost", "image", "latest", ""),
        ("localhost:5000/image:v2", "localhost:5000", "image", "v2", ""),
        ("ghcr.io/owner/image@sha256:ab", "ghcr.io", "owner/image", "", "sha256:ab"),
        ("ghcr.io/owner/image:v1@sha256:ab", "ghcr.io", "owner/image", "v1", "sha256:ab"),
    ],
)
def test_image_references(text: str, registry: str, repository: str, tag: str, digest: str) -> None:
    assert ImageRef(text).as_json() == {
        "registry": registry,
        "repository": repository,
        "tag": tag,
        "digest": digest,
        "labels": {},
    }


def test_only_the_image_named_host_is_the_host() -> None:
    assert is_host_image("host")
    assert not is_host_image("host:latest")


@pytest.mark.parametrize("label", ["a", "web 1", "größe", "x" * 63])
def test_a_label_is_printable(label: str) -> None:
    assert check_label("name", label) == label


@pytest.mark.parametrize("label", ["", "x" * 64, "a\nb", "a\x1b[2J", "a\u2028b", "a\rb"])
def test_a_label_that_would_break_a_table_or_steer_a_terminal_is_refused_by_its_field(label: str) -> None:
    with pytest.raises(Invalid) as refused:
        check_label("org_slug", label)
    assert refused.value.field == "org_slug"

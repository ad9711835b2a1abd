"""Load balancers and CDNs before the proxy: those that are trusted say who asks, and nobody else does."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from tests.kit.authority import Authority
from tests.kit.http2 import User2
from tests.kit.planes import Haproxy
from tests.kit.raw_http import Visit, head, hello
from tests.proxy.conftest import Stage
from tests.proxy.test_tunnels import plain_machine

from hawker.core.preface import Way, write_preface

SAID = "X-Forwarded-For: 192.0.2.6, 203.0.113.7 | X-Forwarded-Proto: https | X-Forwarded-Host: shop.example:8443"
WAY = Way(("203.0.113.7", 4711), ("192.0.2.1", 80))
BALANCER, ANYBODY = "", "127.0.0.5"


@pytest.fixture
def before(stage: Stage) -> Stage:
    """A stage where the address 127.0.0.1 is a load balancer's."""
    stage.settings["trusted"] = ("127.0.0.1",)
    return stage


def of(visit: Visit, *names: str) -> list[str]:
    return [visit[name] for name in names]


async def test_a_trusted_proxy_says_who_asks_and_how(before: Stage, tmp_path: Path) -> None:
    before.settings["access_log"] = str(tmp_path / "log")
    machine = await before.machine()
    user = await before.user()
    await user.ask(f"GET / | {SAID}")
    await user.ask("GET / | X-Forwarded-For: 2001:db8::7 | X-Forwarded-Port: 8080")
    await user.ask("GET /")
    one, two, three = machine.visits
    names = ("fly-client-ip", "x-forwarded-proto", "x-forwarded-ssl", "x-forwarded-port", "fly-forwarded-port")
    assert of(one, *names) == ["203.0.113.7", "https", "on", "443", "80"]
    assert one["x-forwarded-for"] == "192.0.2.6, 203.0.113.7, 127.0.0.1"
    assert of(two, *names) == ["2001:db8::7", "http", "off", "8080", "80"]
    assert of(three, *names) == ["127.0.0.1", "http", "off", "80", "80"]
    await before.close()
    assert [line.split()[0] for line in (tmp_path / "log").read_text().splitlines()] == [
        "203.0.113.7",
        "2001:db8::7",
        "127.0.0.1",
    ]


async def test_of_anybody_else_nothing_of_that_is_believed(before: Stage) -> None:
    machine = await before.machine()
    user = await before.user(source=ANYBODY)
    await user.ask(f"GET / | {SAID} | Fly-Client-IP: 192.0.2.9")
    (visit,) = machine.visits
    assert of(visit, "fly-client-ip", "x-forwarded-proto", "x-forwarded-port") == [ANYBODY, "http", "80"]
    assert visit["x-forwarded-for"] == f"192.0.2.6, 203.0.113.7, {ANYBODY}"


async def test_users_are_sent_to_https_unless_they_came_by_it(before: Stage) -> None:
    before.serves(force_https=True)
    await before.machine()
    assert (await before.ask(f"GET / | {SAID}")).status == 200
    answer = await before.ask("GET /a?b | X-Forwarded-Proto: http | X-Forwarded-Host: shop.example:8080")
    assert (answer.status, answer["location"]) == (301, "https://shop.example/a?b")
    user = await before.user(source=ANYBODY)
    answer = await user.ask(f"GET / | {SAID}")
    assert (answer.status, answer["location"]) == (301, "https://web.example/")


@pytest.mark.parametrize("stage", ["embedded"], indirect=True)
async def test_requests_of_many_users_on_one_connection_of_http2_are_told_apart(before: Stage) -> None:
    machine = await before.machine()
    user = await User2.at((await before.open()).http)
    for number in (7, 8):
        await user.ask(f"GET / | x-forwarded-for: 203.0.113.{number} | x-forwarded-proto: https")
    await user.close()
    assert [visit["fly-client-ip"] for visit in machine.visits] == ["203.0.113.7", "203.0.113.8"]
    assert {visit["via"] for visit in machine.visits} == {"2 hawker"}
    assert {visit["x-forwarded-proto"] for visit in machine.visits} == {"https"}


# --- the PROXY protocol ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["v1", "v2"])
async def test_a_trusted_proxy_says_where_a_connection_comes_from(before: Stage, version: Literal["v1", "v2"]) -> None:
    networks = [f"2001:db8:{number:x}::/48" for number in range(200)]  # as CDNs have
    before.settings |= {"proxy_protocol": (80,), "trusted": (*networks, "127.0.0.1")}
    machine = await before.machine()
    user = await before.user()
    data = write_preface(version, WAY)
    for piece in (data[:20], data[20:]) if not isinstance(before.plane, Haproxy) else (data,):
        await user.send(piece)
    for _ in range(2):
        await user.ask("GET / | X-Forwarded-For: 192.0.2.6")
    assert [visit["fly-client-ip"] for visit in machine.visits] == ["203.0.113.7"] * 2
    assert machine.visits[0]["x-forwarded-for"] == "192.0.2.6, 203.0.113.7"
    other = await before.user(source=ANYBODY)
    assert (await other.ask("GET /")).status == 200
    assert machine.visits[-1]["fly-client-ip"] == ANYBODY
    lying = await before.user(source=ANYBODY)
    await lying.send(write_preface("v1", WAY) + head("GET /"))
    assert (await lying.answer()).status == 400


async def test_a_trusted_proxy_that_does_not_say_so_where_it_must_is_not_served(before: Stage) -> None:
    before.settings["proxy_protocol"] = (80,)
    machine = await before.machine()
    user = await before.user()
    await user.send(b"GET / HTTP/1.1\r\nHost: web.example\r\n\r\n")
    assert await user.ended() in ("closed", "reset")
    assert machine.visits == []


async def test_a_cdn_behind_a_load_balancer_is_believed_if_it_is_trusted_too(before: Stage) -> None:
    before.settings |= {"proxy_protocol": (80,), "trusted": ("127.0.0.1", "203.0.113.0/24")}
    machine = await before.machine()
    user = await before.user()
    await user.send(write_preface("v2", WAY))
    await user.ask("GET / | X-Forwarded-For: 198.51.100.1 | X-Forwarded-Proto: https")
    (visit,) = machine.visits
    assert of(visit, "fly-client-ip", "x-forwarded-proto") == ["198.51.100.1", "https"]
    assert visit["x-forwarded-for"] == "198.51.100.1, 203.0.113.7"


AUTHORITY = Authority()


async def test_over_tls_and_to_a_plain_service_it_comes_first_of_all(before: Stage, tmp_path: Path) -> None:
    AUTHORITY.write(tmp_path, "web.example")
    before.settings |= {"proxy_protocol": (443, 5432), "certificates": tmp_path}
    machine = await before.machine(hello)
    before.serves(handlers=("tls", "http"))
    for number in range(2):
        user = await before.user("tls")
        await user.send(write_preface("v1", WAY))
        await user.writer.start_tls(AUTHORITY.client(), server_hostname="web.example")
        assert (await user.ask("GET /")).status == 200
        assert of(machine.visits[number], "fly-client-ip", "x-forwarded-proto") == ["203.0.113.7", "https"]
        user.writer.transport.abort()
    await plain_machine(before, proxy_protocol="v1")
    own = await before.user("own")
    await own.send(write_preface("v2", WAY) + b"hello")
    told = write_preface("v1", WAY)
    assert await own.bytes(len(told) + 5) == told + b"HELLO", "what the machine got, in capitals"

"""Requests from one proxy to another: with the cluster's token only, and a word about what may be tried elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.kit.raw_http import Visit, echo, head, resetting, saying
from tests.kit.routers import FakeMachine
from tests.proxy.conftest import Stage
from tests.proxy.test_tunnels import plain_machine

from hawker.proxy.base import ServicePort

OWN = "Hawker-Backhaul: secret | Hawker-App: web | Hawker-Port: 80 | Hawker-Hops: 1"


@pytest.mark.parametrize("token", ["", "Hawker-Backhaul: wrong", "Hawker-Backhaul:"])
async def test_without_the_clusters_token_nothing_is_said(stage: Stage, token: str) -> None:
    machine = await stage.machine()
    user = await stage.user("backhaul")
    answer = await user.ask("GET / | Hawker-App: web | Hawker-Port: 80" + (f" | {token}" if token else ""))
    assert answer.status == 401
    assert machine.visits == []


async def test_a_request_passes_with_what_the_edge_said_and_nothing_added(stage: Stage) -> None:
    machine = await stage.machine()
    user = await stage.user("backhaul")
    fields = "X-Forwarded-For: 192.0.2.1 | Fly-Client-IP: 192.0.2.1 | Via: 1.1 hawker | Fly-Request-Id: r1"
    answer = await user.ask(f"GET / | {OWN} | Hawker-Machine: m1 | {fields}")
    assert answer.status == 200
    (visit,) = machine.visits
    assert [visit[name] for name in ("x-forwarded-for", "fly-client-ip", "via", "fly-request-id")] == [
        *("192.0.2.1", "192.0.2.1", "1.1 hawker", "r1")
    ]
    assert not any(name.startswith(b"hawker-") for name, _ in visit.fields)
    assert answer["hawker-load"] == "1/20/25"
    assert answer.all("via") == []


async def test_a_machine_that_is_not_here_is_said_to_be_elsewhere(stage: Stage) -> None:
    await stage.machine()
    user = await stage.user("backhaul")
    answer = await user.ask(f"GET / | {OWN} | Hawker-Machine: m9")
    assert (answer.status, answer["hawker-elsewhere"]) == (421, "elsewhere")


async def test_a_machine_that_breaks_off_is_told_so_that_the_edge_can_decide(stage: Stage) -> None:
    await stage.machine(resetting)
    user = await stage.user("backhaul")
    answer = await user.ask(f"POST / | {OWN} | Hawker-Machine: m1 | Content-Length: 0")
    assert (answer.status, answer["hawker-elsewhere"]) == (421, "reset")


async def test_a_request_goes_through_two_proxies_at_most(stage: Stage) -> None:
    await stage.machine()
    user = await stage.user("backhaul")
    answer = await user.ask(f"GET / | {OWN.replace('Hops: 1', 'Hops: 3')} | Hawker-Machine: m1")
    assert answer.status == 508


async def test_an_app_may_hand_a_request_on_and_only_the_edge_hears_it(stage: Stage) -> None:
    await stage.machine(saying(b"HTTP/1.1 200 OK\r\nFly-Replay: region=fra\r\nContent-Length: 0\r\n\r\n"))
    user = await stage.user("backhaul")
    assert (await user.ask(f"GET / | {OWN}"))["fly-replay"] == "region=fra"


@pytest.fixture
async def edge(stage: Stage) -> AsyncIterator[Stage]:
    """A second stage on the same kind of plane. `behind` makes the first one's machines its own, over the backhaul."""
    other = Stage(stage.kind)
    yield other
    await other.close()


async def behind(stage: Stage, edge: Stage, app: str = "web", port: int = 80) -> None:
    door = await stage.open()
    fields = ((b"hawker-backhaul", b"secret"), (b"hawker-app", app.encode()), (b"hawker-port", b"%d" % port))
    route = edge.web if app == "web" else edge.app(app)
    for machine in stage.router.routes[f"{app}.example"].machines:
        headers = (*fields, (b"hawker-machine", machine.name.encode()))
        route.machines.append(FakeMachine(machine.name, door.backhaul, headers=headers))


async def test_a_request_passes_two_proxies_and_tells_them_apart(stage: Stage, edge: Stage) -> None:
    machine = await stage.machine(echo)
    await behind(stage, edge)
    answer = await edge.ask("POST / | Content-Length: 4 | Hawker-Timing: 1 | Hawker-Backhaul: wrong", b"body")
    assert (answer.status, answer.body) == (200, b"body")
    (visit,) = machine.visits
    assert visit["fly-request-id"] == answer["fly-request-id"]
    assert not any(name.startswith(b"hawker-") for name, _ in [*visit.fields, *answer.fields])
    assert visit.all("via") == ["1.1 hawker"]
    assert edge.web.machines[0].heard == [b"1/20/25"]
    timing = ", ".join(answer.all("server-timing"))
    assert "edge-first-byte" in timing
    assert "worker-first-byte" in timing


async def test_the_edge_tries_another_machine_when_one_has_moved(stage: Stage, edge: Stage) -> None:
    await stage.machine(name="m1")
    await stage.machine(echo, name="m2")
    await behind(stage, edge)
    stage.web.machines.pop(0)
    answer = await edge.ask("POST / | Content-Length: 4", b"body")
    assert (answer.status, answer.body) == (200, b"body")
    assert edge.web.machines[0].failures == ["elsewhere"]


@pytest.mark.parametrize(("method", "status"), [("GET", 200), ("POST", 502)])
async def test_the_edge_repeats_what_may_be_repeated_when_a_machine_breaks_off_behind_its_door(
    stage: Stage, edge: Stage, method: str, status: int
) -> None:
    await stage.machine(resetting)
    await stage.machine(echo)
    await behind(stage, edge)
    answer = await edge.ask(f"{method} / | Content-Length: 0")
    assert answer.status == status
    assert edge.web.machines[0].failures == ["reset"]


@pytest.mark.parametrize("chosen", ["Hawker-Machine: m1", "Hawker-Machine:"])
async def test_a_request_is_held_only_for_what_the_proxy_before_has_left(stage: Stage, chosen: str) -> None:
    await stage.machine(awake=False)
    user = await stage.user("backhaul")
    answer = await user.ask(f"GET / | {OWN} | {chosen} | Hawker-Wait: 50")
    assert answer.status == 503


async def test_a_proxy_tells_the_next_how_long_it_may_hold_a_request(stage: Stage, edge: Stage) -> None:
    await stage.machine(awake=False)
    await behind(stage, edge)
    edge.settings["wait_s"] = 0.05
    assert (await edge.ask("GET /")).status == 503


@pytest.mark.parametrize(("told", "sent"), [("", 3), ("Hawker-Sent: 1", 2), ("Hawker-Sent: 3", 1)])
async def test_who_chooses_a_machine_counts_those_that_have_got_a_request_before(
    stage: Stage, told: str, sent: int
) -> None:
    machines = [await stage.machine(resetting) for _ in range(4)]
    user = await stage.user("backhaul")
    answer = await user.ask(f"GET / | {OWN} | Hawker-Machine:" + (f" | {told}" if told else ""))
    assert (answer.status, answer["hawker-elsewhere"]) == (421, "reset")
    assert sum(len(machine.visits) for machine in machines) == sent


async def test_an_edge_takes_what_another_region_says_of_its_tries_for_all(stage: Stage, edge: Stage) -> None:
    machines = [await stage.machine(resetting) for _ in range(4)]
    fields = (
        (b"hawker-backhaul", b"secret"),
        (b"hawker-app", b"web"),
        (b"hawker-port", b"80"),
        (b"hawker-machine", b""),
    )
    door = await stage.open()
    edge.web.machines = [FakeMachine(name, door.backhaul, headers=fields) for name in ("far", "farther")]
    assert (await edge.ask("GET /")).status == 502
    assert sum(len(machine.visits) for machine in machines) == 3


async def test_a_machine_cannot_speak_as_its_workers_proxy(stage: Stage, edge: Stage) -> None:
    await stage.machine(saying(b"HTTP/1.1 421 No\r\nHawker-Elsewhere: gone\r\nContent-Length: 0\r\n\r\n"))
    await behind(stage, edge)
    assert (await edge.ask("GET /")).status == 421
    assert edge.web.machines[0].failures == []


async def test_plain_tcp_passes_over_the_backhaul(stage: Stage, edge: Stage) -> None:
    machine, seen = await plain_machine(stage)
    await behind(stage, edge, "db", 5432)
    edge.router.by_port[5432] = edge.router.routes["db.example"]
    edge.router.routes["db.example"].port = ServicePort()
    user = await edge.user("own")
    await user.send(b"hello")
    assert await user.bytes(5) == b"HELLO"
    assert machine.in_flight == 1
    user.end()
    assert await user.bytes(3) == b"bye"
    assert seen == [b"hello"]


async def test_an_upgrade_passes_over_the_backhaul(stage: Stage, edge: Stage) -> None:
    async def switching(visit: Visit) -> None:
        await visit.send(b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n")
        visit.complete = True
        await visit.send((await visit.reader.read(5)).upper())

    await stage.machine(switching)
    await behind(stage, edge)
    user = await edge.user()
    await user.send(head("GET / | Connection: upgrade | Upgrade: x"))
    assert (await user.head(upgrade=True)).status == 101
    await user.send(b"hello")
    assert await user.bytes(5) == b"HELLO"

"""`fly-replay`: a machine hands a request on to another machine, region or app."""

from __future__ import annotations

import json

import pytest
from tests.kit.raw_http import Behaviour, Visit, chunked, echo, head, resetting, saying
from tests.kit.waiting import until
from tests.proxy.conftest import Stage

from hawker.model.services import ReplayCache


def handing(words: str, body: bytes = b"not for users", *fields: str) -> Behaviour:
    """Reads the request and hands it on."""

    async def behaviour(visit: Visit) -> None:
        await visit.read()
        await visit.answer(body, "307 Elsewhere", f"Fly-Replay: {words}", *fields)

    return behaviour


def handing_json(**words: object) -> Behaviour:
    async def behaviour(visit: Visit) -> None:
        await visit.read()
        data = json.dumps(words).encode()
        await visit.answer(data, "200 OK", "Content-Type: application/vnd.fly.replay+json")

    return behaviour


async def test_a_request_goes_where_its_machine_says_with_its_body(stage: Stage) -> None:
    first = await stage.machine(handing("instance=m2;state=seen"))
    second = await stage.machine(echo)
    user = await stage.user()
    for _ in range(2):
        answer = await user.ask("POST /a | Content-Length: 4", b"body")
        assert (answer.status, answer.body, answer.all("fly-replay")) == (200, b"body", [])
    source = dict(part.split("=") for part in second.visits[0]["fly-replay-src"].split(";"))
    assert (source["instance"], source["region"], source["state"]) == ("m1", "ams", "seen")
    assert int(source["t"]) > 1_600_000_000_000_000
    assert second.visits[0]["fly-replay-cache-status"] == "miss"
    assert (first.connections, len(first.visits)) == (1, 2), "its answer was read, and its connection kept"
    assert second.visits[0]["fly-request-id"] == first.visits[0]["fly-request-id"]


async def test_a_request_goes_to_the_region_that_is_named(stage: Stage) -> None:
    await stage.machine(handing('region="fra,ams"'))
    await stage.machine(region="fra")
    stage.web.machines[0].region = "lhr"
    assert (await stage.ask("GET /")).body == b"hello"


async def test_what_a_user_asked_for_does_not_overrule_a_replay_behind_another_proxy(stage: Stage) -> None:
    """Which chooses by the same fields."""
    await stage.machine(handing("region=fra"))
    remote_proxy = await stage.machine(region="fra", headers=((b"hawker-app", b"web"),))
    answer = await stage.ask("GET / | Fly-Force-Instance-Id: m1 | Fly-Prefer-Region: ams")
    assert (answer.status, remote_proxy.visits[0].all("fly-force-instance-id")) == (200, [])
    assert remote_proxy.visits[0]["fly-prefer-region"] == "ams"
    stage.web.machines[0].awake.clear()
    assert (await stage.ask("GET / | Fly-Force-Instance-Id: m2")).status == 200
    assert remote_proxy.visits[1]["fly-force-instance-id"] == "m2"


async def test_elsewhere_is_any_but_the_one_that_says_so(stage: Stage) -> None:
    await stage.machine(handing("elsewhere=true"))
    await stage.machine()
    assert (await stage.ask("GET /")).body == b"hello"


async def test_a_request_may_go_to_another_app(stage: Stage) -> None:
    await stage.machine(handing("app=other"))
    other = await stage.machine(name="o1", route=stage.app("other"))
    assert (await stage.ask("GET /")).body == b"hello"
    assert other.visits[0]["host"] == "web.example"


async def test_an_app_that_is_not_there_is_said_so(stage: Stage) -> None:
    await stage.machine(handing("app=none"))
    answer = await stage.ask("GET /")
    assert answer.status == 404
    assert b"PA04" in answer.body


async def test_json_says_the_same_and_may_change_the_request(stage: Stage) -> None:
    await stage.machine(
        handing_json(
            instance="m2",
            transform={
                "path": "/new?a=b",
                "delete_headers": ["X-Secret"],
                "set_headers": [{"name": "X-Given", "value": "1"}],
            },
        )
    )
    second = await stage.machine(echo)
    assert (await stage.ask("POST /old | X-Secret: 1 | Content-Length: 4", b"body")).body == b"body"
    (visit,) = second.visits
    assert (visit.target, visit.all("x-secret"), visit["x-given"]) == ("/new?a=b", [], "1")


@pytest.mark.parametrize(
    "given",
    [
        [("Host", "a.example"), ("host", "b.example")],
        [("Host", "a b")],
        [("Host", "")],
        [("Transfer_Encoding", "chunked")],
        [("Content_Length", "0")],
    ],
)
async def test_json_gives_no_request_two_readings(stage: Stage, given: list[tuple[str, str]]) -> None:
    fields = [{"name": name, "value": value} for name, value in given]
    await stage.machine(handing_json(instance="m2", transform={"set_headers": fields}))
    second = await stage.machine()
    answer = await stage.ask("GET /")
    assert (answer.status, b"PA03" in answer.body) == (502, True)
    assert not second.visits


async def test_json_may_name_one_host_for_any_version(stage: Stage) -> None:
    transform = {"set_headers": [{"name": "Host", "value": "a.example:81"}]}
    await stage.machine(handing_json(instance="m2", transform=transform))
    second = await stage.machine()
    stage.router.by_port[5432] = stage.web
    assert (await stage.ask("GET /")).body == b"hello"
    old = await stage.user("own")
    await old.send(b"GET / HTTP/1.0\r\n\r\n")
    assert (await old.answer()).body == b"hello"
    assert [visit.all("host") for visit in second.visits] == [["a.example:81"], ["a.example:81"]]


async def test_json_may_be_chunked(stage: Stage) -> None:
    said = chunked(b'{"instance":', b'"m2"}')
    kind = b"Content-Type: application/vnd.fly.replay+json; charset=utf-8\r\n"
    await stage.machine(saying(b"HTTP/1.1 200 OK\r\n" + kind + b"Transfer-Encoding: chunked\r\n\r\n" + said))
    await stage.machine()
    assert (await stage.ask("GET /")).body == b"hello"


@pytest.mark.parametrize("body", [b"{", b'{"instance": 5}', b"{}", b"x" * 100_000])
async def test_json_that_cannot_be_read_is_an_error_of_the_app(stage: Stage, body: bytes) -> None:
    kind = b"Content-Type: application/vnd.fly.replay+json\r\nContent-Length: %d\r\n\r\n" % len(body)
    await stage.machine(saying(b"HTTP/1.1 200 OK\r\n" + kind + body))
    answer = await stage.ask("GET /")
    assert answer.status == 502
    assert b"PA03" in answer.body


async def test_words_that_are_not_known_are_an_error_of_the_app(stage: Stage) -> None:
    await stage.machine(handing("planet=mars"))
    answer = await stage.ask("GET /")
    assert answer.status == 502
    assert b"PA03" in answer.body


async def test_machines_that_hand_a_request_to_each_other_are_stopped(stage: Stage) -> None:
    first = await stage.machine(handing("instance=m2"))
    second = await stage.machine(handing("instance=m1"))
    answer = await stage.ask("GET /")
    assert answer.status == 508
    assert b"PA02" in answer.body
    assert len(first.visits) + len(second.visits) == 11


async def test_a_body_that_is_too_large_to_be_kept_cannot_be_handed_on(stage: Stage) -> None:
    stage.settings["replay_bytes"] = 1000
    await stage.machine(handing("instance=m2"))
    second = await stage.machine(echo)
    answer = await stage.ask("POST / | Content-Length: 100000", b"x" * 100_000)
    assert answer.status == 413
    assert b"PA01" in answer.body
    assert second.visits == []


async def test_a_request_may_be_handed_on_before_its_body_has_come(stage: Stage) -> None:
    async def at_once(visit: Visit) -> None:
        await visit.answer(b"", "200 OK", "Fly-Replay: instance=m2")

    await stage.machine(at_once)
    second = await stage.machine(echo)
    user = await stage.user()
    await user.send(head("POST / | Transfer-Encoding: chunked") + b"4\r\nhalf\r\n")
    await until(lambda: len(second.visits) == 1)
    await user.send(b"4\r\nhalf\r\n0\r\n\r\n")
    assert (await user.answer("POST")).body == b"halfhalf"


async def test_an_answer_of_any_length_is_not_waited_for(stage: Stage) -> None:
    await stage.machine(saying(b"HTTP/1.1 200 OK\r\nFly-Replay: instance=m2\r\nContent-Length: 99999999\r\n\r\nsome"))
    await stage.machine()
    assert (await stage.ask("GET /")).body == b"hello"


async def test_an_upgrade_may_be_handed_on(stage: Stage) -> None:
    async def switching(visit: Visit) -> None:
        await visit.send(b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n")
        visit.complete = True
        await visit.send((await visit.reader.read(5)).upper())

    await stage.machine(handing("instance=m2"))
    await stage.machine(switching)
    user = await stage.user()
    await user.send(head("GET / | Connection: upgrade | Upgrade: x"))
    assert (await user.head(upgrade=True)).status == 101
    await user.send(b"hello")
    assert await user.bytes(5) == b"HELLO"


async def test_what_nobody_takes_falls_back_to_the_machine_that_handed_it_on(stage: Stage) -> None:
    async def once(visit: Visit) -> None:
        if visit.all("fly-replay-failed"):
            await echo(visit)
        else:
            await handing("instance=m9;fallback=force_self")(visit)

    first = await stage.machine(once)
    assert (await stage.ask("POST / | Content-Length: 4", b"body")).body == b"body"
    failed = dict(part.split("=") for part in first.visits[1]["fly-replay-failed"].split(";"))
    assert (failed["instance"], failed["replay_source"], failed["reason"]) == ("m9", "m1", "no_candidate")


async def test_what_came_back_is_not_handed_on_again(stage: Stage) -> None:
    first = await stage.machine(handing("instance=m9;fallback=force_self"))
    answer = await stage.ask("GET /")
    assert (answer.status, answer.body[:4]) == (502, b"PA03")
    assert len(first.visits) == 2


async def test_what_breaks_off_elsewhere_falls_back_if_it_may_be_repeated(stage: Stage) -> None:
    async def once(visit: Visit) -> None:
        if visit.all("fly-replay-failed"):
            await echo(visit)
        else:
            await handing("instance=m2;fallback=prefer_self")(visit)

    first = await stage.machine(once)
    await stage.machine(resetting)
    assert (await stage.ask("PUT / | Content-Length: 4", b"body")).body == b"body"
    assert "reason=retries_exhausted" in first.visits[1]["fly-replay-failed"]
    assert (await stage.ask("POST / | Content-Length: 4", b"body")).status == 502


async def test_what_is_waited_for_too_long_elsewhere_falls_back(stage: Stage) -> None:
    async def once(visit: Visit) -> None:
        if visit.all("fly-replay-failed"):
            await echo(visit)
        else:
            await handing("instance=m2;timeout=100ms;fallback=force_self")(visit)

    first = await stage.machine(once)
    await stage.machine(awake=False)
    assert (await stage.ask("GET /")).status == 200
    assert "reason=timeout" in first.visits[1]["fly-replay-failed"]


async def test_where_requests_below_a_path_went_is_remembered(stage: Stage) -> None:
    remembered = ("Fly-Replay-Cache: /a/*", "Fly-Replay-Cache-TTL-Secs: 60", "Fly-Replay-Cache-Allow-Bypass: yes")
    first = await stage.machine(handing("instance=m2", b"", *remembered))
    second = await stage.machine(echo)
    for path in ("/a/b", "/a/c", "/a"):
        assert (await stage.ask(f"GET {path}")).status == 200
    assert [visit.target for visit in first.visits] == ["/a/b"]
    assert [visit["fly-replay-cache-status"] for visit in second.visits] == ["miss", "hit", "hit"]
    await stage.ask("GET /b")
    await stage.ask("GET /a/d | Fly-Replay-Cache-Control: skip")
    assert [visit.target for visit in first.visits] == ["/a/b", "/b", "/a/d"]


async def test_where_a_session_went_is_remembered_for_it_alone(stage: Stage) -> None:
    stage.serves(replay_cache=(ReplayCache(path_prefix="/", ttl_s=60, type="cookie", name="s"),))
    first = await stage.machine(handing("instance=m2"))
    await stage.machine(echo)
    for cookie in ("s=1", "s=1", "s=2"):
        assert (await stage.ask(f"GET / | Cookie: a=b; {cookie}")).status == 200
    assert len(first.visits) == 2


async def test_a_way_that_is_remembered_but_leads_nowhere_is_forgotten(stage: Stage) -> None:
    remembered = ("Fly-Replay-Cache: /*", "Fly-Replay-Cache-TTL-Secs: 60")
    first = await stage.machine(handing("instance=m2", b"", *remembered))
    await stage.machine(echo)
    await stage.ask("GET /")
    stage.web.machines[1].name = "m3"
    first.behaviour = echo
    assert (await stage.ask("GET /")).status == 200
    assert len(first.visits) == 2


async def test_users_cannot_say_that_they_were_replayed(stage: Stage) -> None:
    machine = await stage.machine()
    await stage.ask("GET / | Fly-Replay-Src: instance=m9 | Fly-Replay-Failed: x | Fly-Replay-Cache-Status: hit")
    assert not any(name.startswith(b"fly-replay") for name, _ in machine.visits[0].fields)

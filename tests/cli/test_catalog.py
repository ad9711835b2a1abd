"""`hawker sql`, `hawker watch` and `hawker members`, against a real market and against a server that breaks off."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.cli.programs import PROGRAM, Ended, environment, hawker
from tests.client.servers import Call, chunk, serving
from tests.kit.markets import Market, running_market
from tests.kit.waiting import wait_until

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(name: str, data: str, id: str = "") -> bytes:
    lead = f"event: {name}\nid: {id}\n" if id else f"event: {name}\n"
    return chunk(f"{lead}data: {data}\n\n".encode())


async def watched(*streams: list[bytes], arguments: tuple[str, ...] = ()) -> tuple[Ended, list[str]]:
    """How `hawker watch` ends when its calls are answered so, one after the other, and what it asked for. An answer
    without an end breaks off."""

    async def script(call: Call) -> None:
        await call.request()
        await call.send(HEAD)
        for piece in streams[min(call.number, len(streams)) - 1]:
            await call.send(piece)

    async with serving(script) as server:
        env = {"HAWKER_ENDPOINT": f"http://127.0.0.1:{server.port}", "HAWKER_TOKEN": "t"}
        ended = await asyncio.to_thread(hawker, "watch", "select 1", *arguments, env=env)
    return ended, server.requests


SNAPSHOT = [event("columns", '["id"]'), event("row", '{"row":1,"values":["m1"]}'), event("end", '{"rows":1}', "S/0")]
OVER = b"0\r\n\r\n"


async def test_a_watch_that_breaks_off_goes_on_where_it_was() -> None:
    first = [*SNAPSHOT, event("change", '{"kind":"insert","row":2,"values":["m2"]}', "S/1")]
    second = [event("columns", '["id"]'), event("change", '{"kind":"delete","row":1,"values":["m1"]}', "S/2"), OVER]
    ended, requests = await watched(first, second)
    assert (ended.status, ended.out) == (0, "id\nm1\n+ m2\n- m1\n")
    assert ended.err.endswith("; resuming\n")
    assert requests == ["GET /v1/hawker/subscribe?query=select+1", "GET /v1/hawker/subscribe?query=select+1&from=S%2F1"]


async def test_a_watch_that_was_too_slow_goes_on_and_one_that_missed_too_much_begins_anew() -> None:
    slow = event("error", '{"error": "changes came faster than they were taken", "status": "too_slow"}')
    second = [SNAPSHOT[0], event("reset", '{"why": "it is not kept"}'), *SNAPSHOT[1:], OVER]
    ended, requests = await watched([*SNAPSHOT, slow, OVER], second)
    assert (ended.status, ended.out) == (0, "id\nm1\nid\nm1\n")
    notes = [
        "changes came faster than they were taken; resuming",
        "what changed meanwhile is not kept; everything again:",
    ]
    assert ended.err.splitlines() == notes
    assert len(requests) == 2


async def test_a_watch_whose_query_fails_ends_with_that_error() -> None:
    error = '{"error": "too many rows", "status": "invalid_argument", "details": {"hint": "add a limit"}}'
    ended, requests = await watched([*SNAPSHOT, event("error", error), OVER])
    assert (ended.status, ended.err) == (2, "error: too many rows\n  try: add a limit\n")
    assert len(requests) == 1


async def test_a_watch_for_programs_is_an_event_a_line() -> None:
    ended, _ = await watched([*SNAPSHOT, OVER], arguments=("--json",))
    lines = [json.loads(line) for line in ended.out.splitlines()]
    assert lines[0] == {"event": "columns", "data": ["id"], "id": None}
    assert lines[-1] == {"event": "end", "data": {"rows": 1}, "id": "S/0"}


def test_a_worker_and_all_workers_are_not_asked_at_once() -> None:
    ended = hawker("sql", "--worker", "a", "--workers", "select 1")
    assert ended.status == 2
    assert ended.err == "error: give --worker or --workers, not both\n  try: hawker sql --help\n"


# --- a real market ---------------------------------------------------------------------------------------------------


class User:
    def __init__(self, market: Market) -> None:
        self.env = {"HAWKER_HOME": str(market.home)}
        self.market = market

    def __call__(self, *arguments: str, status: int = 0) -> Ended:
        ended = hawker(*arguments, env=self.env)
        assert ended.status == status, (arguments, ended)
        return ended

    @contextmanager
    def watching(self, query: str) -> Iterator[subprocess.Popen[str]]:
        with subprocess.Popen(
            [*PROGRAM, "watch", query], env=environment(self.env), stdout=subprocess.PIPE, text=True
        ) as process:
            yield process
            process.terminate()


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    with running_market(tmp_path_factory.mktemp("catalog"), ("--region", "ord", "--region", "mad")) as market:
        user = User(market)
        user("apps", "create", "web")
        yield user


@pytest.mark.slow
@pytest.mark.timeout(120)
class TestMarket:
    def test_sql_reads_the_catalog(self, user: User) -> None:
        def listed() -> list[list[str]]:
            found = user("sql", "select name, region from workers order by name")
            return [line.split() for line in found.out.splitlines()]

        rows = [["name", "region"], ["mad-1", "mad"], ["mad-2", "mad"], ["ord-1", "ord"], ["ord-2", "ord"]]
        wait_until(lambda: listed() == rows, "every worker is in the catalog")
        answer = user("sql", "--json", "select count(*) as n from workers").json()
        assert answer == {"columns": ["n"], "rows": [[4]]}
        assert "syntax error" in user("sql", "selec", status=2).err
        refused = user("sql", "delete from workers_of", status=2).err
        assert refused == 'error: query: "delete from workers_of" is not valid: not authorized\n'

    def test_watch_shows_a_machine_come_and_go(self, user: User) -> None:
        with user.watching("select name, state from machines") as process:
            assert process.stdout is not None
            assert process.stdout.readline().split() == ["name", "state"]
            order = ("machine", "run", "--app", "web", "--region", "ord", "--name", "seen", "host", "--", "sleep", "60")
            user(*order)
            assert process.stdout.readline().split()[:2] == ["+", "seen"]
            user("machine", "destroy", "seen", "--force")
            lines = iter(process.stdout.readline, "")
            assert any(line.split()[:2] == ["-", "seen"] for line in lines)

    def test_members_shows_who_is_there_and_how_fresh_its_rows_are(self, user: User) -> None:
        def shown() -> dict[str, list[str]]:
            header, *rows = user("members").out.splitlines()
            assert header.split() == ["member", "region", "roles", "status", "heard", "behind"]
            return {(cells := re.split(r"\s{2,}", row))[0]: cells for row in rows}

        def fresh() -> bool:
            found = shown()
            heard = [found[name][4] != "-" for name in ("ord-1", "ord-2", "mad-1", "mad-2") if name in found]
            return len(found) == 5 and heard == [True] * 4

        wait_until(fresh, "each worker's rows are confirmed")
        found = shown()
        assert [found[name][1:4] for name in ("ord-1", "mad-1")] == [
            ["ord", "worker, proxy", "alive"],
            ["mad", "worker", "remote"],
        ]
        members = user("members", "--json").json()
        assert [m["name"] for m in members if m["here"]] == [members[0]["name"]]

"""Workers as each other's source of images: who is asked first, and what becomes of peers that are slow, wrong or
gone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from tests.kit.image_markets import market
from tests.kit.images import have
from tests.kit.oci import file, image, layer
from tests.kit.shelves import digest
from tests.kit.waiting import eventually

from hawker.core.sketch import short
from hawker.errors import NotFound, TooManyRequests
from hawker.host import Host
from hawker.http.app import AGENT, Serving, Tokens
from hawker.http.call import Call
from hawker.http.handlers import Route, unread
from hawker.http.server import serve
from hawker.model.image_api import Named, NameImage, PrefetchImage, ReadBlob
from hawker.telemetry import Metrics
from hawker.worker.images.peers import LOOK_S, Peers

SHOP = "registry.invalid/shop:1"
BLOB = b"the bytes of a layer" * 1000
DIGEST = digest("a layer")
ROOM = image([layer([file("room", b"r" * 50_000)])])


class Other:
    """Another worker, which serves one blob and one name, or refuses."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[str] = []
        self.has = False
        self.sketched = False
        self.busy = False
        self.silent = asyncio.Event()
        self.silent.set()

    async def blob(self, call: Call) -> Any:
        from starlette.responses import Response

        self.asked.append(call.request.method)
        await self.silent.wait()
        if self.busy:
            raise TooManyRequests("busy")
        if not self.has or call.path("digest") != DIGEST:
            raise NotFound("not here")
        offset = int(call.request.headers.get("range", "bytes=0-")[6:-1])
        return Response(BLOB[offset:], 206 if offset else 200)

    async def named(self, call: Call) -> Any:
        self.asked.append("name")
        await self.silent.wait()
        return Named(digest=DIGEST if self.has and call.request.query_params["image"] == SHOP else "")

    def routes(self) -> tuple[Route, ...]:
        return unread(ReadBlob, self.blob), unread(NameImage, self.named)


class Rows:
    """A catalog that knows these workers."""

    def __init__(self, rows: list[tuple[Any, ...]]) -> None:
        self.on_applied: list[Any] = []
        self._rows = rows
        self.looks = 0

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        assert values == ("ord", "me")
        self.looks += 1
        return self._rows


@asynccontextmanager
async def region(*others: Other, look_s: float = LOOK_S) -> AsyncIterator[Peers]:
    servers, rows = [], []
    host = Host(lambda: 1_800_000_000.0, Random(5))
    for other in others:
        app = Serving(host, Tokens({"token": AGENT}), Metrics(), "ord", other.name).app(other.routes())
        sock = socket.create_server(("127.0.0.1", 0))
        servers.append(await serve(app, sock, host))
        port = sock.getsockname()[1]
        hashes = msgspec.json.encode([short(DIGEST), short(SHOP)] if other.sketched else []).decode()
        rows.append((other.name, "127.0.0.1", port, hashes, "[]"))
    peers = Peers("me", "ord", Rows(rows), "token", host, look_s=look_s)
    try:
        yield peers
    finally:
        for other in others:
            other.silent.set()
        await peers.close()
        for server in servers:
            await server.close()


async def read(peers: Peers, offset: int = 0) -> bytes | None:
    pieces = await peers(DIGEST, len(BLOB), offset)
    return None if pieces is None else b"".join([piece async for piece in pieces])


async def test_who_is_said_to_have_it_is_asked_and_nobody_else() -> None:
    one, two = Other("one"), Other("two")
    two.has = two.sketched = True
    async with region(one, two) as peers:
        assert await read(peers, 1234) == BLOB[1234:]
        assert await peers.resolve(SHOP) == DIGEST
    assert (one.asked, two.asked) == ([], ["GET", "name"])


async def test_who_asks_again_was_not_content_and_gets_it_from_somebody_else() -> None:
    one, two = Other("one"), Other("two")
    for other in (one, two):
        other.has = other.sketched = True
    async with region(one, two) as peers:
        assert [await read(peers), await read(peers), await read(peers)] == [BLOB, BLOB, None]
    assert (one.asked, two.asked) == (["GET"], ["GET"])


async def test_when_nobody_is_said_to_have_it_a_few_are_asked_at_once() -> None:
    others = [Other(f"w{n}") for n in range(9)]
    async with region(*others) as peers:
        assert await read(peers) is None
        assert await read(peers) is None  # a moment later nobody is asked again
        assert await peers.resolve(SHOP) is None
        assert sum(len(other.asked) for other in others) == 12  # six of them, for each
    for other in others:
        other.has = True
        other.asked.clear()
    async with region(*others) as peers:
        assert await read(peers) == BLOB


async def test_one_that_is_busy_or_has_it_no_more_leaves_it_to_the_next() -> None:
    busy, gone, fine = Other("busy"), Other("gone"), Other("fine")
    for other in (busy, gone, fine):
        other.sketched = True
    busy.busy = fine.has = True
    async with region(busy, gone, fine) as peers:
        assert await read(peers) == BLOB


async def test_an_answer_that_does_not_read_leaves_it_to_the_next() -> None:
    class Odd(Other):
        async def named(self, call: Call) -> Any:
            from starlette.responses import Response

            self.asked.append("name")
            return Response(b'{"digest": "\xff"}')

    odd, fine = Odd("odd"), Other("fine")
    odd.sketched = fine.has = True  # so it is asked first, and alone
    async with region(odd, fine) as peers:
        for _ in range(20):  # one that has no time on this machine does not answer
            if found := await peers.resolve(SHOP):
                break
    assert found == DIGEST
    assert set(odd.asked) == {"name"}


async def test_the_fastest_of_late_is_asked_first_and_one_that_was_never_asked_before_them() -> None:
    others = [Other(f"w{n}") for n in range(3)]
    for other in others:
        other.has = other.sketched = True
    async with region(*others) as peers:
        peers._bytes_per_s |= {"w0": 1e6, "w2": 5e6}
        order = []
        for _ in range(3):
            await read(peers)
            order += [other.name for other in others if other.asked and other.name not in order]
    assert order == ["w1", "w2", "w0"]


async def test_a_silent_one_costs_a_moment() -> None:
    took = [60.0]
    for _ in range(10):  # the host may be busy
        silent, fine = Other("silent"), Other("fine")
        silent.silent.clear()
        fine.has = True
        async with region(silent, fine) as peers:
            began = asyncio.get_running_loop().time()
            async with asyncio.timeout(20):
                assert await read(peers) == BLOB
            took.append(asyncio.get_running_loop().time() - began)
        if min(took) < 1.8:
            break
    assert min(took) < 1.8


def rows_of(peers: Peers) -> Rows:
    assert isinstance(peers._view, Rows)
    return peers._view


async def test_the_catalog_is_looked_at_once_for_all_that_is_fetched_within_a_moment() -> None:
    one = Other("one")
    one.has = one.sketched = True
    async with region(one) as peers:
        assert await peers.resolve(SHOP) == DIGEST
        assert await read(peers) == BLOB
        assert await read(peers) is None
        assert rows_of(peers).looks == 1


async def test_what_the_catalog_learns_shows_a_moment_later() -> None:
    one = Other("one")
    one.has = one.sketched = True
    async with region(one, look_s=0.01) as peers:
        rows = rows_of(peers)._rows
        there = rows.pop()
        assert await peers.resolve(SHOP) is None
        rows.append(there)

        async def found() -> bool:
            return await peers.resolve(SHOP) == DIGEST

        await eventually(found, "the worker is asked")


async def test_one_that_takes_no_connection_is_passed_over() -> None:
    fine = Other("fine")
    fine.has = fine.sketched = True
    async with region(fine) as peers:
        rows = rows_of(peers)._rows
        rows.insert(0, ("down", "127.0.0.1", 1, rows[0][3], "[]"))
        assert await read(peers) == BLOB


async def test_bytes_that_are_wrong_at_one_worker_come_from_another(tmp_path: Path) -> None:
    async with market(tmp_path, ["ord-1", "ord-2", "ord-3"], offline=True) as there:
        for name in ("ord-1", "ord-2"):
            found = await have(there.images[name], ROOM, SHOP)
        damaged = there.images["ord-1"].directory / "blobs" / "sha256" / found.layers[0].digest.removeprefix("sha256:")
        damaged.write_bytes(bytes(damaged.stat().st_size))
        there.peers("ord-3")._bytes_per_s |= {"ord-1": 2e9, "ord-2": 1e9}
        events = await there.all_of(PrefetchImage(image=SHOP, worker="ord-3"))
        assert events[-1].event == "done", events
        tree = there.images["ord-3"].layers(found)[0]
        assert (tree / "room").read_bytes() == b"r" * 50_000

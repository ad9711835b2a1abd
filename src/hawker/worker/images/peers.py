"""Other workers as a source of images: blobs by digest, and what a name means, before a registry is asked.

The catalog's sketches say who may have something; those workers are asked first, the fastest of late before the others.
Sketches are some seconds old and do not tell everything, so when nobody in them has it a few of the region are asked at
once, all within a second. Whoever takes the bytes checks them against their digest, so a peer is trusted with nothing
but time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from hawker.catalog.view import View
from hawker.client.connection import Peer, Response
from hawker.core.sketch import short
from hawker.errors import Unreachable
from hawker.host import Host
from hawker.http.app import WORKER
from hawker.model.image_api import Named, NameImage, ReadBlob
from hawker.model.request_codec import encode

ASKED_MOST = 6
"""How many workers are asked that no sketch names."""
TRIED_MOST = 3
"""How many workers are tried that a sketch names: after so many failures the registry is nearer."""
ASK_S = 1.0
HEAD_S = 3.0
"""How long to wait for a stream's head: a worker that serves as many as it can refuses at once."""
AGAIN_S = 10.0
"""For how long a worker that has sent a blob is not asked for it again."""
TIMES = 3
"""How often a transfer that was cut off, or brought wrong bytes, asks peers before it asks a registry."""
LOOK_S = 2.0
"""How long one look at the catalog serves, so that a pull needs one look for all its blobs. Sketches are older than
that."""
NAMES_BYTES_MAX = 64 << 10


class _Place(msgspec.Struct, frozen=True):
    name: str
    host: str
    port: int


class Peers:
    """The other workers of one worker's region, as `view` tells of them. As a function it is an image transfer's
    `Peer`: `(digest, size, offset)` gives the blob's bytes from `offset` on, or None."""

    def __init__(self, name: str, region: str, view: View, token: str, host: Host, *, look_s: float = LOOK_S) -> None:
        self._name = name
        self._region = region
        self._view = view
        self._headers = {"authorization": f"Bearer {token}"}
        self._host = host
        self._look_s = look_s
        self._seen: list[tuple[Any, ...]] | None = None
        self._looking_again: asyncio.TimerHandle | None = None
        self._peers: dict[_Place, Peer] = {}
        self._bytes_per_s: dict[str, float] = {}
        self._nobody: dict[str, float] = {}  # digests that nobody had, a moment ago
        self._gave: dict[tuple[str, str], float] = {}  # who began to send which digest, and when

    async def __call__(self, digest: str, size: int, offset: int) -> AsyncIterator[bytes] | None:
        """A second call for a digest means that the first peer's bytes were wrong or incomplete: another peer gives it
        then."""
        loop = asyncio.get_running_loop()
        self._nobody = {name: at for name, at in self._nobody.items() if loop.time() - at < ASK_S}
        if digest in self._nobody:
            return None
        said, others = self._candidates(digest)
        for place in said[:TRIED_MOST]:
            if (pieces := await self._open(place, digest, offset)) is not None:
                return pieces
        for place in await self._ask(others, "HEAD", encode(ReadBlob(digest=digest)).target):
            if (pieces := await self._open(place, digest, offset)) is not None:
                return pieces
        self._nobody[digest] = loop.time()
        return None

    async def resolve(self, reference: str) -> str | None:
        """The digest that a name means to another worker of the region; None when none that answers knows it."""
        said, others = self._candidates(reference)
        target = encode(NameImage(image=reference)).target
        for group in (said[:ASKED_MOST], others):
            for response in (await self._ask(group, "GET", target)).values():
                try:
                    named = msgspec.json.decode(response.body, type=Named)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    continue
                if named.digest:
                    return named.digest
        return None

    async def close(self) -> None:
        if self._looking_again:
            self._looking_again.cancel()
        peers = list(self._peers.values())
        self._peers.clear()
        await asyncio.gather(*(peer.close() for peer in peers))

    def _candidates(self, name: str) -> tuple[list[_Place], list[_Place]]:
        """Those that a sketch says have it, the fastest first, and some of the others, in any order."""
        wanted = f'"{short(name)}"'
        said: list[_Place] = []
        others: list[_Place] = []
        now = asyncio.get_running_loop().time()
        self._gave = {key: at for key, at in self._gave.items() if now - at < AGAIN_S}
        for worker, host, port, names, layers in self._rows():
            if (worker, name) in self._gave:
                continue
            has = wanted in (names or "") or wanted in (layers or "")
            (said if has else others).append(_Place(worker, host, port))
        self._host.rng.shuffle(said)
        said.sort(key=lambda place: -self._bytes_per_s.get(place.name, float("inf")))  # who was never asked gets a turn
        drawn = self._host.rng.sample(others, min(ASKED_MOST, len(others)))
        return said, drawn

    def _rows(self) -> list[tuple[Any, ...]]:
        """The region's other workers, each with its sketch."""
        if self._seen is None:
            self._seen = self._view.rows(
                "select w.name, w.host, w.port, i.names, i.layers from workers w left join images i on i.id = w.name "
                "and i.worker = w.name where w.region = ? and w.name <> ? order by w.name",
                (self._region, self._name),
            )
            self._looking_again = asyncio.get_running_loop().call_later(self._look_s, self._look_again)
            self._forget_all_but({_Place(worker, host, port) for worker, host, port, *_ in self._seen})
        return self._seen

    def _look_again(self) -> None:
        self._seen = None

    async def _ask(self, places: Sequence[_Place], method: str, target: str) -> Mapping[_Place, Response]:
        """All at once; those that answered with 200, the first to answer first."""
        answered: dict[_Place, Response] = {}

        async def ask(place: _Place) -> None:
            try:
                response = await self._peer(place).request(
                    method,
                    target,
                    headers={WORKER: place.name},
                    timeout_s=ASK_S,
                    body_bytes_max=NAMES_BYTES_MAX,
                )
            except Unreachable:
                return
            if response.status == 200:
                answered[place] = response

        await asyncio.gather(*(ask(place) for place in places))
        return answered

    async def _open(self, place: _Place, digest: str, offset: int) -> AsyncIterator[bytes] | None:
        stack = AsyncExitStack()
        target = encode(ReadBlob(digest=digest)).target
        headers = {WORKER: place.name, **({"range": f"bytes={offset}-"} if offset else {})}
        try:
            status, _, chunks = await stack.enter_async_context(
                self._peer(place).stream("GET", target, headers=headers, timeout_s=HEAD_S)
            )
        except Unreachable:
            return None
        if status != (206 if offset else 200):
            await stack.aclose()
            return None
        self._gave[place.name, digest] = asyncio.get_running_loop().time()
        return self._measured(place, stack, chunks)

    async def _measured(
        self, place: _Place, stack: AsyncExitStack, chunks: AsyncIterator[bytes]
    ) -> AsyncGenerator[bytes, None]:
        loop = asyncio.get_running_loop()
        began, count = loop.time(), 0
        async with stack:
            try:
                async for chunk in chunks:
                    count += len(chunk)
                    yield chunk
            finally:
                took_s = max(loop.time() - began, 0.001)
                before = self._bytes_per_s.get(place.name, count / took_s)
                self._bytes_per_s[place.name] = (before + count / took_s) / 2

    def _peer(self, place: _Place) -> Peer:
        peer = self._peers.get(place)
        if peer is None:
            peer = self._peers[place] = Peer(place.host, place.port, headers=self._headers)
        return peer

    def _forget_all_but(self, places: set[_Place]) -> None:
        """Drop the connections to workers that have gone or moved. A call under way ends with them."""
        for place in [place for place in self._peers if place not in places]:
            peer = self._peers.pop(place)
            asyncio.get_running_loop().create_task(peer.close(), name=f"close {place.name}")
        for name in self._bytes_per_s.keys() - {place.name for place in places}:
            del self._bytes_per_s[name]

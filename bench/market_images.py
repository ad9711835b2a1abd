"""What it brings to rank offers by where the image is: `python -m bench.market_images [--quick]`.

Workers of one region in one process over loopback: real agents, offers, catalog and image stores with real unpacking;
the driver runs nothing, so a machine has started when its image is ready. Each image lies on one worker, and a
registry that all share sends with a limit, as a network does. One machine of each image is ordered, one after the
other, with the term for images and without it. Told are how many went to the worker that had the image, and how long
an order took until its machine had started.

Rows "peers": workers fetch from each other first, over a loopback without a limit. The others ask the registry alone.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from tests.kit.image_markets import PROGRAM, ImageMarket, market
from tests.kit.images import have
from tests.kit.oci import Made, file, image, layer

from bench.command import Table, options, told
from hawker.telemetry import set_up_logs

PIECE = 64 << 10


class Registry:
    """Serves manifests and blobs from memory, `bytes_per_s` in all."""

    def __init__(self, made: Mapping[str, Made], bytes_per_s: float) -> None:
        self._manifests = {
            f"/v2/{name}/manifests/{of}": each for name, each in made.items() for of in ("1", each.digest)
        }
        self._blobs = {digest: data for each in made.values() for digest, data in each.blobs.items()}
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self.sent = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._answer(head.split(b" ", 2)[1].decode(), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, writer: asyncio.StreamWriter) -> None:
        kind = "application/octet-stream"
        if path in self._manifests:
            data, kind = self._manifests[path].manifest, self._manifests[path].media_type
        else:
            data = self._blobs.get(path.rpartition("/")[2], b"")
        status = "200 OK" if data or path == "/v2/" else "404 Not Found"
        writer.write(f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n".encode())
        loop = asyncio.get_running_loop()
        for at in range(0, len(data), PIECE):
            piece = data[at : at + PIECE]
            self._free_s = max(self._free_s, loop.time()) + len(piece) / self._bytes_per_s
            await asyncio.sleep(self._free_s - loop.time())
            writer.write(piece)
            await writer.drain()
        self.sent += len(data)


def random_image(rng: random.Random, mib: int) -> Made:
    """Of two layers, which do not compress."""
    half = mib << 19
    return image([layer([file(f"data-{n}", rng.randbytes(half))], compression="") for n in range(2)])


async def orders(there: ImageMarket, home: Mapping[str, str]) -> dict[str, Any]:
    """One machine of each image, one after the other."""
    took, hits = [], 0
    async with there.client() as client:
        await client.ok("POST", "/apps", {"app_name": "bench", "org_slug": "personal"})
        for name, worker in home.items():
            body = {"region": "ord", "config": {"image": name, "init": {"exec": [PROGRAM]}}}
            began = perf_counter()
            machine = await client.ok("POST", "/apps/bench/machines?wait=true", body)
            took.append((perf_counter() - began) * 1000)
            assert machine["state"] == "started", machine
            hits += machine["hawker"]["worker"] == worker
    cut = statistics.quantiles(took, n=10) if len(took) > 1 else took * 9
    return {"hits": hits, "orders": len(took), "p50_ms": statistics.median(took), "p90_ms": cut[8]}


async def measure(args: argparse.Namespace, *, weight: float, peers: bool) -> dict[str, Any]:
    rng = random.Random(args.seed)
    made = {f"image-{n}": random_image(rng, args.mib) for n in range(args.images)}
    registry = Registry(made, args.rate * 1e6)
    names = [f"ord-{n}" for n in range(1, args.workers + 1)]
    with tempfile.TemporaryDirectory(prefix="hawker-bench-") as place:
        async with registry.serving() as address, market(Path(place), names, image_weight=weight) as there:
            home = {}
            for name, each in made.items():
                worker = rng.choice(names)
                home[f"{address}/{name}:1"] = worker
                await have(there.images[worker], each, f"{address}/{name}:1")
            if not peers:
                for images in there.images.values():
                    images.fetchers.clear()
                    images.namers.clear()
            found = await orders(there, home)
            found["registry_mb"] = registry.sent / 1e6
            return {"image_weight": weight, "peers": peers, **found}


async def measured(given: argparse.Namespace, table: Table) -> None:
    for weight, peers in ((1.0, False), (0.0, False), (1.0, True), (0.0, True)):
        row = await measure(given, weight=weight, peers=peers)
        ranking = "with the image's term" if weight else "without it"
        source = "other workers, then the registry" if peers else "the registry"
        note = f"p90 {row['p90_ms']:.0f}, the registry sent {row['registry_mb']:.0f} MB"
        what = f"{ranking}, from {source}"
        table.add(f"{what}: placed where the image is", row["hits"], "", "", f"of {row['orders']}")
        table.add(f"{what}: order to started", row["p50_ms"], "ms", "", note)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--images", type=int, default=20)
    parser.add_argument("--mib", type=int, default=16, help="of each image")
    parser.add_argument("--rate", type=float, default=40.0, help="MB/s that the registry sends in all")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    if given.quick:
        given.workers, given.images, given.mib = 2, 2, 1
    set_up_logs(level="error")
    table = Table()
    asyncio.run(measured(given, table))
    told(table, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())

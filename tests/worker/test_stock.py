"""Images in the market, on the worker's side: what an offer says is missing, what a reservation keeps, the sketch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from tests.kit.shelves import MemoryShelf, an_image
from tests.kit.sim_worker import APP, REGION, SimWorker, a_worker, order
from tests.kit.virtual_time import virtual_time

from hawker.core.sketch import short
from hawker.images.base import Missing
from hawker.model.config import check_config
from hawker.model.market import Ask, Offer, Order, Parts, Reason, Refusal
from hawker.model.rows import SketchRow
from hawker.worker.drivers.base import Capabilities, Fingerprint
from hawker.worker.images.shelving import SKETCH_S, Sketching
from hawker.worker.images.stock import Stock, parts_of

SHOP = "registry.example/shop:1"
IMAGE = an_image(("base", 30_000_000), ("libraries", 15_000_000), ("shop", 5_000_000))
HEALTHY: Mapping[str, Fingerprint] = {
    "process": Fingerprint(driver="process", healthy=True),
    "container": Fingerprint(driver="container", healthy=True, capabilities=Capabilities(images=True)),
    "microvm": Fingerprint(driver="microvm", healthy=False, problem="qemu-system-x86_64 is not installed"),
}


def shelved(worker: SimWorker, **there: Any) -> MemoryShelf:
    """Give a worker images and the drivers for them."""
    shelf = MemoryShelf(**there)
    worker.market.drivers = HEALTHY
    worker.market.stock = Stock(shelf)
    return shelf


def offered(worker: SimWorker, image: str = SHOP, **fields: Any) -> Offer:
    answer = worker.market.offer(
        Ask(app=APP.name, region=REGION, image=image, resources=order("x").resources, **fields)
    )
    assert isinstance(answer, Offer)
    return answer


def ordered(key: str, **fields: Any) -> Order:
    return replace(order(key), config=check_config({"image": SHOP}).raw, **fields)


def lacks(offer: Offer) -> tuple[bool, int, int]:
    return offer.image_known, offer.image_missing_bytes, offer.image_transfer_ms


@virtual_time
async def test_a_worker_that_has_the_image_misses_nothing_and_tells_what_it_is_made_of(tmp_path: Path) -> None:
    async with a_worker(tmp_path, sweeping=False) as worker:
        shelved(worker).put(SHOP, IMAGE)
        offer = offered(worker)
        assert lacks(offer) == (True, 0, 0)
        assert offer.image_parts == Parts(IMAGE.digest, tuple((layer.digest, layer.size) for layer in IMAGE.layers))
        assert offered(worker, parts=offer.image_parts).image_parts is None  # the broker knows already


@virtual_time
async def test_a_worker_that_has_never_heard_of_the_image_says_so(tmp_path: Path) -> None:
    async with a_worker(tmp_path, sweeping=False) as worker:
        shelf = shelved(worker, **{SHOP: IMAGE})
        assert lacks(offered(worker)) == (False, 0, 0)
        assert shelf.asked == []  # an offer asks nobody


@virtual_time
async def test_told_what_it_is_made_of_a_worker_counts_the_layers_that_are_not_there(tmp_path: Path) -> None:
    async with a_worker(tmp_path, sweeping=False) as worker:
        shelf = shelved(worker)
        assert lacks(offered(worker, parts=parts_of(IMAGE))) == (True, 50_000_000, 1000)
        shelf.put("other:1", an_image(("base", 30_000_000), ("other", 7)))
        shelf.bytes_per_s = 10e6
        assert lacks(offered(worker, parts=parts_of(IMAGE))) == (True, 20_000_000, 2000)


@virtual_time
async def test_a_layer_that_an_image_has_twice_is_fetched_once(tmp_path: Path) -> None:
    async with a_worker(tmp_path, sweeping=False) as worker:
        shelved(worker)
        twice = an_image(("empty", 100), ("empty", 100))
        assert offered(worker, parts=parts_of(twice)).image_missing_bytes == 100


@virtual_time
async def test_what_a_fetch_has_brought_already_is_not_missing(tmp_path: Path) -> None:
    async with a_worker(tmp_path, sweeping=False) as worker:
        shelved(worker).partly[SHOP] = Missing(known=True, bytes=700, transfer_ms=40)
        assert lacks(offered(worker, parts=parts_of(IMAGE))) == (True, 700, 40)


@virtual_time
async def test_for_a_program_of_the_host_no_image_is_missing(tmp_path: Path) -> None:
    async with a_worker(tmp_path, sweeping=False) as worker:
        shelved(worker)
        assert lacks(offered(worker, "host")) == (True, 0, 0)


@virtual_time
async def test_a_worker_offers_only_what_one_of_its_drivers_can_run_and_names_it_else(tmp_path: Path) -> None:
    async with a_worker(tmp_path, sweeping=False) as worker:
        shelved(worker)
        for runtime, problem in (("microvm", "qemu-system-x86_64 is not installed"), ("wasm", "")):
            ask = Ask(app=APP.name, region=REGION, image=SHOP, resources=order("x").resources, runtime=runtime)
            refused = worker.market.offer(ask)
            assert isinstance(refused, Refusal)
            assert (refused.reason, refused.driver, refused.problem) == (Reason.no_driver, runtime, problem)
            wanted = replace(order("a"), config={"image": SHOP, "runtime": runtime})
            assert await worker.market.reserve(wanted) == refused
            assert refused.sentence() == f"ord-1: no driver {runtime}" + (f" ({problem})" if problem else "")


@virtual_time
async def test_a_reservation_keeps_the_image_until_it_is_released_or_lapses(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        shelf = shelved(worker)
        shelf.put(SHOP, IMAGE)
        await worker.market.reserve(ordered("a"))
        await worker.market.reserve(ordered("b", hold_s=1))
        assert shelf.holders == {"reservation a": IMAGE.digest, "reservation b": IMAGE.digest}
        await worker.market.release("a", "no answer in time")
        assert list(shelf.holders) == ["reservation b"]
        await asyncio.sleep(6)  # the sweep
        assert shelf.holders == {}


@virtual_time
async def test_a_confirmed_reservation_hands_the_image_to_its_machine(tmp_path: Path) -> None:
    async with a_worker(tmp_path, sweeping=False) as worker:
        shelf = shelved(worker)
        shelf.put(SHOP, IMAGE)
        await worker.market.reserve(ordered("a", skip_launch=True))
        row, _, _ = await worker.market.confirm("a", APP, None)
        assert shelf.holders == {row.id: IMAGE.digest}


@virtual_time
async def test_after_a_start_what_is_reserved_is_kept_anew(tmp_path: Path) -> None:
    async with a_worker(tmp_path, sweeping=False) as worker:
        shelved(worker)
        await worker.market.reserve(ordered("a"))
        shelf = shelved(worker)
        shelf.put(SHOP, IMAGE)
        worker.market.hold_images()
        assert shelf.holders == {"reservation a": IMAGE.digest}


@virtual_time
async def test_the_sketch_is_written_on_change_and_at_most_every_few_seconds(tmp_path: Path) -> None:
    async with a_worker(tmp_path, sweeping=False) as worker:
        shelf = MemoryShelf()
        sketching = Sketching(worker.store, shelf)
        for n in range(5):
            shelf.put(f"shop:{n}", IMAGE)
            sketching.changed()
            await asyncio.sleep(0.1)
        row = worker.store.read.get(SketchRow, "images")
        assert row is not None
        assert short("shop:0") in row.names
        assert short("shop:4") not in row.names
        await asyncio.sleep(SKETCH_S)
        row = worker.store.read.get(SketchRow, "images")
        assert row is not None
        assert {short(f"shop:{n}") for n in range(5)} <= set(row.names)
        commits = worker.store.commits
        sketching.changed()  # used again: nothing that a sketch tells
        await asyncio.sleep(SKETCH_S)
        assert worker.store.commits == commits
        await sketching.close()

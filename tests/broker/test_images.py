"""Images through a broker, over real workers of one region that ask no registry: where they go, how they get from one
to another, who is preferred for an order, and what removing says."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.kit.image_markets import CLUSTER, PROGRAM, USER, ImageMarket, market
from tests.kit.images import have
from tests.kit.oci import file, image, layer
from tests.kit.waiting import eventually

from hawker.client.client import ApiError
from hawker.client.connection import Peer
from hawker.core.sketch import short
from hawker.model import image_api as calls
from hawker.model.image import ImageConfig
from hawker.model.op import Request, StreamRequest

SHOP = "registry.invalid/shop:1"
BASE = layer([file("base", b"b" * 300_000)])
MADE = image([BASE, layer([file("shop", b"s" * 1000)])], config={"Cmd": ["/shop"]})


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[ImageMarket]:
    """Two workers of one region. They ask no registry at all."""
    async with market(tmp_path, ["ord-1", "ord-2"], offline=True) as there:
        yield there


def last(events: Sequence[calls.ImageEvent]) -> list[tuple[str, dict[str, Any]]]:
    return [(event.event, msgspec.json.decode(event.data)) for event in events if event.event != "progress"]


def machine(name: str, **config: Any) -> dict[str, Any]:
    return {"name": name, "region": "ord", "config": {"image": SHOP, "init": {"exec": [PROGRAM]}, **config}}


async def workers_of(there: ImageMarket, image: str = SHOP) -> list[str]:
    return sorted(entry.worker for entry in await there.send(calls.ListImages()) if image in entry.names)


async def test_an_image_of_one_worker_reaches_another_without_any_registry(two: ImageMarket) -> None:
    await have(two.images["ord-1"], MADE, SHOP)
    events = await two.all_of(calls.PrefetchImage(image=SHOP, worker="ord-2"))
    ((how, done),) = last(events)
    assert (how, done["worker"], done["names"]) == ("done", "ord-2", [SHOP])
    one, other = (two.images[name].find(SHOP) for name in ("ord-1", "ord-2"))
    assert one is not None
    assert one == other
    top = two.images["ord-2"].layers(one)[0]
    assert (top / "shop").read_bytes() == b"s" * 1000


async def test_the_list_of_images_answers_a_head_as_it_answers_a_get(two: ImageMarket) -> None:
    host, _, port = two.endpoint.removeprefix("http://").rpartition(":")
    peer = Peer(host, int(port), headers={"authorization": f"Bearer {USER}"})
    try:
        answers = [await peer.request(method, "/v1/hawker/images", timeout_s=30.0) for method in ("GET", "HEAD")]
    finally:
        await peer.close()
    assert [answer.status for answer in answers] == [200, 200]


async def test_an_order_goes_to_the_worker_that_has_the_image(two: ImageMarket) -> None:
    await have(two.images["ord-2"], MADE, SHOP)
    async with two.client() as client:
        await client.ok("POST", "/apps", {"app_name": "shop", "org_slug": "personal"})
        made = await client.ok("POST", "/apps/shop/machines?wait=true", machine("a"))
        assert (made["hawker"]["worker"], made["state"]) == ("ord-2", "started")
        told = await client.ok("GET", f"/apps/shop/machines/{made['id']}/explain")
    offers = {offer["worker"]: offer for offer in told["decision"]["offers"]}
    assert (offers["ord-2"]["image_known"], offers["ord-2"]["image_missing_bytes"]) == (True, 0)
    assert offers["ord-1"]["image_known"] is False
    assert offers["ord-2"]["image_parts"] is None  # the broker keeps it; a decision need not


async def test_once_a_worker_has_told_what_an_image_is_made_of_the_others_say_what_they_lack(two: ImageMarket) -> None:
    await have(two.images["ord-2"], MADE, SHOP)
    await have(two.images["ord-1"], image([BASE]), "registry.invalid/base:1")
    async with two.client() as client:
        await client.ok("POST", "/apps", {"app_name": "shop", "org_slug": "personal"})
        await client.ok("POST", "/apps/shop/machines?wait=true", machine("a"))
        made = await client.ok("POST", "/apps/shop/machines?wait=true", machine("b"))
        told = await client.ok("GET", f"/apps/shop/machines/{made['id']}/explain")
    offer = next(offer for offer in told["decision"]["offers"] if offer["worker"] == "ord-1")
    found = two.images["ord-2"].find(SHOP)
    assert found is not None
    assert (offer["image_known"], offer["image_missing_bytes"]) == (True, found.layers[1].size)


async def test_a_machine_on_a_worker_without_the_image_gets_it_from_the_other(two: ImageMarket) -> None:
    await have(two.images["ord-2"], MADE, SHOP)
    async with two.client() as client:
        await client.ok("POST", "/apps", {"app_name": "shop", "org_slug": "personal"})
        await client.ok("POST", "/hawker/workers/ord-2/cordon")
        made = await client.ok("POST", "/apps/shop/machines?wait=true", machine("a"))
        assert (made["hawker"]["worker"], made["state"]) == ("ord-1", "started")


async def test_an_order_without_a_start_fetches_the_image(two: ImageMarket) -> None:
    await have(two.images["ord-2"], MADE, SHOP)
    async with two.client() as client:
        await client.ok("POST", "/apps", {"app_name": "shop", "org_slug": "personal"})
        await client.ok("POST", "/hawker/workers/ord-2/cordon")
        await client.ok("POST", "/apps/shop/machines", {**machine("a"), "skip_launch": True})

    async def fetched() -> bool:
        return two.images["ord-1"].find(SHOP) is not None

    await eventually(fetched, "the image is on the machine's worker")


async def test_an_image_that_a_machine_needs_is_kept_and_goes_once_it_is_destroyed(two: ImageMarket) -> None:
    await have(two.images["ord-1"], MADE, SHOP)
    async with two.client() as client:
        await client.ok("POST", "/apps", {"app_name": "shop", "org_slug": "personal"})
        made = await client.ok("POST", "/apps/shop/machines?wait=true", machine("a"))
        with pytest.raises(ApiError, match="needed by") as refused:
            await two.send(calls.RemoveImage(image=SHOP))
        assert refused.value.status_code == 409
        await client.ok("DELETE", f"/apps/shop/machines/{made['id']}?force=true")

        async def removed() -> bool:
            told = await client.call("DELETE", f"/hawker/images?image={SHOP}")
            return bool(told.body == [{"worker": "ord-1", "removed": True}])

        await eventually(removed, "it is removed once nothing needs it")
    assert await workers_of(two) == []


async def test_an_upload_becomes_an_image_on_one_worker_and_may_be_sent_twice(two: ImageMarket) -> None:
    data = tar_of({"bin/shop": b"#!/bin/true\n" * 100})
    half = len(data) // 2
    begun = await two.send(calls.BeginUpload(size=len(data)))

    def part(offset: int, data: bytes) -> calls.Upload:
        return calls.Upload(upload=begun.upload, worker=begun.worker, offset=offset, data=data)

    assert (await two.send(part(0, data[:half]))).offset == half
    assert (await two.send(part(0, data[:half]))).offset == half  # the answer was lost
    with pytest.raises(ApiError, match="what comes next goes there") as gap:
        await two.send(part(half + 1, b"x"))
    assert gap.value.details == {"offset": half}
    config = ImageConfig(entrypoint=("/bin/shop",), env=("A=b",), exposed=("80/tcp",))
    made = calls.ImportImage(upload=begun.upload, worker=begun.worker, image=SHOP, kind="files", config=config)
    with pytest.raises(ApiError, match=r"bytes of upload .* are missing"):
        await two.all_of(made)
    await two.send(part(half, data[half:]))
    ((how, done),) = last(await two.all_of(made))
    with pytest.raises(ApiError, match="no upload"):
        await two.send(part(0, b"x"))
    assert how == "done", done
    (shown,) = await two.send(calls.ShowImage(image=SHOP))
    assert shown.worker == done["worker"]
    found = shown.image.config
    assert (found.entrypoint, found.env, found.exposed) == (("/bin/shop",), ("A=b",), ("80/tcp",))


def tar_of(files: dict[str, bytes]) -> bytes:
    import tarfile

    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o755
            tar.addfile(info, io.BytesIO(data))
    return made.getvalue()


async def test_prefetching_goes_to_every_worker_or_to_as_many_as_wanted(two: ImageMarket) -> None:
    await have(two.images["ord-1"], MADE, SHOP)
    await two.all_of(calls.PrefetchImage(image=SHOP, count=1))
    assert await workers_of(two) == ["ord-1"]
    events = await two.all_of(calls.PrefetchImage(image=SHOP))
    assert sorted(told["worker"] for _, told in last(events)) == ["ord-1", "ord-2"]
    assert await workers_of(two) == ["ord-1", "ord-2"]


async def test_what_no_worker_can_have_is_told_by_each_in_a_sentence(two: ImageMarket) -> None:
    events = await two.all_of(calls.PrefetchImage(image="registry.invalid/nothing:1"))
    assert [how for how, _ in last(events)] == ["error", "error"]
    assert {told["worker"] for _, told in last(events)} == {"ord-1", "ord-2"}
    assert all(told["status"] == "image_not_found" for _, told in last(events))


async def test_what_cannot_be_is_refused_in_a_sentence(two: ImageMarket) -> None:
    nothing = calls.Upload(upload="nothing", worker="ord-1", offset=0, data=b"x")
    refused: list[tuple[Request[Any] | StreamRequest[Any], str]] = [
        (calls.ListImages(worker="nobody"), "no worker is called nobody"),
        (calls.ListImages(region="mad"), "no worker is in region mad"),
        (calls.ShowImage(image="UPPER case"), "image: .* is not valid"),
        (calls.PullImage(image="host"), "the host's own programs"),
        (calls.PushImage(image="registry.invalid/nothing:1"), "no worker has the image"),
        (calls.BeginUpload(size=1 << 50), "at most"),
        (nothing, "no upload nothing"),
        (calls.ImportImage(upload="nothing", worker="ord-1", image=SHOP), "no upload nothing"),
    ]
    for call, problem in refused:
        with pytest.raises(ApiError, match=problem) as told:
            await (two.send(call) if isinstance(call, Request) else two.all_of(call))
        assert 400 <= told.value.status_code < 500


async def test_blobs_are_for_agents_only_and_come_from_any_offset(two: ImageMarket) -> None:
    found = await have(two.images["ord-1"], MADE, SHOP)
    agent = two.agents["ord-1"].settings
    assert agent.worker is not None
    digest = found.layers[0].digest
    whole = b"".join([piece async for piece in two.images["ord-1"].blob(digest)])
    host, _, port = agent.worker.listen.rpartition(":")
    answers = []
    for token in ("a user's token", CLUSTER):
        peer = Peer(host, int(port), headers={"authorization": f"Bearer {token}"})
        for headers in ({}, {"range": "bytes=100-"}, {"range": f"bytes={len(whole)}-"}, {"range": "bytes=-5"}):
            path = f"/v1/images/blobs/{digest}"
            answers.append(await peer.request("GET", path, headers=headers, timeout_s=5))
        await peer.close()
    assert [answer.status for answer in answers] == [404] * 4 + [200, 206, 416, 400]
    assert answers[4].body == whole
    assert answers[5].body == whole[100:]
    assert answers[5].headers["content-range"] == f"bytes 100-{len(whole) - 1}/{len(whole)}"


async def test_the_catalog_has_a_sketch_of_what_each_worker_has(two: ImageMarket) -> None:
    await have(two.images["ord-1"], MADE, SHOP)
    broker = two.agents["ord-broker"]
    assert broker.catalog is not None
    replica = broker.catalog.view

    async def told() -> bool:
        rows = replica.rows("select id, names from images")
        return any(worker == "ord-1" and short(SHOP) in names for worker, names in rows)

    await eventually(told, "the sketch is in the broker's replica")


async def test_a_fetch_goes_on_when_nobody_listens_any_more(two: ImageMarket) -> None:
    await have(two.images["ord-1"], MADE, SHOP)
    gate = asyncio.Event()

    async def slow(digest: str, size: int, offset: int) -> None:
        await gate.wait()

    two.images["ord-2"].fetchers.insert(0, slow)
    host, _, port = two.endpoint.removeprefix("http://").rpartition(":")
    peer = Peer(host, int(port), headers={"authorization": "Bearer a user's token"})
    body = b'{"image": "%s", "worker": "ord-2"}' % SHOP.encode()
    async with peer.stream("POST", "/v1/hawker/images/prefetch", body=body, timeout_s=5) as stream:
        assert stream.status == 200
        assert (await anext(stream.chunks)).startswith(b"event: progress")
    await peer.close()
    assert two.images["ord-2"].find(SHOP) is None
    gate.set()

    async def there() -> bool:
        return two.images["ord-2"].find(SHOP) is not None

    await eventually(there, "the image is there all the same")


async def test_a_worker_that_ends_in_the_middle_has_its_say(tmp_path: Path) -> None:
    async with market(tmp_path, ["ord-1", "ord-2"], offline=True) as there:
        await have(there.images["ord-1"], MADE, SHOP)

        async def never(digest: str, size: int, offset: int) -> None:
            await asyncio.Event().wait()

        there.images["ord-2"].fetchers.insert(0, never)
        events = asyncio.create_task(there.all_of(calls.PrefetchImage(image=SHOP)))

        async def has_begun() -> bool:
            worker = there.agents["ord-2"].worker
            return worker is not None and any(task.get_name() == f"image {SHOP}" for task in asyncio.all_tasks())

        await eventually(has_begun, "the worker fetches")
        await there.agents["ord-2"].close()
        by_worker = {told["worker"]: (how, told) for how, told in last(await events)}
    assert by_worker["ord-1"][0] == "done"
    assert by_worker["ord-2"][0] == "error"

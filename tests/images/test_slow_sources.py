"""A registry or worker that trickles holds up nobody who may have the bytes elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.kit.front import Front, hold, passing, trickle
from tests.kit.images import NOISE, opened, plain_image
from tests.kit.oci import Made
from tests.kit.registry import DockerRegistry, front, put, registry
from tests.kit.waiting import until

from hawker.images.service import Images
from hawker.images.settings import RegistrySettings

__all__ = ["front", "registry"]
SLOW_S = 0.5
"""Long enough for a healthy registry to bring something on a busy host."""


def fetched(images: Images, made: Made) -> bool:
    kept = images.find(made.digest)
    return kept is not None and (images.layers(kept)[0] / "noise").read_bytes() == NOISE


async def test_whoever_waits_for_another_ones_slow_registry_has_the_rest_from_his_own(
    front: Front, registry: DockerRegistry, tmp_path: Path
) -> None:
    """And so has who began: the bytes are the same. What had come is not asked for again."""
    made, over = plain_image(), asyncio.Event()
    digest = made.layers[0].digest
    slow = await put(front.host, "slow:1", made)
    front.spoil(digest, trickle(over, after=300_000))
    async with Front(registry.port) as fast, opened(tmp_path / "images", slow_timeout_s=SLOW_S) as images:
        leader = asyncio.ensure_future(images.ensure(slow))
        await until(lambda: bool(front.asked(digest)))
        follower = await images.ensure(await put(fast.host, "fast:1", made))
        assert (follower.digest, (await leader).digest) == (made.digest, made.digest)
        assert fetched(images, made)
        (asked,) = fast.asked(digest)
        first = int(asked.headers["range"].removeprefix("bytes=").removesuffix("-"))
        assert 300_000 <= first < 600_000
        assert len(front.asked(digest)) == 1
    over.set()


async def test_a_registry_whose_turns_are_all_taken_holds_up_nobody_who_has_another(
    front: Front, registry: DockerRegistry, tmp_path: Path
) -> None:
    stuck, shared = plain_image(NOISE[::-1]), plain_image()
    gate = asyncio.Event()
    front.spoil(stuck.layers[0].digest, hold(gate, after=1000))
    async with (
        Front(registry.port) as fast,
        opened(tmp_path / "images", slow_timeout_s=SLOW_S, parallel=1) as images,
    ):
        holding = asyncio.ensure_future(images.ensure(await put(front.host, "stuck:1", stuck)))
        await until(lambda: bool(front.asked(stuck.layers[0].digest)))
        waiting = asyncio.ensure_future(images.ensure(await put(front.host, "shared:1", shared)))
        other = asyncio.ensure_future(images.ensure(await put(fast.host, "shared:1", shared)))
        assert {(await waiting).digest, (await other).digest} == {shared.digest}
        assert not holding.done()
        gate.set()
        await holding


async def test_a_mirror_that_trickles_is_left_for_the_registry_and_is_then_asked_after_it(
    front: Front, registry: DockerRegistry, tmp_path: Path
) -> None:
    first, second, over = plain_image(), plain_image(NOISE[::-1]), asyncio.Event()
    references = [await put(front.host, f"mirrored:{n}", made) for n, made in enumerate((first, second))]
    async with Front(registry.port) as mirror:
        mirror.spoil("blobs/", trickle(over))
        said = {front.host: RegistrySettings(mirrors=(mirror.host,))}
        async with opened(tmp_path / "images", slow_timeout_s=SLOW_S, registries=said) as images:
            await images.ensure(references[0])
            assert len(mirror.asked(first.layers[0].digest)) == 1
            await images.ensure(references[1])
            assert mirror.asked(second.layers[0].digest) == []
        over.set()


async def test_another_worker_that_trickles_is_left_for_the_registry(front: Front, tmp_path: Path) -> None:
    made, over = plain_image(), asyncio.Event()
    reference = await put(front.host, "peer:1", made)
    asked: list[int] = []

    async def peer(digest: str, size: int, offset: int) -> AsyncIterator[bytes] | None:
        async def pieces() -> AsyncIterator[bytes]:
            for at in range(offset, size, 1024):
                yield made.blobs[digest][at : min(at + 1024, size)]
                await passing(over, 0.1)

        if digest != made.layers[0].digest:
            return None
        asked.append(offset)
        return pieces()

    async with opened(tmp_path / "images", slow_timeout_s=SLOW_S) as images:
        images.fetchers.append(peer)
        await images.ensure(reference)
        assert fetched(images, made)
    assert asked == [0]
    (rest,) = front.asked(made.layers[0].digest)
    assert rest.headers["range"] != "bytes=0-"


@pytest.mark.parametrize("others", [0, 1])
async def test_who_is_slow_is_kept_where_nobody_is_faster(
    front: Front, registry: DockerRegistry, tmp_path: Path, others: int
) -> None:
    made, over = plain_image(), asyncio.Event()
    digest = made.layers[0].digest
    reference = await put(front.host, "alone:1", made)
    front.spoil(digest, trickle(over, after=1000))
    async with Front(registry.port) as mirror:
        mirror.spoil(digest, hold(asyncio.Event(), after=10))
        said = {front.host: RegistrySettings(mirrors=(mirror.host,) * others)}
        async with opened(tmp_path / "images", slow_timeout_s=SLOW_S, registries=said) as images:
            fetching = asyncio.ensure_future(images.ensure(reference))
            if others:  # it was left for the other, which brings less
                await until(lambda: len(front.asked(digest)) == 2)
                assert len(mirror.asked(digest)) == 1
            else:
                await passing(over, 3 * SLOW_S)
                assert len(front.asked(digest)) == 1
            assert not fetching.done()
            over.set()
            assert (await fetching).digest == made.digest
            assert len(mirror.asked(digest)) == others

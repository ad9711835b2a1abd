"""What whoever runs machines may expect of images (`hawker.images.base.ImageSource`), wherever they come from: a
registry, another worker, a file of this host, or a simulated world."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.kit.front import Front
from tests.kit.images import have, opened
from tests.kit.oci import file, image, layer, tree_of
from tests.kit.registry import DockerRegistry, front, put, registry
from tests.kit.sim_worker import a_world
from tests.kit.unpacked import UnpackedImages

from hawker.errors import HawkerError, ImageError
from hawker.images.base import ImageSource
from hawker.sim.hosts.driver import FakeImages

__all__ = ["front", "registry"]

MADE = image([layer([file("below", b"1")]), layer([file("above", b"2")], "zstd")])


@dataclass
class Stage:
    """A source that can give `reference`, and cannot give `unknown`. `trees`: it unpacks `MADE`."""

    source: ImageSource
    reference: str
    unknown: str
    trees: bool = True


@pytest.fixture(params=["registry", "peer", "file", "unpacked", "simulated"])
async def stage(
    request: pytest.FixtureRequest, front: Front, registry: DockerRegistry, tmp_path: Path
) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        match request.param:
            case "registry":
                here = await stack.enter_async_context(opened(tmp_path / "here"))
                yield Stage(here, await put(front.host, "team/web:1", MADE), f"{front.host}/team/none:1")
            case "peer":
                there = await stack.enter_async_context(opened(tmp_path / "there"))
                here = await stack.enter_async_context(opened(tmp_path / "here", offline=True))
                await have(there, MADE, "web:1")

                async def name(reference: str) -> str | None:
                    found = there.find(reference)
                    return found.digest if found else None

                async def give(digest: str, size: int, offset: int) -> AsyncIterator[bytes] | None:
                    return there.blob(digest, offset) if there.has_blob(digest) else None

                here.namers.append(name)
                here.fetchers.append(give)
                yield Stage(here, "web:1", "web:2")
            case "file":
                here = await stack.enter_async_context(opened(tmp_path / "here", offline=True))
                await have(here, MADE, "web:1")
                yield Stage(here, "web:1", "web:2")
            case "unpacked":
                images = UnpackedImages(tmp_path)
                yield Stage(images, images.add("web:1", {}, [[file("above", b"2")]]), "web:2", trees=False)
            case "simulated":
                world = a_world()
                world.bad_images["web:2"] = "its registry does not have it"
                yield Stage(FakeImages(world), "web:1", "web:2", trees=False)


async def test_an_image_that_was_ensured_is_found_by_its_reference_and_by_its_digest(stage: Stage) -> None:
    kept = await stage.source.ensure(stage.reference)
    assert stage.source.find(stage.reference) == stage.source.find(kept.digest) == kept
    assert await stage.source.ensure(stage.reference) == kept
    missing = stage.source.missing(stage.reference)
    assert (missing.known, missing.bytes) == (True, 0)


async def test_its_trees_are_there_the_topmost_first(stage: Stage) -> None:
    kept = await stage.source.ensure(stage.reference)
    trees = stage.source.layers(kept)
    if stage.trees:
        assert [tree_of(tree) for tree in trees] == [{"above": "f644 2"}, {"below": "f644 1"}]
    assert all(tree.is_dir() for tree in trees)


async def test_many_that_ask_at_once_have_the_same(stage: Stage) -> None:
    first, *others = await asyncio.gather(*(stage.source.ensure(stage.reference) for _ in range(4)))
    assert others == [first] * 3


async def test_an_image_that_is_nowhere_is_refused_for_good_and_not_found(stage: Stage) -> None:
    assert stage.source.find(stage.unknown) is None
    assert not stage.source.missing(stage.unknown).known
    with pytest.raises(ImageError):
        await stage.source.ensure(stage.unknown)
    assert stage.source.find(stage.unknown) is None


async def test_a_holder_holds_one_image_and_may_release_what_it_does_not_hold(stage: Stage) -> None:
    kept = await stage.source.ensure(stage.reference)
    for _ in range(2):
        stage.source.hold("machine", kept.digest)
    stage.source.release("machine")
    stage.source.release("machine")
    stage.source.release("nobody")
    assert stage.source.find(stage.reference) == kept


async def test_what_a_source_refuses_says_so_in_words_for_its_user(stage: Stage) -> None:
    with pytest.raises(HawkerError, match=r"web:2|none:1"):
        await stage.source.ensure(stage.unknown)

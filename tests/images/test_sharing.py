"""What several do with a host's images at the same moment: nobody's work undoes another's."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from tests.kit.images import have, images, opened
from tests.kit.oci import file, image, layer

from hawker.errors import Conflict, DiskFull
from hawker.images.blobs import PIECE_BYTES, Blobs
from hawker.images.manifest import digest_of
from hawker.images.service import Images

__all__ = ["images"]


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


async def test_an_image_may_come_under_many_names_at_once(tmp_path: Path) -> None:
    made = image([layer([file("a", b"1")])])
    names = [f"web:{number}" for number in range(8)]
    async with opened(tmp_path / "images") as images:
        await asyncio.gather(*(have(images, made, name) for name in names))
        (listed,) = images.list()
        assert len(listed.names) == len(names)
    async with opened(tmp_path / "images") as images:
        assert [images.find(name) is not None for name in names] == [True] * len(names)


async def test_the_same_bytes_may_be_put_by_many_at_once(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    for _ in range(10):
        data = os.urandom(100_000)
        assert set(await asyncio.gather(*(blobs.put(data) for _ in range(6)))) == {digest_of(data)}
        assert blobs.read(digest_of(data)) == data
    assert list((tmp_path / "partial").iterdir()) == []


async def test_what_a_kill_left_of_bytes_on_their_way_in_or_out_goes_at_the_next_start(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    digest = await blobs.put(b"abc")
    left = blobs.partial_path(digest).with_name(f"{blobs.path(digest).name}.0")
    left.write_bytes(b"ab")
    assert blobs.partials() == {}
    reopened = Blobs(tmp_path)
    assert not left.exists()
    await reopened.remove_large(digest)
    await reopened.remove_large(digest)  # it is gone
    assert digest not in reopened
    assert files(tmp_path) == []


async def test_a_removal_that_had_to_wait_sees_who_came_meanwhile(images: Images) -> None:
    kept = await have(images, image([layer([file("a", b"1")])]), "web:1")
    collecting = asyncio.ensure_future(images.collect())
    removing = asyncio.ensure_future(images.remove("web:1"))
    await asyncio.sleep(0)  # one is at work, the other waits for it
    assert not removing.done()
    images.hold("machine", kept.digest)
    with pytest.raises(Conflict, match="machine"):
        await removing
    await collecting
    assert images.find("web:1") == kept


async def test_a_writer_that_leaves_while_it_is_opened_is_none_any_more(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    digest = digest_of(b"abc")
    partial = await blobs.begin(digest)
    await partial.write(b"x" * (4 << 20))
    partial.close()
    beginning = asyncio.ensure_future(blobs.begin(digest))
    await asyncio.sleep(0)
    beginning.cancel()
    await asyncio.wait([beginning])
    assert beginning.cancelled()
    assert blobs.writing == set()


async def test_a_blob_leaves_others_the_room_that_is_theirs(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path, free=1 << 60)
    partial = await blobs.begin(digest_of(b"abc"))
    await partial.write(b"x" * PIECE_BYTES)
    with pytest.raises(DiskFull, match="left"):
        await partial.write(b"x")
    partial.discard()


async def test_missing_knows_by_digest_what_was_described(images: Images) -> None:
    made = image([layer([file("a", b"1")])])

    async def peer(digest: str, size: int, offset: int) -> object:
        async def pieces() -> object:
            yield blobs[digest][offset:]

        return pieces() if digest in blobs else None

    blobs = {digest_of(made.manifest): made.manifest, **made.blobs}
    images.fetchers.append(peer)  # type: ignore[arg-type]
    await images.describe(made.digest)
    assert images.missing(made.digest).known

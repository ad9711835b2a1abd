"""Blobs on their way: from registries that die, lie and stall, from mirrors and other workers, for many at once, and to
registries.

Each ends in the right tree, or in a clear refusal with nothing left.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.kit.front import Front, corrupt, cut, hold, passed, replace, shorten, status
from tests.kit.images import NOISE, have, images, left, opened, plain_image
from tests.kit.oci import file, image, layer, tree_of
from tests.kit.registry import (
    PASSWORD,
    USER,
    DockerRegistry,
    front,
    put,
    registry,
)
from tests.kit.waiting import until

from hawker.errors import ImageError, Unreachable
from hawker.images.progress import Progress
from hawker.images.service import Images
from hawker.images.settings import RegistrySettings

__all__ = ["front", "images", "registry"]


# What goes wrong


async def test_a_corrupt_blob_is_asked_for_once_more_and_then_refused(front: Front, images: Images) -> None:
    made = plain_image()
    reference = await put(front.host, "corrupt:1", made)
    front.spoil(made.layers[0].digest, corrupt(at=70_000), times=1)
    assert (await images.ensure(reference)).digest == made.digest
    await images.remove(reference)
    front.spoil(made.layers[0].digest, corrupt(at=70_000))
    with pytest.raises(ImageError, match=f"sends {made.layers[0].digest} with other bytes"):
        await images.ensure(reference)
    assert left(images) == []


async def test_a_blob_that_is_too_short_or_too_long_is_refused(front: Front, images: Images) -> None:
    made = plain_image()
    reference = await put(front.host, "short:1", made)
    size = len(made.layers[0].blob)
    front.spoil(made.layers[0].digest, shorten(size - 1))
    with pytest.raises(ImageError, match=f"has {size - 1} bytes of .*, which has {size}"):
        await images.ensure(reference)
    front.heal()
    front.spoil(made.layers[0].digest, replace(made.layers[0].blob + b"x"))
    with pytest.raises(ImageError, match=f"has {size + 1} bytes of .*, which has {size}"):
        await images.ensure(reference)
    assert left(images) == []


async def test_a_layer_with_another_content_than_the_configuration_says_is_refused(
    registry: DockerRegistry, images: Images
) -> None:
    good, other = layer([file("a", b"1")]), layer([file("a", b"2")])
    reference = await put(registry.host, "liar:1", image([good, good], diff_ids=[good.diff_id, other.diff_id]))
    with pytest.raises(ImageError, match="layer 1: "):
        await images.ensure(reference)
    assert left(images) == []


async def test_a_registry_that_dies_midway_is_asked_for_the_rest_alone(front: Front, images: Images) -> None:
    made = plain_image()
    digest, size = made.layers[0].digest, len(made.layers[0].blob)
    reference = await put(front.host, "dies:1", made)
    front.spoil(digest, cut(after=300_000), times=1)
    front.spoil(digest, cut(after=200_000), times=1)
    kept = await images.ensure(reference)
    assert (images.layers(kept)[0] / "noise").read_bytes() == NOISE
    assert [asked.headers.get("range") for asked in front.asked(digest)] == [None, "bytes=300000-", "bytes=500000-"]
    assert size > 500_000


async def test_a_registry_that_knows_no_ranges_sends_the_whole_and_what_is_here_is_skipped(
    registry: DockerRegistry, images: Images
) -> None:
    made = plain_image()
    async with Front(registry.port, ranges=False) as front:
        reference = await put(front.host, "ranges:1", made)
        front.spoil(made.layers[0].digest, cut(after=300_000), times=1)
        kept = await images.ensure(reference)
        assert (images.layers(kept)[0] / "noise").read_bytes() == NOISE
        assert len(front.asked(made.layers[0].digest)) == 2


async def test_a_range_that_the_registry_does_not_have_begins_anew(front: Front, images: Images) -> None:
    made = plain_image()
    digest = made.layers[0].digest
    reference = await put(front.host, "range:1", made)
    front.spoil(digest, cut(after=300_000), times=1)
    front.spoil(digest, status(416, {"Content-Range": "bytes */*"}), times=1)
    await images.ensure(reference)
    assert [asked.headers.get("range") for asked in front.asked(digest)] == [None, "bytes=300000-", None]


async def test_a_fetch_goes_on_after_a_restart_of_the_daemon(front: Front, tmp_path: Path) -> None:
    made = plain_image()
    digest = made.layers[0].digest
    reference = await put(front.host, "restart:1", made)
    front.spoil(digest, cut(after=400_000))
    async with opened(tmp_path / "images", attempts=1) as images:
        with pytest.raises(Unreachable):
            await images.ensure(reference)
    front.heal()
    async with opened(tmp_path / "images") as images:
        kept = await images.ensure(reference)
        assert (images.layers(kept)[0] / "noise").read_bytes() == NOISE
    assert [asked.headers.get("range") for asked in front.asked(digest)] == [None, "bytes=400000-"]


_FETCH = """
import asyncio, sys
from pathlib import Path
from hawker.host import live
from hawker.images.service import Images
from hawker.images.settings import ImageSettings

async def main():
    images = await Images(Path(sys.argv[1]), ImageSettings(docker_config=""), live()).open()
    await images.ensure(sys.argv[2])

asyncio.run(main())
"""


async def test_a_daemon_killed_midway_has_the_next_one_fetch_only_the_rest(front: Front, tmp_path: Path) -> None:
    made = plain_image(NOISE * 3)
    digest = made.layers[0].digest
    reference = await put(front.host, "killed:1", made)
    front.spoil(digest, hold(asyncio.Event(), after=5 << 19), times=1)
    partial = tmp_path / "images" / "blobs" / "partial" / digest.removeprefix("sha256:")
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", _FETCH, str(tmp_path / "images"), reference)
    await until(lambda: partial.exists() and partial.stat().st_size >= 2 << 20)
    process.kill()
    await process.wait()
    size = partial.stat().st_size
    async with opened(tmp_path / "images") as images:
        assert images.missing(reference).known is False
        kept = await images.ensure(reference)
        assert (images.layers(kept)[0] / "noise").read_bytes() == NOISE * 3
    assert [asked.headers.get("range") for asked in front.asked(digest)] == [None, f"bytes={size}-"]
    assert not partial.exists()


async def test_what_an_earlier_fetch_left_wrong_is_thrown_away(front: Front, tmp_path: Path) -> None:
    made = plain_image()
    reference = await put(front.host, "torn:1", made)
    partial = tmp_path / "images" / "blobs" / "partial" / made.layers[0].digest.removeprefix("sha256:")
    partial.parent.mkdir(parents=True)
    partial.write_bytes(bytes(4096))
    async with opened(tmp_path / "images") as images:
        kept = await images.ensure(reference)
        assert (images.layers(kept)[0] / "noise").read_bytes() == NOISE
    assert not partial.exists()


async def test_a_busy_registry_is_asked_again_and_not_for_ever(front: Front, images: Images) -> None:
    made = image([layer([file("a")])])
    reference = await put(front.host, "busy:1", made)
    front.spoil("manifests/", status(429, {"Retry-After": "0"}), times=1)
    front.spoil("manifests/", status(503), times=1)
    await images.ensure(reference)
    assert len(front.asked("manifests/")) == 3
    front.spoil("manifests/", status(502))
    with pytest.raises(Unreachable, match="answered 502"):
        await images.pull(reference)
    assert len(front.asked("manifests/")) == 6
    assert images.find(reference) is not None


async def test_a_registry_that_trickles_is_given_up(front: Front, tmp_path: Path) -> None:
    made = plain_image()
    reference = await put(front.host, "stuck:1", made)
    gate = asyncio.Event()
    front.spoil(made.layers[0].digest, hold(gate, after=1000))
    async with opened(tmp_path / "images", attempts=2, read_timeout_s=0.1) as images:
        with pytest.raises(Unreachable, match="nothing came for"):
            await images.ensure(reference)
    gate.set()


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"{", "its manifest cannot be read"),
        (b"x" * ((4 << 20) + 1), "more than"),
        (b'{"schemaVersion":1,"fsLayers":[]}', "manifest of schema 1"),
    ],
)
async def test_a_manifest_that_makes_no_sense_is_refused(
    front: Front, images: Images, body: bytes, problem: str
) -> None:
    reference = await put(front.host, "nonsense:1", image([layer([file("a")])]))
    front.spoil("manifests/", replace(body))
    with pytest.raises((ImageError, Unreachable), match=problem):
        await images.ensure(reference)
    assert left(images) == []


async def test_a_manifest_asked_for_by_digest_has_that_digest(front: Front, images: Images) -> None:
    made, other = image([layer([file("a", b"1")])]), image([layer([file("a", b"2")])])
    reference = await put(front.host, "digest", made)
    front.spoil("manifests/", replace(other.manifest), times=1)
    with pytest.raises(ImageError, match="its manifest is corrupt"):
        await images.ensure(reference)
    assert (await images.ensure(reference)).digest == made.digest


# Mirrors


async def test_mirrors_are_asked_first_and_the_registry_for_what_they_do_not_have(
    registry: DockerRegistry, tmp_path: Path
) -> None:
    made = plain_image()
    async with Front(registry.port) as origin, Front(registry.port) as mirror:
        reference = await put(origin.host, "mirrored:1", made)
        await put(registry.host, "cache/mirrored:1", made)
        origin.requests.clear()
        said = {origin.host: RegistrySettings(mirrors=("127.0.0.1:1", f"{mirror.host}/cache"))}
        async with opened(tmp_path / "one", registries=said) as images:
            assert (await images.ensure(reference)).digest == made.digest
        assert origin.requests == []
        mirror.spoil(made.layers[0].digest, corrupt(5))
        async with opened(tmp_path / "two", registries=said) as images:
            kept = await images.ensure(reference)
            assert (images.layers(kept)[0] / "noise").read_bytes() == NOISE
        assert len(origin.requests) == 1
        mirror.spoil("manifests/", status(404))
        async with opened(tmp_path / "three", registries=said) as images:
            assert (await images.ensure(reference)).digest == made.digest
        assert len(origin.asked("manifests/")) == 1


async def test_a_mirror_that_is_down_is_left_alone_for_a_while(registry: DockerRegistry, tmp_path: Path) -> None:
    made = plain_image()
    async with Front(registry.port) as mirror:
        reference = await put(registry.host, "downed:1", made)
        mirror.spoil("/v2/", status(503))
        said = {registry.host: RegistrySettings(mirrors=(mirror.host,))}
        async with opened(tmp_path / "images", registries=said) as images:
            assert (await images.ensure(reference)).digest == made.digest
            assert (await images.pull(reference)).digest == made.digest
        assert len(mirror.requests) == 2  # tried once more, then no more: neither for blobs nor for the next manifest


# Sending


async def test_an_image_that_is_pushed_can_be_pulled_and_is_the_same(
    registry: DockerRegistry, images: Images, tmp_path: Path
) -> None:
    made = image([layer([file("noise", NOISE)], ""), layer([file("a", b"1")], "zstd")], {"Cmd": ["x"]})
    await have(images, made, "local/app:1")
    seen: list[Progress] = []
    async with Front(registry.port) as front:
        target = f"{front.host}/pushed/app:2"
        assert (await images.push("local/app:1", target, progress=seen.append)).digest == made.digest
        assert {each.digest for each in seen if each.state == "sent"} == {one.digest for one in made.layers}
        sent = len(front.asked("uploads/", "POST"))
        assert sent == len(made.blobs)
        await images.push("local/app:1", target)
        assert len(front.asked("uploads/", "POST")) == sent  # it is there
        async with opened(tmp_path / "other") as other:
            assert (await other.ensure(target)).digest == made.digest
            assert await other.ensure(target) == images.find("local/app:1")


async def test_a_blob_of_the_same_registry_is_mounted_and_does_not_travel(front: Front, images: Images) -> None:
    made = plain_image()
    reference = await put(front.host, "mounted/from:1", made)
    await images.ensure(reference)
    front.requests.clear()
    await images.push(reference, f"{front.host}/mounted/to:1")
    assert {asked.headers.get("content-length") for asked in front.asked("uploads/", "POST")} == {None, "0"} - {None}
    assert front.asked("uploads/", "PUT") == []


async def test_a_push_that_broke_is_repeated_and_one_that_is_denied_says_so(
    front: Front, images: Images, tmp_path: Path
) -> None:
    made = plain_image()
    await have(images, made, "app:1")
    front.spoil("uploads/", status(500), times=1, method="PUT")
    front.spoil("manifests/", status(503), times=1, method="PUT")
    await images.push("app:1", f"{front.host}/broken/app:1")
    async with Front(front.to, basic=(USER, PASSWORD)) as private:
        with pytest.raises(ImageError, match="knows nobody without credentials"):
            await images.push("app:1", f"{private.host}/private/app:1")
        await images.push("app:1", f"{private.host}/private/app:1", USER, PASSWORD)


async def test_a_large_blob_is_sent_in_parts_and_goes_on_where_it_broke_off(front: Front, tmp_path: Path) -> None:
    made = plain_image()
    async with opened(tmp_path / "images", upload_chunk_bytes=300_000) as images:
        await have(images, made, "app:1")
        front.spoil("uploads/", passed(), times=1, method="PATCH")
        front.spoil("uploads/", status(502), times=1, method="PATCH", arrives=False)
        await images.push("app:1", f"{front.host}/parts/app:1")
    parts = [asked.headers["content-range"] for asked in front.asked("uploads/", "PATCH")]
    assert parts == ["0-299999", "300000-599999", "300000-599999", "600000-899999"]
    assert len(front.asked("uploads/", "GET")) == 1
    async with opened(tmp_path / "other") as other:
        assert (await other.ensure(f"{front.host}/parts/app:1")).digest == made.digest


# Many at once


async def test_twenty_who_ask_cause_one_transfer_of_each_blob(front: Front, images: Images) -> None:
    shared = layer([file("shared", NOISE)])
    one, two = image([shared, layer([file("a", b"1")])]), image([shared, layer([file("b", b"2")])])
    first, second = await put(front.host, "many:1", one), await put(front.host, "many:2", two)
    got = await asyncio.gather(*(images.ensure(first if n % 2 else second) for n in range(20)))
    assert {image.digest for image in got} == {one.digest, two.digest}
    for digest in {*one.blobs, *two.blobs}:
        assert len(front.asked(digest)) == 1, digest
    assert len(front.asked("manifests/")) == 2


async def test_three_layers_travel_at_once_and_none_waits_for_another(front: Front, images: Images) -> None:
    made = image([layer([file(f"noise{n}", NOISE[n:])], "") for n in range(5)])
    reference = await put(front.host, "parallel:1", made)
    gates = {one.digest: asyncio.Event() for one in made.layers}
    for digest, gate in gates.items():
        front.spoil(digest, hold(gate, after=1000), times=1)
    fetching = asyncio.ensure_future(images.ensure(reference))

    def travelling() -> list[str]:
        return [digest for digest in gates if front.asked(digest)]

    digests = list(gates)
    await until(lambda: len(travelling()) == 3)
    assert travelling() == digests[:3]
    gates[digests[1]].set()  # the second is here first: the fourth takes its turn
    await until(lambda: len(travelling()) == 4)
    assert travelling() == digests[:4]
    for gate in gates.values():
        gate.set()
    kept = await fetching
    assert [tree_of(tree).keys() for tree in images.layers(kept)] == [{f"noise{n}": 1}.keys() for n in range(4, -1, -1)]


async def test_a_caller_who_leaves_does_not_take_the_others_transfer_along(front: Front, images: Images) -> None:
    made = plain_image()
    reference = await put(front.host, "leaver:1", made)
    gate = asyncio.Event()
    front.spoil(made.layers[0].digest, hold(gate, after=1000), times=1)
    leaver, stayer = (asyncio.ensure_future(images.ensure(reference)) for _ in range(2))
    await until(lambda: bool(front.asked(made.layers[0].digest)))
    leaver.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaver
    gate.set()
    assert (await stayer).digest == made.digest
    assert len(front.asked(made.layers[0].digest)) == 1


async def test_when_the_last_caller_leaves_the_transfer_stops_and_can_be_gone_on_with(
    front: Front, images: Images
) -> None:
    made = plain_image()
    digest = made.layers[0].digest
    reference = await put(front.host, "last:1", made)
    gate = asyncio.Event()
    front.spoil(digest, hold(gate, after=200_000), times=1)
    leaver = asyncio.ensure_future(images.ensure(reference))
    await until(lambda: bool(front.asked(digest)))
    leaver.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaver
    gate.set()
    assert (await images.ensure(reference)).digest == made.digest
    assert len(front.asked(digest)) == 2


# Other workers


async def test_other_workers_are_asked_before_the_registry(front: Front, tmp_path: Path) -> None:
    made = image([layer([file("noise", NOISE)]), layer([file("a", b"1")])])
    reference = await put(front.host, "peers:1", made)
    async with opened(tmp_path / "one") as there, opened(tmp_path / "two") as here:
        await there.ensure(reference)
        front.requests.clear()
        asked: list[tuple[str, int]] = []

        async def peer(digest: str, size: int, offset: int) -> AsyncIterator[bytes] | None:
            asked.append((digest, offset))
            return there.blob(digest, offset) if there.has_blob(digest) else None

        here.fetchers.append(peer)
        assert (await here.ensure(reference)).digest == made.digest
        assert len(front.requests) == 1  # what the tag means
        assert {digest for digest, _ in asked} == set(made.blobs)
        by_digest = f"nowhere.test/peers@{made.digest}"
        async with opened(tmp_path / "three", offline=True) as third:
            third.fetchers.append(peer)
            assert (await third.ensure(by_digest)).digest == made.digest
            assert third.find(made.digest) is not None


async def test_where_another_worker_breaks_off_or_lies_the_registry_goes_on(front: Front, images: Images) -> None:
    made = plain_image()
    digest = made.layers[0].digest
    reference = await put(front.host, "breaks:1", made)

    async def half(wanted: str, size: int, offset: int) -> AsyncIterator[bytes] | None:
        async def pieces() -> AsyncIterator[bytes]:
            yield made.blobs[wanted][: size // 2]
            raise ConnectionError("gone")

        return pieces()

    async def broken(wanted: str, size: int, offset: int) -> AsyncIterator[bytes] | None:
        raise OSError("no")

    images.fetchers += [broken, half]
    assert (await images.ensure(reference)).digest == made.digest
    assert [asked.headers.get("range") for asked in front.asked(digest)] == [f"bytes={len(made.layers[0].blob) // 2}-"]
    await images.remove(reference)
    front.requests.clear()

    async def liar(wanted: str, size: int, offset: int) -> AsyncIterator[bytes] | None:
        async def pieces() -> AsyncIterator[bytes]:
            yield bytes(size - offset)

        return pieces()

    images.fetchers[:] = [liar]
    assert (await images.ensure(reference)).digest == made.digest
    assert [asked.headers.get("range") for asked in front.asked(digest)] == [None]

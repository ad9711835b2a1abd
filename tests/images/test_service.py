"""A host's images: what is here, what it means, what is kept and what goes, and what a restart finds."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.kit.images import Clock, have, images, opened
from tests.kit.oci import (
    Made,
    busybox_image,
    directory,
    file,
    image,
    index,
    layer,
    symlink,
    tar_of,
    tree_of,
    whiteout,
    write_docker_archive,
    write_layout,
    write_layout_archive,
)
from tests.kit.waiting import until

from hawker.errors import Conflict, DiskFull, ImageError, ImageNotFound, Invalid, Unreachable
from hawker.images.service import Images
from hawker.model.image import ImageConfig

__all__ = ["images"]

MIB = 1 << 20


def sized(name: str, mib: int) -> Made:
    """An image with a layer of its own of so many mebibytes, whose tree has as many."""
    return image([layer([file(name, os.urandom(mib * MIB))], "")])


def files(images: Images) -> list[Path]:
    return [path for path in images.directory.rglob("*") if path.is_file()]


async def test_an_image_that_is_here_is_found_by_name_and_by_digest(images: Images) -> None:
    made = image([layer([file("a", b"1"), file("b", b"2")]), layer([whiteout("a"), file("c", b"3")], "zstd")])
    kept = await have(images, made, "web:1")
    assert kept.digest == made.digest
    assert images.find("web:1") == images.find("docker.io/library/web:1") == images.find(made.digest) == kept
    assert images.find(f"elsewhere.test/web@{made.digest}") == kept
    assert images.find("web:2") is None
    top, bottom = images.layers(kept)
    assert tree_of(bottom) == {"a": "f644 1", "b": "f644 2"}
    assert tree_of(top) == {"a": "20000 0 0", "c": "f644 3"}
    assert list(images.all()) == [(("registry-1.docker.io/library/web:1",), kept)]
    assert images.missing("web:1").bytes == 0


async def test_images_that_share_layers_share_their_trees(images: Images) -> None:
    base = layer([file("base", b"0")])
    one = await have(images, image([base, layer([file("a")])]), "one")
    two = await have(images, image([base, layer([file("b")])]), "two")
    assert images.layers(one)[1] == images.layers(two)[1]
    assert images.layers(one)[0] != images.layers(two)[0]
    await images.remove("one")
    assert images.has_blob(base.digest)
    assert tree_of(images.layers(two)[1]) == {"base": "f644 0"}
    assert not images.layers(one)[0].exists()


async def test_the_same_layer_on_another_base_has_a_tree_of_its_own(images: Images) -> None:
    top = layer([file("d/x", b"1")])
    one = await have(images, image([layer([directory("d", 0o700)]), top]), "one")
    two = await have(images, image([layer([directory("d", 0o711)]), top]), "two")
    assert tree_of(images.layers(one)[0])["d"] == "d700"
    assert tree_of(images.layers(two)[0])["d"] == "d711"


async def test_an_image_without_layers_is_one(images: Images) -> None:
    kept = await have(images, image([]), "scratch:1")
    assert images.find("scratch:1") == kept
    assert images.layers(kept) == []


async def test_a_reference_that_is_none_is_refused(images: Images) -> None:
    for reference in ("", "Web", "host", "a@sha256:1"):
        with pytest.raises(Invalid):
            await images.ensure(reference)
    with pytest.raises(ImageNotFound):
        await images.ensure("sha256:" + "0" * 64)


async def test_a_host_that_asks_no_registry_says_so(tmp_path: Path) -> None:
    async with opened(tmp_path / "images", offline=True) as images:
        with pytest.raises(ImageNotFound, match="asks no registry"):
            await images.ensure("nginx")


# From elsewhere than registries


@pytest.mark.parametrize("form", ["layout", "layout archive", "docker archive"])
async def test_an_archive_of_any_form_becomes_an_image(images: Images, tmp_path: Path, form: str) -> None:
    made = image([layer([file("a", b"1")]), layer([whiteout("a"), file("b", b"2")], "zstd")], {"Cmd": ["/a"]})
    path = tmp_path / "given"
    match form:
        case "layout":
            write_layout(path, {"": made})
        case "layout archive":
            write_layout_archive(path, {"": made})
        case _:
            write_docker_archive(path, {"example.test/web:3": made})
    kept = await images.import_archive(path, "web:1")
    assert images.find("web:1") == kept
    assert kept.config.cmd == ("/a",)
    assert [tree_of(tree) for tree in images.layers(kept)] == [{"a": "20000 0 0", "b": "f644 2"}, {"a": "f644 1"}]
    assert path.exists()
    again = await images.import_archive(path)
    assert again == kept
    assert (images.find("example.test/web:3") is not None) is (form == "docker archive")


async def test_of_an_archive_with_an_index_the_image_for_this_platform_is_taken(images: Images, tmp_path: Path) -> None:
    arm = image([layer([file("arm")])], architecture="arm64")
    amd = image([layer([file("amd")])])
    made = index([(arm, {"os": "linux", "architecture": "arm64"}), (amd, {"os": "linux", "architecture": "amd64"})])
    kept = await images.import_archive(write_layout(tmp_path / "layout", {"": made}), "both:1")
    assert kept.digest == amd.digest


async def test_an_archive_that_is_none_leaves_nothing(images: Images, tmp_path: Path) -> None:
    (tmp_path / "tar").write_bytes(tar_of([file("hello")]))
    with pytest.raises(ImageError, match="no archive of an image"):
        await images.import_archive(tmp_path / "tar", "x")
    bad = image([layer([file("a")]), layer([symlink("d", "/"), file("../../evil", b"x")])])
    with pytest.raises(ImageError, match="layer 1"):
        await images.import_archive(write_layout_archive(tmp_path / "bad", {"": bad}), "x")
    assert files(images) == []
    assert [path.name for path in images.directory.rglob("*") if path.parent.name == "unpacking"] == []


async def test_a_directory_or_a_tar_of_files_becomes_the_same_image_each_time(images: Images, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "bin").mkdir(parents=True)
    (source / "bin/app").write_text("#!/bin/sh\n")
    (source / "bin/app").chmod(0o755)
    config = ImageConfig(cmd=("/bin/app",), env=("A=1",), exposed=("80/tcp",), labels={"a": "b"})
    one = await images.build_from(source, "app:1", config)
    os.utime(source / "bin/app", (1, 1))
    assert (await images.build_from(source, "app:2", config)).digest == one.digest
    assert one.config == config
    assert tree_of(images.layers(one)[0])["bin/app"] == "f755 #!/bin/sh\n"
    (tmp_path / "tar").write_bytes(tar_of([file("hello", b"you")]))
    two = await images.build_from(tmp_path / "tar", "app:3")
    assert tree_of(images.layers(two)[0])["hello"] == "f644 you"
    assert {name for names, _ in images.all() for name in names} == {
        f"registry-1.docker.io/library/app:{tag}" for tag in (1, 2, 3)
    }


# What is kept and what goes


async def test_an_image_that_is_held_is_not_removed(images: Images) -> None:
    kept = await have(images, image([layer([file("a")])]), "web:1")
    images.hold("machine 1", kept.digest)
    with pytest.raises(Conflict, match="machine 1"):
        await images.remove("web:1")
    assert images.find("web:1") == kept
    images.hold("machine 1", "sha256:" + "0" * 64)  # it needs another one now
    gone: list[str] = []
    images.on_removed.append(gone.append)
    await images.remove("web:1")
    assert gone == [kept.digest]
    assert files(images) == []
    with pytest.raises(ImageNotFound):
        await images.remove("web:1")


async def test_one_of_two_names_goes_alone(images: Images) -> None:
    made = image([layer([file("a")])])
    await have(images, made, "web:1")
    kept = await have(images, made, "web:2")
    await images.remove("web:1")
    assert images.find("web:1") is None
    assert images.find("web:2") == kept
    await have(images, made, "web:3")
    await images.remove(kept.digest)  # by digest, with all its names
    assert list(images.all()) == []
    assert files(images) == []


async def test_a_name_that_moves_leaves_the_image_it_had_without_one(images: Images) -> None:
    old = await have(images, image([layer([file("old")])]), "web:1")
    new = await have(images, image([layer([file("new")])]), "web:1")
    assert images.find("web:1") == new
    assert {names for names, _ in images.all()} == {(), ("registry-1.docker.io/library/web:1",)}
    assert images.find(old.digest) == old


async def test_above_the_watermark_those_go_first_that_were_not_used_the_longest(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path / "images", clock=clock, keep_mib_max=20, keep_mib_least=15) as images:
        kept = {}
        for name in ("held", "oldest", "older", "newest"):
            kept[name] = await have(images, sized(name, 2), name)  # 2 as a blob, 2 as a tree
            clock.now_s += 3600
            if name == "held":
                images.hold("machine", kept["held"].digest)
        await images.ensure("oldest")  # which it no longer is
        clock.now_s += 3600
        assert (await images.collect()).images == ()  # 16 MiB: below the upper mark
        await have(images, sized("more", 3), "more")
        clock.now_s += 3600
        collected = await images.collect()
        assert collected.images == (kept["older"].digest, kept["newest"].digest)
        assert collected.bytes > 8 * MIB
        assert images.find("held") is not None
        assert images.find("oldest") is not None
        assert images.find("more") is not None
        images.hold("other", kept["oldest"].digest)
        images.release("machine")


async def test_nothing_goes_by_itself_before_all_that_is_needed_is_held(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path / "images", clock=clock, keep_mib_max=6, keep_mib_least=5) as images:
        kept = {}
        for name in ("needed", "spare", "spare too"):
            kept[name] = await have(images, sized(name, 2), name.replace(" ", "-"))
            clock.now_s += 3600
        assert len(list(images.all())) == 3
        images.hold("machine", kept["needed"].digest)
        images.begin_collecting()
        await until(lambda: len(list(images.all())) == 1)
        assert images.find("needed") == kept["needed"]
        clock.now_s += 3600
        await have(images, sized("more", 2), "more")
        clock.now_s += 3600
        await have(images, image([]), "last")  # which is over the mark, too, and was used this very moment
        await until(lambda: images.find("more") is None)
        assert images.find("needed") is not None
        assert images.find("last") is not None


async def test_an_image_just_asked_for_is_not_collected_before_it_can_be_held(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path / "images", clock=clock, keep_mib_max=1, keep_mib_least=0) as images:
        kept = await have(images, sized("a", 2), "a")
        assert (await images.collect()).images == ()
        clock.now_s += 61
        images.hold("machine", kept.digest)
        clock.now_s += 61
        assert (await images.collect()).images == ()
        images.release("machine")
        assert (await images.collect()).images == ()
        clock.now_s += 61
        assert (await images.collect()).images == (kept.digest,)
        assert files(images) == []


async def test_what_is_being_fetched_is_not_collected(tmp_path: Path) -> None:
    made = image([layer([file("a", os.urandom(MIB))], ""), layer([file("b")])])
    gate = asyncio.Event()
    begun = asyncio.Event()
    clock = Clock(4_000_000_000)  # far ahead of the files' own times: everything here is old

    async def slow(digest: str, size: int, offset: int) -> AsyncIterator[bytes] | None:
        async def pieces() -> AsyncIterator[bytes]:
            data = {**made.blobs, made.digest: made.manifest}[digest]
            yield data[: len(data) // 2]
            if digest == made.layers[0].digest:
                begun.set()
                await gate.wait()
            yield data[len(data) // 2 :]

        return pieces()

    async with opened(tmp_path / "images", clock=clock, keep_mib_max=0, keep_mib_least=0, offline=True) as images:
        images.fetchers.append(slow)
        fetching = asyncio.ensure_future(images.ensure(made.digest))
        await begun.wait()
        await images.collect()
        gate.set()
        assert (await fetching).digest == made.digest
        assert images.find(made.digest) is not None


async def test_what_broken_fetches_left_goes_after_a_day(tmp_path: Path) -> None:
    made = image([layer([file("a", os.urandom(MIB))], ""), layer([file("b")])])
    clock = Clock()

    async def half(digest: str, size: int, offset: int) -> AsyncIterator[bytes] | None:
        async def pieces() -> AsyncIterator[bytes]:
            yield {**made.blobs, made.digest: made.manifest}[digest][offset : offset + 500_000]

        return pieces()

    async with opened(tmp_path / "images", clock=clock, offline=True) as images:
        images.fetchers.append(half)
        with pytest.raises(Unreachable):
            await images.ensure(made.digest)
        clock.now_s = max(path.stat().st_mtime for path in files(images))
        await images.collect()
        assert len(files(images)) > 1
        clock.now_s += 25 * 3600
        await images.collect()
        assert files(images) == []


async def test_without_room_an_image_is_refused_before_a_byte_of_it_travels(tmp_path: Path) -> None:
    made = image([layer([file("a")])])
    asked: list[str] = []

    async def peer(digest: str, size: int, offset: int) -> AsyncIterator[bytes] | None:
        asked.append(digest)

        async def pieces() -> AsyncIterator[bytes]:
            yield {**made.blobs, made.digest: made.manifest}[digest]

        return pieces()

    async with opened(tmp_path / "images", free_mib_least=1 << 30, offline=True) as images:
        images.fetchers.append(peer)
        with pytest.raises(DiskFull, match="are lacking here"):
            await images.ensure(made.digest)
    assert made.layers[0].digest not in asked


# Who is told


async def test_who_listens_is_told_of_changes_and_of_progress(images: Images) -> None:
    changes: list[int] = []
    images.on_change.append(lambda: changes.append(len(list(images.all()))))
    states: list[str] = []
    end = images.watch("web:1", lambda progress: states.append(progress.state))
    await have(images, image([layer([file("a")])]), "web:1")
    assert states == ["fetched", "unpacking", "ready"]
    end()
    await have(images, image([layer([file("b")])]), "web:1")
    assert len(states) == 3
    await images.remove("web:1")
    assert changes == [1, 2, 1]


async def test_other_workers_may_read_blobs_from_any_byte_on(images: Images) -> None:
    made = image([layer([file("a", b"x" * 5000)], "")])
    await have(images, made, "web:1")
    blob = made.layers[0].blob
    digest = made.layers[0].digest
    assert images.blob_size(digest) == len(blob)
    assert images.blob_size("sha256:" + "0" * 64) is None
    assert b"".join([piece async for piece in images.blob(digest)]) == blob
    assert b"".join([piece async for piece in images.blob(digest, 4000)]) == blob[4000:]
    assert images.has_blob(made.digest)


# After a restart


async def test_a_restart_finds_everything_as_it_was(tmp_path: Path) -> None:
    made = image([layer([file("a", b"1")]), layer([file("b")])], {"Cmd": ["x"]})
    clock = Clock()
    async with opened(tmp_path / "images", clock=clock) as images:
        kept = await have(images, made, "web:1")
        await have(images, made, "web:2")
        listed = images.list()
    async with opened(tmp_path / "images", clock=clock) as images:
        assert images.find("web:1") == images.find("web:2") == kept
        assert images.list() == listed
        assert listed[0].complete
        assert tree_of(images.layers(kept)[1]) == {"a": "f644 1"}
        images.hold("machine", kept.digest)
        assert images.list()[0].held == ("machine",)


@pytest.mark.parametrize("first", [0, 1])
async def test_of_two_images_that_a_kill_left_with_one_name_the_later_has_it(tmp_path: Path, first: int) -> None:
    made = [image([layer([file("a", b"1")])]), image([layer([file("b", b"2")])])]
    old, new = made[first], made[1 - first]
    root = tmp_path / "images"
    clock = Clock()
    async with opened(root, clock=clock) as images:
        await have(images, old, "web:1")
        record = root / "images" / f"{old.digest.removeprefix('sha256:')}.json"
        before = record.read_bytes()
        clock.now_s += 1
        await have(images, new, "web:1")
    record.write_bytes(before)  # as if its last change had not come to the disk
    async with opened(root, clock=clock) as images:
        found = images.find("web:1")
        assert found is not None
        assert found.digest == new.digest
        assert sorted(tuple(names) for names, _ in images.all()) == [(), ("registry-1.docker.io/library/web:1",)]


@pytest.mark.parametrize(
    "damage", ["record", "text", "manifest", "configuration", "layer", "tree", "tree and layer", "junk"]
)
async def test_damage_costs_what_it_hit_and_no_more(tmp_path: Path, damage: str) -> None:
    made, other = image([layer([file("a", b"1")])]), image([layer([file("b", b"2")])])
    root = tmp_path / "images"
    async with opened(root) as images:
        kept = await have(images, made, "web:1")
        await have(images, other, "other:1")
        tree = images.layers(kept)[0]
    hexes = {
        "record": root / "images" / f"{made.digest.removeprefix('sha256:')}.json",
        "manifest": root / "blobs" / "sha256" / made.digest.removeprefix("sha256:"),
        "configuration": next(root / "blobs/sha256" / d[7:] for d, data in made.blobs.items() if data == made.config),
        "layer": root / "blobs" / "sha256" / made.layers[0].digest.removeprefix("sha256:"),
    }
    match damage:
        case "tree":
            tree.rename(tmp_path / "lost")
        case "layer":
            hexes["layer"].unlink()
        case "tree and layer":
            tree.rename(tmp_path / "lost")
            blob = bytearray(made.layers[0].blob)
            blob[-1] ^= 1
            hexes["layer"].write_bytes(blob)
        case "text":
            hexes["record"].write_bytes(b'{"names": {"\xff": 1}}')
        case "junk":
            for name in ("images/x.json.new", "unpacking/half", "trees/x.json", "blobs/partial/" + "0" * 64):
                (root / name).write_bytes(b"{")
        case _:
            hexes[damage].write_bytes(b"{")
    async with opened(root, offline=True) as images:
        assert images.find("other:1") is not None
        match damage:
            case "record" | "text":
                assert images.find("web:1") is None
                assert images.find(made.digest) == kept
            case "manifest" | "configuration":
                assert images.find(made.digest) is None
                assert await have(images, made, "web:1") == kept
            case "tree":
                assert images.find("web:1") is None
                assert await images.ensure("web:1") == kept  # unpacked anew
                assert tree_of(images.layers(kept)[0]) == {"a": "f644 1"}
            case "tree and layer":
                with pytest.raises(Unreachable):  # it is found out, and there is nobody to ask
                    await images.ensure("web:1")
                assert await have(images, made, "web:1") == kept
            case "layer":
                assert images.find("web:1") == kept  # what runs needs the tree alone
            case _:
                assert images.find("web:1") == kept
                assert list((root / "unpacking").iterdir()) == []
                assert not (root / "images" / "x.json.new").exists()


_IMPORT = """
import asyncio, sys
from pathlib import Path
from hawker.host import live
from hawker.images.service import Images
from hawker.images.settings import ImageSettings

async def main():
    images = await Images(Path(sys.argv[1]), ImageSettings(docker_config=""), live()).open()
    images.watch("web:1", lambda progress: print(progress.state, flush=True))
    print("open", flush=True)
    await images.import_archive(Path(sys.argv[2]), "web:1")
    print("here", flush=True)
    sys.stdin.readline()
    await images.remove("web:1")
    print("removed", flush=True)
    sys.stdin.readline()

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.crash
async def test_a_daemon_killed_at_any_step_leaves_the_image_or_nothing(tmp_path: Path) -> None:
    """Imported, unpacked, kept and removed, and killed after each of its steps in turn."""
    made = image([layer([file(f"{n}/{m}", os.urandom(2000)) for m in range(200)]) for n in range(2)])
    archive = write_layout_archive(tmp_path / "archive", {"": made})
    root = tmp_path / "images"
    steps: list[str] = []
    while "removed" not in steps:
        count, steps = len(steps) + 1, []
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _IMPORT, str(root), str(archive)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        while len(steps) < count:
            steps.append((await process.stdout.readline()).decode().strip())
            if steps[-1] == "here" and len(steps) < count:
                process.stdin.write(b"\n")
        process.kill()
        await process.wait()
        async with opened(root, clock=Clock(4_000_000_000), offline=True) as images:
            assert list((root / "unpacking").iterdir()) == []
            found = images.find("web:1")
            if found is not None:
                assert found.digest == made.digest
                for tree in images.layers(found):
                    assert len([path for path in tree.rglob("*") if path.is_file()]) == 200
                await images.remove("web:1")
            assert found is not None or steps[-1] != "here"
            assert found is None or steps[-1] in ("ready", "here")
            await images.collect()
            assert files(images) == []
    assert steps[0] == "open"
    assert len(steps) >= 7


async def test_the_image_for_the_tests_of_others_has_a_shell(images: Images) -> None:
    kept = await have(images, busybox_image(layer([file("etc/motd", b"hello")])), "bb")
    tree = tree_of(images.layers(kept)[-1])
    assert tree["bin/sh"] == "l busybox"
    assert tree["tmp"] == "d1777"
    assert kept.config.cmd == ("/bin/sh",)

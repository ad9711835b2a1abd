"""`hawker image`: the images that workers have, and how they get them."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import click

from hawker.cli import calls, output
from hawker.cli.groups import Ordered
from hawker.cli.params import F, region_option, together, worker_option
from hawker.cli.session import Session, confirmed, market_command
from hawker.errors import HawkerError, Invalid, NotFound

if TYPE_CHECKING:
    from hawker.model.image import ImageConfig
    from hawker.model.image_api import ImageEvent, ImageHere, ImageShown
    from hawker.model.op import StreamRequest

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SHORT = 19  # of a digest: "sha256:" and twelve digits tell images apart


def image_options(worker: str, region: str) -> Callable[[F], F]:
    """IMAGE, and the options that say which workers a command is about, with the help of each."""
    return together(click.argument("reference", metavar="IMAGE"), worker_option(worker), region_option(region))


@click.group(cls=Ordered)
def image() -> None:
    """Bring images to workers, list and remove them.

    Machines fetch the image they need by themselves: from other workers of their region, then from its registry. These
    commands are for having it there before, and for images that no registry has.
    """


@image.command("list")
@worker_option("Only this worker's.")
@region_option("Only this region's.")
@market_command
def list_(session: Session, worker: str | None, region: str | None) -> None:
    """List images and the workers that have them."""
    found = session.send(calls.ListImages(worker=worker, region=region))
    if session.json:
        output.data(found)
    elif not found:
        output.note("no images")
    else:
        output.table(("image", "digest", "size", "in use", "workers"), list(_rows(found)))
    output.silent(session.silent())


@image.command()
@image_options("As this worker has it.", "As workers of this region have it.")
@market_command
def show(session: Session, reference: str, worker: str | None, region: str | None) -> None:
    """Show what an image is made of and how its program is started."""
    found = session.send(calls.ShowImage(image=reference, worker=worker, region=region))
    if not found:
        raise _nowhere(reference, worker, region)
    if session.json:
        output.data(found)
        return
    for number, digest in enumerate(dict.fromkeys(entry.digest for entry in found)):
        if number:
            output.say("")
        _show(digest, [entry for entry in found if entry.digest == digest])
    output.silent(session.silent())


@image.command()
@image_options("To this worker.", "To workers of this region.")
@market_command
def pull(session: Session, reference: str, worker: str | None, region: str | None) -> None:
    """Ask the registry what IMAGE means now, and fetch what is missing.

    On every worker that has the image, so that none goes on with an old meaning of its tag; where none has it, on the
    one that the market would choose. With --worker, there. Machines that run keep what they run.
    """
    _follow(session, calls.PullImage(image=reference, worker=worker, region=region), "has")


@image.command()
@image_options("On this worker.", "On workers of this region.")
@click.option("--count", type=click.IntRange(1, 10_000), metavar="N", help="Only N workers of each region.")
@market_command
def prefetch(session: Session, reference: str, worker: str | None, region: str | None, count: int | None) -> None:
    """Have IMAGE on workers before machines need it.

    On all of them; --region, --worker and --count narrow that down. It goes on after Ctrl-C. What a worker has already
    is not asked for again: `hawker image pull` does that.
    """
    _follow(session, calls.PrefetchImage(image=reference, worker=worker, region=region, count=count), "has")


@image.command()
@image_options("From this worker.", "From workers of this region.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@market_command
def remove(session: Session, reference: str, worker: str | None, region: str | None, yes: bool) -> None:
    """Remove IMAGE from every worker that has it, or from some.

    What machines need is kept, and said so: destroy them first. A worker removes by itself what it has not used for
    longest when it needs the room.
    """
    where = f"from {worker}" if worker else f"from region {region}" if region else "from all workers"
    confirmed(f"Remove {reference} {where}?", yes=yes)
    told = session.send(calls.RemoveImage(image=reference, worker=worker, region=region))
    gone = [entry.worker for entry in told if entry.removed]
    kept = [entry for entry in told if entry.error]
    if not gone and not kept:
        raise _nowhere(reference, worker, region)
    if session.json:
        output.data(told)
    elif gone:
        output.say(f"{reference} is removed from {', '.join(gone)}")
    output.silent(session.silent())
    if kept:
        raise HawkerError(
            "; ".join(f"{entry.worker} keeps it: {entry.error}" for entry in kept), hint="hawker machine list"
        )


@image.command()
@click.argument("reference", metavar="IMAGE")
@click.argument("to", required=False)
@worker_option("From this worker.")
@click.option("--username", help="For the registry; the password comes from HAWKER_REGISTRY_PASSWORD.")
@market_command
def push(session: Session, reference: str, to: str | None, worker: str | None, username: str | None) -> None:
    """Copy IMAGE from a worker that has it to a registry, under the name TO or its own.

    Without --username the credentials are those of the worker's configuration.
    """
    password = os.environ.get("HAWKER_REGISTRY_PASSWORD") if username else None
    if username and not password:
        raise Invalid("HAWKER_REGISTRY_PASSWORD", password, "set it to the password that goes with --username")
    push = calls.PushImage(image=reference, to=to, worker=worker, username=username, password=password)
    _follow(session, push, "has pushed", f" to {to}" if to else "")


@image.command("import")
@click.argument("archive", type=click.Path(exists=True, dir_okay=False, path_type=Path, allow_dash=True))
@image_options("To this worker.", "To a worker of this region.")
@market_command
def import_(session: Session, archive: Path, reference: str, worker: str | None, region: str | None) -> None:
    """Import an image from ARCHIVE, as `docker save`, `podman save` and `skopeo copy` write it, and name it IMAGE.

    It goes to one worker, the one that the market would choose, and others fetch it from there. "-" reads standard
    input.
    """
    with archive.open("rb") if str(archive) != "-" else tempfile.TemporaryFile(prefix="hawker-") as file:
        if str(archive) == "-":  # an upload says its size first
            shutil.copyfileobj(sys.stdin.buffer, file)
        _import(session, file, reference, "archive", worker, region)


@image.command("build-from")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@image_options("On this worker.", "On a worker of this region.")
@click.option("--entrypoint", multiple=True, metavar="WORD", help="The program and its first arguments, word by word.")
@click.option("--cmd", multiple=True, metavar="WORD", help="Arguments that a machine may replace, word by word.")
@click.option("-e", "--env", multiple=True, metavar="NAME=VALUE", help="Set a variable.")
@click.option("--user", default="", metavar="USER", help="Run it as this user: name|uid[:group|gid].")
@click.option("--workdir", default="", metavar="PATH", help="Start it in this directory.")
@click.option("--expose", multiple=True, metavar="PORT", help="A port it listens on: 8080 or 53/udp.")
@click.option("--stop-signal", default="", metavar="SIGNAL", help="The signal that ends it, such as SIGINT.")
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="Note something about it.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Leave files out, such as .git or '*.pyc'.")
@market_command
def build_from(
    session: Session,
    /,
    directory: Path,
    reference: str,
    worker: str | None,
    region: str | None,
    env: tuple[str, ...],
    labels: tuple[str, ...],
    exclude: tuple[str, ...],
    **how: Any,
) -> None:
    """Make an image of the files in DIRECTORY, which become its root, and name it IMAGE.

    No registry and no Docker is needed. It goes to one worker, the one that the market would choose, and others fetch
    it from there.
    """
    from hawker.cli.params import pairs
    from hawker.images.tree.pack import pack_directory
    from hawker.model.image import ImageConfig

    pairs("env", env)
    config = ImageConfig(
        entrypoint=how["entrypoint"],
        cmd=how["cmd"],
        env=env,
        user=how["user"],
        working_dir=how["workdir"],
        stop_signal=how["stop_signal"],
        exposed=tuple(port if "/" in port else f"{port}/tcp" for port in how["expose"]),
        labels=pairs("label", labels),
    )
    with tempfile.TemporaryDirectory(prefix="hawker-") as place:
        packed = Path(place) / "files"
        with output.working(f"packing {directory}"):
            pack_directory(directory, packed, compression="zstd", exclude=exclude)
        with packed.open("rb") as file:
            _import(session, file, reference, "files", worker, region, config)


# --- uploads and progress --------------------------------------------------------------------------------------------


def _import(
    session: Session,
    file: BinaryIO,
    reference: str,
    kind: Literal["archive", "files"],
    worker: str | None,
    region: str | None,
    config: ImageConfig | None = None,
) -> None:
    from hawker.model.image import ImageConfig
    from hawker.model.image_api import PART_BYTES

    client = session.client
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    begun = client.send(calls.BeginUpload(size=size, worker=worker, region=region))
    upload, at = begun.upload, begun.worker
    try:
        with output.bars() as bar:
            offset = 0
            while piece := file.read(PART_BYTES):
                part = calls.Upload(upload=upload, worker=at, offset=offset, data=piece)
                offset = client.send(part).offset
                bar(f"to {at}", offset, size, "uploading")
    except BaseException:
        client.send(calls.DropUpload(upload=upload, worker=at))
        raise
    made_of = config or ImageConfig()
    importing = calls.ImportImage(upload=upload, worker=at, image=reference, kind=kind, config=made_of)
    for made in _follow(session, importing, "has"):
        _note_other_meanings(session, made)


def _note_other_meanings(session: Session, made: ImageHere) -> None:
    """No registry says what a name means here: a worker goes on with the image that it has under it."""
    others = [
        entry.worker
        for entry in session.send(calls.ListImages())
        if entry.digest != made.digest and set(entry.names) & set(made.names)
    ]
    if others:
        name = made.names[0]
        output.note(f"{', '.join(others)}: still another image under this name, which machines there would get")
        output.note(f"  try: give each build a tag of its own, or hawker image remove {name} --worker {others[0]}")


def _follow(session: Session, call: StreamRequest[ImageEvent], verb: str, where: str = "") -> list[ImageHere]:
    """Show progress until every worker has ended, then tell what came of it: it `verb` the image `where`. Raises when
    one failed."""
    from msgspec.json import decode

    from hawker.model.image_api import ImageFailed, ImageHere, ImageProgress

    done: list[ImageHere] = []
    failed: list[ImageFailed] = []
    with session.client.stream(call) as events, output.bars() as bar:
        for event in events:
            match event.event:
                case "progress":
                    told = decode(event.data, type=ImageProgress)
                    bar(told.worker, told.done, told.total, told.doing)
                case "done":
                    done.append(decode(event.data, type=ImageHere))
                case "error":
                    failed.append(decode(event.data, type=ImageFailed))
    if session.json:
        output.data(done)
    else:
        for entry in done:
            name = entry.names[0] if entry.names else entry.digest
            image = f"{name} ({entry.digest[:_SHORT]}, {size_text(entry.size)})"
            output.say(f"{entry.worker} {verb} {image}{where}")
    if failed:
        raise HawkerError("; ".join(f"{f.worker}: {f.error}" for f in failed), hint=failed[0].hint)
    if not done:
        raise HawkerError("no worker took it", hint="hawker workers")
    return done


# --- shown -----------------------------------------------------------------------------------------------------------


def _rows(found: Iterable[ImageHere]) -> Iterable[tuple[object, ...]]:
    """A row for each image under each of its names, with all its workers."""
    grouped: dict[tuple[str, str], list[ImageHere]] = {}
    for entry in found:
        for name in entry.names or ["<none>"]:
            grouped.setdefault((name, entry.digest), []).append(entry)
    for (name, digest), entries in sorted(grouped.items()):
        workers = ", ".join(entry.worker for entry in entries)
        in_use = sum(entry.in_use for entry in entries)
        yield name, digest[:_SHORT], size_text(entries[0].size), in_use or None, workers


def _show(digest: str, entries: list[ImageShown]) -> None:
    made = entries[0].image
    config, platform = made.config, made.platform
    names = dict.fromkeys(name for entry in entries for name in entry.names)
    output.fields(
        [
            ("digest", digest),
            ("names", ", ".join(names) or "-"),
            ("platform", "/".join(filter(None, (platform.os, platform.architecture, platform.variant)))),
            ("size", f"{size_text(entries[0].size)} in {len(made.layers)} layers"),
            ("workers", ", ".join(entry.worker for entry in entries)),
            ("entrypoint", _words(config.entrypoint)),
            ("cmd", _words(config.cmd)),
            ("user", config.user or "root"),
            ("directory", config.working_dir or "/"),
            ("ports", ", ".join(config.exposed) or "-"),
            ("stopped by", config.stop_signal or "SIGTERM"),
        ]
    )
    for variable in config.env:
        output.say(f"env         {variable}")
    for layer in made.layers:
        output.say(f"layer       {layer.digest}  {size_text(layer.size)}")


def _words(words: Iterable[str]) -> str:
    from shlex import join

    return join(words) or "-"


def size_text(count: float) -> str:
    """Bytes, in a unit that leaves three digits."""
    for unit in _UNITS[:-1]:
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} {_UNITS[-1]}"


def _nowhere(reference: str, worker: str | None, region: str | None) -> NotFound:
    where = f"{worker} does not have" if worker else f"no worker{f' in {region}' if region else ''} has"
    return NotFound(f"{where} the image {reference}", hint="hawker image list")

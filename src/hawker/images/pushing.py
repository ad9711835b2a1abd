"""An image of this host, copied to a registry: its blobs, those that are not there yet, and then its manifest."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from hawker.errors import ImageError
from hawker.host import Host
from hawker.images.blobs import Blobs
from hawker.images.known import Known
from hawker.images.progress import Progress, State, Watcher
from hawker.images.pull import first_of
from hawker.images.registry import Registries
from hawker.images.settings import ImageSettings
from hawker.model.image import Descriptor
from hawker.model.values import ImageRef


def with_credentials(settings: ImageSettings, host: str, username: str, password: str) -> ImageSettings:
    """The same settings, but for who we are to one registry."""
    registry = replace(settings.registry(host), username=username, password=password, token="")
    return replace(settings, registries={**settings.registries, host: registry})


async def push(
    settings: ImageSettings, host: Host, blobs: Blobs, known: Known, to: ImageRef, watcher: Watcher | None
) -> None:
    """Raises `ImageError`, `Unreachable`. May be repeated: what is there is not sent again."""
    config = known.manifest.config
    layers = [
        Descriptor(media_type=layer.media_type, digest=layer.digest, size=layer.size) for layer in known.image.layers
    ]
    for blob in (config, *layers):
        if blob.digest not in blobs:
            raise ImageError(str(to), f"{blob.digest} is not here any more", hint="pull the image again")
    gate = asyncio.Semaphore(settings.parallel)
    registries = Registries(settings, host)
    source = next((name for name in map(ImageRef, known.record.names) if name.registry == to.registry), None)
    mount_from = source.repository if source is not None and source.repository != to.repository else ""

    async def send(blob: Descriptor) -> None:
        def moved(count: int) -> None:
            if watcher is not None and blob is not config:
                state: State = "sending" if count < blob.size else "sent"
                watcher(Progress(str(to), blob.digest, state, count, blob.size))

        async with gate:
            if not await registries.has_blob(to, blob.digest):
                await registries.upload(to, blob, blobs.path(blob.digest), moved, mount_from)
            moved(blob.size)

    try:
        async with asyncio.TaskGroup() as group:
            for blob in {blob.digest: blob for blob in (*layers, config)}.values():
                group.create_task(send(blob))
        manifest = await asyncio.to_thread(blobs.read, known.image.digest)
        await registries.put_manifest(to, known.manifest.media_type, manifest)
    except BaseExceptionGroup as errors:
        raise first_of(errors) from errors
    finally:
        await registries.close()

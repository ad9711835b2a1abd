"""The calls about images by name: see `client/api.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hawker.client.answers import QUIET_S, Object, many, one, present
from hawker.client.events import Events
from hawker.client.plain import Transport, path_of


class Images(Transport):
    """What workers keep of images, and what is fetched, pushed and uploaded."""

    def images(self, *, worker: str | None = None, region: str | None = None) -> list[Object]:
        """*Extension*: the images that workers have, an entry for each image on each worker."""
        return many(self.get("/v1/hawker/images", query={"worker": worker, "region": region}))

    def image(self, image: str, *, worker: str | None = None, region: str | None = None) -> list[Object]:
        """*Extension*: what an image is made of, by a reference or a digest, from every worker that has it."""
        query = {"image": image, "worker": worker, "region": region}
        return many(self.get("/v1/hawker/images/show", query=query))

    def remove_image(self, image: str, *, worker: str | None = None, region: str | None = None) -> list[Object]:
        """*Extension*: remove it from every worker that has it. What became of it on each; `ApiError` with
        `status_code` 409 when machines need it wherever it is."""
        query = {"image": image, "worker": worker, "region": region}
        return many(self.delete("/v1/hawker/images", query=query))

    def pull_image(self, image: str, *, worker: str | None = None, region: str | None = None) -> Events:
        """*Extension*: ask the registry again what a name means, where the image is, or on one worker. Events:
        `progress`, and for each worker one `done` or `error`."""
        return self._image_events("pull", image=image, worker=worker, region=region)

    def prefetch_image(
        self, image: str, *, worker: str | None = None, region: str | None = None, count: int | None = None
    ) -> Events:
        """*Extension*: have it on every worker, or on `count` of each region. Events as `pull_image` has them."""
        return self._image_events("prefetch", image=image, worker=worker, region=region, count=count)

    def push_image(
        self,
        image: str,
        to: str | None = None,
        *,
        worker: str | None = None,
        username: str | None = None,
        password: str | None = None,
    ) -> Events:
        """*Extension*: copy it from a worker that has it to a registry. Events as `pull_image` has them."""
        return self._image_events("push", image=image, to=to, worker=worker, username=username, password=password)

    def begin_upload(self, size: int, *, worker: str | None = None, region: str | None = None) -> Object:
        """*Extension*: where to send an archive or files of `size` bytes: `upload`, and the `worker` that it is at."""
        body = present(size=size, worker=worker, region=region)
        return one(self.post("/v1/hawker/images/uploads", json=body))

    def upload(self, upload: str, worker: str, offset: int, data: bytes) -> Object:
        """*Extension*: the bytes at `offset`, at most 16 MiB. May be repeated. `offset` in the answer: what is there
        now."""
        query = {"offset": offset, "worker": worker}
        return one(self.put(path_of("hawker", "images", "uploads", upload), query=query, data=data))

    def drop_upload(self, upload: str, worker: str) -> None:
        self.delete(path_of("hawker", "images", "uploads", upload), query={"worker": worker})

    def import_image(
        self,
        upload: str,
        worker: str,
        image: str,
        *,
        kind: str = "archive",
        config: Mapping[str, Any] | None = None,
    ) -> Events:
        """*Extension*: make an image of an upload, `archive` or `files`, and name it. Events as `pull_image` has them.
        The upload is gone then, also after an error."""
        return self._image_events("import", upload=upload, worker=worker, image=image, kind=kind, config=config)

    def _image_events(self, verb: str, **body: Any) -> Events:
        return Events(self.lines(f"/v1/hawker/images/{verb}", json=present(**body), quiet_s=QUIET_S))

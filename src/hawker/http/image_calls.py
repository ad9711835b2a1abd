"""What answers the endpoints for images: a worker for itself, or a broker with what its workers answer."""

from __future__ import annotations

from typing import Any, Protocol

from hawker.http.app import Handler
from hawker.http.call import Call


class ImageCalls(Protocol):
    """A method for each of `hawker.model.image_endpoints`."""

    async def list_images(self, call: Call) -> Any: ...
    async def show(self, call: Call) -> Any: ...
    async def remove(self, call: Call) -> Any: ...
    async def pull(self, call: Call) -> Any: ...
    async def prefetch(self, call: Call) -> Any: ...
    async def push(self, call: Call) -> Any: ...
    async def begin_upload(self, call: Call) -> Any: ...
    async def upload(self, call: Call) -> Any: ...
    async def drop_upload(self, call: Call) -> Any: ...
    async def import_image(self, call: Call) -> Any: ...


def image_handlers(calls: ImageCalls) -> dict[str, Handler]:
    """By operation."""
    return {
        "Images_list": calls.list_images,
        "Images_show": calls.show,
        "Images_remove": calls.remove,
        "Images_pull": calls.pull,
        "Images_prefetch": calls.prefetch,
        "Images_push": calls.push,
        "Images_begin_upload": calls.begin_upload,
        "Images_upload": calls.upload,
        "Images_drop_upload": calls.drop_upload,
        "Images_import": calls.import_image,
    }

"""What answers the calls for images: a worker for itself, or a broker with what its workers answer."""

from __future__ import annotations

from typing import Any, Protocol

from hawker.http.call import Call
from hawker.http.handlers import Route, on
from hawker.model import image_api as calls


class ImageCalls(Protocol):
    """A method for each call of `hawker.model.image_api`."""

    async def list_images(self, call: Call, request: calls.ListImages) -> Any: ...
    async def show(self, call: Call, request: calls.ShowImage) -> Any: ...
    async def remove(self, call: Call, request: calls.RemoveImage) -> Any: ...
    async def pull(self, call: Call, request: calls.PullImage) -> Any: ...
    async def prefetch(self, call: Call, request: calls.PrefetchImage) -> Any: ...
    async def push(self, call: Call, request: calls.PushImage) -> Any: ...
    async def begin_upload(self, call: Call, request: calls.BeginUpload) -> Any: ...
    async def upload(self, call: Call, request: calls.Upload) -> Any: ...
    async def drop_upload(self, call: Call, request: calls.DropUpload) -> Any: ...
    async def import_image(self, call: Call, request: calls.ImportImage) -> Any: ...


def image_routes(answers: ImageCalls) -> tuple[Route, ...]:
    return (
        on(calls.ListImages, answers.list_images),
        on(calls.ShowImage, answers.show),
        on(calls.RemoveImage, answers.remove),
        on(calls.PullImage, answers.pull),
        on(calls.PrefetchImage, answers.prefetch),
        on(calls.PushImage, answers.push),
        on(calls.BeginUpload, answers.begin_upload),
        on(calls.Upload, answers.upload),
        on(calls.DropUpload, answers.drop_upload),
        on(calls.ImportImage, answers.import_image),
    )

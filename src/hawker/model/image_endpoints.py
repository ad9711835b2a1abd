"""The endpoints for images. A worker serves them for itself; a broker sends each to the workers that it is about."""

from __future__ import annotations

from hawker.model import api, image_api
from hawker.model.endpoint import Endpoint, Query

_STRING = {"type": "string"}
_IMAGE = Query("image", {"type": "string", "minLength": 1}, "a reference or a digest", required=True)
_WHERE = (Query("worker", _STRING, "only this worker"), Query("region", _STRING, "only this region"))
_UPLOAD = "/v1/hawker/images/uploads/{upload}"
_EVENTS = "text/event-stream"

IMAGE_ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        op="Images_list",
        method="GET",
        path="/v1/hawker/images",
        summary="List the images that workers have",
        served="worker",
        reply=list[image_api.ImageHere],
        query=_WHERE,
        statuses=(404, 412, 500),
        extension=True,
    ),
    Endpoint(
        op="Images_remove",
        method="DELETE",
        path="/v1/hawker/images",
        summary="Remove an image from every worker that has it; one that machines need is kept and says so",
        served="worker",
        reply=list[image_api.ImageRemoved],
        query=(_IMAGE, *_WHERE),
        statuses=(404, 409, 412, 500),
        extension=True,
    ),
    Endpoint(
        op="Images_show",
        method="GET",
        path="/v1/hawker/images/show",
        summary="Show what an image is made of, on every worker that has it",
        served="worker",
        reply=list[image_api.ImageShown],
        query=(_IMAGE, *_WHERE),
        statuses=(404, 412, 500),
        extension=True,
    ),
    Endpoint(
        op="Images_pull",
        method="POST",
        path="/v1/hawker/images/pull",
        summary="Ask the registry again what a name means: on the workers that have the image, or on one; its progress",
        served="worker",
        body=image_api.PullImage,
        reply=image_api.ImageEvent,
        media=_EVENTS,
        statuses=(404, 412, 429, 500),
        extension=True,
    ),
    Endpoint(
        op="Images_prefetch",
        method="POST",
        path="/v1/hawker/images/prefetch",
        summary="Have an image on workers before machines need it; its progress. Goes on when nobody listens any more",
        served="worker",
        body=image_api.PrefetchImage,
        reply=image_api.ImageEvent,
        media=_EVENTS,
        statuses=(404, 412, 429, 500),
        extension=True,
    ),
    Endpoint(
        op="Images_push",
        method="POST",
        path="/v1/hawker/images/push",
        summary="Copy an image from a worker that has it to a registry; its progress",
        served="worker",
        body=image_api.PushImage,
        reply=image_api.ImageEvent,
        media=_EVENTS,
        statuses=(404, 412, 429, 500),
        extension=True,
    ),
    Endpoint(
        op="Images_begin_upload",
        method="POST",
        path="/v1/hawker/images/uploads",
        summary="Begin to upload an archive or files to a worker: the one named, or one with room",
        served="worker",
        body=image_api.BeginUpload,
        reply=image_api.Uploading,
        success=201,
        statuses=(404, 409, 412, 429, 500),
        extension=True,
    ),
    Endpoint(
        op="Images_upload",
        method="PUT",
        path=_UPLOAD,
        summary="Send the next bytes of an upload, at most 16 MiB; answers how many are there",
        served="worker",
        reply=image_api.Uploading,
        query=(
            Query("offset", {"type": "integer", "minimum": 0}, "where these bytes go", required=True),
            Query("worker", _STRING, "the worker that the upload is at", required=True),
        ),
        statuses=(404, 409, 412, 500),
        extension=True,
        raw_body=True,
    ),
    Endpoint(
        op="Images_drop_upload",
        method="DELETE",
        path=_UPLOAD,
        summary="Give an upload up",
        served="worker",
        reply=api.Ok,
        query=(Query("worker", _STRING, "the worker that the upload is at", required=True),),
        statuses=(404, 412, 500),
        extension=True,
    ),
    Endpoint(
        op="Images_import",
        method="POST",
        path="/v1/hawker/images/import",
        summary="Make an image of an upload that is complete, under a name; its progress",
        served="worker",
        body=image_api.ImportImage,
        reply=image_api.ImageEvent,
        media=_EVENTS,
        statuses=(404, 409, 412, 422, 429, 500),
        extension=True,
    ),
)

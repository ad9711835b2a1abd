"""The endpoints for apps, and the article's own paths to start and stop."""

from __future__ import annotations

from hawker.model import api
from hawker.model.endpoint import APP, BOOL, STRING, WAIT_START, Endpoint, Query

APP_ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        op="Apps_list",
        method="GET",
        path="/v1/apps",
        summary="List an organisation's apps",
        served="broker",
        reply=api.Apps,
        query=(Query("org_slug", STRING, "all when absent"), Query("app_role", STRING)),
    ),
    Endpoint(
        op="Apps_create",
        method="POST",
        path="/v1/apps",
        summary="Create an app",
        served="broker",
        body=api.CreateApp,
        reply=api.App,
        success=201,
        statuses=(409, 422, 500),
        query=(Query("wait", BOOL),),
    ),
    Endpoint(
        op="Apps_show",
        method="GET",
        path=APP,
        summary="Get an app; with a machine's id in its place that machine, as in the original article",
        served="broker",
        reply=api.App,
        also=api.Machine,
    ),
    Endpoint(
        op="Apps_delete",
        method="DELETE",
        path=APP,
        summary="Delete an app and its machines; with a machine's id in its place that, as in the original article",
        served="broker",
        reply=api.Ok,
        success=202,
        statuses=(409, 412, 500),
        query=(Query("force", BOOL, "also machines that somebody has leased"),),
    ),
    Endpoint(
        op="Article_start",
        method="POST",
        path="/v1/apps/{machine_id}/start",
        summary="Start a machine by its id alone, as in the original article",
        served="worker",
        reply=api.Started,
        query=(WAIT_START,),
        statuses=(408, 409, 412, 422),
    ),
    Endpoint(
        op="Article_stop",
        method="POST",
        path="/v1/apps/{machine_id}/stop",
        summary="Stop a machine by its id alone, as in the original article",
        served="worker",
        body=api.StopMachine,
        body_required=False,
        reply=api.Ok,
        statuses=(409, 412),
    ),
)

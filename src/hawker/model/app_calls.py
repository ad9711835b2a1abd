"""The calls for apps, and the original article's own paths to start and stop a machine."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from hawker.model import api
from hawker.model.call_bases import APP, START_S, OfApp, WaitStart
from hawker.model.op import Op, Request, declared_in


class ListApps(Request[api.Apps]):
    """List an organisation's apps."""

    op = Op("Apps_list", "GET", "/v1/apps", served="broker")
    org_slug: Annotated[str | None, Meta(description="all when absent")] = None
    app_role: str = ""


class CreateApp(Request[api.App]):
    """Create an app."""

    op = Op(
        "Apps_create",
        "POST",
        "/v1/apps",
        served="broker",
        success=201,
        refuses=(409, 422, 500),
        query=("wait",),
        example={"app_name": "shop", "org_slug": "personal"},
    )
    app_name: str | None = None
    name: str | None = None
    org_slug: str | None = None
    network: str | None = None
    app_role_id: str | None = None
    enable_subdomains: bool | None = None
    wait: bool = False


class ShowApp(OfApp[api.App]):
    """Get an app; with a machine's id in its place that machine, as in the original article."""

    op = Op("Apps_show", "GET", APP, served="broker", also=api.Machine)


class DeleteApp(OfApp[api.Ok]):
    """Delete an app and its machines; with a machine's id in its place that, as in the original article."""

    op = Op("Apps_delete", "DELETE", APP, served="broker", success=202, refuses=(409, 412, 500))
    force: Annotated[bool, Meta(description="also machines that somebody has leased")] = False


class StartById(Request[api.Started], kw_only=False):
    """Start a machine by its id alone, as in the original article."""

    op = Op(
        "Article_start",
        "POST",
        "/v1/apps/{machine_id}/start",
        query=("wait",),
        refuses=(408, 409, 412, 422),
        deadline_s=START_S,
    )
    machine_id: str
    wait: WaitStart = False


class StopById(Request[api.Ok], kw_only=False):
    """Stop a machine by its id alone, as in the original article."""

    op = Op("Article_stop", "POST", "/v1/apps/{machine_id}/stop", refuses=(409, 412))
    machine_id: str
    signal: str | int | None = None
    timeout: str | int | None = None


APP_CALLS = declared_in(globals())

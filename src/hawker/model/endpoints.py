"""Every endpoint of the public API as data: the routes, the checks of their input and the OpenAPI document follow
from it.

`served` says who answers: the broker itself; the worker that owns the machine, to which the broker passes the request
on as it came; or any agent for itself. What Hawker adds to the public API is marked `extension`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from hawker.model import api

Served = Literal["broker", "worker", "any"]


class Query(msgspec.Struct, frozen=True):
    """A query parameter: its JSON schema type and meaning."""

    name: str
    schema: dict[str, Any]
    doc: str = ""
    required: bool = False
    extension: bool = False


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One operation. `statuses` are the refusals it may answer beside 401; 400 and 404 are added where they apply."""

    op: str
    method: str
    path: str
    summary: str
    served: Served
    body: Any = None
    body_required: bool = True
    reply: Any = None
    also: Any = None  # another form of the reply, for the article's paths where a machine's id stands for an app
    success: int = 200
    query: tuple[Query, ...] = ()
    statuses: tuple[int, ...] = ()
    extension: bool = False
    media: str = "application/json"


_STRING = {"type": "string"}
_BOOL = {"type": "boolean"}
_COUNT = {"type": "integer", "minimum": 0}
_DAY = {"type": "integer", "minimum": 0, "maximum": 86400}
_WAIT_STATES = {"type": "array", "items": _STRING}

_WAIT_START = Query("wait", _BOOL, "answer only once the machine is started or has failed to start", extension=True)
_APP = "/v1/apps/{app_name}"
_M = f"{_APP}/machines"
_ID = f"{_M}/{{machine_id}}"

LISTING = (
    Query("include_deleted", _BOOL, "also destroyed machines"),
    Query("include_leases", _BOOL, "with each machine's lease"),
    Query("region", _STRING),
    Query("state", _STRING, "states, separated by commas"),
    Query("summary", _BOOL, "without the configuration's details; accepted, the whole machine is given"),
)

ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        op="Machines_create",
        method="POST",
        path=_M,
        summary="Order a machine: filled now, in the region asked for, or refused with reasons",
        served="broker",
        body=api.CreateMachine,
        reply=api.Machine,
        query=(_WAIT_START,),
        statuses=(409, 412, 422, 500),
    ),
    Endpoint(
        op="Machines_list",
        method="GET",
        path=_M,
        summary="List an app's machines",
        served="broker",
        reply=list[api.Machine],
        query=LISTING,
    ),
    Endpoint(
        op="Machines_show",
        method="GET",
        path=_ID,
        summary="Get a machine",
        served="worker",
        reply=api.Machine,
        query=(Query("include_leases", _BOOL),),
    ),
    Endpoint(
        op="Machines_update",
        method="POST",
        path=_ID,
        summary="Replace a machine's configuration: a new version",
        served="worker",
        body=api.UpdateMachine,
        reply=api.Machine,
        statuses=(409, 412, 422),
    ),
    Endpoint(
        op="Machines_delete",
        method="DELETE",
        path=_ID,
        summary="Destroy a machine",
        served="worker",
        reply=api.Ok,
        query=(Query("force", _BOOL, "kill it first if it runs"), Query("kill", _BOOL, "the same as force")),
        statuses=(409, 412),
    ),
    Endpoint(
        op="Machines_start",
        method="POST",
        path=f"{_ID}/start",
        summary="Start a machine, or wake a suspended one",
        served="worker",
        reply=api.Started,
        query=(_WAIT_START,),
        statuses=(409, 412, 422),
    ),
    Endpoint(
        op="Machines_stop",
        method="POST",
        path=f"{_ID}/stop",
        summary="Stop a machine",
        served="worker",
        body=api.StopMachine,
        body_required=False,
        reply=api.Ok,
        statuses=(409, 412),
    ),
    Endpoint(
        op="Machines_suspend",
        method="POST",
        path=f"{_ID}/suspend",
        summary="Freeze a machine, memory kept",
        served="worker",
        reply=api.Ok,
        statuses=(409, 412, 422),
    ),
    Endpoint(
        op="Machines_restart",
        method="POST",
        path=f"{_ID}/restart",
        summary="Stop and start a machine",
        served="worker",
        reply=api.Ok,
        statuses=(409, 412),
        query=(
            Query("timeout", _STRING, "grace time: a duration or seconds"),
            Query("signal", _STRING),
            Query("force_stop", _BOOL, "no grace time"),
        ),
    ),
    Endpoint(
        op="Machines_signal",
        method="POST",
        path=f"{_ID}/signal",
        summary="Send a signal to the program",
        served="worker",
        body=api.SignalMachine,
        reply=api.Ok,
        statuses=(412,),
    ),
    Endpoint(
        op="Machines_wait",
        method="GET",
        path=f"{_ID}/wait",
        summary="Wait until a machine reaches a state",
        served="worker",
        reply=api.Waited,
        statuses=(408, 412),
        query=(
            Query("state", _WAIT_STATES, "started (default), stopped, suspended, destroyed, failed or settled"),
            Query("timeout", {"type": "integer", "minimum": 1, "maximum": 60}, "seconds, default 60"),
            Query("version", _STRING),
            Query("instance_id", _STRING, "the same as version"),
            Query("from_event_id", _STRING, "only count what happened after this event"),
        ),
    ),
    Endpoint(
        op="Machines_exec",
        method="POST",
        path=f"{_ID}/exec",
        summary="Run a command beside the program",
        served="worker",
        body=api.ExecMachine,
        reply=api.ExecReply,
        statuses=(408, 412, 422),
    ),
    Endpoint(
        op="Machines_list_processes",
        method="GET",
        path=f"{_ID}/ps",
        summary="List the machine's processes",
        served="worker",
        reply=list[api.ProcessStat],
        query=(Query("sort_by", _STRING), Query("order", {"type": "string", "enum": ["asc", "desc"]})),
    ),
    Endpoint(
        op="Machines_list_events",
        method="GET",
        path=f"{_ID}/events",
        summary="List events, newest first",
        served="worker",
        reply=list[api.Event],
        query=(Query("limit", {"type": "integer", "minimum": 1, "maximum": 50}, "default 20"),),
    ),
    Endpoint(
        op="Machines_list_versions",
        method="GET",
        path=f"{_ID}/versions",
        summary="List configurations, newest first",
        served="worker",
        reply=list[api.Version],
    ),
    Endpoint(
        op="Machines_cordon",
        method="POST",
        path=f"{_ID}/cordon",
        summary="Take a machine out of traffic",
        served="worker",
        reply=api.Ok,
        statuses=(409,),
    ),
    Endpoint(
        op="Machines_uncordon",
        method="POST",
        path=f"{_ID}/uncordon",
        summary="Put a machine back into traffic",
        served="worker",
        reply=api.Ok,
    ),
    Endpoint(
        op="Machines_show_lease",
        method="GET",
        path=f"{_ID}/lease",
        summary="Get the lease in force",
        served="worker",
        reply=api.LeaseReply,
    ),
    Endpoint(
        op="Machines_create_lease",
        method="POST",
        path=f"{_ID}/lease",
        summary="Acquire a lease, or refresh one's own",
        served="worker",
        body=api.AcquireLease,
        body_required=False,
        reply=api.LeaseReply,
        success=201,
        query=(Query("ttl", {"type": "integer"}, "seconds, 1 to 86400; default 120"),),
        statuses=(409, 412),
    ),
    Endpoint(
        op="Machines_release_lease",
        method="DELETE",
        path=f"{_ID}/lease",
        summary="Release one's own lease",
        served="worker",
        reply=api.OkData,
        statuses=(409,),
    ),
    Endpoint(
        op="Machines_show_metadata",
        method="GET",
        path=f"{_ID}/metadata",
        summary="Get all metadata",
        served="worker",
        reply=dict[str, str],
    ),
    Endpoint(
        op="Machines_replace_metadata",
        method="PUT",
        path=f"{_ID}/metadata",
        summary="Replace all metadata",
        served="worker",
        body=api.SetMetadata,
        success=204,
        statuses=(412,),
    ),
    Endpoint(
        op="Machines_merge_metadata",
        method="PATCH",
        path=f"{_ID}/metadata",
        summary="Add to the metadata",
        served="worker",
        body=api.SetMetadata,
        success=204,
        statuses=(412,),
    ),
    Endpoint(
        op="Machines_show_metadata_key",
        method="GET",
        path=f"{_ID}/metadata/{{key}}",
        summary="Get one value",
        served="worker",
        reply=api.MetadataValue,
    ),
    Endpoint(
        op="Machines_update_metadata",
        method="POST",
        path=f"{_ID}/metadata/{{key}}",
        summary="Set one value",
        served="worker",
        body=api.SetMetadataValue,
        success=204,
    ),
    Endpoint(
        op="Machines_delete_metadata",
        method="DELETE",
        path=f"{_ID}/metadata/{{key}}",
        summary="Remove one value",
        served="worker",
        success=204,
    ),
    Endpoint(
        op="Machines_logs",
        method="GET",
        path=f"{_ID}/logs",
        summary="The program's output, a JSON object a line",
        served="worker",
        reply=api.LogLine,
        extension=True,
        media="application/x-ndjson",
        query=(
            Query("tail", {"type": "integer", "minimum": 0, "maximum": 10000}, "lines from before, default 100"),
            Query("follow", _BOOL, "go on with new lines as they come, until the machine is destroyed"),
        ),
    ),
    Endpoint(
        op="Machines_explain",
        method="GET",
        path=f"{_ID}/explain",
        summary="Why the machine was placed where it is",
        served="worker",
        reply=dict[str, Any],
        extension=True,
    ),
    Endpoint(
        op="Apps_list",
        method="GET",
        path="/v1/apps",
        summary="List an organisation's apps",
        served="broker",
        reply=api.Apps,
        query=(Query("org_slug", _STRING, "all when absent"), Query("app_role", _STRING)),
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
        query=(Query("wait", _BOOL),),
    ),
    Endpoint(
        op="Apps_show",
        method="GET",
        path=_APP,
        summary="Get an app; with a machine's id in its place that machine, as in the original article",
        served="broker",
        reply=api.App,
        also=api.Machine,
    ),
    Endpoint(
        op="Apps_delete",
        method="DELETE",
        path=_APP,
        summary="Delete an app; with a machine's id in its place that machine, as in the original article",
        served="broker",
        reply=api.Ok,
        success=202,
        statuses=(409, 412, 500),
        query=(Query("force", _BOOL, "also destroy its machines"),),
    ),
    Endpoint(
        op="Article_start",
        method="POST",
        path="/v1/apps/{machine_id}/start",
        summary="Start a machine by its id alone, as in the original article",
        served="worker",
        reply=api.Started,
        query=(_WAIT_START,),
        statuses=(409, 412, 422),
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
    Endpoint(
        op="Platform_regions",
        method="GET",
        path="/v1/platform/regions",
        summary="List regions",
        served="broker",
        reply=api.Regions,
    ),
    Endpoint(
        op="Platform_placements",
        method="POST",
        path="/v1/platform/placements",
        summary="How many machines of a size each region has room for now",
        served="broker",
        body=api.Placements,
        reply=api.PlacementReply,
        statuses=(422,),
    ),
    Endpoint(
        op="Hawker_workers",
        method="GET",
        path="/v1/hawker/workers",
        summary="Workers and what they hold",
        served="broker",
        reply=list[dict[str, Any]],
        extension=True,
    ),
    Endpoint(
        op="Hawker_cordon",
        method="POST",
        path="/v1/hawker/workers/{name}/cordon",
        summary="Take a worker out of the market: it makes no offers, what runs goes on",
        served="broker",
        reply=api.Ok,
        statuses=(500,),
        extension=True,
    ),
    Endpoint(
        op="Hawker_uncordon",
        method="POST",
        path="/v1/hawker/workers/{name}/uncordon",
        summary="Put a worker back into the market",
        served="broker",
        reply=api.Ok,
        statuses=(500,),
        extension=True,
    ),
    Endpoint(
        op="Hawker_forget",
        method="POST",
        path="/v1/hawker/workers/{name}/forget",
        summary="Give up a worker that is gone for good: nobody lists it or asks it any more, until it is back",
        served="broker",
        reply=api.Ok,
        statuses=(409, 500),
        extension=True,
    ),
    Endpoint(
        op="Hawker_runs",
        method="GET",
        path="/v1/hawker/runs",
        summary="List the runs of every worker that have not ended, each worker's newest first",
        served="worker",
        reply=list[api.Run],
        query=(
            Query("status", _STRING, "active, parked, done, failed, cancelled, separated by commas"),
            Query("machine", _STRING, "only this machine's"),
            Query("limit", {"type": "integer", "minimum": 1, "maximum": 1000}, "of each worker, default 100"),
        ),
        extension=True,
    ),
    Endpoint(
        op="Hawker_run",
        method="GET",
        path="/v1/hawker/runs/{run_id}",
        summary="Get a run",
        served="worker",
        reply=api.Run,
        statuses=(500,),
        extension=True,
    ),
    Endpoint(
        op="Hawker_retry_run",
        method="POST",
        path="/v1/hawker/runs/{run_id}/retry",
        summary="Try a parked step again; a run that is not parked stays as it is; answers at its end, or within 5 s",
        served="worker",
        reply=api.Run,
        statuses=(500,),
        extension=True,
    ),
    Endpoint(
        op="Hawker_cancel_run",
        method="POST",
        path="/v1/hawker/runs/{run_id}/cancel",
        summary="Give a run up: its final step puts right what is half done; answers at its end, or within 5 s",
        served="worker",
        reply=api.Run,
        statuses=(500,),
        extension=True,
    ),
    Endpoint(
        op="Hawker_sql",
        method="POST",
        path="/v1/hawker/sql",
        summary="Run a read-only query on this node's replica of the catalog, or on workers' own databases",
        served="any",
        body=api.Sql,
        reply=api.RowsFound,
        extension=True,
        statuses=(404, 412, 422, 500),
    ),
    Endpoint(
        op="Hawker_subscribe",
        method="GET",
        path="/v1/hawker/subscribe",
        summary="A query's result on this node's replica of the catalog, then its changes, as server-sent events",
        served="any",
        reply=api.SubscriptionEvent,
        media="text/event-stream",
        query=(
            Query("query", _STRING, "one select statement", required=True),
            Query("from", _STRING, "the id of the last event seen: go on after it; also the header Last-Event-ID"),
            Query("seconds", _DAY, "end after this long, at most a day; 0: at once"),
        ),
        extension=True,
        statuses=(412, 429, 500),
    ),
    Endpoint(
        op="Hawker_members",
        method="GET",
        path="/v1/hawker/members",
        summary="The members of the catalog as this node sees them, and how fresh each one's rows are",
        served="any",
        reply=list[api.Member],
        extension=True,
        statuses=(412,),
    ),
    Endpoint(
        op="OpenAPI",
        method="GET",
        path="/openapi.json",
        summary="This document",
        served="broker",
        reply=dict[str, Any],
    ),
    Endpoint(
        op="Health",
        method="GET",
        path="/health",
        summary="Whether this agent should get traffic",
        served="any",
        reply=api.Health,
        statuses=(503,),
    ),
)

"""The calls for machines. A broker fills orders and lists; what is about one machine its worker answers."""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeVar

from msgspec import Meta

from hawker.model import api
from hawker.model.call_bases import (
    MACHINE,
    MACHINES,
    OURS,
    START_S,
    OfApp,
    OfLeasedMachine,
    OfMachine,
    StreamOfMachine,
    WaitStart,
)
from hawker.model.op import NDJSON, Op, declared_in

R = TypeVar("R")

EXEC_S = 3700.0
"""A broker holds the line for so long for a command that is run."""
RESTART_S = 390.0
"""A program may have five minutes to end, and a minute to start."""
_CONFIG = {"image": "docker.io/library/nginx:1.29", "guest": {"cpus": 1, "memory_mb": 256}}

LeaseTtl = Annotated[int, Meta(ge=0, le=86400, description="seconds: with a lease from the beginning")]
SecretsVersion = Annotated[int, Meta(ge=0)]
ImageTimeout = Annotated[int, Meta(ge=1, le=86400, description="seconds for its image to be there; *ours*")]


class CreateMachine(OfApp[api.Machine]):
    """Order a machine: filled now, in the region asked for, or refused with reasons.

    The order fails when its image is not there within `image_timeout`. `replaces`, ours: a machine whose worker does
    not answer; the new one takes its id.
    """

    op = Op(
        "Machines_create",
        "POST",
        MACHINES,
        served="broker",
        query=("wait",),
        headers={"key": "idempotency-key"},
        refuses=(409, 412, 422, 500),
        deadline_s=START_S,
        example={"region": "mad", "config": _CONFIG},
    )
    config: dict[str, Any]
    name: str | None = None
    region: str | None = None
    lease_ttl: LeaseTtl | None = None
    skip_launch: bool | None = None
    skip_service_registration: bool | None = None
    skip_secrets: bool | None = None
    min_secrets_version: SecretsVersion | None = None
    image_timeout: ImageTimeout | None = None
    replaces: str | None = None
    wait: WaitStart = False
    key: Annotated[str, Meta(description="an order with the same key is the same machine", extra_json_schema=OURS)] = ""


class ListMachines(OfApp[list[api.Machine]]):
    """List an app's machines.

    A parameter `metadata.KEY=VALUE` keeps those whose metadata has that value.
    """

    op = Op("Machines_list", "GET", MACHINES, served="broker")
    include_deleted: Annotated[bool, Meta(description="also destroyed machines")] = False
    include_leases: Annotated[bool, Meta(description="with each machine's lease")] = False
    region: str | None = None
    state: Annotated[tuple[str, ...], Meta(description="states, separated by commas")] = ()
    summary: Annotated[
        bool, Meta(description="without the configuration's details; accepted, the whole machine is given")
    ] = False
    metadata: dict[str, str] = {}


class ShowMachine(OfMachine[api.Machine]):
    """Get a machine."""

    op = Op("Machines_show", "GET", MACHINE)
    include_leases: bool = False


class UpdateMachine(OfLeasedMachine[api.Machine]):
    """Replace a machine's configuration: a new version.

    With `current_version` the configuration is replaced only if that version is still the current one. The update fails
    when its image is not there within `image_timeout`.
    """

    op = Op("Machines_update", "POST", MACHINE, refuses=(409, 412, 422), example={"config": _CONFIG})
    config: dict[str, Any]
    name: str | None = None
    region: str | None = None
    lease_ttl: LeaseTtl | None = None
    skip_launch: bool | None = None
    skip_service_registration: bool | None = None
    skip_secrets: bool | None = None
    min_secrets_version: SecretsVersion | None = None
    image_timeout: ImageTimeout | None = None
    current_version: str | None = None


class DestroyMachine(OfLeasedMachine[api.Ok]):
    """Destroy a machine."""

    op = Op("Machines_delete", "DELETE", MACHINE, refuses=(409, 412))
    force: Annotated[bool, Meta(description="kill it first if it runs")] = False
    kill: Annotated[bool, Meta(description="the same as force")] = False


class StartMachine(OfLeasedMachine[api.Started]):
    """Start a machine, or wake a suspended one."""

    op = Op(
        "Machines_start", "POST", f"{MACHINE}/start", query=("wait",), refuses=(408, 409, 412, 422), deadline_s=START_S
    )
    wait: WaitStart = False


class StopMachine(OfLeasedMachine[api.Ok]):
    """Stop a machine.

    Its program gets the signal, and is killed when the grace time `timeout` is over. The answer comes at once.
    """

    op = Op(
        "Machines_stop", "POST", f"{MACHINE}/stop", refuses=(409, 412), example={"signal": "SIGTERM", "timeout": "30s"}
    )
    signal: str | int | None = None
    timeout: str | int | None = None


class SuspendMachine(OfLeasedMachine[api.Ok]):
    """Freeze a machine, memory kept."""

    op = Op("Machines_suspend", "POST", f"{MACHINE}/suspend", refuses=(409, 412, 422))


class RestartMachine(OfLeasedMachine[api.Ok]):
    """Stop and start a machine."""

    op = Op(
        "Machines_restart",
        "POST",
        f"{MACHINE}/restart",
        query=("timeout", "signal", "force_stop"),
        refuses=(409, 412),
        deadline_s=RESTART_S,
    )
    timeout: Annotated[str, Meta(description="grace time: a duration or seconds")] = ""
    signal: str = ""
    force_stop: Annotated[bool, Meta(description="no grace time")] = False


class SignalMachine(OfMachine[api.Ok]):
    """Send a signal to the program."""

    op = Op("Machines_signal", "POST", f"{MACHINE}/signal", refuses=(412,), example={"signal": "SIGHUP"})
    signal: str | int


class WaitForMachine(OfMachine[api.Waited]):
    """Wait until a machine reaches a state."""

    op = Op("Machines_wait", "GET", f"{MACHINE}/wait", refuses=(408, 412), deadline_s=75.0)
    state: Annotated[
        list[str], Meta(description="started (default), stopped, suspended, destroyed, failed or settled")
    ] = []
    timeout: Annotated[int, Meta(ge=1, le=60, description="seconds")] = 60
    version: str = ""
    instance_id: Annotated[str, Meta(description="the same as version")] = ""
    from_event_id: Annotated[str, Meta(description="only count what happened after this event")] = ""


class ExecInMachine(OfMachine[api.ExecReply]):
    """Run a command beside the program, to its end or its time-out.

    When the time-out came first, the 408's details have what it wrote until then, as a reply. A session
    (exec/sessions) gives all that a command writes, as it comes.
    """

    op = Op(
        "Machines_exec",
        "POST",
        f"{MACHINE}/exec",
        refuses=(408, 412, 422),
        deadline_s=EXEC_S,
        example={"command": ["ls", "-l"], "timeout": 10},
    )
    cmd: str | None = None
    command: list[str] | None = None
    container: str | None = None
    stdin: str | None = None
    timeout: Annotated[int, Meta(ge=0)] | None = None
    machine: bool | None = None


class ListProcesses(OfMachine[list[api.ProcessStat]]):
    """List the machine's processes."""

    op = Op("Machines_list_processes", "GET", f"{MACHINE}/ps")
    sort_by: str = ""
    order: Annotated[str, Meta(extra_json_schema={"enum": ["asc", "desc"]})] = ""


class ListEvents(OfMachine[list[api.Event]]):
    """List events, newest first."""

    op = Op("Machines_list_events", "GET", f"{MACHINE}/events")
    limit: Annotated[int, Meta(ge=1, le=50)] = 20


class ListVersions(OfMachine[list[api.Version]]):
    """List configurations, newest first."""

    op = Op("Machines_list_versions", "GET", f"{MACHINE}/versions")


class CordonMachine(OfLeasedMachine[api.Ok]):
    """Take a machine out of traffic."""

    op = Op("Machines_cordon", "POST", f"{MACHINE}/cordon", refuses=(409,))


class UncordonMachine(OfLeasedMachine[api.Ok]):
    """Put a machine back into traffic."""

    op = Op("Machines_uncordon", "POST", f"{MACHINE}/uncordon")


class ShowLease(OfMachine[api.LeaseReply]):
    """Get the lease in force."""

    op = Op("Machines_show_lease", "GET", f"{MACHINE}/lease")


class AcquireLease(OfLeasedMachine[api.LeaseReply]):
    """Acquire a lease, or refresh one's own, whose nonce is shown then."""

    op = Op(
        "Machines_create_lease",
        "POST",
        f"{MACHINE}/lease",
        either=("ttl",),
        success=201,
        refuses=(409, 412),
        example={"ttl": 120, "description": "a deploy"},
    )
    ttl: Annotated[int, Meta(description="seconds, 1 to 86400; default 120")] | None = None
    description: str | None = None


class ReleaseLease(OfLeasedMachine[api.OkData]):
    """Release one's own lease."""

    op = Op("Machines_release_lease", "DELETE", f"{MACHINE}/lease", refuses=(409,))


class ShowMetadata(OfMachine[dict[str, str]]):
    """Get all metadata."""

    op = Op("Machines_show_metadata", "GET", f"{MACHINE}/metadata")


class _GivesMetadata(OfLeasedMachine[R], Generic[R]):
    """Base of the calls that give many values."""

    metadata: dict[str, str]
    machine_version: str | None = None
    updated_at: str | None = None


class ReplaceMetadata(_GivesMetadata[None]):
    """Replace all metadata."""

    op = Op(
        "Machines_replace_metadata",
        "PUT",
        f"{MACHINE}/metadata",
        success=204,
        refuses=(412,),
        example={"metadata": {"role": "web"}},
    )


class MergeMetadata(_GivesMetadata[None]):
    """Add to the metadata."""

    op = Op(
        "Machines_merge_metadata",
        "PATCH",
        f"{MACHINE}/metadata",
        success=204,
        refuses=(412,),
        example={"metadata": {"role": "web"}},
    )


class ShowMetadataKey(OfMachine[api.MetadataValue], kw_only=False):
    """Get one value."""

    op = Op("Machines_show_metadata_key", "GET", f"{MACHINE}/metadata/{{key}}")
    key: str


class SetMetadataKey(OfMachine[None], kw_only=False):
    """Set one value."""

    op = Op("Machines_update_metadata", "POST", f"{MACHINE}/metadata/{{key}}", success=204, example={"value": "web"})
    key: str
    value: str
    updated_at: str | None = None


class DeleteMetadataKey(OfMachine[None], kw_only=False):
    """Remove one value."""

    op = Op("Machines_delete_metadata", "DELETE", f"{MACHINE}/metadata/{{key}}", success=204)
    key: str


class FollowLogs(StreamOfMachine[api.LogLine]):
    """The program's output, a JSON object a line."""

    op = Op("Machines_logs", "GET", f"{MACHINE}/logs", media=NDJSON, extension=True)
    tail: Annotated[int, Meta(ge=0, le=10_000, description="lines from before")] = 100
    follow: Annotated[bool, Meta(description="go on with new lines as they come, until the machine is destroyed")] = (
        False
    )


class ExplainMachine(OfMachine[dict[str, Any]]):
    """Why the machine was placed where it is."""

    op = Op("Machines_explain", "GET", f"{MACHINE}/explain", extension=True)


MACHINE_CALLS = declared_in(globals())

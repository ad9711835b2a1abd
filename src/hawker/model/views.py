"""A worker's rows as the public API shows them: bodies of `hawker.model.api`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import UNSET, UnsetType

from hawker.model import api
from hawker.model.rows import AppRow, EventRow, LeaseRow, MachineRow, RunRow
from hawker.model.values import ImageRef, pinned, rfc3339


def machine_view(
    row: MachineRow,
    worker: str,
    events: Sequence[EventRow],
    checks: list[api.Check],
    *,
    nonce: str = "",
    lease: LeaseRow | UnsetType | None = UNSET,
) -> api.Machine:
    """A machine as the API shows it. `events` are its latest, newest first."""
    return api.Machine(
        id=row.id,
        name=row.name,
        state=row.state,
        region=row.region,
        image_ref=ImageRef(pinned(row.config["image"], row.image_digest)).as_json(),
        instance_id=row.version,
        version=row.version,
        private_ip=row.private_ip,
        config=row.config,
        incomplete_config=None,
        events=[event_view(e) for e in events],
        checks=checks,
        created_at=rfc3339(row.created_at_ms),
        updated_at=rfc3339(row.updated_at_ms),
        host_status="ok",
        cordoned=row.cordoned,
        hawker=api.Placed(
            app=row.app, worker=worker, driver=row.driver, holds=row.held(), cause=row.cause, ports=row.ports
        ),
        nonce=nonce or UNSET,
        lease=lease_view(lease, row) if isinstance(lease, LeaseRow) else lease,
    )


def event_view(row: EventRow) -> api.Event:
    return api.Event(
        id=row.id,
        type=row.type,
        status=row.status,
        source=row.source,
        timestamp=row.at_ms,
        request=row.request,
        hawker={"cause": row.cause, "run": row.run, "step": row.step},
    )


def run_view(row: RunRow, worker: str) -> api.Run:
    return api.Run(
        id=row.id,
        worker=worker,
        flow=row.flow,
        machine=row.resource,
        status=row.status,
        step=row.steps[row.next] if row.next < len(row.steps) else "",
        steps=row.steps,
        attempt=row.attempt,
        error=row.error,
        cause=row.cause,
        started_at=rfc3339(row.started_at_ms),
        updated_at=rfc3339(row.updated_at_ms),
    )


def lease_view(lease: LeaseRow, row: MachineRow) -> api.Lease:
    return api.Lease(
        nonce=lease.nonce,
        expires_at=lease.expires_at_ms // 1000,
        owner=lease.owner,
        description=lease.description,
        version=row.version,
    )


def app_view(row: AppRow, machine_count: int, urls: Mapping[str, str]) -> api.App:
    """`urls` by public port, with "{app}" where the app's name goes."""
    return api.App(
        id=row.id,
        name=row.name,
        internal_numeric_id=row.number,
        network=row.network,
        status="deployed" if row.deployed else "pending",
        machine_count=machine_count,
        volume_count=0,
        organization=api.Organization(name=row.org, slug=row.org),
        cname_target=f"{row.name}.internal",
        app_role=row.role,
        created_at=row.created_at_ms,
        urls={port: url.replace("{app}", row.name) for port, url in urls.items()},
    )

"""Reads of what is documented upstream and not built here: each answers with the empty list, which is the truth.

Clients read these beside what they came for, and stop at a refusal. Whatever would change one of them is refused by its
path (`hawker.http.app`).
"""

from __future__ import annotations

from typing import Any

from hawker.model.api import Body
from hawker.model.endpoint import APP, BOOL, STRING, Endpoint, Query

_INTEGER = {"type": "integer"}


class Secrets(Body, frozen=True):
    secrets: list[dict[str, Any]] = []


class SecretKeys(Body, frozen=True):
    secret_keys: list[dict[str, Any]] = []


class Assignments(Body, frozen=True):
    ips: list[dict[str, Any]] = []


class Certificates(Body, frozen=True):
    certificates: list[dict[str, Any]] = []
    total_count: int = 0
    next_cursor: str = ""


def _read(op: str, path: str, what: str, reply: Any, *query: Query) -> Endpoint:
    return Endpoint(
        op=op,
        method="GET",
        path=f"{APP}/{path}",
        summary=f"List {what}: none, they are not built yet",
        served="broker",
        reply=reply,
        query=query,
    )


_VERSIONS = (Query("min_version", STRING), Query("version", STRING), Query("show_secrets", BOOL))

UNBUILT_ENDPOINTS: tuple[Endpoint, ...] = (
    _read("Volumes_list", "volumes", "an app's volumes", list[dict[str, Any]], Query("summary", BOOL)),
    _read("Volumes_list_snapshots", "volumes/{volume_id}/snapshots", "a volume's snapshots", list[dict[str, Any]]),
    _read("Secrets_list", "secrets", "an app's secrets", Secrets, *_VERSIONS),
    _read("Secretkeys_list", "secretkeys", "an app's secret keys", SecretKeys, *_VERSIONS[:1], Query("types", STRING)),
    _read("App_IPAssignments_list", "ip_assignments", "an app's addresses", Assignments),
    _read(
        *("App_Certificates_list", "certificates", "an app's certificates", Certificates),
        *(Query("filter", STRING), Query("cursor", STRING), Query("limit", _INTEGER)),
    ),
)


def empty(endpoint: Endpoint) -> Any:
    """What such a read answers."""
    return [] if endpoint.reply == list[dict[str, Any]] else endpoint.reply()

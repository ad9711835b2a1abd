"""Reads of what is documented upstream and not built here: each answers with the empty list, which is the truth.

Clients read these beside what they came for, and stop at a refusal. Whatever would change one of them is refused by its
path (`hawker.http.app`).
"""

from __future__ import annotations

from typing import Any

from hawker.model.api import Body
from hawker.model.call_bases import APP, OfApp
from hawker.model.op import Declared, Op, declared_in, reply_of


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


class ListVolumes(OfApp[list[dict[str, Any]]]):
    """List an app's volumes: none, they are not built yet."""

    op = Op("Volumes_list", "GET", f"{APP}/volumes", served="broker")
    summary: bool = False


class ListSnapshots(OfApp[list[dict[str, Any]]]):
    """List a volume's snapshots: none, they are not built yet."""

    op = Op("Volumes_list_snapshots", "GET", f"{APP}/volumes/{{volume_id}}/snapshots", served="broker")
    volume_id: str


class ListSecrets(OfApp[Secrets]):
    """List an app's secrets: none, they are not built yet."""

    op = Op("Secrets_list", "GET", f"{APP}/secrets", served="broker")
    min_version: str = ""
    version: str = ""
    show_secrets: bool = False


class ListSecretKeys(OfApp[SecretKeys]):
    """List an app's secret keys: none, they are not built yet."""

    op = Op("Secretkeys_list", "GET", f"{APP}/secretkeys", served="broker")
    min_version: str = ""
    types: str = ""


class ListAddresses(OfApp[Assignments]):
    """List an app's addresses: none, they are not built yet."""

    op = Op("App_IPAssignments_list", "GET", f"{APP}/ip_assignments", served="broker")


class ListCertificates(OfApp[Certificates]):
    """List an app's certificates: none, they are not built yet."""

    op = Op("App_Certificates_list", "GET", f"{APP}/certificates", served="broker")
    filter: str = ""
    cursor: str = ""
    limit: int | None = None


UNBUILT_CALLS = declared_in(globals())


def empty(kind: type[Declared[Any]]) -> Any:
    """What such a read answers."""
    reply = reply_of(kind)
    return [] if reply == list[dict[str, Any]] else reply()

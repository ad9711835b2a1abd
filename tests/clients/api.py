"""A bare HTTP client for the public API, on the standard library alone: what it sends is exactly what the test says."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

DEADLINE_S = 75.0
"""Longer than the longest wait the API allows, so that an answer that never comes is a failure of its own."""


@dataclass(frozen=True)
class Reply:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def expect(self, status: int) -> Any:
        """The decoded body (None when there is none), after the status was checked."""
        assert self.status == status, f"{self.status} instead of {status}: {self.body.decode(errors='replace')[:500]}"
        return self.json if self.body else None


@dataclass(frozen=True)
class Api:
    """One market's endpoint and a token for it."""

    endpoint: str
    token: str

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        timeout_s: float = DEADLINE_S,
    ) -> Reply:
        """One request on a connection of its own.

        A `body` is sent as JSON, bytes as they are; None sends neither a body nor its type.
        """
        sent = {"Authorization": f"Bearer {self.token}", **(headers or {})}
        data = None
        if body is not None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            sent.setdefault("Content-Type", "application/json")
        connection = http.client.HTTPConnection(urlsplit(self.endpoint).netloc, timeout=timeout_s)
        try:
            connection.request(method, path, body=data, headers=sent)
            response = connection.getresponse()
            return Reply(response.status, response.headers, response.read())
        finally:
            connection.close()

    def get(self, path: str, **options: Any) -> Reply:
        return self.call("GET", path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> Reply:
        return self.call("POST", path, body, **options)

    def delete(self, path: str, **options: Any) -> Reply:
        return self.call("DELETE", path, **options)

    # --- what most tests begin with ----------------------------------------------------------------------------------

    def create_app(self, name: str, **fields: Any) -> Any:
        return self.post("/v1/apps", {"app_name": name, "org_slug": "personal", **fields}).expect(201)

    def create_machine(self, app: str, *argv: str, region: str = "ord", **fields: Any) -> Any:
        """Order a machine that runs `argv` (a long sleep when none is given) and wait until its launch is over."""
        config = {"image": "host", "init": {"exec": list(argv or SLEEP)}, **fields.pop("config", {})}
        created = self.post(f"/v1/apps/{app}/machines", {"config": config, "region": region, **fields}).expect(200)
        self.wait(app, created["id"], "stopped" if fields.get("skip_launch") else "started,stopped,failed")
        return created

    def machine(self, app: str, machine: str) -> Any:
        return self.get(f"/v1/apps/{app}/machines/{machine}").expect(200)

    def wait(self, app: str, machine: str, state: str, **query: str) -> Any:
        more = "".join(f"&{name}={value}" for name, value in query.items())
        return self.get(f"/v1/apps/{app}/machines/{machine}/wait?state={state}&timeout=30{more}").expect(200)


SLEEP = ("sleep", "1000")

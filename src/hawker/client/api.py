"""The Machines API by name, for the command line and for programs: each method is one call and gives its decoded JSON.

    with Client("http://127.0.0.1:4280", token) as client:
        machine = client.create_machine("web", {"region": "mad", "config": {...}}, wait=True)
        client.stop("web", machine["id"])

Methods take what the API takes and check nothing that the server checks better. Calls of a machine that its lease
guards take the lease's `nonce`. Errors and connections: `client/plain.py`. Methods marked *extension* are Hawker's own;
other servers of this API do not have them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hawker.client.answers import Object, data, many, one, present
from hawker.client.events import Events
from hawker.client.fleet import Fleet
from hawker.client.images import Images
from hawker.client.lines import Lines, Pieces
from hawker.client.plain import ApiError, path_of
from hawker.model.values import format_duration

__all__ = ["ApiError", "Client", "Events", "Lines", "path_of"]

NONCE = "fly-machine-lease-nonce"
WAIT_S_MAX = 60  # the API's own limit for one wait
_MARGIN_S = 15.0  # for the way there and back, on top of what the server was told it may take
_SESSION_S = 35.0  # three of the frames that a command is never quieter than
_EXEC_S = 3700.0  # as long as a broker holds the line for a command without a limit of its own


class Client(Fleet, Images):
    """One market, seen through one of its brokers."""

    # --- apps --------------------------------------------------------------------------------------------------------

    def apps(self, org: str | None = None, *, role: str | None = None) -> list[Object]:
        """All apps, or one organisation's."""
        return many(one(self.get("/v1/apps", query={"org_slug": org, "app_role": role})).get("apps"))

    def create_app(self, name: str, org: str = "personal", **more: Any) -> Object:
        """Raises `ApiError` with the word `name_taken` when the name is in use, by whomever."""
        return one(self.post("/v1/apps", json={"app_name": name, "org_slug": org, **more}))

    def app(self, name: str) -> Object:
        return one(self.get(path_of("apps", name)))

    def delete_app(self, name: str, *, force: bool = False) -> None:
        """Its machines go with it. Raises `ApiError` when somebody has leased one, unless `force`: then nothing was
        destroyed."""
        self.delete(path_of("apps", name), query={"force": force or None})

    # --- machines ----------------------------------------------------------------------------------------------------

    def machines(
        self,
        app: str,
        *,
        region: str | None = None,
        state: str | Sequence[str] | None = None,
        metadata: Mapping[str, str] | None = None,
        include_deleted: bool = False,
        include_leases: bool = False,
        summary: bool = False,
    ) -> list[Object]:
        """An app's machines; filters narrow the list. `state` may be several."""
        query: dict[str, Any] = {
            "region": region,
            "state": state if state is None or isinstance(state, str) else ",".join(state),
            "include_deleted": include_deleted or None,
            "include_leases": include_leases or None,
            "summary": summary or None,
        }
        query |= {f"metadata.{key}": value for key, value in (metadata or {}).items()}
        return many(self.get(path_of("apps", app, "machines"), query=query))

    def create_machine(
        self, app: str, body: Mapping[str, Any], *, key: str | None = None, wait: bool = False
    ) -> Object:
        """Order a machine: `body` has `config`, and as you like `name`, `region`, `lease_ttl`, `skip_launch`, ...

        Filled now or refused: `ApiError` with the word `insufficient_capacity` says why, worker by worker.
        *Extensions*: with an idempotency `key` the same order may be sent again and is the same machine; `wait` answers
        once the machine has started.
        """
        headers = {} if key is None else {"idempotency-key": key}
        limit = WAIT_S_MAX + 2 * _MARGIN_S if wait else None
        path = path_of("apps", app, "machines")
        return one(self.post(path, json=dict(body), query={"wait": wait or None}, headers=headers, timeout_s=limit))

    def machine(self, app: str, machine: str, *, include_leases: bool = False) -> Object:
        return one(self.get(_machine(app, machine), query={"include_leases": include_leases or None}))

    def find_machine(self, machine: str) -> Object:
        """A machine by its id alone. *Extension*: its app is in it, at `["hawker"]["app"]`."""
        return one(self.get(path_of("apps", machine)))

    def update_machine(self, app: str, machine: str, body: Mapping[str, Any], *, nonce: str | None = None) -> Object:
        """Replace the whole configuration: a new version. With `current_version` only if that is still current."""
        return one(self.post(_machine(app, machine), json=dict(body), headers=_held(nonce)))

    def destroy(self, app: str, machine: str, *, force: bool = False, nonce: str | None = None) -> Object:
        """`force` kills it first; without, a running machine is refused."""
        return one(self.delete(_machine(app, machine), query={"force": force or None}, headers=_held(nonce)))

    def start(self, app: str, machine: str, *, wait: bool = False, nonce: str | None = None) -> Object:
        """Start or wake a machine. *Extension*: `wait` answers once it has started, or failed to."""
        limit = WAIT_S_MAX + 2 * _MARGIN_S if wait else None
        path = _machine(app, machine, "start")
        return one(self.post(path, query={"wait": wait or None}, headers=_held(nonce), timeout_s=limit))

    def stop(
        self,
        app: str,
        machine: str,
        *,
        signal: str | int | None = None,
        grace_s: float | None = None,
        nonce: str | None = None,
    ) -> Object:
        """Signal, grace time, kill. Answers at once; `wait` for stopped."""
        body = present(signal=signal, timeout=None if grace_s is None else format_duration(grace_s))
        return one(self.post(_machine(app, machine, "stop"), json=body, headers=_held(nonce)))

    def suspend(self, app: str, machine: str, *, nonce: str | None = None) -> Object:
        return one(self.post(_machine(app, machine, "suspend"), headers=_held(nonce)))

    def restart(
        self,
        app: str,
        machine: str,
        *,
        signal: str | None = None,
        grace_s: float | None = None,
        force: bool = False,
        nonce: str | None = None,
    ) -> Object:
        """Stop and start. `force` leaves no grace time."""
        grace = None if grace_s is None else format_duration(grace_s)
        query = {"signal": signal, "timeout": grace, "force_stop": force or None}
        limit = self._timeout_s + (grace_s or 0.0)
        return one(self.post(_machine(app, machine, "restart"), query=query, headers=_held(nonce), timeout_s=limit))

    def signal(self, app: str, machine: str, signal: str | int) -> Object:
        return one(self.post(_machine(app, machine, "signal"), json={"signal": signal}))

    def wait(
        self,
        app: str,
        machine: str,
        states: str | Sequence[str] = "started",
        *,
        timeout_s: int = WAIT_S_MAX,
        version: str | None = None,
        from_event_id: str | None = None,
    ) -> Object:
        """Wait until the machine is in one of `states`, or `settled`. Raises `ApiError` with `status_code` 408 when it
        is not within `timeout_s` (1 to 60)."""
        query = {
            "state": states,
            "timeout": timeout_s,
            "version": version,
            "from_event_id": from_event_id,
        }
        return one(self.get(_machine(app, machine, "wait"), query=query, timeout_s=timeout_s + _MARGIN_S))

    def exec(
        self,
        app: str,
        machine: str,
        command: str | Sequence[str],
        *,
        stdin: str | None = None,
        timeout_s: int | None = None,
    ) -> Object:
        """Run a command beside the program, a line of shell words or a list. Gives `exit_code`, `stdout`, `stderr`."""
        how = {"cmd": command} if isinstance(command, str) else {"command": list(command)}
        body = present(**how, stdin=stdin, timeout=timeout_s)
        limit = _EXEC_S if timeout_s is None else timeout_s + _MARGIN_S
        return one(self.post(_machine(app, machine, "exec"), json=body, timeout_s=limit))

    def open_session(
        self,
        app: str,
        machine: str,
        command: Sequence[str],
        *,
        tty: bool = False,
        columns: int = 80,
        rows: int = 24,
        env: Mapping[str, str] | None = None,
    ) -> str:
        """*Extension*: start a command to talk to. It is killed when nobody reads what it writes for half a minute."""
        body = {"command": list(command), "tty": tty, "columns": columns, "rows": rows, "env": dict(env or {})}
        return str(one(self.post(_machine(app, machine, "exec", "sessions"), json=body))["id"])

    def connect(self, app: str, machine: str, port: int) -> str:
        """*Extension*: a connection to a TCP port of the machine, as a session: read and write it as one."""
        return str(one(self.post(_machine(app, machine, "connections"), json={"port": port}))["id"])

    def read_session(self, app: str, machine: str, session: str) -> Pieces:
        """*Extension*: what the command writes, in the frames of `hawker.model.inside_api`."""
        return self.pieces(_machine(app, machine, "exec", "sessions", session, "output"), quiet_s=_SESSION_S)

    def write_session(self, app: str, machine: str, session: str, data: bytes, *, end: bool = False) -> None:
        """*Extension*: input for the command; `end`: the last of it."""
        path = _machine(app, machine, "exec", "sessions", session, "input")
        self.post(path, data=data, query={"end": end or None})

    def resize_session(self, app: str, machine: str, session: str, columns: int, rows: int) -> None:
        """*Extension*: the size of its terminal."""
        path = _machine(app, machine, "exec", "sessions", session, "resize")
        self.post(path, json={"columns": columns, "rows": rows})

    def close_session(self, app: str, machine: str, session: str) -> None:
        """*Extension*: kill the command if it runs."""
        self.delete(_machine(app, machine, "exec", "sessions", session))

    def memory(self, app: str, machine: str) -> Object:
        """Its limit, and what of it is free."""
        return one(self.get(_machine(app, machine, "memory")))

    def set_memory(self, app: str, machine: str, limit_mb: int, *, cpus: int | None = None) -> Object:
        """Give it another size while it runs. `cpus` is an *extension*."""
        return one(self.put(_machine(app, machine, "memory"), json=present(limit_mb=limit_mb, cpus=cpus)))

    def ps(self, app: str, machine: str, *, sort_by: str | None = None, order: str | None = None) -> list[Object]:
        return many(self.get(_machine(app, machine, "ps"), query={"sort_by": sort_by, "order": order}))

    def events(self, app: str, machine: str, *, limit: int | None = None) -> list[Object]:
        """Newest first."""
        return many(self.get(_machine(app, machine, "events"), query={"limit": limit}))

    def versions(self, app: str, machine: str) -> list[Object]:
        """Newest first."""
        return many(self.get(_machine(app, machine, "versions")))

    def cordon(self, app: str, machine: str, *, nonce: str | None = None) -> Object:
        return one(self.post(_machine(app, machine, "cordon"), headers=_held(nonce)))

    def uncordon(self, app: str, machine: str, *, nonce: str | None = None) -> Object:
        return one(self.post(_machine(app, machine, "uncordon"), headers=_held(nonce)))

    def logs(self, app: str, machine: str, *, tail: int | None = None, follow: bool = False) -> Lines:
        """*Extension*: the program's output, a JSON object a line; with `follow` until closed."""
        return self.lines(_machine(app, machine, "logs"), query={"tail": tail, "follow": follow or None})

    def explain(self, app: str, machine: str) -> Object:
        """*Extension*: why the machine was placed where it is."""
        return one(self.get(_machine(app, machine, "explain")))

    # --- leases ------------------------------------------------------------------------------------------------------

    def lease(self, app: str, machine: str) -> Object:
        """The lease in force. Raises `ApiError` with `status_code` 404 when there is none."""
        return data(self.get(_machine(app, machine, "lease")))

    def acquire_lease(self, app: str, machine: str, ttl_s: int, *, description: str | None = None) -> Object:
        """A lease with its `nonce`. Raises `ApiError` with `status_code` 409 while somebody else holds one."""
        body = present(ttl=ttl_s, description=description)
        return data(self.post(_machine(app, machine, "lease"), json=body))

    def refresh_lease(self, app: str, machine: str, nonce: str, ttl_s: int) -> Object:
        """Prolong one's own: the same nonce, a new end."""
        return data(self.post(_machine(app, machine, "lease"), json={"ttl": ttl_s}, headers=_held(nonce)))

    def release_lease(self, app: str, machine: str, nonce: str) -> None:
        self.delete(_machine(app, machine, "lease"), headers=_held(nonce))

    # --- metadata ----------------------------------------------------------------------------------------------------

    def metadata(self, app: str, machine: str) -> dict[str, str]:
        return one(self.get(_machine(app, machine, "metadata")))

    def replace_metadata(
        self, app: str, machine: str, metadata: Mapping[str, str], *, machine_version: str | None = None
    ) -> None:
        body = present(metadata=dict(metadata), machine_version=machine_version)
        self.put(_machine(app, machine, "metadata"), json=body)

    def merge_metadata(
        self, app: str, machine: str, metadata: Mapping[str, str], *, machine_version: str | None = None
    ) -> None:
        body = present(metadata=dict(metadata), machine_version=machine_version)
        self.patch(_machine(app, machine, "metadata"), json=body)

    def set_metadata(self, app: str, machine: str, key: str, value: str) -> None:
        self.post(_machine(app, machine, "metadata", key), json={"value": value})

    def delete_metadata(self, app: str, machine: str, key: str) -> None:
        self.delete(_machine(app, machine, "metadata", key))


def _machine(app: str, machine: str, *more: str) -> str:
    return path_of("apps", app, "machines", machine, *more)


def _held(nonce: str | None) -> dict[str, str]:
    return {} if nonce is None else {NONCE: nonce}

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

from hawker.client.events import Events
from hawker.client.lines import Lines, Pieces
from hawker.client.plain import ApiError, Transport, path_of
from hawker.errors import Unreachable
from hawker.model.values import format_duration

__all__ = ["ApiError", "Client", "Events", "Lines", "path_of"]

NONCE = "fly-machine-lease-nonce"
WAIT_S_MAX = 60  # the API's own limit for one wait
_MARGIN_S = 15.0  # for the way there and back, on top of what the server was told it may take
_QUIET_S = 45.0  # three of the comments that a stream of events is never without
_SESSION_S = 35.0  # three of the frames that a command is never quieter than
_EXEC_S = 3700.0  # as long as a broker holds the line for a command without a limit of its own

Object = dict[str, Any]


class Client(Transport):
    """One market, seen through one of its brokers."""

    # --- apps --------------------------------------------------------------------------------------------------------

    def apps(self, org: str | None = None, *, role: str | None = None) -> list[Object]:
        """All apps, or one organisation's."""
        return _objects(_object(self.get("/v1/apps", query={"org_slug": org, "app_role": role})).get("apps"))

    def create_app(self, name: str, org: str = "personal", **more: Any) -> Object:
        """Raises `ApiError` with the word `name_taken` when the name is in use, by whomever."""
        return _object(self.post("/v1/apps", json={"app_name": name, "org_slug": org, **more}))

    def app(self, name: str) -> Object:
        return _object(self.get(path_of("apps", name)))

    def delete_app(self, name: str, *, force: bool = False) -> None:
        """`force` also destroys its machines."""
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
        return _objects(self.get(path_of("apps", app, "machines"), query=query))

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
        return _object(self.post(path, json=dict(body), query={"wait": wait or None}, headers=headers, timeout_s=limit))

    def machine(self, app: str, machine: str, *, include_leases: bool = False) -> Object:
        return _object(self.get(_machine(app, machine), query={"include_leases": include_leases or None}))

    def find_machine(self, machine: str) -> Object:
        """A machine by its id alone. *Extension*: its app is in it, at `["hawker"]["app"]`."""
        return _object(self.get(path_of("apps", machine)))

    def update_machine(self, app: str, machine: str, body: Mapping[str, Any], *, nonce: str | None = None) -> Object:
        """Replace the whole configuration: a new version. With `current_version` only if that is still current."""
        return _object(self.post(_machine(app, machine), json=dict(body), headers=_held(nonce)))

    def destroy(self, app: str, machine: str, *, force: bool = False, nonce: str | None = None) -> Object:
        """`force` kills it first; without, a running machine is refused."""
        return _object(self.delete(_machine(app, machine), query={"force": force or None}, headers=_held(nonce)))

    def start(self, app: str, machine: str, *, wait: bool = False, nonce: str | None = None) -> Object:
        """Start or wake a machine. *Extension*: `wait` answers once it has started, or failed to."""
        limit = WAIT_S_MAX + 2 * _MARGIN_S if wait else None
        path = _machine(app, machine, "start")
        return _object(self.post(path, query={"wait": wait or None}, headers=_held(nonce), timeout_s=limit))

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
        body = _present(signal=signal, timeout=None if grace_s is None else format_duration(grace_s))
        return _object(self.post(_machine(app, machine, "stop"), json=body, headers=_held(nonce)))

    def suspend(self, app: str, machine: str, *, nonce: str | None = None) -> Object:
        return _object(self.post(_machine(app, machine, "suspend"), headers=_held(nonce)))

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
        return _object(self.post(_machine(app, machine, "restart"), query=query, headers=_held(nonce), timeout_s=limit))

    def signal(self, app: str, machine: str, signal: str | int) -> Object:
        return _object(self.post(_machine(app, machine, "signal"), json={"signal": signal}))

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
        return _object(self.get(_machine(app, machine, "wait"), query=query, timeout_s=timeout_s + _MARGIN_S))

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
        body = _present(**how, stdin=stdin, timeout=timeout_s)
        limit = _EXEC_S if timeout_s is None else timeout_s + _MARGIN_S
        return _object(self.post(_machine(app, machine, "exec"), json=body, timeout_s=limit))

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
        return str(_object(self.post(_machine(app, machine, "exec", "sessions"), json=body))["id"])

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
        return _object(self.get(_machine(app, machine, "memory")))

    def set_memory(self, app: str, machine: str, limit_mb: int, *, cpus: int | None = None) -> Object:
        """Give it another size while it runs. `cpus` is an *extension*."""
        return _object(self.put(_machine(app, machine, "memory"), json=_present(limit_mb=limit_mb, cpus=cpus)))

    def ps(self, app: str, machine: str, *, sort_by: str | None = None, order: str | None = None) -> list[Object]:
        return _objects(self.get(_machine(app, machine, "ps"), query={"sort_by": sort_by, "order": order}))

    def events(self, app: str, machine: str, *, limit: int | None = None) -> list[Object]:
        """Newest first."""
        return _objects(self.get(_machine(app, machine, "events"), query={"limit": limit}))

    def versions(self, app: str, machine: str) -> list[Object]:
        """Newest first."""
        return _objects(self.get(_machine(app, machine, "versions")))

    def cordon(self, app: str, machine: str, *, nonce: str | None = None) -> Object:
        return _object(self.post(_machine(app, machine, "cordon"), headers=_held(nonce)))

    def uncordon(self, app: str, machine: str, *, nonce: str | None = None) -> Object:
        return _object(self.post(_machine(app, machine, "uncordon"), headers=_held(nonce)))

    def logs(self, app: str, machine: str, *, tail: int | None = None, follow: bool = False) -> Lines:
        """*Extension*: the program's output, a JSON object a line; with `follow` until closed."""
        return self.lines(_machine(app, machine, "logs"), query={"tail": tail, "follow": follow or None})

    def explain(self, app: str, machine: str) -> Object:
        """*Extension*: why the machine was placed where it is."""
        return _object(self.get(_machine(app, machine, "explain")))

    # --- leases ------------------------------------------------------------------------------------------------------

    def lease(self, app: str, machine: str) -> Object:
        """The lease in force. Raises `ApiError` with `status_code` 404 when there is none."""
        return _data(self.get(_machine(app, machine, "lease")))

    def acquire_lease(self, app: str, machine: str, ttl_s: int, *, description: str | None = None) -> Object:
        """A lease with its `nonce`. Raises `ApiError` with `status_code` 409 while somebody else holds one."""
        body = _present(ttl=ttl_s, description=description)
        return _data(self.post(_machine(app, machine, "lease"), json=body))

    def refresh_lease(self, app: str, machine: str, nonce: str, ttl_s: int) -> Object:
        """Prolong one's own: the same nonce, a new end."""
        return _data(self.post(_machine(app, machine, "lease"), json={"ttl": ttl_s}, headers=_held(nonce)))

    def release_lease(self, app: str, machine: str, nonce: str) -> None:
        self.delete(_machine(app, machine, "lease"), headers=_held(nonce))

    # --- metadata ----------------------------------------------------------------------------------------------------

    def metadata(self, app: str, machine: str) -> dict[str, str]:
        return _object(self.get(_machine(app, machine, "metadata")))

    def replace_metadata(
        self, app: str, machine: str, metadata: Mapping[str, str], *, machine_version: str | None = None
    ) -> None:
        body = _present(metadata=dict(metadata), machine_version=machine_version)
        self.put(_machine(app, machine, "metadata"), json=body)

    def merge_metadata(
        self, app: str, machine: str, metadata: Mapping[str, str], *, machine_version: str | None = None
    ) -> None:
        body = _present(metadata=dict(metadata), machine_version=machine_version)
        self.patch(_machine(app, machine, "metadata"), json=body)

    def set_metadata(self, app: str, machine: str, key: str, value: str) -> None:
        self.post(_machine(app, machine, "metadata", key), json={"value": value})

    def delete_metadata(self, app: str, machine: str, key: str) -> None:
        self.delete(_machine(app, machine, "metadata", key))

    # --- the platform ------------------------------------------------------------------------------------------------

    def regions(self) -> Object:
        """`Regions`, a list, and `Nearest`, a code."""
        return _object(self.get("/v1/platform/regions"))

    def placements(self, body: Mapping[str, Any]) -> list[Object]:
        """Room by region for machines of a size: `body` has `compute`, `region`, `count`, ..."""
        return _objects(_object(self.post("/v1/platform/placements", json=dict(body))).get("regions"))

    def workers(self) -> list[Object]:
        """*Extension*: workers and what they hold."""
        return _objects(self.get("/v1/hawker/workers"))

    def cordon_worker(self, name: str) -> Object:
        """*Extension*: the worker makes no more offers; what runs there goes on."""
        return _object(self.post(path_of("hawker", "workers", name, "cordon")))

    def uncordon_worker(self, name: str) -> Object:
        """*Extension*: the worker makes offers again."""
        return _object(self.post(path_of("hawker", "workers", name, "uncordon")))

    def forget_worker(self, name: str) -> Object:
        """*Extension*: give up a worker that is gone for good."""
        return _object(self.post(path_of("hawker", "workers", name, "forget")))

    def runs(self, *, status: Sequence[str] = (), machine: str | None = None, limit: int | None = None) -> list[Object]:
        """*Extension*: the workers' runs, without `status` those that have not ended."""
        query = {"status": ",".join(status) or None, "machine": machine, "limit": limit}
        return _objects(self.get("/v1/hawker/runs", query=query))

    def run(self, run: str) -> Object:
        """*Extension*: one run."""
        return _object(self.get(path_of("hawker", "runs", run)))

    def retry_run(self, run: str) -> Object:
        """*Extension*: try the step again at which it is parked. The run as it is then."""
        return _object(self.post(path_of("hawker", "runs", run, "retry")))

    def cancel_run(self, run: str) -> Object:
        """*Extension*: give it up. The run as it is then."""
        return _object(self.post(path_of("hawker", "runs", run, "cancel")))

    def sql(self, query: str, *, worker: str | None = None, on: str | None = None) -> Object:
        """*Extension*: a read-only query on the catalog; on every worker's own database with `on="workers"`; on one's
        with `worker`."""
        return _object(self.post("/v1/hawker/sql", json=_present(query=query, worker=worker, on=on)))

    def subscribe(self, query: str, *, since: str | None = None, seconds: int | None = None) -> Events:
        """*Extension*: a query's result on the catalog, then its changes. `since`: the id of the last event seen, to go
        on after it; `seconds`: end after so long."""
        asked = {"query": query, "from": since, "seconds": seconds}
        return Events(self.lines("/v1/hawker/subscribe", query=asked, quiet_s=_QUIET_S))

    def members(self) -> list[Object]:
        """*Extension*: the catalog's members as the node asked sees them."""
        return _objects(self.get("/v1/hawker/members"))

    # --- images ------------------------------------------------------------------------------------------------------

    def images(self, *, worker: str | None = None, region: str | None = None) -> list[Object]:
        """*Extension*: the images that workers have, an entry for each image on each worker."""
        return _objects(self.get("/v1/hawker/images", query={"worker": worker, "region": region}))

    def image(self, image: str, *, worker: str | None = None, region: str | None = None) -> list[Object]:
        """*Extension*: what an image is made of, by a reference or a digest, from every worker that has it."""
        query = {"image": image, "worker": worker, "region": region}
        return _objects(self.get("/v1/hawker/images/show", query=query))

    def remove_image(self, image: str, *, worker: str | None = None, region: str | None = None) -> list[Object]:
        """*Extension*: remove it from every worker that has it. What became of it on each; `ApiError` with
        `status_code` 409 when machines need it wherever it is."""
        query = {"image": image, "worker": worker, "region": region}
        return _objects(self.delete("/v1/hawker/images", query=query))

    def pull_image(self, image: str, *, worker: str | None = None, region: str | None = None) -> Events:
        """*Extension*: ask the registry again what a name means, where the image is, or on one worker. Events:
        `progress`, and for each worker one `done` or `error`."""
        return self._image_events("pull", image=image, worker=worker, region=region)

    def prefetch_image(
        self, image: str, *, worker: str | None = None, region: str | None = None, count: int | None = None
    ) -> Events:
        """*Extension*: have it on every worker, or on `count` of each region. Events as `pull_image` has them."""
        return self._image_events("prefetch", image=image, worker=worker, region=region, count=count)

    def push_image(
        self,
        image: str,
        to: str | None = None,
        *,
        worker: str | None = None,
        username: str | None = None,
        password: str | None = None,
    ) -> Events:
        """*Extension*: copy it from a worker that has it to a registry. Events as `pull_image` has them."""
        return self._image_events("push", image=image, to=to, worker=worker, username=username, password=password)

    def begin_upload(self, size: int, *, worker: str | None = None, region: str | None = None) -> Object:
        """*Extension*: where to send an archive or files of `size` bytes: `upload`, and the `worker` that it is at."""
        body = _present(size=size, worker=worker, region=region)
        return _object(self.post("/v1/hawker/images/uploads", json=body))

    def upload(self, upload: str, worker: str, offset: int, data: bytes) -> Object:
        """*Extension*: the bytes at `offset`, at most 16 MiB. May be repeated. `offset` in the answer: what is there
        now."""
        query = {"offset": offset, "worker": worker}
        return _object(self.put(path_of("hawker", "images", "uploads", upload), query=query, data=data))

    def drop_upload(self, upload: str, worker: str) -> None:
        self.delete(path_of("hawker", "images", "uploads", upload), query={"worker": worker})

    def import_image(
        self,
        upload: str,
        worker: str,
        image: str,
        *,
        kind: str = "archive",
        config: Mapping[str, Any] | None = None,
    ) -> Events:
        """*Extension*: make an image of an upload, `archive` or `files`, and name it. Events as `pull_image` has them.
        The upload is gone then, also after an error."""
        return self._image_events("import", upload=upload, worker=worker, image=image, kind=kind, config=config)

    def _image_events(self, verb: str, **body: Any) -> Events:
        return Events(self.lines(f"/v1/hawker/images/{verb}", json=_present(**body), quiet_s=_QUIET_S))


def _machine(app: str, machine: str, *more: str) -> str:
    return path_of("apps", app, "machines", machine, *more)


def _held(nonce: str | None) -> dict[str, str]:
    return {} if nonce is None else {NONCE: nonce}


def _present(**fields: Any) -> Object:
    return {name: value for name, value in fields.items() if value is not None}


def _object(answer: Any) -> Object:
    if isinstance(answer, dict):
        return answer
    raise _not_the_api(answer)


def _objects(answer: Any) -> list[Object]:
    if isinstance(answer, list):
        return [_object(entry) for entry in answer]
    raise _not_the_api(answer)


def _data(answer: Any) -> Object:
    return _object(_object(answer).get("data"))


def _not_the_api(answer: Any) -> Unreachable:
    return Unreachable(f"the answer is not one of this API: {str(answer)[:80]}", hint="is the endpoint a market's?")

"""Leads a fuzzer to where the work is done: generated requests get names of things that exist, and bounds.

A generated name hits nothing, so that a fuzz of the document alone tests little but "not found". Here three of four
requests are about an app, a machine and workers that are there; the rest stay as generated. What a request destroys,
stops, leases or cordons is put back before the next one, and after one that cannot have done so nothing is looked at.
Nothing that was generated is ever run as a program.
"""

from __future__ import annotations

import io
import tarfile
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.clients.api import SLEEP, Api
from tests.kit.processes import PYTHON
from tests.kit.waiting import wait_until

APP = "fuzzed"
KEY = "team"  # of the machine's metadata
UPLOADS = "/v1/hawker/images/uploads"
NONCE = "fly-machine-lease-nonce"
FRAMING = ("connection", "content-length", "expect", "host", "te", "trailer", "transfer-encoding", "upgrade")
"""What is HTTP's, and refused before a request is one of the API. Hypothesis takes words for what it generates from the
code that is loaded, ours included, so that now and then one of these is the name of a header."""
LISTEN = (PYTHON, "-ISc", "import socket, time; s = socket.create_server(('127.0.0.1', 0)); time.sleep(1000)")


class World:
    """One app with one running machine on the market behind `api`, an image, and a registry that has nothing."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._registry = ThreadingHTTPServer(("127.0.0.1", 0), _Nothing)
        threading.Thread(target=self._registry.serve_forever, name="registry", daemon=True).start()
        self._workers = [worker["name"] for worker in api.get("/v1/hawker/workers").expect(200)]
        self._machine = ""
        self._port = 0  # where it listens
        self._begun: list[str] = []  # uploads
        self._sessions: list[str] = []
        self._touched = True  # since all was well

    def mend(self) -> None:
        """Whatever the requests before did: the app is there, its machine runs and has metadata, nobody has a lease; no
        upload is under way."""
        if not self._touched:
            return
        while self._begun:
            self._api.delete(self._begun.pop()).expect(200)
        while self._sessions:  # most are over by now
            self._api.delete(f"{self._path}/exec/sessions/{self._sessions.pop()}")
        if self._api.get(f"/v1/apps/{APP}").status == 404:
            self._api.create_app(APP)
        if not self._machine_is_well():
            config = {"metadata": {KEY: "blue"}}
            self._machine = self._api.create_machine(APP, *LISTEN, config=config)["id"]
            wait_until(self._listens, "the machine's program listens")
        self._touched = False

    def guide(self, case: Any) -> None:
        """Replace names and values of a generated `schemathesis.Case` by ones that lead somewhere."""
        for name in [name for name in case.headers or () if name.lower() in FRAMING]:
            del case.headers[name]
        operation = _operation(case)
        drawn = zlib.crc32(repr((case.path_parameters, case.query, case.body)).encode())  # the same in every run
        if drawn % 4:
            self._guide_path(operation, case, drawn)
            if isinstance(case.body, dict):
                self._guide_body(operation, case.body, drawn)
        if operation == "Machines_exec" and isinstance(case.body, dict):
            _only_echo(case.body)
        if operation == "Machines_open_session" and isinstance(case.body, dict) and case.body.get("command"):
            case.body["command"] = ["echo", "said"]
        if operation == "Machines_wait" and _seconds(case.query.get("timeout")) > 1:
            case.query["timeout"] = 1
        if operation == "Machines_logs" and case.query.get("follow") not in (None, False, "false"):
            case.query["follow"] = (
                "false"  # an answer that is meant never to end; followed logs have tests of their own
            )
        if operation == "Hawker_subscribe":
            self._guide_subscription(case, drawn)
        if operation.startswith("Images_"):
            self._guide_images(operation, case, drawn)

    def tidy(self, case: Any, response: Any) -> None:
        """Remove what the request made, if it made something."""
        read_only = case.method.upper() in ("GET", "HEAD") or response.status_code in (400, 404)
        self._touched = self._touched or not read_only or bool(self._begun or self._sessions)
        match _operation(case), response.status_code:
            case "Apps_create", 201:
                self._api.delete(f"/v1/apps/{response.json()['name']}").expect(202)
            case "Machines_create", 200:
                made = response.json()
                path = f"/v1/apps/{made['hawker']['app']}/machines/{made['id']}"
                self._api.delete(f"{path}?force=true", headers={NONCE: made.get("nonce", "")}).expect(200)
            case "Machines_connect", 200:
                self._sessions.append(response.json()["id"])
            case "Images_begin_upload", 201:
                begun = response.json()
                self._api.delete(f"{UPLOADS}/{begun['upload']}?worker={begun['worker']}").expect(200)
            case "Hawker_cordon", 200:
                for worker in self._workers:
                    self._api.post(f"/v1/hawker/workers/{worker}/uncordon").expect(200)

    @property
    def _path(self) -> str:
        return f"/v1/apps/{APP}/machines/{self._machine}"

    def close(self) -> None:
        """Leave no machine behind, nor a lease on it, which would keep the next ones from deleting the app."""
        if self._machine_is_well():
            self._api.delete(f"{self._path}?force=true").expect(200)
        self._registry.shutdown()
        self._registry.server_close()

    def _machine_is_well(self) -> bool:
        """A machine that is not is destroyed; a lease is no illness and ends here."""
        reply = self._api.get(f"{self._path}?include_leases=true") if self._machine else None
        if reply is None or reply.status != 200:
            return False
        machine = reply.json
        if lease := machine["lease"]:
            self._api.delete(f"{self._path}/lease", headers={NONCE: lease["nonce"]}).expect(200)
        if machine["state"] == "started" and not machine["cordoned"] and KEY in machine["config"].get("metadata", {}):
            return True
        self._api.delete(f"{self._path}?force=true").expect(200)
        return False

    def _listens(self) -> bool:
        for process in self._api.get(f"{self._path}/ps").expect(200):
            for each in process["listen_sockets"]:
                self._port = int(each["address"].rpartition(":")[2])
                return True
        return False

    def _guide_path(self, operation: str, case: Any, drawn: int) -> None:
        worker = self._workers[drawn % len(self._workers)]
        names = {"app_name": APP, "machine_id": self._machine, "name": worker, "key": KEY}
        if "session_id" in case.path_parameters:
            names["session_id"] = self._session(operation)
        if "run_id" in case.path_parameters:
            names["run_id"] = self._api.get("/v1/hawker/runs?status=done&limit=1").expect(200)[0]["id"]
        if operation in ("Apps_show", "Apps_delete") and drawn % 8 == 1:
            names["app_name"] = self._machine  # the article's paths
        case.path_parameters |= {name: names[name] for name in names.keys() & case.path_parameters.keys()}
        if operation == "Apps_delete" and drawn % 3 == 0:
            case.query["force"] = "true"  # the app has a machine
        if operation in ("Machines_show_lease", "Machines_release_lease"):
            self._touched = True
            lease = self._api.post(f"{self._path}/lease", {"ttl": 60}).expect(201)
            case.headers[NONCE] = lease["data"]["nonce"]

    def _session(self, operation: str) -> str:
        """One whose output has an end, or whose command takes input."""
        command = ["echo", "said"] if operation == "Machines_read_session" else ["cat"]
        made = self._api.post(f"{self._path}/exec/sessions", {"command": command}).expect(200)
        self._sessions.append(made["id"])
        return str(made["id"])

    def _guide_subscription(self, case: Any, drawn: int) -> None:
        """A stream ends by itself only when that is asked for; subscriptions have tests of their own."""
        if drawn % 4:
            case.query["query"] = ("select name, region from workers", "select count(*) from machines")[drawn % 2]
        if not case.query.get("seconds") or _seconds(case.query["seconds"]) > 1:
            case.query["seconds"] = drawn % 2

    def _guide_images(self, operation: str, case: Any, drawn: int) -> None:
        """Names are of an image that is there, or of a registry of ours: nobody else's is asked for anything."""
        registry = f"127.0.0.1:{self._registry.server_address[1]}"
        image, nothing = f"{registry}/fuzzed:1", f"{registry}/nothing:1"
        worker = self._workers[drawn % len(self._workers)]
        where = case.body if isinstance(case.body, dict) else case.query
        if operation in ("Images_upload", "Images_drop_upload", "Images_import"):
            data = b"" if operation == "Images_upload" else _tar()
            size = 1 << 20 if operation == "Images_upload" else len(data)
            begun = self._api.post(UPLOADS, {"size": size, "worker": worker}).expect(201)
            query = f"worker={worker}"
            self._api.call("PUT", f"{UPLOADS}/{begun['upload']}?{query}&offset=0", data).expect(200)
            self._begun.append(f"{UPLOADS}/{begun['upload']}?{query}")
            if "upload" in case.path_parameters:
                case.path_parameters["upload"] = begun["upload"]
                case.query |= {"worker": worker, "offset": 0}
            elif isinstance(case.body, dict):
                case.body |= {"upload": begun["upload"], "image": image, "kind": "files", "worker": worker}
        elif operation == "Images_begin_upload" and isinstance(case.body, dict):
            case.body |= {"size": drawn, "worker": worker, "region": None}
        elif operation == "Images_list":
            case.query |= ({"worker": worker}, {"region": "ord"}, {})[drawn % 3]
        else:
            where["image"] = (image, nothing)[drawn % 2]
            region = {"region": "ord", "worker": None}
            where |= ({"worker": worker}, region, {"worker": None, "region": None})[drawn % 3]
            if where is case.query:
                for name in [name for name, value in where.items() if value is None]:
                    del where[name]
            if operation == "Images_push":
                where |= {"to": nothing}

    def _guide_body(self, operation: str, body: dict[str, Any], drawn: int) -> None:
        match operation:
            case "Machines_create" | "Machines_update" if isinstance(body.get("config"), dict):
                # A configuration that is generated whole is nearly always refused; one with a program is a machine.
                body["config"] |= {"image": "host", "init": {"exec": list(SLEEP)}}
                if drawn % 3:
                    body["region"] = "ord"
            case "Apps_create":
                body["name"] = f"made-{drawn}"
            case "Platform_placements":
                body["region"] = "any"
            case "Machines_connect":
                body["port"] = self._port
            case "Machines_set_memory" if drawn % 3:
                body |= {"limit_mb": (256, 512)[drawn % 2], "cpus": None}
            case "Hawker_sql":
                body |= {"query": "select count(*) from sqlite_schema"}
                body |= ({}, {"on": "workers"}, {"on": None, "worker": self._workers[0]})[drawn % 3]


class _Nothing(BaseHTTPRequestHandler):
    """A registry that knows no image and takes none."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("content-length", "0")
        self.end_headers()

    do_HEAD = do_POST = do_PUT = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""


def _tar() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("empty"))
    return made.getvalue()


def _operation(case: Any) -> str:
    operation: str = case.operation.definition.raw["operationId"]
    return operation


def _only_echo(body: dict[str, Any]) -> None:
    if isinstance(body.get("cmd"), str):
        body["cmd"] = "echo " + body["cmd"]
    if isinstance(body.get("command"), list):
        body["command"] = ["echo", *body["command"]]


def _seconds(value: Any) -> float:
    """How long a `wait` with this timeout may take; one that is refused takes no time."""
    if value is None:
        return 60
    try:
        return float(value)
    except (TypeError, ValueError):
        return 0

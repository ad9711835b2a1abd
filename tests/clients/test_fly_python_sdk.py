"""fly-python-sdk 0.3.4 from PyPI, unmodified, against a real market: only the address it talks to is ours.

The SDK types `init.exec` as one string, against the API's documentation. A program may reach the machine that way, or
as the one element of `config.processes`, of which the SDK has a right model. It has no methods for update, wait, exec,
lease, signal, metadata and cordon, and its own `stop` calls a method that is not there: for these its request functions
are used, which set its headers and address. They cannot send other headers, nor PUT and PATCH; `test_fifteen.py` and
`test_common_rules.py` have what needs them.
"""

from __future__ import annotations

import http.client
import signal
import socket
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
from tests.clients.api import Api
from tests.clients.driven import ClientError, Driven
from tests.kit.markets import free_port
from tests.kit.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]  # the first test waits for the SDK's installation


def program(*argv: str, region: str = "ord", **config: Any) -> dict[str, Any]:
    """What the SDK's FlyMachine is made from."""
    process = {"name": "main", "entrypoint": list(argv[:1]), "cmd": list(argv[1:])}
    return {
        "region": region,
        "config": {
            "image": "host",
            "guest": {"cpu_kind": "shared", "cpus": 1, "memory_mb": 256},
            "processes": [process],
            **config,
        },
    }


class SdkApp:
    """One app as the SDK sees it, and the calls it has no methods for, by its own request functions."""

    def __init__(self, sdk: Driven, name: str) -> None:
        self.sdk = sdk
        self.name = name

    def call(self, method: str, *args: Any, **on: Any) -> Any:
        return self.sdk.call(method, *args, app=self.name, **on)

    def get(self, machine: str, rest: str) -> Any:
        return self._request("get", machine, rest)

    def post(self, machine: str, rest: str, body: Any) -> Any:
        return self._request("post", machine, rest, body)

    def delete(self, machine: str, rest: str) -> Any:
        return self._request("delete", machine, rest)

    def _request(self, method: str, machine: str, rest: str, *body: Any) -> Any:
        """{"status": the HTTP status, "json": the body}."""
        return self.call(f"_make_api_{method}_request", f"apps/{self.name}/machines/{machine}{rest}", *body)

    def running(self, *argv: str, **config: Any) -> str:
        """The id of a new machine that has started."""
        machine: str = self.call("create_machine", program(*(argv or ("sleep", "1000")), **config))["id"]
        self.wait(machine, "started")
        return machine

    def wait(self, machine: str, state: str) -> None:
        waited = self.get(machine, f"/wait?state={state}&timeout=30")
        assert (waited["status"], waited["json"]["ok"]) == (200, True), waited

    def exec(self, machine: str, command: str) -> str:
        done = self.post(machine, "/exec", {"cmd": command})
        assert done["status"] == 200, done
        assert done["json"]["exit_code"] == 0, done
        stdout: str = done["json"]["stdout"]
        return stdout


@pytest.fixture
def sdk_app(sdk: Driven, new_app: Callable[[], str]) -> SdkApp:
    """A new app, made by the SDK."""
    name = new_app()
    sdk.call("create_app", name)
    return SdkApp(sdk, name)


def test_an_app_is_created_inspected_listed_and_deleted(sdk: Driven, new_app: Callable[[], str]) -> None:
    name = new_app()

    sdk.call("create_app", name)

    organization = {"name": "personal", "slug": "personal"}
    assert sdk.call("inspect", app=name) == {"name": name, "organization": organization, "status": "pending"}
    assert {"name": name, "machine_count": 0, "network": "default"} in sdk.call("list_apps")
    sdk.call("delete", app=name)
    assert name not in [app["name"] for app in sdk.call("list_apps")]
    with pytest.raises(ClientError, match=f"Could not find {name}"):
        sdk.call("inspect", app=name)


def test_a_name_that_is_taken_is_refused(sdk_app: SdkApp) -> None:
    with pytest.raises(ClientError, match=f"Unable to create {sdk_app.name}"):
        sdk_app.sdk.call("create_app", sdk_app.name)


def test_a_machine_serves_http_from_the_program_it_was_created_with(sdk_app: SdkApp) -> None:
    port = free_port()

    machine = sdk_app.running("python3", "-m", "http.server", "--bind", "127.0.0.1", str(port))

    assert http_status(port) == 200
    seen = sdk_app.call("inspect", machine=machine)
    assert (seen["id"], seen["state"], seen["region"]) == (machine, "started", "ord")
    assert seen["config"]["processes"][0]["cmd"][-1] == str(port)
    assert datetime.fromisoformat(seen["created_at"]) <= datetime.fromisoformat(seen["updated_at"])


def test_a_program_may_be_one_command_line(sdk_app: SdkApp) -> None:
    config = {"image": "host", "init": {"exec": "sh -c 'sleep 1000; true'"}}

    machine = sdk_app.call("create_machine", {"region": "mad", "config": config})["id"]
    sdk_app.wait(machine, "started")

    assert sdk_app.call("inspect", machine=machine)["config"]["init"]["exec"] == "sh -c 'sleep 1000; true'"
    running = sdk_app.get(machine, "/ps?sort_by=stime")["json"]
    assert "sh -c sleep 1000; true" in [process["command"] for process in running]


def test_machines_are_listed_by_region(sdk_app: SdkApp) -> None:
    created = sdk_app.call("create_machines", [program("sleep", "1000", region=r) for r in ("ord", "mad", "syd")])

    assert [machine["region"] for machine in created] == ["ord", "mad", "syd"]
    everywhere = sdk_app.call("list_machines")
    assert {machine["id"] for machine in everywhere} == {machine["id"] for machine in created}
    assert sdk_app.call("list_machines", ["mad"], True) == [created[1]["id"]]


def test_an_update_replaces_the_environment(sdk_app: SdkApp) -> None:
    machine = sdk_app.running("sleep", "1000", env={"GREETING": "hello"})
    before = sdk_app.call("inspect", machine=machine)
    assert sdk_app.exec(machine, "printenv GREETING") == "hello\n"

    config = {**program("sleep", "1000")["config"], "env": {"GREETING": "good evening"}}
    updated = sdk_app.post(machine, "", {"config": config})
    assert updated["status"] == 200
    sdk_app.wait(machine, f"started&version={updated['json']['instance_id']}")

    after = sdk_app.call("inspect", machine=machine)
    assert after["config"]["env"] == {"GREETING": "good evening"}
    assert after["instance_id"] == updated["json"]["instance_id"] != before["instance_id"]
    assert sdk_app.exec(machine, "printenv GREETING") == "good evening\n"


def test_a_machine_is_stopped_and_started_again(sdk_app: SdkApp) -> None:
    machine = sdk_app.running()

    assert sdk_app.post(machine, "/stop", {})["status"] == 200
    sdk_app.wait(machine, "stopped")
    sdk_app.call("start", machine=machine)
    sdk_app.wait(machine, "started")

    events = sdk_app.call("get_events", machine=machine)
    changes = [event for event in events if (event["type"], event["status"]) != ("start", "starting")]
    assert [event["type"] for event in changes if event["type"] in ("start", "exit")] == ["start", "exit", "start"]
    ended = next(event for event in events if event["type"] == "exit")["request"]
    assert ended["exit_event"]["requested_stop"] is True
    assert ended["exit_event"]["signal"] == signal.SIGINT  # the default; not killed after the grace time
    assert ended["restart_count"] == 0


def test_a_command_is_executed_beside_the_program(sdk_app: SdkApp) -> None:
    machine = sdk_app.running()

    done = sdk_app.post(machine, "/exec", {"command": ["sh", "-c", "echo hello; echo oh >&2; exit 3"]})

    assert done["status"] == 200
    assert done["json"] == {
        "exit_code": 3,
        "exit_signal": 0,
        "stdout": "hello\n",
        "stderr": "oh\n",
        "truncated": False,
    }


def test_a_lease_keeps_others_from_changing_the_machine(sdk_app: SdkApp, api: Api) -> None:
    machine = sdk_app.running()

    taken = sdk_app.post(machine, "/lease", {"ttl": 30, "description": "an update"})
    shown = sdk_app.get(machine, "/lease")
    refused = [sdk_app.post(machine, rest, {}) for rest in ("/lease", "/stop", "/start")]

    assert taken["status"] == 201
    assert taken["json"]["status"] == "success"
    assert shown["json"] == taken["json"]
    assert shown["json"]["data"]["description"] == "an update"
    assert [reply["status"] for reply in refused] == [409, 409, 409]
    assert all("lease currently held by" in reply["json"]["error"] for reply in refused)
    with pytest.raises(ClientError, match=f"Unable to start {machine}"):
        sdk_app.call("start", machine=machine)
    nonce = {"fly-machine-lease-nonce": taken["json"]["data"]["nonce"]}  # a header, which the SDK cannot send
    api.delete(f"/v1/apps/{sdk_app.name}/machines/{machine}/lease", headers=nonce).expect(200)
    assert sdk_app.get(machine, "/lease")["status"] == 404


def test_a_lease_lapses(sdk_app: SdkApp) -> None:
    machine = sdk_app.running()
    assert sdk_app.post(machine, "/lease", {"ttl": 1})["status"] == 201
    assert sdk_app.post(machine, "/stop", {})["status"] == 409

    wait_until(lambda: sdk_app.get(machine, "/lease")["status"] == 404, "the lease has lapsed")

    assert sdk_app.post(machine, "/stop", {})["status"] == 200


def test_a_signal_reaches_the_program(sdk_app: SdkApp) -> None:
    machine = sdk_app.running("sh", "-c", "trap 'exit 7' USR1; while :; do sleep 0.3; done", restart={"policy": "no"})
    wait_until(lambda: len(sdk_app.get(machine, "/ps")["json"]) == 2, "the shell has set its trap and sleeps")

    assert sdk_app.post(machine, "/signal", {"signal": "SIGUSR1"})["status"] == 200
    sdk_app.wait(machine, "stopped")

    ended = sdk_app.call("get_events", machine=machine)[0]["request"]["exit_event"]
    assert (ended["exit_code"], ended["requested_stop"]) == (7, False)


def test_metadata_is_set_read_and_removed(sdk_app: SdkApp) -> None:
    machine = sdk_app.running("sleep", "1000", metadata={"team": "blue"})

    assert sdk_app.post(machine, "/metadata/stage", {"value": "test"})["status"] == 204
    assert sdk_app.get(machine, "/metadata")["json"] == {"team": "blue", "stage": "test"}
    assert sdk_app.delete(machine, "/metadata/team")["status"] == 204
    assert sdk_app.get(machine, "/metadata")["json"] == {"stage": "test"}
    assert sdk_app.call("inspect", machine=machine)["config"]["metadata"] == {"stage": "test"}


def test_a_machine_is_cordoned_and_uncordoned(sdk_app: SdkApp) -> None:
    machine = sdk_app.running()

    seen = []
    for action in ("cordon", "uncordon"):
        assert sdk_app.post(machine, f"/{action}", {})["status"] == 200
        seen.append(sdk_app.get(machine, "")["json"]["cordoned"])

    assert seen == [True, False]


def test_a_clone_runs_the_same_program_in_another_region(sdk_app: SdkApp) -> None:
    machine = sdk_app.running("sleep", "2000", env={"A": "1"})

    clone = sdk_app.call("clone", "twin", "syd", machine=machine)

    sdk_app.wait(clone["id"], "started")
    assert (clone["name"], clone["region"]) == ("twin", "syd")
    assert clone["config"] == sdk_app.call("inspect", machine=machine)["config"]


def test_only_a_stopped_machine_is_destroyed_without_force(sdk_app: SdkApp) -> None:
    machine = sdk_app.running()

    with pytest.raises(ClientError, match=f"Unable to delete {machine}"):
        sdk_app.call("destroy", machine=machine)
    assert sdk_app.post(machine, "/stop", {})["status"] == 200
    sdk_app.wait(machine, "stopped")
    sdk_app.call("destroy", machine=machine)

    assert sdk_app.call("list_machines") == []
    assert sdk_app.call("inspect", machine=machine)["state"] == "destroyed"


def test_a_running_machine_is_destroyed_by_force(sdk_app: SdkApp) -> None:
    port = free_port()
    machine = sdk_app.running("python3", "-m", "http.server", "--bind", "127.0.0.1", str(port))
    assert http_status(port) == 200

    assert sdk_app.delete(machine, "?force=true")["status"] == 200
    sdk_app.wait(machine, "destroyed")

    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def http_status(port: int, *, within_s: float = 20.0) -> int:
    """The status of GET / once something answers there: a server opens its port some time after it was started."""
    deadline = time.monotonic() + within_s
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/")
            return connection.getresponse().status
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        finally:
            connection.close()

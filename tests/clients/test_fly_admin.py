"""fly-admin 1.6.1 from npm, unmodified, against a real market: all its REST calls about apps and machines.

What is not built, its GraphQL calls and its calls that make volumes, is refused by name.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
from tests.clients.api import Api
from tests.clients.driven import ClientError, Driven
from tests.kit.waiting import wait_until

pytestmark = [pytest.mark.node, pytest.mark.slow, pytest.mark.timeout(240)]  # the first test waits for npm


class AdminApp:
    """One app as fly-admin sees it."""

    def __init__(self, client: Driven, name: str) -> None:
        self.client = client
        self.name = name

    def machine(self, method: str, machine: str = "", **fields: Any) -> Any:
        """`client.Machine.<method>({app_name, machine_id, ...fields})`."""
        if machine:
            fields["machine_id"] = machine
        return self.client.call(f"Machine.{method}", {"app_name": self.name, **fields})

    def running(self, *argv: str, region: str = "ord", **config: Any) -> Any:
        """A new machine that has started."""
        created = self.machine("createMachine", region=region, config=config_of(*argv, **config))
        assert self.machine("waitMachine", created["id"], state="started", timeout="30s")["ok"] is True
        return created


def config_of(*argv: str, **config: Any) -> dict[str, Any]:
    return {"image": "host", "init": {"exec": list(argv or ("sleep", "1000"))}, **config}


@pytest.fixture
def admin_app(fly_admin: Driven, new_app: Callable[[], str]) -> AdminApp:
    """A new app, made by fly-admin."""
    name = new_app()
    fly_admin.call("App.createApp", {"org_slug": "personal", "app_name": name})
    return AdminApp(fly_admin, name)


def test_an_app_is_created_read_listed_and_deleted(fly_admin: Driven, new_app: Callable[[], str]) -> None:
    name = new_app()

    fly_admin.call("App.createApp", {"org_slug": "personal", "app_name": name, "network": "blue"})

    found = fly_admin.call("App.getApp", name)
    assert (found["name"], found["status"], found["organization"]["slug"]) == (name, "pending", "personal")
    listed = fly_admin.call("App.listApps", "personal")
    assert listed["total_apps"] == len(listed["apps"])
    mine = next(app for app in listed["apps"] if app["name"] == name)
    assert (mine["machine_count"], mine["network"]) == (0, "blue")
    fly_admin.call("App.deleteApp", name)
    with pytest.raises(ClientError, match=r"404: .*app not found"):
        fly_admin.call("App.getApp", name)


def test_an_error_carries_the_status_and_the_reason(admin_app: AdminApp) -> None:
    with pytest.raises(ClientError, match=r"422: .*Name has already been taken"):
        admin_app.client.call("App.createApp", {"org_slug": "personal", "app_name": admin_app.name})
    with pytest.raises(ClientError, match=r"404: .*machine not found"):
        admin_app.machine("getMachine", "00000000000000")
    with pytest.raises(ClientError, match=r"400: .*config\.image"):
        admin_app.machine("createMachine", config={})


def test_a_machine_has_every_field_of_its_type(admin_app: AdminApp) -> None:
    created = admin_app.running("sleep", "1000", env={"A": "1"})

    found = admin_app.machine("getMachine", created["id"])

    assert found["state"] == "started"
    assert found["region"] == "ord"
    assert found["config"]["env"] == {"A": "1"}
    assert found["config"]["init"] == {"exec": ["sleep", "1000"]}
    assert found["config"]["guest"] == {"cpu_kind": "shared", "cpus": 1, "memory_mb": 256}
    assert found["config"]["restart"]["policy"] == "on-failure"
    text = ("id", "name", "instance_id", "private_ip", "created_at", "updated_at")
    assert {name: type(found[name]) for name in text} == dict.fromkeys(text, str)
    parts = ("registry", "repository", "tag", "digest")
    assert {name: type(found["image_ref"][name]) for name in parts} == dict.fromkeys(parts, str)
    assert [(event["type"], event["status"]) for event in found["events"]][-1] == ("launch", "created")


def test_machines_are_listed_by_region_and_after_they_are_destroyed(admin_app: AdminApp) -> None:
    here, there = admin_app.running(region="ord"), admin_app.running(region="mad")

    assert {machine["id"] for machine in admin_app.client.call("Machine.listMachines", admin_app.name)} == {
        here["id"],
        there["id"],
    }
    assert [machine["id"] for machine in admin_app.machine("listMachines", region="mad")] == [there["id"]]
    assert admin_app.machine("deleteMachine", there["id"], force=True) == {"ok": True}
    assert [machine["id"] for machine in admin_app.machine("listMachines")] == [here["id"]]
    with_deleted = admin_app.machine("listMachines", include_deleted="")
    assert {(machine["id"], machine["state"]) for machine in with_deleted} == {
        (here["id"], "started"),
        (there["id"], "destroyed"),
    }


def test_an_update_makes_a_new_version(admin_app: AdminApp) -> None:
    created = admin_app.running("sleep", "1000", env={"A": "1"})

    updated = admin_app.machine("updateMachine", created["id"], config=config_of("sleep", "2000", env={"A": "2"}))
    waited = admin_app.machine(
        "waitMachine", created["id"], state="started", instance_id=updated["instance_id"], timeout="30s"
    )

    assert waited["ok"] is True
    found = admin_app.machine("getMachine", created["id"])
    assert found["config"]["env"] == {"A": "2"}
    versions = admin_app.machine("listVersions", created["id"])
    assert [version["version"] for version in versions] == [updated["instance_id"], created["instance_id"]]
    assert [version["user_config"]["env"] for version in versions] == [{"A": "2"}, {"A": "1"}]
    assert [process["command"] for process in admin_app.machine("listProcesses", created["id"])] == ["sleep 2000"]


def test_a_machine_is_stopped_started_and_restarted(admin_app: AdminApp) -> None:
    machine = admin_app.running()["id"]

    assert admin_app.machine("stopMachine", machine, timeout="5s") == {"ok": True}
    assert admin_app.machine("waitMachine", machine, state="stopped", timeout="30")["ok"] is True
    assert admin_app.machine("startMachine", machine)["previous_state"] == "stopped"
    assert admin_app.machine("waitMachine", machine, state="started")["ok"] is True
    before = admin_app.machine("listProcesses", machine)
    assert admin_app.machine("restartMachine", machine, timeout="5s") == {"ok": True}
    assert admin_app.machine("waitMachine", machine, state="started")["ok"] is True
    after = admin_app.machine("listProcesses", machine)

    assert len(before) == len(after) == 1
    assert before[0]["pid"] != after[0]["pid"]
    ended = [event for event in admin_app.machine("listEvents", machine) if event["type"] == "exit"]
    assert [event["request"]["exit_event"]["requested_stop"] for event in ended] == [True, True]
    assert ended[1]["request"]["exit_event"]["signal"] == signal.SIGTERM  # what fly-admin asks for


def test_a_signal_reaches_the_program(admin_app: AdminApp) -> None:
    script = "trap 'exit 9' HUP; while :; do sleep 0.3; done"
    machine = admin_app.running("sh", "-c", script, restart={"policy": "no"})["id"]
    wait_until(lambda: len(admin_app.machine("listProcesses", machine)) == 2, "the shell has set its trap and sleeps")

    assert admin_app.machine("signalMachine", machine, signal="SIGHUP") == {"ok": True}
    assert admin_app.machine("waitMachine", machine, state="stopped", timeout="30s")["ok"] is True

    latest = admin_app.machine("listEvents", machine)[0]
    assert (latest["type"], latest["request"]["exit_event"]["exit_code"]) == ("exit", 9)


def test_a_lease_is_acquired_shown_and_held_against_others(admin_app: AdminApp, api: Api) -> None:
    machine = admin_app.running()["id"]
    with pytest.raises(ClientError, match=r"404: .*lease not found"):
        admin_app.machine("getLease", machine)

    lease = admin_app.machine("acquireLease", machine, ttl=30, description="nightly")

    assert lease["status"] == "success"
    assert lease["data"]["description"] == "nightly"
    assert {name: type(lease["data"][name]) for name in ("nonce", "owner", "expires_at")} == {
        "nonce": str,
        "owner": str,
        "expires_at": int,
    }
    assert admin_app.machine("getLease", machine) == lease
    with pytest.raises(ClientError, match=r"409: .*lease currently held by"):
        admin_app.machine("acquireLease", machine, ttl=30)
    with pytest.raises(ClientError, match=r"409: .*lease currently held by"):
        admin_app.machine("stopMachine", machine)
    nonce = {"fly-machine-lease-nonce": lease["data"]["nonce"]}  # fly-admin has no method to release a lease
    api.delete(f"/v1/apps/{admin_app.name}/machines/{machine}/lease", headers=nonce).expect(200)


def test_a_machine_is_cordoned_and_uncordoned(admin_app: AdminApp) -> None:
    machine = admin_app.running()["id"]

    assert admin_app.machine("cordonMachine", machine) == {"ok": True}
    assert admin_app.machine("getMachine", machine)["cordoned"] is True
    assert admin_app.machine("uncordonMachine", machine) == {"ok": True}
    assert admin_app.machine("getMachine", machine)["cordoned"] is False


def test_a_machine_is_destroyed(admin_app: AdminApp) -> None:
    machine = admin_app.running()["id"]

    with pytest.raises(ClientError, match=r"412: "):
        admin_app.machine("deleteMachine", machine)
    assert admin_app.machine("deleteMachine", machine, force=True) == {"ok": True}

    assert admin_app.machine("waitMachine", machine, state="destroyed")["ok"] is True
    assert admin_app.client.call("Machine.listMachines", admin_app.name) == []


def test_an_app_has_no_volumes(admin_app: AdminApp) -> None:
    assert admin_app.client.call("Volume.listVolumes", admin_app.name) == []


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("Regions.getRegions", []),
        ("App.getAppDetailed", ["web"]),
        ("Organization.getOrganization", ["personal"]),
        ("Secret.setSecrets", [{"appId": "web", "secrets": []}]),
        ("Network.allocateIpAddress", [{"appId": "web", "type": "v6"}]),
        ("Volume.createVolume", [{"app_name": "web", "name": "data", "region": "ord"}]),
    ],
)
def test_what_is_not_built_says_so(fly_admin: Driven, method: str, arguments: list[Any]) -> None:
    with pytest.raises(ClientError, match=r"422: .*not built yet"):
        fly_admin.call(method, *arguments)

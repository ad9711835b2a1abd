"""The fifteen things that break clients of the Machines API, each with a test against a real market.

They were found by recording what flyctl sends and by reading fly-go, fly-admin and fly-python-sdk; the number in a
test's name is the number in that list. What a thing demands is said in its test's docstring.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tests.clients.api import Api, Reply
from tests.kit.markets import free_port, running_agent

pytestmark = pytest.mark.slow

NONCE = "fly-machine-lease-nonce"


def types_and_states(events: list[Any]) -> list[tuple[str, str]]:
    return [(event["type"], event["status"]) for event in events]


# --- 1: three servers in one -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/graphql"),  # "web"
        ("GET", "/api/v1/organizations/personal"),  # "ui-ex"
        ("GET", "/api/v1/apps/web/logs"),
        ("POST", "/v1/apps/web/volumes"),
        ("POST", "/v1/apps/web/secrets"),
        ("POST", "/v1/apps/web/ip_assignments"),
        ("DELETE", "/v1/apps/web/certificates/example.com"),
    ],
)
def test_1_what_flyctl_asks_beside_machines_is_refused_at_once_and_by_name(api: Api, method: str, path: str) -> None:
    """flyctl talks to three servers; all may be one. The two that are not built answer, and say that they are not."""
    refused = api.call(method, path, {"query": "{ viewer { id } }"} if method == "POST" else None, timeout_s=5)

    assert refused.expect(422)["status"] == "not_built"
    assert "not built yet" in refused.json["error"]
    assert refused.headers["content-type"] == "application/json"


def test_1_a_path_that_nobody_documents_is_not_found(api: Api) -> None:
    assert api.get("/v2/apps", timeout_s=5).expect(404)["status"] == "not_found"


# --- 2: the filter that protects apps --------------------------------------------------------------------------------


def test_2_a_list_by_role_holds_no_app_of_another_role(api: Api, new_app: Callable[[], str]) -> None:
    """`fly launch` takes the first app of role `remote-docker-builder` for its builder, and deletes it."""
    ordinary, postgres = new_app(), new_app()
    api.create_app(ordinary)
    api.create_app(postgres, app_role_id="postgres_cluster")

    def listed(role: str) -> list[str]:
        answer = api.get(f"/v1/apps?org_slug=personal&app_role={role}").expect(200)
        assert answer["total_apps"] == len(answer["apps"])
        return [app["name"] for app in answer["apps"]]

    assert listed("remote-docker-builder") == []
    assert listed("postgres_cluster") == [postgres]
    assert {ordinary, postgres} <= set(listed(""))


def test_2_no_app_can_be_made_a_remote_builder(api: Api, new_app: Callable[[], str]) -> None:
    body = {"name": new_app(), "org_slug": "personal", "network": "", "app_role_id": "remote-docker-builder"}

    assert api.post("/v1/apps?wait=true", body).expect(422)["status"] == "not_built"


# --- 3: no answer that clients repeat with an empty body -------------------------------------------------------------


@pytest.fixture
def cut_off(tmp_path: Path) -> Iterator[Api]:
    """A broker that knows two workers, neither of which is there."""
    token, port = secrets.token_hex(16), free_port()
    config = tmp_path / "broker.toml"
    workers = [f"{name}@ord=127.0.0.1:{free_port()}" for name in ("ord-1", "ord-2")]
    config.write_text(
        f'name = "broker"\nregion = "ord"\ndirectory = "{tmp_path / "broker"}"\n'
        f'[tokens]\ncluster = "{secrets.token_hex(16)}"\nusers = {{ tests = "{token}" }}\n'
        f'[broker]\nlisten = "127.0.0.1:{port}"\nworkers = {workers}\n'
    )
    with running_agent(config, port):
        yield Api(f"http://127.0.0.1:{port}", token)


def test_3_a_broker_that_reaches_no_worker_answers_neither_502_nor_503(cut_off: Api) -> None:
    """flyctl repeats any request on 502 and 503, and loses its body on the way: the user sees the wrong error."""
    machine = "/v1/apps/web/machines/0123456789abcd"
    config = {"image": "host", "init": {"exec": ["true"]}}
    asked: list[tuple[str, str, Any]] = [
        ("POST", "/v1/apps", {"app_name": "web", "org_slug": "personal"}),
        ("POST", "/v1/apps/web/machines", {"config": config, "region": "ord"}),
        ("POST", machine, {"config": config}),
        ("POST", f"{machine}/start", None),
        ("POST", f"{machine}/lease", {"ttl": 10}),
        ("GET", machine, None),
        ("GET", "/v1/apps/web", None),
        ("DELETE", machine, None),
    ]

    answers = {f"{method} {path}": cut_off.call(method, path, body) for method, path, body in asked}

    refused = {asked: reply.status for asked, reply in answers.items() if reply.status in (500, 409)}
    assert refused.keys() == answers.keys(), {asked: reply.status for asked, reply in answers.items()}
    assert all(reply.json["error"] and reply.json["status"] for reply in answers.values())


def test_3_no_answer_of_502_or_503_is_documented(api: Api) -> None:
    paths = api.get("/openapi.json").expect(200)["paths"]
    del paths["/health"]  # it is for load balancers, which want a 503 where no traffic should go

    statuses = {
        status
        for operations in paths.values()
        for operation in operations.values()
        for status in operation["responses"]
    }

    assert {"200", "201", "204", "400", "401", "404", "408", "409", "412", "422", "500"} <= statuses
    assert not statuses & {"502", "503"}


def test_3_an_order_that_nobody_can_fill_is_a_conflict_with_reasons(api: Api, app: str) -> None:
    guest = {"cpu_kind": "performance", "cpus": 16, "memory_mb": 131072}
    config = {"image": "host", "init": {"exec": ["true"]}, "guest": guest}

    refused = api.post(f"/v1/apps/{app}/machines", {"config": config, "region": "ord"}, timeout_s=5).expect(409)

    assert refused["status"] == "insufficient_capacity"
    assert refused["details"]["refusals"]
    assert api.get(f"/v1/apps/{app}/machines?include_deleted=true").expect(200) == []


# --- 4 and 5: what every machine must have ---------------------------------------------------------------------------


def every_view(api: Api, app: str) -> list[Any]:
    """A machine as create, get, list and update show it; its first configuration has no guest."""
    created = api.create_machine(app)
    path = f"/v1/apps/{app}/machines"
    views = [created, api.machine(app, created["id"]), *api.get(path).expect(200)]
    views.append(api.post(f"{path}/{created['id']}", {"config": created["config"]}).expect(200))
    return views


def test_4_every_machine_says_that_its_host_is_ok(api: Api, app: str) -> None:
    """Otherwise flyctl takes the host for unreachable: it takes no lease and replaces the machine."""
    assert [machine["host_status"] for machine in every_view(api, app)] == ["ok"] * 4


def test_5_every_machine_has_a_configuration_with_a_guest(api: Api, app: str) -> None:
    """`fly machine status` reads both without looking whether they are there."""
    views = every_view(api, app)

    smallest = {"cpu_kind": "shared", "cpus": 1, "memory_mb": 256}
    assert [machine["config"]["guest"] for machine in views] == [smallest] * 4
    assert [machine["incomplete_config"] for machine in views] == [None] * 4


def test_5_checks_are_a_list_and_each_has_the_time_of_its_last_change(api: Api, app: str) -> None:
    """Clients read `updated_at` without looking whether it is there."""
    assert [machine["checks"] for machine in every_view(api, app)] == [[]] * 4
    tcp = {"type": "tcp", "port": 1}
    config = {"services": [{"internal_port": 1, "checks": [tcp]}], "checks": {"up": tcp}}
    created = api.create_machine(app, config=config, skip_launch=True)
    for machine in (created, api.machine(app, created["id"])):
        assert [(c["name"], c["status"]) for c in machine["checks"]] == [
            ("servicecheck-00-tcp-1", "warning"),
            ("up", "warning"),
        ]
        assert all(datetime.fromisoformat(check["updated_at"]) for check in machine["checks"])


# --- 6 to 8: resting states and waiting ------------------------------------------------------------------------------


def test_6_skip_launch_ends_in_stopped(api: Api, app: str) -> None:
    """flyctl waits for `stopped` after both a create and an update with `skip_launch`."""
    created = api.create_machine(app, skip_launch=True)
    assert api.wait(app, created["id"], "stopped")["state"] == "stopped"

    path = f"/v1/apps/{app}/machines/{created['id']}"
    api.post(f"{path}/start").expect(200)
    api.wait(app, created["id"], "started")
    updated = api.post(path, {"config": created["config"], "skip_launch": True}).expect(200)
    api.wait(app, created["id"], "stopped", version=updated["instance_id"])

    assert api.machine(app, created["id"])["state"] == "stopped"
    assert types_and_states(api.machine(app, created["id"])["events"]).count(("start", "started")) == 1


def test_7_waiting_for_stopped_needs_no_version(api: Api, app: str) -> None:
    machine = api.create_machine(app)["id"]
    api.post(f"/v1/apps/{app}/machines/{machine}/stop").expect(200)

    waited = api.get(f"/v1/apps/{app}/machines/{machine}/wait?state=stopped&timeout=30").expect(200)

    assert (waited["ok"], waited["state"]) == (True, "stopped")


@pytest.mark.parametrize("query", ["state=stopped&state=started", "state=stopped,started", "state=settled", ""])
def test_8_wait_takes_several_states_and_settled(api: Api, app: str, query: str) -> None:
    """`settled` is any state a machine rests in; one whose launch is still to come does not rest."""
    config = {"image": "host", "init": {"exec": ["sleep", "1000"]}}
    machine = api.post(f"/v1/apps/{app}/machines", {"config": config}).expect(200)

    waited = api.get(f"/v1/apps/{app}/machines/{machine['id']}/wait?{query}").expect(200)

    assert (waited["ok"], waited["state"], waited["version"]) == (True, "started", machine["instance_id"])
    assert waited["event_id"] == api.machine(app, machine["id"])["events"][0]["id"]


def test_8_a_wait_counts_only_what_came_after_an_event(api: Api, app: str) -> None:
    machine = api.create_machine(app)["id"]
    started = api.wait(app, machine, "started")["event_id"]

    path = f"/v1/apps/{app}/machines/{machine}"
    api.get(f"{path}/wait?state=started&timeout=1&from_event_id={started}").expect(408)
    api.post(f"{path}/restart").expect(200)
    again = api.wait(app, machine, "started", from_event_id=started)

    assert again["event_id"] > started
    assert types_and_states(api.machine(app, machine)["events"]).count(("start", "started")) == 2


def test_8_a_wait_that_ends_without_the_state_is_a_408_that_flyctl_knows(api: Api, app: str) -> None:
    machine = api.create_machine(app)["id"]

    began = time.monotonic()
    ended = api.get(f"/v1/apps/{app}/machines/{machine}/wait?state=stopped&timeout=1").expect(408)

    assert 0.9 < time.monotonic() - began < 10
    assert "deadline_exceeded: machine failed to reach desired state, stopped, currently started" in ended["error"]


@pytest.mark.parametrize("query", ["timeout=0", "timeout=61", "timeout=soon", "state=happy"])
def test_8_a_wait_for_what_cannot_be_is_refused(api: Api, app: str, query: str) -> None:
    machine = api.create_machine(app)["id"]

    assert api.get(f"/v1/apps/{app}/machines/{machine}/wait?{query}").expect(400)["status"] == "invalid_argument"


# --- 9: what is left of a destroyed machine --------------------------------------------------------------------------


def test_9_the_exit_code_of_a_destroyed_machine_can_be_read(api: Api, app: str) -> None:
    """A release command is a machine with `auto_destroy`; its exit code, and its log, are read once it is destroyed."""
    config = {"auto_destroy": True, "restart": {"policy": "no"}}
    command = api.create_machine(app, "sh", "-c", "echo why; exit 42", config=config, skip_launch=True)
    path = f"/v1/apps/{app}/machines/{command['id']}"
    api.post(f"{path}/start").expect(200)

    assert api.wait(app, command["id"], "destroyed")["ok"] is True

    seen = api.get(path).expect(200)
    assert seen["state"] == "destroyed"
    exit_event = next(event for event in seen["events"] if event["type"] == "exit")["request"]["exit_event"]
    assert (exit_event["exit_code"], exit_event["requested_stop"], exit_event["oom_killed"]) == (42, False, False)
    # Go clients decode this into a time: anything else than RFC 3339 makes the whole machine unreadable to them.
    assert datetime.fromisoformat(exit_event["exited_at"]).tzinfo is not None
    assert api.get(f"/v1/apps/{app}/machines").expect(200) == []
    assert api.delete(f"{path}/lease", headers={NONCE: "ab"}).status in (200, 404)
    assert api.get(f"{path}/logs").expect(200)["message"] == "why", "what it said, too"


def test_9_a_machine_that_never_was_is_not_found(api: Api, app: str) -> None:
    gone = api.get(f"/v1/apps/{app}/machines/00000000000000/wait?state=destroyed").expect(404)

    assert "machine not found" in gone["error"]


# --- 10: leases ------------------------------------------------------------------------------------------------------


def test_10_a_lease_is_wrapped_and_a_refresh_keeps_its_nonce(api: Api, app: str) -> None:
    machine = api.create_machine(app)
    lease = f"/v1/apps/{app}/machines/{machine['id']}/lease"

    acquired = api.post(f"{lease}?ttl=30").expect(201)  # as fly-go: the time in the query, no body
    mine = {NONCE: acquired["data"]["nonce"]}
    refreshed = api.post(f"{lease}?ttl=60", headers=mine).expect(201)

    assert acquired["status"] == refreshed["status"] == "success"
    assert re.fullmatch(r"[0-9a-f]{12}", acquired["data"]["nonce"])
    assert acquired["data"]["version"] == machine["instance_id"]
    assert acquired["data"]["owner"]
    assert refreshed["data"]["nonce"] == acquired["data"]["nonce"]
    assert 28 <= refreshed["data"]["expires_at"] - acquired["data"]["expires_at"] <= 35
    assert api.get(lease).expect(200) == refreshed
    assert api.delete(lease, headers=mine).expect(200) == {"status": "success", "data": {"ok": True}}
    assert "lease not found" in api.get(lease).expect(404)["error"]


def test_10_every_change_by_another_than_the_holder_is_a_conflict(api: Api, app: str) -> None:
    machine = api.create_machine(app)
    path = f"/v1/apps/{app}/machines/{machine['id']}"
    nonce = api.post(f"{path}/lease?ttl=60").expect(201)["data"]["nonce"]

    def changes(headers: dict[str, str]) -> Iterator[Reply]:
        yield api.post(f"{path}/lease?ttl=60", headers=headers)
        yield api.post(f"{path}/cordon", headers=headers)
        yield api.post(f"{path}/stop", {"id": machine["id"], "timeout": "5s"}, headers=headers)
        api.wait(app, machine["id"], "settled")
        yield api.post(f"{path}/start", headers=headers)
        api.wait(app, machine["id"], "settled")
        yield api.post(f"{path}/restart?force_stop=false&timeout=5s", headers=headers)
        api.wait(app, machine["id"], "settled")
        yield api.post(path, {"config": machine["config"], "skip_secrets": False}, headers=headers)
        api.wait(app, machine["id"], "settled")
        yield api.delete(f"{path}?kill=true", headers=headers)

    for headers in ({}, {NONCE: "0123456789ab"}):
        for reply in changes(headers):
            assert "lease currently held by" in reply.expect(409)["error"]
    assert [reply.status for reply in changes({NONCE: nonce})] == [201, 200, 200, 200, 200, 200, 200]


def test_10_a_machine_can_be_created_with_a_lease(api: Api, app: str) -> None:
    created = api.create_machine(app, lease_ttl=300)
    lease = f"/v1/apps/{app}/machines/{created['id']}/lease"

    assert api.get(lease).expect(200)["data"]["nonce"] == created["nonce"]
    assert "nonce" not in api.machine(app, created["id"])
    api.delete(lease, headers={NONCE: created["nonce"]}).expect(200)
    assert "nonce" not in api.create_machine(app)


# --- 11: the order of events -----------------------------------------------------------------------------------------


def test_11_events_come_newest_first_and_their_times_rise(api: Api, app: str) -> None:
    """Clients find the last start by its place after the last launch, and an exit by its time after the start."""
    machine = api.create_machine(app, "sh", "-c", "exit 1", config={"restart": {"policy": "no"}})["id"]
    api.wait(app, machine, "stopped,failed")

    events = api.machine(app, machine)["events"]

    assert types_and_states(events) == [
        ("exit", "stopped"),
        ("start", "started"),
        ("start", "starting"),
        ("launch", "created"),
    ]
    times = [event["timestamp"] for event in events]
    assert times == sorted(set(times), reverse=True)
    assert [event["id"] for event in events] == sorted((event["id"] for event in events), reverse=True)
    assert all(event["source"] in ("user", "flyd") for event in events)
    assert api.get(f"/v1/apps/{app}/machines/{machine}/events?limit=2").expect(200) == events[:2]


def test_11_a_request_in_an_event_is_an_exit_with_its_restart_count(api: Api, app: str) -> None:
    """The Python SDK takes no other form, and fails to list the events of a machine that could not be started."""
    machine = api.create_machine(app, "/nonexistent/program")["id"]
    assert api.machine(app, machine)["state"] == "failed"

    requests = [event.get("request") for event in api.machine(app, machine)["events"]]

    assert all(request is None or request.keys() >= {"exit_event", "restart_count"} for request in requests)


# --- 12 to 15: forms -------------------------------------------------------------------------------------------------


def test_12_the_list_of_regions_has_capital_keys(api: Api) -> None:
    answer = api.get("/v1/platform/regions").expect(200)

    assert answer.keys() == {"Regions", "Nearest"}
    assert {region["code"] for region in answer["Regions"]} == {"ord", "mad", "syd"}
    assert answer["Nearest"] in ("ord", "mad", "syd")


def test_13_a_private_address_has_eight_groups_and_names_the_host(api: Api, app: str) -> None:
    """The third and fourth group are read as the host: two machines with the same ones are on the same host."""
    machines = [api.create_machine(app, region=region, skip_launch=True) for region in ("ord", "ord", "mad")]

    groups = [machine["private_ip"].split(":") for machine in machines]

    assert [len(parts) for parts in groups] == [8, 8, 8]
    assert all(re.fullmatch(r"[0-9a-f]{1,4}", part) for parts in groups for part in parts)
    assert {parts[0] for parts in groups} == {"fdaa"}
    hosts = [parts[2:4] for parts in groups]
    assert hosts[0] == hosts[1] != hosts[2]
    assert len({machine["private_ip"] for machine in machines}) == 3


def test_14_an_app_is_pending_until_its_first_machine_and_deployed_after(api: Api, app: str) -> None:
    """flyctl knows by `pending` that a deploy is the first one."""
    assert api.get(f"/v1/apps/{app}").expect(200)["status"] == "pending"

    machine = api.create_machine(app, skip_launch=True)["id"]
    assert api.get(f"/v1/apps/{app}").expect(200)["status"] == "deployed"
    api.delete(f"/v1/apps/{app}/machines/{machine}?force=true").expect(200)

    assert api.get(f"/v1/apps/{app}").expect(200)["status"] == "deployed"


@pytest.mark.parametrize(
    ("given", "shown"), [("15s", "15s"), ("90s", "1m30s"), ("1m", "1m0s"), (2_500_000_000, "2.5s"), (0, "0s")]
)
def test_15_durations_are_taken_as_text_or_nanoseconds_and_given_as_text(
    api: Api, app: str, given: str | int, shown: str
) -> None:
    config = {"stop_config": {"timeout": given, "signal": "SIGTERM"}}

    machine = api.create_machine(app, config=config, skip_launch=True)

    assert machine["config"]["stop_config"] == {"timeout": shown, "signal": "SIGTERM"}
    assert api.machine(app, machine["id"])["config"] == machine["config"]


def test_15_a_duration_that_is_none_is_refused_by_name(api: Api, app: str) -> None:
    config = {"image": "host", "init": {"exec": ["true"]}, "stop_config": {"timeout": "soon"}}

    refused = api.post(f"/v1/apps/{app}/machines", {"config": config}).expect(400)

    assert "config.stop_config.timeout" in refused["error"]

"""What holds for every request of the Machines API, as Go, JavaScript and Python clients send them."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from typing import Any

import pytest
from tests.clients.api import SLEEP, Api, Reply

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("header", ["Bearer {}", "bearer {}", "FlyV1 {}", "FlyV1 fm2_other,{}"])
def test_a_token_is_taken_as_bearer_and_as_one_of_a_list_of_macaroons(api: Api, header: str) -> None:
    answer = api.get("/v1/apps?org_slug=personal", headers={"Authorization": header.format(api.token)})

    answer.expect(200)


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer other", "Basic {}", "{}"])
def test_without_a_known_token_every_request_is_refused_in_the_form_of_an_error(api: Api, header: str) -> None:
    answer = api.post("/v1/apps", {"app_name": "x"}, headers={"Authorization": header.format(api.token)})

    assert answer.expect(401)["error"].startswith("Authenticate: ")


def test_every_answer_names_its_request(api: Api, app: str) -> None:
    """A ULID and a region; clients print it with an error, and events name it as the cause of a change."""
    found = api.get(f"/v1/apps/{app}").headers["fly-request-id"]
    missing = api.get("/v1/apps/no-such-app").headers["fly-request-id"]

    assert all(re.fullmatch(r"[0-9A-HJKMNP-TV-Z]{26}-[a-z]{3}", request) for request in (found, missing))
    assert found != missing
    created = api.post(f"/v1/apps/{app}/machines", {"config": {"image": "host", "init": {"exec": list(SLEEP)}}})
    assert created.headers["fly-request-id"] in created.expect(200)["events"][-1]["hawker"]["cause"]


@pytest.mark.parametrize("headers", [{}, {"Content-Type": "application/json"}])
def test_a_post_without_a_body_is_one_without_wishes(api: Api, app: str, headers: dict[str, str]) -> None:
    """fly-go sends neither body nor type, fly-admin sends the type alone."""
    machine = api.create_machine(app)["id"]
    path = f"/v1/apps/{app}/machines/{machine}"

    api.post(f"{path}/stop", headers=headers).expect(200)
    api.wait(app, machine, "stopped")
    started = api.post(f"{path}/start", headers=headers).expect(200)

    assert started["previous_state"] == "stopped"


@pytest.mark.parametrize("body", [b"{", b"nul", b'6"', b"[\xff", b"\xff", b'"text"', b"[]", b"{}{}"])
@pytest.mark.parametrize("path", ["/v1/apps", "/v1/apps/{app}/machines", "/v1/platform/placements"])
def test_a_body_that_is_no_json_object_is_refused(api: Api, app: str, path: str, body: bytes) -> None:
    assert api.post(path.format(app=app), body).expect(400)["status"] == "invalid_argument"


@pytest.mark.parametrize("timeout", ["%C2%B2", "%D9%A3", "-1", "1e1", "9" * 20, "9" * 5000, "301", "x"])
def test_a_time_that_is_no_time_is_refused(api: Api, app: str, timeout: str) -> None:
    machine = api.create_machine(app)["id"]

    refused = api.post(f"/v1/apps/{app}/machines/{machine}/restart?timeout={timeout}").expect(400)

    assert refused["details"]["field"] == "timeout"


def test_fields_that_are_not_known_are_kept_and_given_back(api: Api, app: str) -> None:
    """An update replaces the whole configuration with what the client read, so that nothing read may be lost."""
    unknown = {
        "from_the_future": {"a": [1, 2.5, None, "ü"]},
        "spot": {"max_price": "0.01"},
        "cache_drive": {"size_mb": 1},
    }

    created = api.create_machine(app, config=unknown, a_new_field=True)
    updated = api.post(f"/v1/apps/{app}/machines/{created['id']}", {"config": created["config"]}).expect(200)

    assert unknown.items() <= created["config"].items()
    assert updated["config"] == created["config"]


@pytest.mark.parametrize(
    "field",
    [
        {"mounts": [{"volume": "vol_1", "path": "/data"}]},
        {"schedule": "daily"},
        {"files": [{"guest_path": "/a", "raw_value": "YQ=="}]},
        {"containers": [{"name": "a", "image": "b"}]},
    ],
    ids=lambda field: next(iter(field)),
)
def test_a_field_that_is_documented_and_not_built_is_refused_by_name(api: Api, app: str, field: dict[str, Any]) -> None:
    config = {"image": "host", "init": {"exec": ["true"]}, **field}

    refused = api.post(f"/v1/apps/{app}/machines", {"config": config}).expect(422)

    assert refused["status"] == "not_built"
    assert refused["details"]["field"] == f"config.{next(iter(field))}"
    assert api.get(f"/v1/apps/{app}/machines?include_deleted=true").expect(200) == []


def test_a_configuration_that_is_too_large_is_refused_with_its_size(api: Api, app: str) -> None:
    machine = api.create_machine(app, config={"metadata": {"note": "x" * 150_000}}, skip_launch=True)
    path = f"/v1/apps/{app}/machines"
    config = {**machine["config"], "metadata": {"note": "x" * (256 * 1024)}}

    for where in (path, f"{path}/{machine['id']}"):
        refused = api.post(where, {"config": config, "skip_launch": True}).expect(400)
        assert refused["details"]["field"] == "config"
        assert " bytes" in refused["details"]["value"]
        assert "at most 262144 bytes" in refused["error"]
    more = {"metadata": {"more": "x" * 150_000}}
    api.call("PATCH", f"{path}/{machine['id']}/metadata", more).expect(400)
    api.post(f"{path}/{machine['id']}", {"config": machine["config"], "skip_launch": True}).expect(200)


def test_a_kill_as_fly_go_sends_it_is_a_number(api: Api, app: str) -> None:
    machine = api.create_machine(app, config={"restart": {"policy": "no"}})["id"]

    api.post(f"/v1/apps/{app}/machines/{machine}/signal", {"signal": 9}).expect(200)
    api.wait(app, machine, "stopped")

    ended = api.machine(app, machine)["events"][0]["request"]["exit_event"]
    assert (ended["signal"], ended["requested_stop"]) == (9, False)


def test_an_update_of_a_version_that_is_not_current_is_a_conflict(api: Api, app: str) -> None:
    machine = api.create_machine(app, skip_launch=True)
    path = f"/v1/apps/{app}/machines/{machine['id']}"
    body = {"config": machine["config"], "current_version": machine["instance_id"], "skip_launch": True}

    updated = api.post(path, body).expect(200)
    api.wait(app, machine["id"], "stopped", version=updated["instance_id"])
    api.post(path, body).expect(409)

    assert api.machine(app, machine["id"])["instance_id"] == updated["instance_id"] != machine["instance_id"]


def test_the_original_six_paths_find_a_machine_by_its_id_alone(api: Api, app: str) -> None:
    """As in the article: `/v1/apps/{machineid}`, with `/start` and `/stop`."""
    machine = api.create_machine(app)["id"]

    assert api.get(f"/v1/apps/{machine}").expect(200)["id"] == machine
    api.post(f"/v1/apps/{machine}/stop").expect(200)
    api.wait(app, machine, "stopped")
    api.post(f"/v1/apps/{machine}/start").expect(200)
    api.wait(app, machine, "started")
    assert api.delete(f"/v1/apps/{machine}?force=true").status == 200

    assert api.machine(app, machine)["state"] == "destroyed"


def test_an_app_that_is_not_there_is_told_before_room_that_is_not(api: Api) -> None:
    much = {"cpu_kind": "performance", "cpus": 128, "memory_mb": 1048576}
    config = {"image": "host", "init": {"exec": ["true"]}, "guest": much}

    refused = api.post("/v1/apps/no-such-app/machines", {"config": config, "region": "ord"}).expect(404)

    assert refused["error"] == "app not found: no-such-app"


# --- commands beside a program ---------------------------------------------------------------------------------------


@pytest.fixture
def execute(api: Api, app: str) -> Callable[..., Reply]:
    """Runs a line of shell beside a program."""
    path = f"/v1/apps/{app}/machines/{api.create_machine(app)['id']}/exec"
    return lambda line, **more: api.post(path, {"command": ["sh", "-c", line], **more})


def test_the_output_of_a_command_says_when_it_was_cut_and_what_is_no_text(execute: Callable[..., Reply]) -> None:
    plain = execute("echo in; echo oh >&2").expect(200)
    assert plain == {"exit_code": 0, "exit_signal": 0, "stdout": "in\n", "stderr": "oh\n", "truncated": False}

    odd = execute(r"printf '\377\376'").expect(200)
    assert (odd["stdout"], base64.b64decode(odd["stdout_base64"])) == ("\ufffd\ufffd", b"\xff\xfe")

    much = execute("yes | head -c 3000000").expect(200)
    assert (much["exit_code"], len(much["stdout"]), much["truncated"]) == (0, 1 << 20, True)


def test_a_command_that_is_killed_at_its_time_out_has_said_what_it_said(execute: Callable[..., Reply]) -> None:
    late = execute("echo so far; echo oh >&2; sleep 60", timeout=1).expect(408)

    assert late["error"] == "deadline_exceeded: the command was killed after 1 s"
    killed = {"exit_code": 137, "exit_signal": 9, "truncated": False}
    assert late["details"] == {**killed, "stdout": "so far\n", "stderr": "oh\n"}


# --- deleting an app -------------------------------------------------------------------------------------------------


def test_a_bare_delete_of_an_app_takes_its_machines_along(api: Api, app: str) -> None:
    """flyctl and fly-go send nothing else."""
    machines = [api.create_machine(app, region=region)["id"] for region in ("ord", "mad")]

    assert api.delete(f"/v1/apps/{app}").expect(202) == {"ok": True}

    assert api.get(f"/v1/apps/{app}").status == 404
    states = {api.get(f"/v1/apps/{app}/machines/{machine}").expect(200)["state"] for machine in machines}
    assert states == {"destroyed"}


def test_one_leased_machine_keeps_a_whole_app_and_its_holder_or_force_does_not_ask(api: Api, app: str) -> None:
    machines = [api.create_machine(app, region=region)["id"] for region in ("ord", "mad", "syd")]
    lease = api.post(f"/v1/apps/{app}/machines/{machines[1]}/lease", {"ttl": 300}).expect(201)["data"]

    refused = api.delete(f"/v1/apps/{app}").expect(409)

    assert f"machine ID {machines[1]} lease currently held by" in refused["error"]
    assert {machine["state"] for machine in api.get(f"/v1/apps/{app}/machines").expect(200)} == {"started"}
    api.delete(f"/v1/apps/{app}", headers={"fly-machine-lease-nonce": lease["nonce"]}).expect(202)


def test_a_lease_is_no_obstacle_to_a_forced_delete_of_an_app(api: Api, app: str) -> None:
    machine = api.create_machine(app)["id"]
    api.post(f"/v1/apps/{app}/machines/{machine}/lease", {"ttl": 300}).expect(201)

    api.delete(f"/v1/apps/{app}?force=true").expect(202)

    assert api.get(f"/v1/apps/{app}/machines/{machine}").expect(200)["state"] == "destroyed"


# --- what is not built -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("volumes", []),
        ("volumes/vol_1234567890abcdef/snapshots", []),
        ("secrets", {"secrets": []}),
        ("secretkeys", {"secret_keys": []}),
        ("ip_assignments", {"ips": []}),
        ("certificates", {"certificates": [], "total_count": 0, "next_cursor": ""}),
    ],
)
def test_lists_of_what_is_not_built_are_empty_and_what_would_fill_them_is_refused_by_name(
    api: Api, app: str, path: str, answer: Any
) -> None:
    assert api.get(f"/v1/apps/{app}/{path}").expect(200) == answer
    assert api.get(f"/v1/apps/no-such-app/{path}").expect(404)["error"] == "app not found: no-such-app"
    assert api.post(f"/v1/apps/{app}/{path}", {}).expect(422)["status"] == "not_built"

"""The calls by name: each is one that the API's own description knows, with the parameters and the body it takes."""

from __future__ import annotations

import asyncio
import re
import typing
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec
import pytest
from tests.client.servers import LIMIT_S, Call, Server, serving

from hawker.client.api import NONCE, ApiError, Client
from hawker.errors import Unreachable
from hawker.model.calls import CALLS as DECLARED
from hawker.model.op import Declared, reply_of
from hawker.model.request_codec import shape_of
from hawker.model.unbuilt_calls import UNBUILT_CALLS

APP, ID, KEY = "web/1", "0123456789abcd", "a b"  # names that must be quoted to stay one part of a path

CALLS: list[tuple[str, Callable[[Client], Any], str, dict[str, str], Any]] = [
    ("Apps_list", lambda c: c.apps("o", role="r"), "/v1/apps", {"org_slug": "o", "app_role": "r"}, None),
    ("Apps_create", lambda c: c.create_app("web", network="n"), "/v1/apps", {},
     {"app_name": "web", "org_slug": "personal", "network": "n"}),
    ("Apps_show", lambda c: c.app(APP), "/v1/apps/{app}", {}, None),
    ("Apps_delete", lambda c: c.delete_app(APP), "/v1/apps/{app}", {}, None),
    ("Apps_delete", lambda c: c.delete_app(APP, force=True), "/v1/apps/{app}", {"force": "true"}, None),
    ("Machines_list", lambda c: c.machines(APP), "{machines}", {}, None),
    ("Machines_list",
     lambda c: c.machines(APP, region="mad", state=["started", "stopped"], include_deleted=True, include_leases=True,
                          summary=True),
     "{machines}",
     {"region": "mad", "state": "started,stopped", "include_deleted": "true", "include_leases": "true",
      "summary": "true"}, None),
    ("Machines_create", lambda c: c.create_machine(APP, {"config": {}, "region": "mad"}), "{machines}", {},
     {"config": {}, "region": "mad"}),
    ("Machines_create", lambda c: c.create_machine(APP, {"config": {}}, wait=True), "{machines}", {"wait": "true"},
     {"config": {}}),
    ("Machines_show", lambda c: c.machine(APP, ID, include_leases=True), "{id}", {"include_leases": "true"}, None),
    ("Apps_show", lambda c: c.find_machine(APP), "/v1/apps/{app}", {}, None),
    ("Machines_update", lambda c: c.update_machine(APP, ID, {"config": {}}), "{id}", {}, {"config": {}}),
    ("Machines_delete", lambda c: c.destroy(APP, ID, force=True), "{id}", {"force": "true"}, None),
    ("Machines_start", lambda c: c.start(APP, ID, wait=True), "{id}/start", {"wait": "true"}, None),
    ("Machines_stop", lambda c: c.stop(APP, ID), "{id}/stop", {}, {}),
    ("Machines_stop", lambda c: c.stop(APP, ID, signal="SIGINT", grace_s=90), "{id}/stop", {},
     {"signal": "SIGINT", "timeout": "1m30s"}),
    ("Machines_suspend", lambda c: c.suspend(APP, ID), "{id}/suspend", {}, None),
    ("Machines_restart", lambda c: c.restart(APP, ID, signal="SIGINT", grace_s=0.5, force=True), "{id}/restart",
     {"signal": "SIGINT", "timeout": "500ms", "force_stop": "true"}, None),
    ("Machines_signal", lambda c: c.signal(APP, ID, "SIGHUP"), "{id}/signal", {}, {"signal": "SIGHUP"}),
    ("Machines_signal", lambda c: c.signal(APP, ID, 9), "{id}/signal", {}, {"signal": 9}),
    ("Machines_wait", lambda c: c.wait(APP, ID), "{id}/wait", {"state": "started", "timeout": "60"}, None),
    ("Machines_wait", lambda c: c.wait(APP, ID, "settled", timeout_s=5, version="v", from_event_id="e"), "{id}/wait",
     {"state": "settled", "timeout": "5", "version": "v", "from_event_id": "e"}, None),
    ("Machines_exec", lambda c: c.exec(APP, ID, "ls -l"), "{id}/exec", {}, {"cmd": "ls -l"}),
    ("Machines_exec", lambda c: c.exec(APP, ID, ("ls", "-l"), stdin="x", timeout_s=5), "{id}/exec", {},
     {"command": ["ls", "-l"], "stdin": "x", "timeout": 5}),
    ("Machines_show_memory", lambda c: c.memory(APP, ID), "{id}/memory", {}, None),
    ("Machines_set_memory", lambda c: c.set_memory(APP, ID, 512, cpus=2), "{id}/memory", {},
     {"limit_mb": 512, "cpus": 2}),
    ("Machines_open_session",
     lambda c: c.open_session(APP, ID, ["sh"], tty=True, columns=100, rows=30, env={"A": "b"}), "{id}/exec/sessions",
     {}, {"command": ["sh"], "tty": True, "columns": 100, "rows": 30, "env": {"A": "b"}}),
    ("Machines_read_session", lambda c: list(c.read_session(APP, ID, KEY)), "{id}/exec/sessions/{key}/output", {},
     None),
    ("Machines_write_session", lambda c: c.write_session(APP, ID, KEY, b"5", end=True),
     "{id}/exec/sessions/{key}/input", {"end": "true"}, 5),
    ("Machines_resize_session", lambda c: c.resize_session(APP, ID, KEY, 100, 30),
     "{id}/exec/sessions/{key}/resize", {}, {"columns": 100, "rows": 30}),
    ("Machines_close_session", lambda c: c.close_session(APP, ID, KEY), "{id}/exec/sessions/{key}", {}, None),
    ("Machines_connect", lambda c: c.connect(APP, ID, 8080), "{id}/connections", {}, {"port": 8080}),
    ("Machines_list_processes", lambda c: c.ps(APP, ID, sort_by="rss", order="desc"), "{id}/ps",
     {"sort_by": "rss", "order": "desc"}, None),
    ("Machines_list_events", lambda c: c.events(APP, ID, limit=5), "{id}/events", {"limit": "5"}, None),
    ("Machines_list_versions", lambda c: c.versions(APP, ID), "{id}/versions", {}, None),
    ("Machines_cordon", lambda c: c.cordon(APP, ID), "{id}/cordon", {}, None),
    ("Machines_uncordon", lambda c: c.uncordon(APP, ID), "{id}/uncordon", {}, None),
    ("Machines_show_lease", lambda c: c.lease(APP, ID), "{id}/lease", {}, None),
    ("Machines_create_lease", lambda c: c.acquire_lease(APP, ID, 30, description="d"), "{id}/lease", {},
     {"ttl": 30, "description": "d"}),
    ("Machines_create_lease", lambda c: c.refresh_lease(APP, ID, "n", 30), "{id}/lease", {}, {"ttl": 30}),
    ("Machines_release_lease", lambda c: c.release_lease(APP, ID, "n"), "{id}/lease", {}, None),
    ("Machines_show_metadata", lambda c: c.metadata(APP, ID), "{id}/metadata", {}, None),
    ("Machines_replace_metadata", lambda c: c.replace_metadata(APP, ID, {"a": "b"}), "{id}/metadata", {},
     {"metadata": {"a": "b"}}),
    ("Machines_merge_metadata", lambda c: c.merge_metadata(APP, ID, {"a": "b"}, machine_version="v"), "{id}/metadata",
     {}, {"metadata": {"a": "b"}, "machine_version": "v"}),
    ("Machines_update_metadata", lambda c: c.set_metadata(APP, ID, KEY, "v"), "{id}/metadata/{key}", {},
     {"value": "v"}),
    ("Machines_delete_metadata", lambda c: c.delete_metadata(APP, ID, KEY), "{id}/metadata/{key}", {}, None),
    ("Machines_logs", lambda c: list(c.logs(APP, ID, tail=5, follow=True)), "{id}/logs",
     {"tail": "5", "follow": "true"}, None),
    ("Machines_explain", lambda c: c.explain(APP, ID), "{id}/explain", {}, None),
    ("Platform_regions", lambda c: c.regions(), "/v1/platform/regions", {}, None),
    ("Platform_placements", lambda c: c.placements({"region": "mad"}), "/v1/platform/placements", {},
     {"region": "mad"}),
    ("Hawker_workers", lambda c: c.workers(), "/v1/hawker/workers", {}, None),
    ("Hawker_cordon", lambda c: c.cordon_worker(APP), "/v1/hawker/workers/{app}/cordon", {}, None),
    ("Hawker_uncordon", lambda c: c.uncordon_worker(APP), "/v1/hawker/workers/{app}/uncordon", {}, None),
    ("Hawker_forget", lambda c: c.forget_worker(APP), "/v1/hawker/workers/{app}/forget", {}, None),
    ("Hawker_runs", lambda c: c.runs(status=["parked", "done"], machine=ID, limit=5), "/v1/hawker/runs",
     {"status": "parked,done", "machine": ID, "limit": "5"}, None),
    ("Hawker_run", lambda c: c.run(APP), "/v1/hawker/runs/{app}", {}, None),
    ("Hawker_retry_run", lambda c: c.retry_run(APP), "/v1/hawker/runs/{app}/retry", {}, None),
    ("Hawker_cancel_run", lambda c: c.cancel_run(APP), "/v1/hawker/runs/{app}/cancel", {}, None),
    ("Hawker_sql", lambda c: c.sql("select 1", worker="w"), "/v1/hawker/sql", {},
     {"query": "select 1", "worker": "w"}),
    ("Hawker_sql", lambda c: c.sql("select 1", on="workers"), "/v1/hawker/sql", {},
     {"query": "select 1", "on": "workers"}),
    ("Hawker_subscribe", lambda c: list(c.subscribe("select 1", since="S/7", seconds=5)), "/v1/hawker/subscribe",
     {"query": "select 1", "from": "S/7", "seconds": "5"}, None),
    ("Hawker_members", lambda c: c.members(), "/v1/hawker/members", {}, None),
    ("Images_list", lambda c: c.images(worker="w", region="mad"), "/v1/hawker/images",
     {"worker": "w", "region": "mad"}, None),
    ("Images_show", lambda c: c.image("a/b:1"), "/v1/hawker/images/show", {"image": "a/b:1"}, None),
    ("Images_remove", lambda c: c.remove_image("a/b:1", region="mad"), "/v1/hawker/images",
     {"image": "a/b:1", "region": "mad"}, None),
    ("Images_pull", lambda c: list(c.pull_image("a/b:1", worker="w")), "/v1/hawker/images/pull", {},
     {"image": "a/b:1", "worker": "w"}),
    ("Images_prefetch", lambda c: list(c.prefetch_image("a/b:1", region="mad", count=2)),
     "/v1/hawker/images/prefetch", {}, {"image": "a/b:1", "region": "mad", "count": 2}),
    ("Images_push", lambda c: list(c.push_image("a/b:1", "r/b:1", username="u", password="p")),
     "/v1/hawker/images/push", {}, {"image": "a/b:1", "to": "r/b:1", "username": "u", "password": "p"}),
    ("Images_begin_upload", lambda c: c.begin_upload(9, worker="w"), "/v1/hawker/images/uploads", {},
     {"size": 9, "worker": "w"}),
    ("Images_upload", lambda c: c.upload(APP, "w", 4, b"5"), "/v1/hawker/images/uploads/{app}",
     {"offset": "4", "worker": "w"}, 5),
    ("Images_drop_upload", lambda c: c.drop_upload(APP, "w"), "/v1/hawker/images/uploads/{app}", {"worker": "w"}, None),
    ("Images_import", lambda c: list(c.import_image("u", "w", "b:1", kind="files", config={"cmd": ["a"]})),
     "/v1/hawker/images/import", {},
     {"upload": "u", "worker": "w", "image": "b:1", "kind": "files", "config": {"cmd": ["a"]}}),
]  # fmt: skip
BY_OP = {kind.op.name: kind for kind in DECLARED}
NOT_WRAPPED = {"Article_start", "Article_stop", "Health", "Machines_show_metadata_key", "OpenAPI"} | {
    kind.op.name for kind in UNBUILT_CALLS
}  # for other clients


async def made(make: Callable[[Client], Any], answer: str, status: str = "200 OK") -> tuple[Any, Server]:
    """What a call gives when the server answers so, and what the server saw."""

    async def script(call: Call) -> None:
        while await call.request():
            await call.reply(answer, status)

    async with serving(script) as server:
        with Client(f"http://127.0.0.1:{server.port}", "t", timeout_s=LIMIT_S) as client:
            return await asyncio.to_thread(make, client), server


def fitting_answer(kind: type[Declared[Any]]) -> str:
    """The least that has the shape of the call's reply."""
    if typing.get_origin(reply_of(kind)) is list:
        return "[{}]"
    return '{"apps": [{}], "regions": [{}], "data": {}, "id": "i"}'


def test_every_call_of_the_api_has_a_method() -> None:
    assert {op for op, *_ in CALLS} == set(BY_OP) - NOT_WRAPPED


@pytest.mark.parametrize(
    ("op", "make", "path", "query", "body"), CALLS, ids=[f"{n}-{c[0]}" for n, c in enumerate(CALLS)]
)
async def test_a_method_makes_the_call_that_the_api_describes(
    op: str, make: Callable[[Client], Any], path: str, query: dict[str, str], body: Any
) -> None:
    kind = BY_OP[op]
    _, server = await made(make, fitting_answer(kind))
    (request,) = server.requests
    method, target = request.split(" ")
    url = urlsplit(target)
    template = re.compile(re.sub(r"\{\w+\}", "([^/]+)", kind.op.path))
    match = template.fullmatch(url.path)
    assert method == kind.op.method
    assert match is not None, url.path
    names = [unquote(part) for part in match.groups()]
    assert names == [APP, ID, KEY][: len(names)]
    machines = "/v1/apps/web%2F1/machines"
    assert url.path == path.format(app="web%2F1", machines=machines, id=f"{machines}/{ID}", key="a%20b")
    sent = dict(parse_qsl(url.query))
    assert sent == query
    assert set(sent) <= {field.name for field in shape_of(kind).query}
    (raw,) = server.bodies
    assert (msgspec.json.decode(raw) if raw else None) == body
    if raw and not kind.op.raw:
        msgspec.json.decode(raw, type=shape_of(kind).body or Any)  # raises when the API would refuse it


@pytest.mark.parametrize(
    "make",
    [
        lambda c: c.update_machine(APP, ID, {"config": {}}, nonce="n"),
        lambda c: c.destroy(APP, ID, nonce="n"),
        lambda c: c.start(APP, ID, nonce="n"),
        lambda c: c.stop(APP, ID, nonce="n"),
        lambda c: c.suspend(APP, ID, nonce="n"),
        lambda c: c.restart(APP, ID, nonce="n"),
        lambda c: c.cordon(APP, ID, nonce="n"),
        lambda c: c.uncordon(APP, ID, nonce="n"),
        lambda c: c.refresh_lease(APP, ID, "n", 30),
        lambda c: c.release_lease(APP, ID, "n"),
    ],
)
async def test_a_call_that_a_lease_guards_shows_its_nonce(make: Callable[[Client], Any]) -> None:
    _, server = await made(make, '{"data": {}}')
    assert f"\r\n{NONCE}: n\r\n" in server.heads[0]


async def test_an_order_shows_its_idempotency_key() -> None:
    _, server = await made(lambda c: c.create_machine(APP, {"config": {}}, key="order-1"), "{}")
    assert "\r\nidempotency-key: order-1\r\n" in server.heads[0]


async def test_machines_are_filtered_by_metadata_under_its_own_name() -> None:
    _, server = await made(lambda c: c.machines(APP, metadata={"role": "a b"}), "[]")
    assert server.requests[0].endswith("?metadata.role=a+b")


async def test_a_wait_for_several_states_names_each() -> None:
    _, server = await made(lambda c: c.wait(APP, ID, ["stopped", "failed"]), "{}")
    assert "state=stopped&state=failed" in server.requests[0]


async def test_wrapped_answers_are_given_without_their_wrapping() -> None:
    assert (await made(lambda c: c.apps(), '{"total_apps": 1, "apps": [{"name": "web"}]}'))[0] == [{"name": "web"}]
    assert (await made(lambda c: c.lease(APP, ID), '{"status": "success", "data": {"nonce": "n"}}'))[0] == {
        "nonce": "n"
    }


@pytest.mark.parametrize("answer", ["[]", "null", '"text"', '{"apps": {}}', '{"apps": [1]}', ""])
async def test_an_answer_of_another_shape_is_an_error_here_and_not_later(answer: str) -> None:
    with pytest.raises(Unreachable, match="not one of this API") as caught:
        await made(lambda c: c.apps(), answer)
    assert "market" in caught.value.hint


async def test_a_wait_that_ends_without_the_state_is_an_error_with_status_408() -> None:
    with pytest.raises(ApiError, match="deadline_exceeded") as caught:
        await made(lambda c: c.wait(APP, ID), '{"error": "deadline_exceeded: x"}', "408 Request Timeout")
    assert caught.value.status_code == 408

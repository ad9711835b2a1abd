"""Images by the command line, in a region of two workers that ask no registry: made of a directory on one, run on the
other."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tests.cli.programs import PROGRAM, Ended, environment, hawker, on_terminal
from tests.kit.markets import Market, running_market
from tests.kit.oci import busybox_image, write_docker_archive

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.timeout(120),
]

SHOP = "shop.invalid/shop:1"


@pytest.fixture(scope="module")
def market(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Market]:
    with running_market(tmp_path_factory.mktemp("images"), ("--region", "ord", "--workers", "2")) as market:
        yield market


class User:
    """Runs commands on a market. Keeps what it made of images to remove them."""

    def __init__(self, market: Market) -> None:
        self.env = {"HAWKER_HOME": str(market.home)}

    def __call__(self, *arguments: str | Path, status: int = 0) -> Ended:
        ended = hawker(*arguments, env=self.env)
        assert ended.status == status, (arguments, ended)
        return ended

    def json(self, *arguments: str | Path) -> Any:
        at = arguments.index("--") if "--" in arguments else len(arguments)
        return self(*arguments[:at], "--json", *arguments[at:]).json()

    def workers_of(self, image: str) -> list[str]:
        return sorted(entry["worker"] for entry in self.json("image", "list") if image in entry["names"])

    def terminal(self, *arguments: str) -> Ended:
        return on_terminal(*arguments, env=self.env)


@pytest.fixture
def user(market: Market) -> Iterator[User]:
    user = User(market)
    yield user
    for app in user.json("apps", "list"):
        user("apps", "destroy", app["name"], "--yes", "--force")
    for image in {entry["digest"] for entry in user.json("image", "list")}:
        user("image", "remove", image, "--yes")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A directory with a program that needs nothing else."""
    root = tmp_path / "site"
    (root / "bin").mkdir(parents=True)
    shutil.copy(shutil.which("busybox") or "", root / "bin" / "busybox")
    (root / "bin" / "sh").symlink_to("busybox")
    (root / "hello").write_text("from a directory\n")
    (root / ".git").mkdir()
    return root


def built(user: User, site: Path, *more: str) -> Any:
    command = ("--entrypoint", "/bin/busybox", "--cmd", "sleep", "--cmd", "600", "--exclude", ".git")
    (made,) = user.json("image", "build-from", site, SHOP, *command, *more)
    return made


def test_an_image_made_of_a_directory_on_one_worker_runs_on_another_without_a_registry(user: User, site: Path) -> None:
    made = built(user, site, "--worker", "ord-1")
    assert (made["worker"], made["names"], made["layers"]) == ("ord-1", [SHOP], 1)
    user("apps", "create", "shop")
    user("workers", "cordon", "ord-1")
    try:
        machine = user.json("machine", "run", "--app", "shop", SHOP)
    finally:
        user("workers", "uncordon", "ord-1")
    assert (machine["hawker"]["worker"], machine["state"]) == ("ord-2", "started")
    said = user("machine", "exec", machine["id"], "--", "/bin/busybox", "cat", "/hello")
    assert said.out == "from a directory\n"
    assert user("machine", "exec", machine["id"], "--", "/bin/busybox", "ls", "-a", "/").out.count(".git") == 0
    assert user.workers_of(SHOP) == ["ord-1", "ord-2"]


def test_an_image_that_a_machine_needs_is_kept_and_the_rest_removed(user: User, site: Path) -> None:
    built(user, site)
    user("image", "prefetch", SHOP)
    assert user.workers_of(SHOP) == ["ord-1", "ord-2"]
    user("apps", "create", "shop")
    machine = user.json("machine", "run", "--app", "shop", SHOP)
    here = machine["hawker"]["worker"]
    other = {"ord-1": "ord-2", "ord-2": "ord-1"}[here]
    kept = user("image", "remove", SHOP, "--yes", status=1)
    assert f"{here} keeps it: image {SHOP} is needed by {machine['id']}" in kept.err
    assert f"removed from {other}" in kept.out
    assert user.workers_of(SHOP) == [here]
    user("machine", "destroy", machine["id"], "--force")
    user("image", "remove", SHOP, "--yes")
    assert user.workers_of(SHOP) == []
    assert "no worker has the image" in user("image", "remove", SHOP, "--yes", status=3).err


def test_an_update_to_an_image_that_there_is_not_leaves_the_machine_running(
    user: User, site: Path, tmp_path: Path
) -> None:
    built(user, site)
    user("apps", "create", "shop")
    before = user.json("machine", "run", "--app", "shop", SHOP)
    registry = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path / "nothing"))
    serving = Thread(target=registry.serve_forever)
    serving.start()
    try:
        image = f"127.0.0.1:{registry.server_port}/gone:1"
        told = user("machine", "update", before["id"], "--image", image, status=1)
    finally:
        registry.shutdown()
        serving.join()
        registry.server_close()
    assert "runs on as it was" in told.err
    assert image in told.err
    after = user.json("machine", "status", before["id"])
    assert (after["state"], after["version"], after["config"]) == ("started", before["version"], before["config"])
    said = user("machine", "exec", before["id"], "--", "/bin/busybox", "cat", "/hello")
    assert said.out == "from a directory\n"


def test_an_update_in_the_place_of_one_that_waits_tells_that_its_own_image_did_not_come(user: User, site: Path) -> None:
    built(user, site)
    user("apps", "create", "twice")
    before = user.json("machine", "run", "--app", "twice", SHOP)
    user("machine", "update", before["id"], "--image", "127.0.0.1:1/first:1", "--detach")
    told = user("machine", "update", before["id"], "--image", "127.0.0.1:1/second:1", "--timeout", "1", status=5)
    assert "runs on as it was: image 127.0.0.1:1/second:1: it was not here within 1 s" in told.err
    assert user.json("machine", "status", before["id"])["version"] == before["version"]


def test_an_order_whose_image_does_not_come_says_why_while_it_waits(user: User) -> None:
    user("apps", "create", "waits")
    argv = [*PROGRAM, "machine", "run", "--app", "waits", "127.0.0.1:1/nobody:1"]
    with subprocess.Popen(argv, env=environment(user.env), stderr=subprocess.PIPE, text=True) as ordering:
        assert ordering.stderr is not None
        said = ordering.stderr.readline()
        ordering.terminate()
    assert "127.0.0.1:1" in said
    assert said.endswith("; its worker tries again\n")


def test_an_order_whose_image_cannot_be_had_fails_in_its_time_names_what_is_there_and_leaves_nothing(
    user: User, site: Path
) -> None:
    built(user, site)
    user("apps", "create", "nine")
    told = user("machine", "run", "--app", "nine", "--timeout", "1", "127.0.0.1:1/shop:9", status=5)
    assert "nothing was ordered: image 127.0.0.1:1/shop:9: it was not here within 1 s" in told.err
    assert f"no worker has 127.0.0.1:1/shop:9; there is {SHOP}" in told.err
    assert user("machine", "list", "--app", "nine").out == ""


def test_who_does_not_wait_for_an_image_is_answered_at_once_and_finds_why_it_did_not_come(user: User) -> None:
    user("apps", "create", "later")
    order = ("machine", "run", "--app", "later", "--timeout", "1", "--detach")
    machine = user.json(*order, "127.0.0.1:1/nobody:1")
    assert machine["state"] == "created"
    user("machine", "wait", machine["id"], "--state", "failed")
    (why,) = {
        event["request"]["exit_event"]["error"]
        for event in user.json("machine", "status", machine["id"])["events"]
        if event["request"]
    }
    assert why.startswith("image 127.0.0.1:1/nobody:1: it was not here within 1 s")


def test_images_are_listed_and_shown_for_people(user: User, site: Path) -> None:
    made = built(user, site, "--worker", "ord-2", "--expose", "8080", "-e", "A=b", "--user", "1000:1000")
    listed = user("image", "list").out
    assert SHOP in listed
    assert made["digest"][:19] in listed
    shown = user("image", "show", SHOP).out
    for line in ("entrypoint  /bin/busybox", "cmd         sleep 600", "user        1000:1000", "ports       8080/tcp"):
        assert line in shown
    assert "no worker has the image nothing:1" in user("image", "show", "nothing:1", status=3).err


def test_an_archive_is_imported_and_runs(user: User, tmp_path: Path) -> None:
    write_docker_archive(tmp_path / "bb.tar", {"bb:1": busybox_image()})
    (made,) = user.json("image", "import", tmp_path / "bb.tar", "bb.invalid/bb:1")
    assert made["names"] == ["bb.invalid/bb:1"]
    user("apps", "create", "bb")
    machine = user.json("machine", "run", "--app", "bb", "bb.invalid/bb:1", "--", "/bin/sh", "-c", "sleep 600")
    assert (machine["state"], machine["hawker"]["worker"]) == ("started", made["worker"])


def test_what_is_no_archive_is_told_in_a_sentence(user: User, tmp_path: Path) -> None:
    (tmp_path / "bad.tar").write_bytes(b"no tar" * 1000)
    told = user("image", "import", tmp_path / "bad.tar", "bad.invalid/bad:1", status=1)
    assert told.err.startswith("error: ord-")
    assert "Traceback" not in told.err
    assert user.json("image", "list") == []


def test_a_wrong_name_and_an_unknown_worker_are_told_before_anything_is_sent(user: User, site: Path) -> None:
    assert "lower-case" in user("image", "build-from", site, "Shop:1", status=2).err
    told = user("image", "build-from", site, SHOP, "--worker", "nobody", status=3)
    assert "no worker is called nobody" in told.err


def test_on_a_terminal_a_fetch_shows_how_far_it_is(user: User, site: Path) -> None:
    made = built(user, site, "--worker", "ord-1")
    shown = user.terminal("image", "prefetch", SHOP)
    assert shown.status == 0
    assert f"ord-2 has {SHOP} ({made['digest'][:19]}" in shown.out


def test_json_of_an_error_is_the_apis(user: User) -> None:
    failed = user("image", "push", "nothing:1", "--json", status=3)
    assert json.loads(failed.err)["status"] == "not_found"


def test_a_name_that_means_another_image_elsewhere_is_pointed_out(user: User, site: Path) -> None:
    first = built(user, site, "--worker", "ord-1")
    (site / "hello").write_text("changed\n")
    told = user("image", "build-from", site, SHOP, "--worker", "ord-2")
    assert "ord-1: still another image under this name" in told.err
    user("image", "remove", SHOP, "--worker", "ord-1", "--yes")
    assert first["digest"] not in {entry["digest"] for entry in user.json("image", "list")}
    assert user("image", "build-from", site, SHOP, "--worker", "ord-1").err == ""

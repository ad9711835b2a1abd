"""A daemon meets a supervisor that another version of it has started."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.kit.waiting import eventually

from hawker.supervisor.protocol import CONFINED, MOUNTS, PROTOCOL, features, needed
from hawker.worker.drivers.base import NotSupported, StartFailed
from hawker.worker.drivers.supervisor import Supervisor

ANOTHER = """
import fcntl, json, os, socket, sys
os.chdir(sys.argv[1])
lock = open("lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
instances = [{"key": key, "machine": "m", "pid": 1, "started_at_ms": 1, "exit": None} for key in sys.argv[3:]]
listener = socket.socket(socket.AF_UNIX)
listener.bind("socket")
listener.listen()
print("listens", flush=True)
while True:
    peer, _ = listener.accept()
    for line in peer.makefile():
        ask = json.loads(line)
        said = {"id": ask["id"], "ok": None}
        if ask["op"] == "hello":
            said["ok"] = {"pid": os.getpid(), "cgroups": "", "instances": instances, **json.loads(sys.argv[2])}
        elif ask["op"] == "list":
            said["ok"] = instances
        elif ask["op"] == "stop":
            (ended,) = [each for each in instances if each["key"] == ask["key"]]
            said["ok"] = ended["exit"] = {"key": ask["key"], "machine": "m", "code": 0, "at_ms": 1}
            peer.sendall(json.dumps({"event": "exit", "exit": said["ok"]}).encode() + b"\\n")
        peer.sendall(json.dumps(said).encode() + b"\\n")
"""
"""A supervisor that says of itself what it is given, and has the instances it is given."""

OF_BEFORE: Mapping[str, Any] = {}  # the first supervisors said nothing of their version
OF_TOMORROW = {"protocol": PROTOCOL + 1, "features": [*features(["--mounts"]), "of-tomorrow"]}
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncIterator[Supervisor]:
    connection = Supervisor(tmp_path, "--no-cgroups")
    yield connection
    await connection.shut_down(grace_s=0)
    await connection.close()


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts another version's supervisor."""
    started = []

    def start(hello: Mapping[str, Any], *running: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-S", "-c", ANOTHER, str(tmp_path), json.dumps(hello), *running]
        child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        started.append(child)
        assert child.stdout
        assert child.stdout.readline() == "listens\n"
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("hello", [OF_BEFORE, OF_TOMORROW], ids=["before", "tomorrow"])
async def test_one_under_which_nothing_runs_is_replaced_at_once(
    supervisor: Supervisor, start: Start, hello: Mapping[str, Any]
) -> None:
    old = start(hello)
    await supervisor.open(lambda ended: None)
    met = await supervisor.call("hello")
    assert (met["protocol"], met["features"]) == (PROTOCOL, features([]))
    assert old.wait() == -9


@pytest.mark.parametrize(
    ("hello", "lacking"), [(OF_BEFORE, MOUNTS), (OF_TOMORROW, f"protocol {PROTOCOL}")], ids=["before", "tomorrow"]
)
async def test_one_that_is_needed_is_not_asked_what_it_does_not_understand_and_replaced_once_it_is_not(
    supervisor: Supervisor, start: Start, hello: Mapping[str, Any], lacking: str
) -> None:
    old = start(hello, "a/launch", "b/launch")
    told = []
    await supervisor.open(lambda ended: told.append(ended.key))
    for ask in (supervisor.call, supervisor.call_once):
        with pytest.raises(StartFailed, match=rf"process {old.pid}\) is of another version .* lacks {lacking}"):
            await ask("make", key="c/launch")
    await supervisor.call("stop", key="a/launch")
    assert {each["key"] for each in await supervisor.call("list")} == {"a/launch", "b/launch"}
    assert old.poll() is None
    await supervisor.call("stop", key="b/launch")
    assert told == ["a/launch", "b/launch"]

    async def replaced() -> bool:
        return bool((await supervisor.call("hello"))["pid"] != old.pid)

    await eventually(replaced, "a supervisor of this version serves")
    assert await asyncio.to_thread(old.wait) == -9


async def test_one_of_before_still_starts_what_it_always_could(supervisor: Supervisor, start: Start) -> None:
    start(OF_BEFORE, "a/launch")
    await supervisor.open(lambda ended: None)
    await supervisor.call("start", key="b/launch", argv=["true"], cwd="/")
    with pytest.raises(StartFailed, match=f"lacks {CONFINED}"):
        await supervisor.call("start", key="b/launch", argv=["true"], confined={"user": 1})


async def test_an_order_that_nobody_knows_is_refused_by_its_name(supervisor: Supervisor) -> None:
    await supervisor.open(lambda ended: None)
    with pytest.raises(NotSupported, match=f"protocol {PROTOCOL} knows no order 'levitate'"):
        await supervisor.call("levitate")


def test_a_feature_is_needed_where_an_order_makes_use_of_it() -> None:
    assert needed("make", {}) == {MOUNTS}
    assert needed("start", {"key": "a"}) == set()
    assert needed("start", {"key": "a", "confined": None}) == set()
    assert needed("start", {"key": "a", "confined": {"user": 7}}) == {CONFINED}
    assert needed("signal", {"key": "a"}) == set()

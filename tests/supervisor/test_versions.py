"""A daemon meets a supervisor that another version of it has started."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.kit.waiting import eventually

from hawker.supervisor import calls
from hawker.supervisor.protocol import CONFINED, MOUNTS, PROTOCOL, USER_EACH, features, needed
from hawker.supervisor.wire import request_of
from hawker.worker.drivers.base import Exit, Instance, NotSupported, StartFailed
from hawker.worker.drivers.supervised import Made
from hawker.worker.drivers.supervisor import Supervisor
from hawker.worker.drivers.wire import RunningSupervisor, encoded

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
LIMITS = calls.Limits(cpu_millis=100, memory_mib=64)
Start = Callable[..., "subprocess.Popen[str]"]


def program(**more: Any) -> calls.Start:
    return calls.Start(key="b/launch", machine="m", argv=["true"], env={}, limits=LIMITS, **more)


def container(key: str) -> calls.MakeContainer:
    root = calls.RootLayer(persist=True)
    file = calls.NamedFile(name="0", content="", mode=0o644, owner=0)
    return calls.MakeContainer(
        key=key,
        machine="m",
        runtime="runc",
        init="init",
        config="{}",
        layers=["/layer"],
        root=root,
        ids=None,
        mounts=[],
        files=[file],
        owner=0,
        limits=LIMITS,
    )


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
    met = await supervisor.call(calls.Hello(), RunningSupervisor)
    assert (met.protocol, met.features) == (PROTOCOL, frozenset(features([])))
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
    for once in (False, True):
        with pytest.raises(StartFailed, match=rf"process {old.pid}\) is of another version .* lacks {lacking}"):
            await supervisor.call(container("c/launch"), Made, once=once)
    await supervisor.call(calls.Stop(key="a/launch", signal=15, grace_s=1), Exit)
    there = await supervisor.call(calls.ListInstances(), list[Instance])
    assert {each.key for each in there} == {"a/launch", "b/launch"}
    assert old.poll() is None
    await supervisor.call(calls.Stop(key="b/launch", signal=15, grace_s=1), Exit)
    assert told == ["a/launch", "b/launch"]

    async def replaced() -> bool:
        return bool((await supervisor.call(calls.Hello(), RunningSupervisor)).pid != old.pid)

    await eventually(replaced, "a supervisor of this version serves")
    assert await asyncio.to_thread(old.wait) == -9


async def test_one_of_before_still_starts_what_it_always_could(supervisor: Supervisor, start: Start) -> None:
    start(OF_BEFORE, "a/launch")
    await supervisor.open(lambda ended: None)
    await supervisor.call(program())
    with pytest.raises(StartFailed, match=f"lacks {CONFINED}"):
        await supervisor.call(program(confined=calls.Confined(user=1)))


async def test_a_call_that_nobody_knows_is_refused_by_its_name(supervisor: Supervisor) -> None:
    @dataclass
    class Levitate:
        op: ClassVar[str] = "levitate"

    await supervisor.open(lambda ended: None)
    with pytest.raises(NotSupported, match=f"protocol {PROTOCOL} knows no call 'levitate'"):
        await supervisor.call(Levitate())  # type: ignore[call-overload]  # of tomorrow


def test_a_feature_is_needed_where_a_call_makes_use_of_it() -> None:
    assert needed(container("a")) == {MOUNTS}
    assert needed(program()) == set()
    assert needed(program(confined=calls.Confined(user=7))) == {CONFINED}
    assert needed(program(users=100_000)) == {USER_EACH}
    assert needed(calls.Signal(key="a", signal=1)) == set()


def test_of_a_newer_daemons_call_what_is_not_known_is_left_out() -> None:
    message = json.loads(encoded(7, program(confined=calls.Confined(user=7)), None))
    message |= {"of_tomorrow": 1, "limits": message["limits"] | {"of_tomorrow": 1}}
    message["confined"]["of_tomorrow"] = 1
    assert encoded(7, request_of(message), None) == encoded(7, program(confined=calls.Confined(user=7)), None)


CALLS = [program(), container("a"), calls.Hello(), calls.Prespawn(standby="s", start=program())]


@pytest.mark.parametrize("call", CALLS)
def test_a_call_comes_to_the_supervisor_as_the_daemon_made_it(call: calls.Request) -> None:
    came = request_of(json.loads(encoded(7, call, None)))
    assert (type(came), encoded(7, came, None)) == (type(call), encoded(7, call, None))

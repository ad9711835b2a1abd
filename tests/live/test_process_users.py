"""Whose the programs of the process driver are: where the worker is root, each machine has users of its own, who own
nothing else of the worker's, and have no say over the programs of others."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.kit.belongings import ended, processes
from tests.kit.drivers import Heard, Opened, opened, shell, spec
from tests.kit.markets import UP_S, Client, free_port
from tests.kit.private import open_directory
from tests.kit.processes import PYTHON
from tests.kit.waiting import eventually
from tests.live.test_lost_database import CONFIG, agent
from tests.live.test_process_driver import FromAnImage, with_cgroups, without_cgroups

from hawker.client.wire import PeerUnreachable
from hawker.worker.drivers.base import InstanceSpec, StartFailed
from hawker.worker.drivers.process import ProcessDriver

pytestmark = pytest.mark.root

WHO = "id -u; id -g; id -G; grep -h NoNewPrivs /proc/self/status; grep -h CapBnd /proc/self/status"
BARE = ["NoNewPrivs:", "1", "CapBnd:", "0" * 16]

TRIES = """
import ctypes, json, os, socket, sys
got = []
def tried(what, how):
    try:
        how()
    except OSError:
        return
    got.append(what)
def connect(path):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
def trace(pid):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(16, pid, None, None) < 0:
        raise OSError(ctypes.get_errno(), "ptrace")
    os.waitpid(pid, 0x40000000)
    libc.ptrace(17, pid, None, None)
paths, pids = json.loads(sys.argv[1])
for path in paths:
    tried("read " + path, lambda: os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK)))
    tried("write " + path, lambda: os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK)))
    tried("connect " + path, lambda: connect(path))
for pid in pids:
    tried(f"signal {pid}", lambda: os.kill(pid, 0))
    tried(f"trace {pid}", lambda: trace(pid))
    for name in ("environ", "mem", "cwd/", "root/", "fd"):
        path = f"/proc/{pid}/{name}"
        tried("read " + path, lambda: os.close(os.open(path, os.O_RDONLY)))
        tried("list " + path, lambda: os.listdir(path))
print(json.dumps(got))
"""
"""What comes of opening, listing, connecting, signalling and tracing. What is refused is left out."""


def attempts(paths: list[str], pids: list[int]) -> list[str]:
    return [PYTHON, "-S", "-c", TRIES, json.dumps([paths, pids])]


@pytest.fixture(params=[with_cgroups, without_cgroups], ids=["prespawned", "spawned"])
async def driver(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Opened]:
    async with opened(request.param(tmp_path)) as it:
        yield it


async def words(driver: Opened, one: InstanceSpec, *command: str) -> list[str]:
    """What a command beside it says."""
    done = await driver.driver.exec(one.key, command, timeout_s=20)
    assert (done.code, done.stderr) == (0, b"")
    return done.stdout.decode().split()


async def user_of(driver: Opened, one: InstanceSpec) -> str:
    return (await words(driver, one, "id", "-u"))[0]


@pytest.mark.parametrize("tty", [False, True], ids=["pipes", "terminal"])
async def test_without_users_of_their_own_machines_and_their_commands_are_the_workers_user(
    tmp_path: Path, tty: bool
) -> None:
    async with opened(ProcessDriver(tmp_path, own_users=False)) as driver:
        one = replace(shell("id -u; echo so; exec sleep 60"), tty=tty)
        await driver.driver.start(one)
        await driver.says(one.machine, "so")
        assert (await driver.lines(one.machine))[0].text == str(os.getuid())
        assert await user_of(driver, one) == str(os.getuid())
        assert (await driver.driver.fingerprint()).attributes["user"] == "the agent's own"


@pytest.mark.parametrize("tty", [False, True], ids=["pipes", "terminal"])
async def test_each_machine_is_a_user_of_its_own_without_privileges_and_so_are_its_commands(
    driver: Opened, tty: bool
) -> None:
    users = set()
    for one in [replace(shell(f"{WHO}; echo so; exec sleep 60"), tty=tty) for _ in range(2)]:
        await driver.driver.start(one)
        await driver.says(one.machine, "so")
        said = [word for line in await driver.lines(one.machine) for word in line.text.split()]
        user = said[0]
        assert said[:5] == [user, user, user, "NoNewPrivs:", "1"]
        beside = await words(driver, one, "sh", "-c", WHO)
        assert beside == [user] * 3 + BARE
        terminal = await driver.terminals.terminal(one.key, ["sh", "-c", f"{WHO}; test -O $(tty) && echo so"], tty=True)
        heard = Heard(terminal)
        await heard.until("so")
        await terminal.close()
        assert heard.streams["stdout"].decode().split() == [*beside, "so"]
        users.add(int(user))
    assert len(users) == 2
    assert os.getuid() not in users


async def test_its_directory_and_its_outputs_are_its_own_and_it_knows_a_way_to_them(driver: Opened) -> None:
    one = shell("touch $(pwd)/made; echo out > /dev/stdout; echo err > /dev/stderr; stat -c '%u %a' $(pwd); id -u")
    said = await driver.run(one)
    assert {"out", "err"} < set(said)
    [user] = filter(str.isdigit, said)  # lines of two streams have no order
    assert f"{user} 700" in said
    again = replace(shell("ls; exec sleep 60"), machine=one.machine)
    await driver.driver.start(again)
    await driver.says(one.machine, "made")
    assert await words(driver, again, "sh", "-c", "id -u; cat; echo out > /dev/stdout") == [user, "out"]


async def test_it_keeps_its_user_as_long_as_it_is_there(driver: Opened) -> None:
    one = spec("sleep", "60")
    await driver.driver.start(one)
    user = await user_of(driver, one)
    await driver.kill_supervisor()
    assert await user_of(driver, one) == user, "another supervisor has taken it over"
    await driver.driver.stop(one.key, signal=signal.SIGKILL, grace_s=0)
    await driver.kill_supervisor()
    others = [spec("sleep", "60") for _ in range(3)]
    for other in others:
        await driver.driver.start(other)
    again = replace(one, key="again/launch")
    await driver.driver.start(again)
    assert await user_of(driver, again) == user
    assert user not in [await user_of(driver, other) for other in others]


async def test_a_program_that_its_user_may_not_run_is_refused_with_the_reason(driver: Opened, tmp_path: Path) -> None:
    program = tmp_path / "closed"
    shutil.copy("/bin/true", program)
    program.chmod(0o700)
    with pytest.raises(StartFailed, match=r"permission denied to user \d+ of this host"):
        await driver.driver.start(spec(str(program)))


class TestFromAnImage(FromAnImage):
    async def test_its_users_are_the_machines_and_so_is_its_tree(self, driver: Opened) -> None:
        """Root of an image too is nobody on the host, and still has what the image gives root."""
        outside = set()
        for name, inside in (("", "0"), ("user", "1000")):
            script = "grep NoNewPrivs /proc/self/status; id -u; touch /etc/mine && echo touched; echo so; exec sleep 60"
            one = replace(driver.shell(script), user=name)
            await driver.driver.start(one)
            await driver.says(one.machine, "so")
            said = [word for line in await driver.lines(one.machine) for word in line.text.split()]
            assert said[:3] == ["NoNewPrivs:", "1", inside]
            assert ("touched" in said) == (inside == "0")
            assert await words(driver, one, "id", "-u") == [inside]
            outside |= {os.stat(f"/proc/{each.pid}").st_uid for each in await driver.driver.processes(one.key)}
        assert len(outside - {0}) == 2, "but for those that start them and collect what they leave"
        assert min(outside - {0}) >= 1 << 20

    async def test_root_of_an_image_leaves_its_directory_by_no_way(self, driver: Opened) -> None:
        tries = "mkdir /x; chroot /x true 2>&1; unshare -U true 2>&1; mount -t tmpfs none /x 2>&1; true"
        said = await driver.run(driver.shell(tries))
        assert len(said) == 3
        assert [line for line in said if "not permitted" in line or "denied" in line or "you root" in line] == said


class Worker:
    """An agent with two machines, where the way to its files is open but for what it closes itself."""

    def __init__(self, place: Path) -> None:
        self.directory, self.config = place / "w", place / "agent.toml"
        self.api, self.broker = free_port(), free_port()
        text = CONFIG.format(directory=self.directory, worker=self.api, broker=self.broker)
        self.config.write_text(f"stop_machines_on_exit = true\n{text}")
        self.config.chmod(0o600)
        self.client = Client(f"http://127.0.0.1:{self.broker}", "a")

    async def up(self) -> None:
        async def serves() -> bool:
            with suppress(PeerUnreachable):
                return (await self.client.call("GET", "/hawker/workers")).status == 200
            return False

        await eventually(serves, "the agent serves", UP_S)

    async def exec(self, machine: str, *command: str) -> Any:
        body = {"command": list(command), "timeout": 60}
        return await self.client.ok("POST", f"/apps/k/machines/{machine}/exec", body)


@pytest.fixture
def worker() -> Iterator[Worker]:
    with open_directory() as place:
        yield Worker(place)


def everything(*places: Path) -> list[Path]:
    return [path for place in places for path in (place, *place.rglob("*"))]


@pytest.mark.slow
async def test_a_machine_reaches_nothing_of_its_worker_nor_of_its_neighbour(worker: Worker) -> None:
    script = "echo x > file; exec sleep 3600"
    config = {"image": "host", "restart": {"policy": "no"}, "init": {"exec": ["sh", "-c", script]}}
    with agent(worker.config, worker.broker):
        await worker.up()
        await worker.client.ok("POST", "/apps", {"app_name": "k"})
        body = {"region": "ord", "config": config}
        one, other = [(await worker.client.ok("POST", "/apps/k/machines?wait=true", body))["id"] for _ in range(2)]
        programs = [(await worker.client.ok("GET", f"/apps/k/machines/{each}/ps"))[0]["pid"] for each in (one, other)]
        work, memory = worker.directory / "process/work", (worker.directory / "process/run").resolve()
        user = os.stat(work / one).st_uid
        paths = [
            str(path) for path in everything(worker.config, worker.directory, memory) if path.lstat().st_uid != user
        ]
        for name in ("agent.toml", "w/worker.db", "w/catalog.db", "process/socket", f"{other}/file"):
            assert any(path.endswith(name) for path in paths)
        pids = [pid for pid in processes(worker.directory) if pid != programs[0]]
        assert programs[1] in pids
        by_root = json.loads(await asyncio.to_thread(subprocess.check_output, attempts(paths, pids)))
        assert {f"read {path}" for path in paths if not path.endswith("socket")} <= set(by_root)
        assert {f"{what} {pid}" for pid in pids for what in ("signal", "trace")} <= set(by_root)
        done = await worker.exec(one, *attempts(paths, pids))
        assert (done["exit_code"], done["stderr"]) == (0, "")
        assert json.loads(done["stdout"]) == []
    await worker.client.close()
    assert ended(worker.directory) == []

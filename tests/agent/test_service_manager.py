"""What a service manager hears of an agent, over the socket and in the words of systemd: sd_notify(3)."""

from __future__ import annotations

import asyncio
import os
import socket
from asyncio.trsock import TransportSocket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit.waiting import until, wait_until

from hawker.agent.service_manager import NAME, ServiceManager
from hawker.listening import Listening


class Ear:
    """The service manager's end."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.setblocking(False)
        self.environ = {"NOTIFY_SOCKET": str(path), "PATH": "/bin"}
        self.stored: dict[str, socket.socket] = {}
        self.heard: list[dict[str, str]] = []

    def listen(self) -> None:
        """To all that was said."""
        while True:
            try:
                data, numbers, _, _ = socket.recv_fds(self.socket, 4096, 8)
            except BlockingIOError:
                return
            words = dict(line.split("=", 1) for line in data.decode().splitlines())
            self.heard.append(words)
            if "FDSTORE" in words:
                self.stored[words["FDNAME"]] = socket.socket(fileno=numbers[0])
            elif "BARRIER" in words:
                os.close(numbers[0])
            elif "FDSTOREREMOVE" in words:
                self.stored.pop(words["FDNAME"]).close()

    def wait_for(self, word: str) -> None:
        wait_until(lambda: self.said(word), word)

    def said(self, word: str) -> bool:
        self.listen()
        return any(word in words for words in self.heard)


@pytest.fixture
def ear(tmp_path: Path) -> Iterator[Ear]:
    ear = Ear(tmp_path / "notify")
    yield ear
    ear.socket.close()
    for sock in ear.stored.values():
        sock.close()


async def test_it_hears_that_the_agent_serves_that_its_loop_turns_and_that_it_ends(ear: Ear) -> None:
    ear.environ.update(WATCHDOG_USEC="60000", WATCHDOG_PID=str(os.getpid()))
    manager = ServiceManager(ear.environ)
    assert ear.environ == {"PATH": "/bin"}, "no child is to speak for the agent"
    manager.ready(Listening())
    await until(lambda: ear.said("WATCHDOG"))
    manager.reloading()
    manager.refused("no\nsuch file")
    manager.stopping()
    ear.listen()
    assert ear.heard[0] == {"READY": "1"}
    told = [words for words in ear.heard[1:] if words != {"WATCHDOG": "1"}]
    assert told[0]["RELOADING"] == "1"
    assert told[0]["MONOTONIC_USEC"].isdecimal()
    assert told[1:] == [{"READY": "1", "STATUS": "not begun anew: no such file"}, {"STOPPING": "1"}]


async def test_it_keeps_the_sockets_that_are_open_and_no_others(ear: Ear) -> None:
    """What it keeps takes connections when the agent is dead, and is what the next one gets."""
    ear.environ.update(FDSTORE="16", WATCHDOG_USEC="60000")
    unwanted = socket.create_server(("127.0.0.1", 0))
    name_of_unwanted = name_of(unwanted)
    ear.stored[name_of_unwanted] = unwanted.dup()
    listening = Listening([unwanted])
    one, two = [(await listening.serve(asyncio.Protocol, "127.0.0.1", 0, backlog=10))[0] for _ in range(2)]
    names = [name_of(server.sockets[0]) for server in (one, two)]
    address = one.sockets[0].getsockname()
    manager = ServiceManager(ear.environ)
    manager.ready(listening)
    ear.listen()
    assert sorted(ear.stored) == sorted(names)
    two.close()
    await until(lambda: ear.said("FDSTOREREMOVE") and list(ear.stored) == names[:1])
    manager.leave_off()
    one.close()
    with socket.create_connection(address):
        ear.stored[names[0]].accept()[0].close()


async def test_one_that_is_in_the_way_of_a_new_one_is_let_go_first(ear: Ear) -> None:
    """The configuration has changed: no agent could start, as often as it is handed what it cannot use."""
    ear.environ["FDSTORE"] = "16"
    everywhere = socket.create_server(("0.0.0.0", 0))
    port = everywhere.getsockname()[1]
    ear.stored[name_of(everywhere)] = everywhere.dup()
    listening = Listening([everywhere], ServiceManager(ear.environ).forget)
    hearing = asyncio.create_task(asyncio.to_thread(ear.wait_for, "BARRIER"))
    await asyncio.to_thread(lambda: None)
    (server,) = await listening.serve(asyncio.Protocol, "127.0.0.1", port, backlog=10)
    await hearing
    assert not ear.stored
    server.close()


def name_of(sock: socket.socket | TransportSocket) -> str:
    return f"{NAME}{os.fstat(sock.fileno()).st_ino}"


async def test_without_one_nothing_is_said() -> None:
    manager = ServiceManager({})
    manager.ready(Listening())
    manager.reloading()
    manager.stopping()

"""An address of an agent while its role comes up, and once the role is open."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path

from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

import hawker.agent.listener
from hawker.agent.listener import Listener, listen
from hawker.client.connection import Peer
from hawker.host import live

LISTENER = Path(hawker.agent.listener.__file__).name


class App:
    """Answers with its name. `through_listener` tells whether the listener's own code stood on the way to it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.through_listener: list[bool] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        frame = inspect.currentframe()
        files = []
        while frame is not None:
            files.append(Path(frame.f_code.co_filename).name)
            frame = frame.f_back
        self.through_listener.append(LISTENER in files)
        await PlainTextResponse(self._name)(scope, receive, send)


async def test_members_are_answered_early_and_all_else_waits_for_the_role_and_reaches_it_directly_then() -> None:
    sock = listen("127.0.0.1:0")
    listener = Listener("127.0.0.1:0", lambda address: sock, live())
    await listener.open()
    early, role = App("early"), App("role")
    listener.answer_early(early)
    peer = Peer("127.0.0.1", sock.getsockname()[1], headers={}, connections_max=1)
    assert (await peer.request("GET", "/v1/catalog/members", timeout_s=5)).body == b"early"
    waiting = asyncio.ensure_future(peer.request("GET", "/v1/apps", timeout_s=5))
    done, _ = await asyncio.wait([waiting], timeout=0.1)
    assert not done
    listener.answer(role)
    assert (await waiting).body == b"role"
    assert (await peer.request("GET", "/v1/catalog/members", timeout_s=5)).body == b"role"
    assert early.through_listener == [True]
    assert role.through_listener == [True, False], "the connection is the same, and the listener is out of the way"
    await peer.close()
    await listener.close()

"""WebSocket through a data plane: what comes back is, byte by byte, what comes back without one.

The cases are in `tests/kit/websocket.py`; `python -m bench.websocket` prints them as a table. The server at the other
end is a library's, and held to what the protocol says in each case: so no two wrongs look right.
"""

from __future__ import annotations

import pytest
from tests.kit.routers import FakeMachine
from tests.kit.websocket import ACCEPT, CLOSE, cases, echoing, told
from tests.proxy.conftest import Stage

CASES = cases()
CATEGORIES = list(dict.fromkeys(case.category for case in CASES))


@pytest.mark.parametrize("category", CATEGORIES)
async def test_what_comes_back_is_what_comes_without_a_proxy(stage: Stage, category: str) -> None:
    async with echoing() as address:
        stage.web.machines.append(FakeMachine("m1", address))
        plane = await stage.open()
        for case in (case for case in CASES if case.category == category):
            direct = await told(address, "web.example", case)
            assert f"sec-websocket-accept: {ACCEPT}" in direct.head
            assert direct.code == case.code, (case.name, direct.frames)
            if not case.extension:
                assert direct.frames[:-1] == list(case.echoes), case.name
            assert direct.frames[-1][0] == CLOSE, case.name
            assert await told(plane.http, "web.example", case) == direct, case.name

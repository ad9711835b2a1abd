"""Places of a machine's hard limit, over a catalog and a proxy as they are."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.kit.doors import free_port
from tests.kit.fleets import REGION, Fleet
from tests.kit.raw_http import Upstream, User, echo, head
from tests.kit.waiting import until

from hawker.host import live
from hawker.proxy.embedded.settings import Settings
from hawker.proxy.service import Proxy
from hawker.proxy.settings import ProxySettings

PORT = 80


@pytest.mark.parametrize("at", ["door", "edge"])
async def test_a_few_who_hardly_send_anything_do_not_keep_others_from_an_app(tmp_path: Path, at: str) -> None:
    fleet, machine, backhaul, most = Fleet(tmp_path), Upstream(echo), free_port(), 3
    await machine.open()
    fleet.worker("ord-1", proxy=backhaul)
    fleet.app("web")
    fleet.machine("m1", "web")
    fleet.service("m1", "web", internal=machine.address[1], soft=most, hard=most)
    proxies = {}
    for name, worker in (("door", "ord-1"), ("edge", "")):
        settings = ProxySettings(
            listen={str(PORT): "127.0.0.1:0"},
            backhaul=f"127.0.0.1:{backhaul}" if worker else "",
            embedded=Settings(upload_look_s=0.1, drain_s=0.1),
        )
        proxies[name] = await Proxy.open(settings, fleet.replica, live(), region=REGION, token="secret", worker=worker)
    users = [await User.at(proxies[at].listening[PORT]) for _ in range(most + 1)]
    try:
        for count, user in enumerate(users[:most], 1):
            await user.send(head("POST / | Host: web.localhost | Transfer-Encoding: chunked"))
            await until(lambda count=count: len(machine.visits) == count)  # type: ignore[misc]
        for _ in range(most):
            assert (await users[most].ask("GET / | Host: web.localhost")).status == 200
        answers = [asyncio.create_task(user.answer("POST")) for user in users[:most]]
        done, left = await asyncio.wait(answers, timeout=0.05)
        assert {task.result().status for task in done} == {408}
        assert left, "nobody gives up a place that nobody waits for"
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
    finally:
        for user in users:
            await user.close()
        for proxy in reversed(proxies.values()):
            await proxy.close()
        await machine.close()
        fleet.close()

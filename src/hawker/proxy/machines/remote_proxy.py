"""Machines behind another proxy: what this proxy knows of them is what the other one tells with its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Literal

from hawker.client.deadline import within
from hawker.proxy.apps.endpoints import Endpoint
from hawker.proxy.backoff import Backoff
from hawker.proxy.base import NO_UPSTREAMS, Address, Failure, Upstreams
from hawker.proxy.machines.listen_probe import ListenProbe
from hawker.proxy.settings import RouterSettings

LOOK_MOST_S = 120.0
"""After this long requests try the machine again, whatever looks have found."""
LOOK_S = 0.25
ANSWER_PART = 0.4
"""The part of `hung_s` within which a proxy answers that is only busy. One that does not gets no more requests; after
all of `hung_s` those that it has are made elsewhere."""
CROWDED_S = 0.5
"""For this long a machine is said to have no room for requests that wait, once its proxy has said so."""
SILENT_TIMES = 4
"""So many times `hung_s` a proxy may say nothing. Then requests that it has and that cannot be made elsewhere get an
error: an agent that is stalled is ended by its watchdog before that."""
PROBLEM = "its worker's proxy says nothing"


class RemoteProxy:
    """A worker's proxy, which owns the endpoints there. One that refuses connections, or takes them and says nothing,
    is looked at until it answers; it is `away` so long, and none of its machines is chosen."""

    def __init__(
        self,
        worker: str,
        settings: RouterSettings,
        listen_probe: ListenProbe,
        endpoints: Callable[[], Iterable[Endpoint]] = tuple,
        upstreams: Upstreams = NO_UPSTREAMS,
    ) -> None:
        """`endpoints` gives all that this proxy owns. `upstreams` are told when requests wait at its address in
        vain."""
        self.worker = worker
        self._settings = settings
        self._listen_probe = listen_probe
        self._places = endpoints
        self._upstreams = upstreams
        self._look: asyncio.Task[None] | None = None
        self._failed: dict[Endpoint, None] = {}  # since it is looked at
        self.away = False
        self._backoff = Backoff(settings.trouble_s)

    @property
    def closing(self) -> bool:
        return False  # its own proxy sees to that

    def failed(self, endpoint: Endpoint, how: Failure) -> None:
        """A row that is wrong is not believed for a while. What broke or was silent is left alone, for longer each
        time; a proxy that is silent is left alone until it answers again."""
        now = asyncio.get_running_loop().time()
        if how == "elsewhere":
            endpoint.pool.rest(endpoint.entry, now + self._settings.stale_s)
            return
        if how == "crowded":  # it is well: others may have room
            endpoint.crowded_until = now + CROWDED_S
            return
        until = self._backoff.failed(now)
        if how in ("refused", "timeout"):
            self._failed[endpoint] = None
            self.look(endpoint.address)
            if self.away:
                until = now + LOOK_MOST_S
        endpoint.pool.rest(endpoint.entry, until)

    def added(self, endpoint: Endpoint) -> None:
        """It owns this endpoint from now on, or the endpoint's row has changed."""
        if self.away:
            self._leave_alone(endpoint)

    def look(self, address: Address) -> None:
        """Begin to look whether the proxy is there at all, unless that is under way."""
        if self._look is None:
            self._look = asyncio.get_running_loop().create_task(
                self._until_back(address), name=f"look at {self.worker}"
            )

    def moved(self) -> None:
        """The proxy has another address now. What was found out at the old one says nothing of it."""
        self._backoff.over()
        if self._look is not None:
            self._look.cancel()
            failed = self._failed
            self.away, self._failed, self._look = False, {}, None
            for endpoint in failed:
                endpoint.pool.rest(endpoint.entry, 0.0)
                endpoint.wait_queue.all()

    async def close(self) -> None:
        if self._look is not None:
            self._look.cancel()
            await asyncio.gather(self._look, return_exceptions=True)

    async def _until_back(self, address: Address) -> None:
        """Look until the proxy answers. If it is there, what failed was a machine. If it is not, no user's request
        should be what finds out."""
        asking = asyncio.get_running_loop().create_task(answers(address, self._settings.hung_s))
        try:
            with suppress(TimeoutError):
                async with within(self._settings.hung_s * ANSWER_PART):
                    await asyncio.shield(asking)
            if asking.done() and asking.result():
                return
            self.away = True
            for endpoint in [*self._failed, *self._places()]:
                self._leave_alone(endpoint)
            if not await asking:
                self._upstreams.give_up(address, PROBLEM)
                ending = asyncio.get_running_loop().create_task(self._end(address))
                try:
                    await self._back(address)
                finally:
                    ending.cancel()
            self._backoff.over()
            for endpoint in self._failed:
                endpoint.pool.rest(endpoint.entry, 0.0)
                endpoint.wait_queue.all()
        finally:
            asking.cancel()
            if self._look is asyncio.current_task():
                self.away, self._failed, self._look = False, {}, None

    async def _end(self, address: Address) -> None:
        """Give up requests at a proxy that is only silent. One that refuses connections may still answer those that it
        took before it goes."""
        hung_s = self._settings.hung_s
        await asyncio.sleep(hung_s * (SILENT_TIMES - 1))
        if await said(address, hung_s * ANSWER_PART) == "nothing":
            self._upstreams.give_up(address, PROBLEM, every=True)

    def _leave_alone(self, endpoint: Endpoint) -> None:
        self._failed[endpoint] = None
        endpoint.pool.rest(endpoint.entry, asyncio.get_running_loop().time() + LOOK_MOST_S)

    async def _back(self, address: Address) -> None:
        within_s = self._settings.hung_s * ANSWER_PART
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_MOST_S):
                await self._listen_probe.until_listening((address,))
                while not await answers(address, within_s):  # noqa: ASYNC110  # it is not in this process
                    await asyncio.sleep(LOOK_S)

    def answered(self, endpoint: Endpoint) -> None:
        self._backoff.over()

    def heard(self, endpoint: Endpoint, load: bytes) -> None:
        """`load` is such as b"3/20/25": what is in flight, and the limits, which the row has, too."""
        count = load.partition(b"/")[0]
        if count.isdigit() and len(count) < 10:
            endpoint.pool.told(endpoint.entry, int(count), asyncio.get_running_loop().time())


async def answers(address: Address, within_s: float) -> bool:
    """Whether a proxy says anything on its backhaul, if only that the caller is a stranger."""
    return await said(address, within_s) == "something"


async def said(address: Address, within_s: float) -> Literal["something", "nothing", "no"]:
    """What a proxy says on its backhaul; "no": it takes no connection, or none to answer anything."""
    try:
        async with within(within_s):
            reader, writer = await asyncio.open_connection(*address)
            try:
                writer.write(b"GET / HTTP/1.1\r\nhost: backhaul\r\nconnection: close\r\n\r\n")
                return "something" if await reader.read(1) else "no"
            finally:
                writer.close()
    except TimeoutError:
        return "nothing"
    except OSError:
        return "no"

"""A worker under churn: machines with short lives, several at a time, while its processes are killed at random moments.

```
churn = Churn(market, "ord-1", seed=1, runtimes=("process", "container"))
report = await churn.run(cycles=40)
assert report.wrong == []
```

A life is an order, a few things done to the machine, and its end. What is done comes from the seed; when a kill meets
it, the machine decides. What a broken connection leaves in doubt is neither success nor failure: at the end everything
that the worker knows is destroyed, a day passes, the daemon is started once more, and then nothing of it may be left
(`tests.kit.belongings`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.kit import belongings
from tests.kit.markets import SLEEPER, Client, Market
from tests.kit.oci import busybox_layer, file, image, layer, write_docker_archive
from tests.kit.waiting import eventually

from hawker.client.client import ApiError
from hawker.client.client import Client as PlainClient
from hawker.client.wire import PeerUnreachable
from hawker.errors import HawkerError
from hawker.model import image_api as calls

APP, IMAGE = "churn", "churn.invalid/busybox:1"
PATIENCE_S = 60.0
LOOK_S = 0.4
"""How long a process that comes and goes is looked for before another kind is killed."""
ALWAYS = ("daemon", "supervisor", "program")
"""What is always there to be killed."""
KINDS: Mapping[str, Sequence[str]] = {
    "process": ALWAYS,
    "container": (*ALWAYS, "runtime", "unpacker"),
    "microvm": ("daemon", "supervisor", "hypervisor", "disk builder"),
}
"""What of a worker can be killed where machines of a runtime come and go."""
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "process": SLEEPER,
    "container": {**SLEEPER, "image": IMAGE, "runtime": "container"},
    "microvm": {**SLEEPER, "image": IMAGE, "runtime": "microvm"},
}
SERVICES = [{"internal_port": 8080, "protocol": "tcp", "ports": [{"port": 80}]}]
OPERATIONS = ("exec", "restart", "suspend", "update", "resize")
MOST_TOLD = 50


@dataclass
class Report:
    """`done` and `refused` count operations, `lost` those whose answer never came. `wrong` is what must not be; `late`
    what was left of machines until the daemon's next start."""

    cycles: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    started: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)


class Churn:
    """Of one worker of a market that nobody else uses."""

    def __init__(self, market: Market, worker: str, *, seed: int, runtimes: Sequence[str], at_once: int = 8) -> None:
        self._market = market
        self._name = worker
        self._directory = market.home / worker
        self._seed = seed
        self._runtimes = runtimes
        self._at_once = at_once
        self._over = asyncio.Event()
        self.report = Report()

    async def run(
        self,
        cycles: int,
        *,
        microvms_most: int | None = None,
        kills_most: Mapping[str, int] | None = None,
        kill_within_s: float = 0.0,
    ) -> Report:
        """`microvms_most`: how many of the machines may be microVMs, which take seconds each. `kills_most`: by kind.
        `kill_within_s`: how long after a kill the next one follows at the latest."""
        kinds = [Random(f"{self._seed}/{n}").choice(self._runtimes) for n in range(cycles)]
        slow = [number for number, kind in enumerate(kinds) if kind == "microvm"]
        for number in slow[len(slow) if microvms_most is None else microvms_most :]:
            kinds[number] = "container"
        async with self._market.client() as client:
            await client.ok("POST", "/apps", {"app_name": APP, "org_slug": "personal"})
            images = set(self._runtimes) != {"process"}
            if images:
                await self._import(IMAGE, 0)
            others = [asyncio.create_task(self._kill_now_and_then(kills_most or {}, kill_within_s))]
            others += [asyncio.create_task(self._images_come_and_go())] if images else []
            left = iter(enumerate(kinds))

            async def live_on() -> None:
                for number, kind in left:
                    await self._life(client, Random(f"{self._seed}/{number}/{kind}"), number, kind)
                    self.report.cycles += 1

            try:
                await asyncio.gather(*(live_on() for _ in range(self._at_once)))
            finally:
                self._over.set()
                await asyncio.gather(*others)
            await self._serves_again()
            for number, kind in enumerate(dict.fromkeys(self._runtimes), cycles):
                before = self.report.started[kind]
                await self._life(client, Random(number), number, kind, calm=True)
                if self.report.started[kind] == before:
                    self.report.wrong.append(f"afterwards no {kind} starts")
            await self._destroy_all(client)
            if images:
                await self._remove_images()
            await self._nothing_is_left()
        return self.report

    async def one_runs(self) -> None:
        """A machine of the first runtime, which stays."""
        async with self._market.client() as client:
            await client.ok("POST", "/apps", {"app_name": APP, "org_slug": "personal"})
            await self._import(IMAGE, 0)
            order = {"config": {**CONFIGS[self._runtimes[0]], "services": SERVICES}, "region": "ord"}
            machine = await client.ok("POST", f"/apps/{APP}/machines?wait=true", order)
            await client.ok("GET", f"/apps/{APP}/machines/{machine['id']}/wait?state=started&timeout=30")

    # --- lives -------------------------------------------------------------------------------------------------------

    async def _life(self, client: Client, rng: Random, number: int, kind: str, *, calm: bool = False) -> None:
        config = dict(CONFIGS[kind])
        if kind != "process":
            if rng.random() < 0.5:
                config["services"] = SERVICES
            if kind == "container" and rng.random() < 0.15:
                config["rootfs"] = {"size_gb": 1, "persist": rng.choice(("always", "never"))}
        order = {"name": f"m{number}", "config": config, "region": "ord"}
        made = await self._insist(client, f"create {kind}", "POST", "/machines", order)
        if made is None:
            self.report.wrong.append(f"no machine {order['name']} within {PATIENCE_S:g} s: {config}")
            return
        path = f"/machines/{made['id']}"
        patient = calm or kind == "microvm" or rng.random() < 0.8  # the others are destroyed on their way
        if patient and await self._insist(client, "wait", "GET", f"{path}/wait?state=settled&timeout=20"):
            shown = await self._try(client, "show", "GET", path) or {"state": "unknown"}
            self.report.started[kind] += shown["state"] == "started"
            for _ in range(rng.randrange(4)):
                await self._operate(client, rng, path, config)
        await self._insist(client, "destroy", "DELETE", f"{path}?force=true")

    async def _operate(self, client: Client, rng: Random, path: str, config: dict[str, Any]) -> None:
        match rng.choice(OPERATIONS):
            case "exec":
                await self._try(client, "exec", "POST", f"{path}/exec", {"command": ["sh", "-c", "exit 3"]})
            case "restart":
                await self._try(client, "stop", "POST", f"{path}/stop", {"timeout": "1s"})
                await self._try(client, "wait", "GET", f"{path}/wait?state=stopped&timeout=10")
                await self._try(client, "start", "POST", f"{path}/start?wait=true")
            case "suspend":
                await self._try(client, "suspend", "POST", f"{path}/suspend")
                await self._try(client, "wait", "GET", f"{path}/wait?state=suspended&timeout=10")
                if rng.random() < 0.7:
                    await self._try(client, "resume", "POST", f"{path}/start?wait=true")
            case "update":
                await self._try(client, "update", "POST", path, {"config": {**config, "env": {"N": str(rng.random())}}})
                await self._try(client, "wait", "GET", f"{path}/wait?state=started&timeout=10")
            case "resize":
                await self._try(client, "resize", "PUT", f"{path}/memory", {"limit_mb": rng.choice((256, 512))})

    async def _insist(self, client: Client, what: str, method: str, path: str, body: Any = None) -> Any:
        """Until it succeeds: the worker may be away. A machine that was ordered twice is destroyed with all at the
        end."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE_S
        while True:
            answer = await self._try(client, what, method, path, body)
            if answer is not None or loop.time() > deadline:
                return answer
            await asyncio.sleep(0.1)

    async def _try(self, client: Client, what: str, method: str, path: str, body: Any = None) -> Any:
        """The answer's body, None unless it was a success."""
        try:
            answer = await client.call(method, f"/apps/{APP}{path}", body)
        except (PeerUnreachable, TimeoutError):
            self.report.lost[what] += 1
            return None
        if answer.status < 300:
            self.report.done[what] += 1
            return answer.body
        (self.report.lost if answer.status >= 500 else self.report.refused)[what] += 1
        return None

    # --- images ------------------------------------------------------------------------------------------------------

    async def _images_come_and_go(self) -> None:
        """So that there is somebody who unpacks."""
        number = 1
        while not self._over.is_set():
            name = f"churn.invalid/other:{number}"
            with contextlib.suppress(HawkerError, ApiError):
                await self._import(name, number, patience_s=0)
                await asyncio.to_thread(
                    self._plain, lambda client, name=name: client.send(calls.RemoveImage(image=name))
                )
                self.report.done["image"] += 1
            number += 1

    async def _import(self, name: str, number: int, *, patience_s: float = PATIENCE_S) -> None:
        """An image of busybox and a layer of its own."""
        above = layer([file(f"own/{number}-{n}", os.urandom(64) * 64) for n in range(200)])
        made = image([busybox_layer(), above], {"Cmd": ["/bin/sh"], "Env": ["PATH=/bin"]})
        path = self._market.home / "churn.tar"
        write_docker_archive(path, {name: made})

        def send(client: PlainClient) -> None:
            data = path.read_bytes()
            begun = client.send(calls.BeginUpload(size=len(data), worker=self._name))
            upload, at = begun.upload, begun.worker
            client.send(calls.Upload(upload=upload, worker=at, offset=0, data=data))
            told = list(client.stream(calls.ImportImage(upload=upload, worker=at, image=name)))
            if told[-1].event != "done":
                raise HawkerError(str(told[-1].data))

        await asyncio.to_thread(self._plain, send)

    def _plain(self, call: Any) -> Any:
        with PlainClient(self._market.endpoint, self._market.token) as client:
            return call(client)

    async def _remove_images(self) -> None:
        """A reservation whose broker never heard of it needs its image until it lapses."""
        why = ""

        def remove(client: PlainClient) -> bool:
            nonlocal why
            try:
                for each in client.send(calls.ListImages()):
                    client.send(calls.RemoveImage(image=each.digest))
            except ApiError as error:
                why = str(error)
                return False
            return True

        async def gone() -> bool:
            return bool(await asyncio.to_thread(self._plain, remove))

        try:
            await eventually(gone, "every image is removed", PATIENCE_S)
        except AssertionError as error:
            self.report.wrong.append(f"{error}: {why}")

    # --- kills -------------------------------------------------------------------------------------------------------

    async def _kill_now_and_then(self, most: Mapping[str, int], within_s: float) -> None:
        """Every kind by turns, in an order of the seed's, those first that are always there to be killed."""
        rng = Random(f"{self._seed}/kills")
        within_s = within_s or (2.5 if "microvm" in self._runtimes else 0.5)  # they take seconds to start
        kinds = sorted({kind for runtime in self._runtimes for kind in KINDS[runtime]})
        while not self._over.is_set():
            rng.shuffle(kinds)
            kinds.sort(key=lambda kind: kind not in ALWAYS)
            left = [kind for kind in kinds if self.report.kills[kind] < most.get(kind, sys.maxsize)]
            if not left:
                return
            for kind in left:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._over.wait(), rng.uniform(within_s / 10, within_s))
                if self._over.is_set():
                    return
                if pid := await self._seen(kind, rng):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        self.report.kills[kind] += 1
                    if kind == "daemon":
                        await eventually(self._serves, "the daemon is back", PATIENCE_S)

    async def _seen(self, kind: str, rng: Random) -> int:
        """A process of this kind, 0 when none came in time."""
        deadline = asyncio.get_running_loop().time() + LOOK_S
        while True:
            if found := [pid for pid, its in self._victims().items() if its == kind]:
                return rng.choice(found)
            if asyncio.get_running_loop().time() > deadline or self._over.is_set():
                return 0
            await asyncio.sleep(0.002)

    def _victims(self) -> dict[int, str]:
        """Processes of the worker, by what they are."""
        try:
            daemon = self._market.pid(self._name)
        except (FileNotFoundError, ValueError):
            return {}
        parents = _parents()
        kinds = {daemon: "daemon"}
        for pid in parents:
            words = belongings.argv(pid)
            if "hawker.supervisor" in words and any(word.startswith(f"{self._directory}/") for word in words):
                kinds[pid] = "supervisor"
        supervisors = {pid for pid, kind in kinds.items() if kind == "supervisor"}
        for pid, parent in parents.items():
            if parent == daemon and pid not in kinds:
                kinds[pid] = _helper(belongings.argv(pid))
            elif parent in supervisors:
                kinds[pid] = _supervised(pid)
        return kinds

    async def _serves_again(self) -> None:
        try:
            await eventually(self._serves, "the daemon serves", PATIENCE_S)
        except AssertionError as error:
            self.report.wrong.append(str(error))

    async def _begin_again(self) -> None:
        """The daemon, by a kill."""
        before = self._market.pid(self._name)
        os.kill(before, signal.SIGKILL)

        async def another() -> bool:
            with contextlib.suppress(FileNotFoundError, ValueError):
                return self._market.pid(self._name) != before
            return False

        await eventually(another, "the daemon is started again", PATIENCE_S)
        await self._serves_again()

    async def _serves(self) -> bool:
        async with self._market.client() as client:
            with contextlib.suppress(PeerUnreachable):
                answer = await client.call("GET", "/hawker/workers")
                return answer.status == 200 and all(worker["reachable"] for worker in answer.body)
        return False

    # --- the end -----------------------------------------------------------------------------------------------------

    async def _destroy_all(self, client: Client) -> None:
        machines: list[Any] = []

        async def gone() -> bool:
            answer = await client.call("GET", f"/apps/{APP}/machines")
            if answer.status != 200 or answer.headers.get("hawker-silent"):
                return False
            machines[:] = answer.body
            for machine in machines:
                await self._try(client, "destroy at the end", "DELETE", f"/machines/{machine['id']}?force=true")
            return not machines

        try:
            await eventually(gone, "every machine is destroyed", PATIENCE_S)
        except AssertionError as error:
            states = [f"{machine['id']} {machine['state']}" for machine in machines]
            self.report.wrong.append(f"{error}: {', '.join(states)}")

    async def _nothing_is_left(self) -> None:
        """Of machines at once, but for the ends of their logs; of these, and of images that were cut off in their
        making, once the time is over for which they are kept."""
        found: list[str] = []

        async def clear() -> bool:
            found[:] = await asyncio.to_thread(belongings.left, self._directory)
            return not found

        async def clear_of_machines() -> bool:
            await clear()
            found[:] = [what for what in found if not belongings.kept_for_a_time(self._directory, what)]
            return not found

        with contextlib.suppress(AssertionError):
            await eventually(clear_of_machines, "nothing is left of machines", 20)
        self.report.late += found
        await asyncio.to_thread(belongings.let_a_day_pass, self._directory)
        await self._begin_again()
        with contextlib.suppress(AssertionError):
            await eventually(clear, "nothing is left after another start", PATIENCE_S)
        self.report.wrong += found[:MOST_TOLD]


def _parents() -> dict[int, int]:
    """The parent of every process that lives."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                if fields[0] not in "ZX":
                    found[int(name)] = int(fields[1])
    return found


def _helper(words: Sequence[str]) -> str:
    """What a child of the daemon is."""
    if "hawker.images.tree.child" in words:
        return "unpacker"
    return "disk builder" if "hawker.worker.drivers.microvm.building" in words else "helper"


def _supervised(pid: int) -> str:
    """What a child of a supervisor is."""
    program = os.path.basename((belongings.argv(pid) or [""])[0])
    if program in ("crun", "runc"):
        return "runtime"
    if program.startswith("qemu-system"):
        return "hypervisor"
    return "helper" if program in ("rm", "mke2fs") else "program"

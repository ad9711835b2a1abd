"""Containers from the order to the program's first instruction: `python -m bench.containers [--quick] [--json FILE]`.

As root. The image is cached. The program tells the moment in which it began (`first.c`), by the clock that everybody
here reads. By turns, so that a busy machine is busy for all: the whole market over HTTP, the driver alone, and the bare
runtime on the same bundle, with and without a network (`bench.bare_container`). A ratio is the median of the rounds'
ratios. Then Debian's podman and dockerd, where they can be started, without a network as podman has none for root
without further packages.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path
from time import monotonic, monotonic_ns, sleep
from typing import Any

import msgspec
from tests.kit.oci import busybox_layer, file, image, layer, write_docker_archive
from tests.kit.unpacked import UnpackedImages

from bench.bare_container import Request
from bench.command import Table, options, say_machine, told
from bench.market import USER, running_agents
from hawker.client.client import Client
from hawker.model import machine_calls as calls
from hawker.model.app_calls import CreateApp
from hawker.model.image import Image
from hawker.model.image_api import BeginUpload, ImportImage, Upload
from hawker.network.manager import Manager
from hawker.supervisor.calls import ReleaseContainer
from hawker.worker.drivers.base import Instance, InstanceSpec, Limits, Network
from hawker.worker.drivers.container.driver import ContainerDriver
from hawker.worker.drivers.container.runtimes import Host
from hawker.worker.drivers.supervised import Made

IMAGE = "bench.invalid/first:1"
LIMITS = Limits(cpu_millis=1000, memory_mib=256)
PATIENCE_S = 20.0
QUIET_S = 0.1  # so that what the one before has left to do does not count for the next
_numbers = count(1)
Times = dict[str, list[float]]


class Sizes(msgspec.Struct, frozen=True):
    """The first rounds only fill caches; `peers`: rounds of each other program."""

    warm: int
    rounds: int
    peers: int


FULL, QUICK = Sizes(warm=2, rounds=30, peers=10), Sizes(warm=0, rounds=1, peers=1)


async def measure(sizes: Sizes, table: Table) -> None:
    with directory() as home:
        program = compiled(home)
        archive = home / "image.tar"
        made = image([busybox_layer(), layer([file("first", program, 0o755)])], {"Cmd": ["/first"]})
        write_docker_archive(archive, {IMAGE: made})
        times: Times = defaultdict(list)
        async with AsyncExitStack() as stack:
            market = stack.enter_context(the_market(home, archive))
            driver = await stack.enter_async_context(the_driver(home, program))
            bare = stack.enter_context(the_bare(home, driver, await driver.host(), await driver.images.ensure(IMAGE)))
            for number in range(-sizes.warm, sizes.rounds):
                found: Times = defaultdict(list)
                await asyncio.to_thread(market.round, found)
                for network in (True, False):
                    for turn in ("ours", "bare") if number % 2 else ("bare", "ours"):
                        await asyncio.sleep(QUIET_S)
                        if turn == "ours":
                            await driver.start(found, network=network)
                        else:
                            await asyncio.to_thread(bare.create, found, network=network)
                await asyncio.to_thread(bare.run, found)
                await driver.prepared(found)
                if number >= 0:
                    for name, each in found.items():
                        times[name] += each
        tell(table, times)
        before = peers_groups()
        podman(table, home, archive, sizes.peers)
        docker(table, home, archive, sizes.peers)
        for group in peers_groups() - before:
            with contextlib.suppress(OSError):  # others use it by now
                for path in (*(path for path in group.rglob("*") if path.is_dir()), group):
                    path.rmdir()


@contextmanager
def directory() -> Iterator[Path]:
    home = Path(tempfile.mkdtemp(prefix="hawker-bench-")).resolve()
    home.chmod(0o755)  # containers have users of their own
    try:
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


def compiled(home: Path) -> bytes:
    target = home / "first"
    source = Path(__file__).with_name("first.c")
    subprocess.run(["gcc", "-O2", "-static", "-s", "-o", str(target), str(source)], check=True)
    return target.read_bytes()


def tell(table: Table, times: Mapping[str, Sequence[float]]) -> None:
    rows = (
        ("market", "API: order -> first instruction of a container", ""),
        ("market, again", "API: start of a stopped one -> first instruction", ""),
        ("driver", "driver: start -> first instruction", ""),
        ("bare", "  bare: overlay, create, pair of interfaces, start", ""),
        ("bare, one run", "  bare: overlay, one `run`, no network", ""),
        ("driver, alone", "driver: start -> first instruction, no network", ""),
        ("bare, alone", "  bare: overlay, create, start, no network", ""),
        ("prepared", "driver: a container that was made before, let go", "4"),
        ("bare, start", "  bare: start of a created one", ""),
        ("market, exec", "API: exec -> its answer", ""),
        ("exec", "driver: exec -> its answer", ""),
        ("bare, exec", "  bare: exec", ""),
        ("stop", "driver: stop -> ended", ""),
        ("bare, stop", "  bare: SIGTERM -> ended", ""),
        ("destroy", "driver: destroy of an ended one", ""),
        ("bare, destroy", "  bare: delete, files removed", ""),
    )
    for name, what, aim in rows:
        table.latency(what, times[name], aim)
    for what, ours, theirs, aim in (
        ("ratio: driver to bare, with a network", "driver", "bare", "1.2"),
        ("ratio: driver to bare, without", "driver, alone", "bare, alone", "1.2"),
        ("ratio: driver to bare with one `run`, without", "driver, alone", "bare, one run", ""),
        ("ratio: market to bare, with a network", "market", "bare", ""),
    ):
        each = [a / b for a, b in zip(times[ours], times[theirs], strict=True)]
        table.add(what, statistics.median(each), "x", aim)


# --- the market ------------------------------------------------------------------------------------------------------


class Market:
    def __init__(self, client: Client) -> None:
        self._client = client
        config = {"image": IMAGE, "init": {"exec": ["/first"]}, "runtime": "container", "restart": {"policy": "no"}}
        self._order = calls.CreateMachine("bench", region="ord", config=config, wait=True)
        client.send(CreateApp(app_name="bench"))

    def round(self, times: Times) -> None:
        began = monotonic_ns()
        machine = self._client.send(self._order).id
        times["market"].append(ms(began, self._said(machine, 1)))
        began = monotonic_ns()
        self._client.send(calls.ExecInMachine("bench", machine, command=["/first", "once"]))
        times["market, exec"].append(ms(began))
        self._client.send(calls.StopMachine("bench", machine))
        self._client.send(calls.WaitForMachine("bench", machine, state=["stopped"]))
        began = monotonic_ns()
        self._client.send(calls.StartMachine("bench", machine, wait=True))
        times["market, again"].append(ms(began, self._said(machine, 2)))
        self._client.send(calls.DestroyMachine("bench", machine, force=True))
        self._client.send(calls.WaitForMachine("bench", machine, state=["destroyed"]))

    def _said(self, machine: str, times: int) -> int:
        """What the program said at its latest start."""
        deadline = monotonic() + PATIENCE_S
        while monotonic() < deadline:
            lines = [line.message for line in self._client.stream(calls.FollowLogs("bench", machine))]
            numbers = [int(text) for text in lines if text.strip().isdigit()]
            if len(numbers) >= times:
                return numbers[-1]
            sleep(0.002)
        raise RuntimeError(f"machine {machine} did not say when it began")


@contextmanager
def the_market(home: Path, archive: Path) -> Iterator[Market]:
    with (
        running_agents(home, workers=1, machines=10_000) as agents,
        Client(f"http://127.0.0.1:{agents.broker}", USER) as client,
    ):
        data = archive.read_bytes()
        begun = client.send(BeginUpload(size=len(data)))
        upload, at = begun.upload, begun.worker
        client.send(Upload(upload=upload, worker=at, offset=0, data=data))
        list(client.stream(ImportImage(upload=upload, worker=at, image=IMAGE)))
        yield Market(client)


# --- the driver ------------------------------------------------------------------------------------------------------


class Ours:
    """The driver without a worker around it."""

    def __init__(self, driver: ContainerDriver, images: UnpackedImages) -> None:
        self.driver = driver
        self.images = images

    def spec(self, *, network: bool) -> InstanceSpec:
        number = next(_numbers)
        its = Network(number=1, address=f"fdaa:0:1:0:1:0:{number:x}:2") if network else None
        return InstanceSpec(
            key=f"run{number:06d}/launch",
            machine=f"{number:014x}",
            image=IMAGE,
            argv=("/first",),
            env={},
            limits=LIMITS,
            network=its,
        )

    async def start(self, times: Times, *, network: bool) -> None:
        name = "driver" if network else "driver, alone"
        spec = self.spec(network=network)
        began = monotonic_ns()
        await self.driver.start(spec)
        times[name].append(ms(began, await self._said(spec)))
        if network:
            began = monotonic_ns()
            await self.driver.exec(spec.key, ["/first", "once"], timeout_s=5)
            times["exec"].append(ms(began))
            began = monotonic_ns()
            await self.driver.stop(spec.key, signal=signal.SIGTERM, grace_s=5)
            times["stop"].append(ms(began))
            began = monotonic_ns()
            await self.driver.destroy(spec.key)
            times["destroy"].append(ms(began))
        await self._end(spec)

    async def prepared(self, times: Times) -> None:
        """What is left to do once a container waits with its network."""
        spec = self.spec(network=True)
        found = await self.images.ensure(spec.image)
        host = await self.host()
        assert host.runtime is not None
        request = self.driver._container_of(spec, found, host, host.runtime)
        made = await self.driver.supervisor.call(request, Made, once=True)
        await self.driver._attach(spec, made.pid)
        began = monotonic_ns()
        await self.driver.supervisor.call(ReleaseContainer(key=spec.key), Instance, once=True)
        times["prepared"].append(ms(began, await self._said(spec)))
        await self._end(spec)

    async def host(self) -> Host:
        return await self.driver._looked()

    async def _end(self, spec: InstanceSpec) -> None:
        await self.driver.destroy(spec.key, force=True)
        await self.driver.purge(spec.machine)

    async def _said(self, spec: InstanceSpec) -> int:
        async with asyncio.timeout(PATIENCE_S):
            async for line in self.driver.logs(spec.machine, follow=True):
                return int(line.text)
        raise RuntimeError("its log ended")


@asynccontextmanager
async def the_driver(home: Path, program: bytes) -> AsyncIterator[Ours]:
    network = Manager(str(home / "driver"))
    await network.open()
    images = UnpackedImages(home / "images")
    images.add(IMAGE, {"cmd": ("/first",)}, [[file("first", program, 0o755)]])
    driver = ContainerDriver(home / "driver", images, network)
    await driver.open(lambda ended: None)
    try:
        found = await driver.fingerprint()
        print(f"runtime {found.attributes.get('runtime')}, user namespaces {found.attributes.get('user namespaces')}\n")
        yield Ours(driver, images)
    finally:
        await driver.stop_all(grace_s=0)
        await driver.close()
        await network.close(remove=True)


# --- the bare runtime ------------------------------------------------------------------------------------------------


class Bare:
    def __init__(self, home: Path, ours: Ours, process: subprocess.Popen[bytes], host: Host, found: Image) -> None:
        self._home = home
        self._ours = ours
        self._process = process
        self._host = host
        self._image = found

    def create(self, times: Times, *, network: bool) -> None:
        directory, told, said = self._start("create", network=network)
        times["bare" if network else "bare, alone"].append(ms(told["began"], said))
        if network:
            times["bare, start"].append(ms(told["connected"], said))
            done = self._ask("exec", directory, ["/first", "once"])
            times["bare, exec"].append(ms(done["began"], done["ended"]))
        end = self._ask("end", directory)
        if network:
            times["bare, stop"].append(ms(end["began"], end["stopped"]))
            times["bare, destroy"].append(ms(end["stopped"], end["ended"]))

    def run(self, times: Times) -> None:
        directory, told, said = self._start("run", network=False)
        times["bare, one run"].append(ms(told["began"], said))
        self._ask("end", directory)

    def _start(self, how: str, *, network: bool) -> tuple[str, dict[str, int], int]:
        spec = self._ours.spec(network=network)
        assert self._host.runtime is not None
        request = self._ours.driver._container_of(spec, self._image, self._host, self._host.runtime)
        directory = str(self._home / "bare" / spec.machine)
        config = request.config.replace("@directory@", directory).replace("@group@", f"/hawker-bench-{os.getpid()}/c")
        ask = Request(
            directory=directory,
            config=config,
            layers=list(request.layers),
            ids=request.ids,
            init=request.init,
            files=["text\n"] * len(request.files),
            how=how,
            address=spec.network.address.replace("fdaa", "fdbe") if spec.network else "",
        )
        told = self._ask("start", msgspec.to_builtins(ask))
        deadline = monotonic() + PATIENCE_S
        while not (text := Path(directory, "out").read_text()) and monotonic() < deadline:
            sleep(0.0002)
        return directory, told, int(text)

    def _ask(self, name: str, *arguments: Any) -> dict[str, int]:
        asked = {name: arguments[0] if name == "start" else arguments}
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        answer: dict[str, int] = json.loads(self._process.stdout.readline())
        return answer


@contextmanager
def the_bare(home: Path, ours: Ours, host: Host, found: Image) -> Iterator[Bare]:
    assert host.runtime is not None
    argv = [sys.executable, "-m", "bench.bare_container", host.runtime.path]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield Bare(home, ours, process, host, found)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(10)
        for group in Path("/sys/fs/cgroup").glob(f"*/hawker-bench-{os.getpid()}"):
            group.rmdir()


# --- others ----------------------------------------------------------------------------------------------------------


def peers_groups() -> set[Path]:
    """Parent groups that podman and dockerd make and leave."""
    return {path for name in ("libpod_parent", "docker") for path in Path("/sys/fs/cgroup").glob(f"*/{name}")}


def podman(table: Table, home: Path, archive: Path, rounds: int) -> None:
    program = shutil.which("podman")
    if program is None:
        print("podman is not installed")
        return
    kept = ["--root", str(home / "podman"), "--runroot", str(home / "podman-run"), "--cgroup-manager", "cgroupfs"]
    if Path("/sys/fs/cgroup/unified").exists():  # crun refuses both versions of control groups, and podman prefers crun
        kept += ["--runtime", "runc"]
    limits = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1000:1000"]
    peer(table, "podman", [program, *kept], archive, rounds, limits)


def docker(table: Table, home: Path, archive: Path, rounds: int) -> None:
    """In namespaces of its own, with a socket and directories of its own."""
    program, daemon = shutil.which("docker"), shutil.which("dockerd")
    if program is None or daemon is None:
        print("docker is not installed")
        return
    place = home / "docker"
    place.mkdir()
    listen = f"unix://{place}/socket"
    argv = ["unshare", "-n", "-m", daemon, "-H", listen, "--data-root", str(place / "data")]
    argv += ["--exec-root", str(place / "run"), "--pidfile", str(place / "pid"), "--bridge", "none"]
    with (place / "log").open("wb") as log:
        server = subprocess.Popen(argv, stdout=log, stderr=log, env={**os.environ, "DOCKER_RAMDISK": "1"})
    try:
        deadline = monotonic() + PATIENCE_S
        command = [program, "-H", listen]
        while not quiet(*command, "version"):
            if server.poll() is not None or monotonic() > deadline:
                print(f"dockerd cannot be started here: {(place / 'log').read_text()[-300:].strip()}")
                return
            sleep(0.1)
        peer(table, "docker", command, archive, rounds, [])
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(20)
        if server.poll() is None:
            server.kill()
            server.wait()


def peer(table: Table, name: str, command: Sequence[str], archive: Path, rounds: int, options: Sequence[str]) -> None:
    """`run -d`, `exec`, `stop`, `rm` of one that has loaded the same image."""
    if not quiet(*command, "load", "-i", str(archive)):
        print(f"{name} cannot load an image here")
        return
    told = archive.parent / f"told-{name}"
    told.mkdir()
    times: Times = defaultdict(list)
    for number in range(-1, rounds):
        box = f"bench-{name}-{os.getpid()}-{number + 1}"
        said = told / str(number)
        began = monotonic_ns()
        run = ["run", "-d", "--init=false", "--network", "none", "--name", box, *options]
        if not quiet(*command, *run, "-v", f"{told}:/told", IMAGE, "/first", f"/told/{number}"):
            print(f"{name} cannot run a container here")
            return
        answered = ms(began)
        deadline = monotonic() + PATIENCE_S
        while not (said.exists() and said.read_text().endswith("\n")) and monotonic() < deadline:
            sleep(0.001)
        first = ms(began, int(said.read_text()))
        again = monotonic_ns()
        quiet(*command, "exec", box, "/first", "once")
        executed = ms(again)
        again = monotonic_ns()
        quiet(*command, "rm", "-f", *(["-t", "0"] if name == "podman" else []), box)
        removed = ms(again)
        if number >= 0:
            for what, value in (("first", first), ("run", answered), ("exec", executed), ("rm", removed)):
                times[what].append(value)
    table.latency(f"{name}: run -d -> first instruction, no network", times["first"])
    table.latency(f"{name}: run -d -> its answer", times["run"])
    table.latency(f"{name}: exec", times["exec"])
    table.latency(f"{name}: rm -f", times["rm"])


def quiet(*argv: str) -> bool:
    return subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0


def ms(began: int, ended: int | None = None) -> float:
    """From one moment to another, or to now; in ns."""
    return ((monotonic_ns() if ended is None else ended) - began) / 1e6


def main(arguments: Sequence[str] | None = None) -> int:
    given = options(__doc__).parse_args(arguments)
    table = Table()
    say_machine()
    asyncio.run(measure(QUICK if given.quick else FULL, table))
    told(table, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())

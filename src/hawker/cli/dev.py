"""`hawker dev`: a market on this machine, several regions with workers of their own, every agent its own process.

State is kept under one directory; Ctrl-C stops every agent and machine, and the next start brings the machines back. An
agent that dies is started again, as a service manager would.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import re
import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hawker.cli import output
from hawker.cli.dev_files import write_market, write_private
from hawker.errors import Conflict, HawkerError, Refused

if TYPE_CHECKING:
    from hawker.cli.zygote import Forked

REGIONS = ("ord", "mad", "syd")
READY_S = 60.0
STOP_S = 20.0
STOP_TRIES = 3
RESTART_S = 0.1
RESTART_MOST_S = 2.0
HEALTHY_S = 5.0  # an agent that lived this long is started again at once when it dies
LOG_LINES = 10  # of an agent that did not come up
COUNT = click.IntRange(min=1)
POLICIES = ("curve", "pack", "spread", "random", "two-choices")  # those of `core/ranking.py`, not imported for help
REGION = re.compile("[a-z0-9][a-z0-9-]{0,30}")


def _checked_regions(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    for code in given:
        if not REGION.fullmatch(code):
            raise click.BadParameter(
                f"{code!r} is not a region's code: lower-case letters, digits and dashes, at most 31.", ctx, param
            )
    return tuple(dict.fromkeys(given))


@click.command("dev", help="Run a market on this machine: three regions, two workers each, one broker.")
@click.option("--dir", "directory", type=click.Path(path_type=Path), help="Where state is kept.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=4280,
    show_default=True,
    help="The broker's port; 0 takes any free one.",
)
@click.option(
    "--http",
    type=click.IntRange(0, 65535),
    help="Where apps are served, as http://APP.localhost:PORT; 0 takes any free one. Default: 8080 if it is free.",
)
@click.option(
    "--region",
    "regions",
    multiple=True,
    callback=_checked_regions,
    help="A region; repeatable. Default: ord, mad, syd.",
)
@click.option("--workers", type=COUNT, default=2, show_default=True, help="Workers in each region.")
@click.option("--cpus", type=COUNT, default=16, show_default=True, help="Shared cpus each worker offers.")
@click.option(
    "--dedicated", type=click.IntRange(min=0), default=2, show_default=True, help="Dedicated cpus each worker offers."
)
@click.option("--memory", type=COUNT, default=4096, show_default=True, help="MiB of memory each worker offers.")
@click.option("--machines", type=COUNT, default=1000, show_default=True, help="Machines each worker takes at most.")
@click.option(
    "--policy", type=click.Choice(POLICIES), default="curve", show_default=True, help="How the broker ranks offers."
)
@click.option("--no-cgroups", is_flag=True, help="Do without kernel limits.")
@click.option("--detach", is_flag=True, help="Return once the market is up, and leave it running.")
@click.option("--stop", is_flag=True, help="End the market that runs, and its machines.")
def dev_command(directory: Path | None, regions: tuple[str, ...], detach: bool, stop: bool, **options: Any) -> None:
    if directory is None:
        from hawker.client.settings import dev_directory

        directory = dev_directory(os.environ)
    if detach or stop:
        from hawker.cli import dev_detached

        (dev_detached.stop if stop else dev_detached.detach)(directory.resolve())
        return
    Dev(directory.resolve(), regions or REGIONS, options).run()


class Dev:
    """The agents of one market and who watches over them."""

    def __init__(self, home: Path, regions: tuple[str, ...], options: dict[str, Any]) -> None:
        self._home = home
        self._regions = regions
        self._options = options
        self._stopping = asyncio.Event()
        self._up_once = False
        self._failed: HawkerError | None = None
        self._failed_agent = ""
        self._keepers: list[asyncio.Task[None]] = []

    def run(self) -> None:
        """Until Ctrl-C, SIGTERM, or the end of its terminal. Raises `Refused` when another market runs in this
        directory, `HawkerError` when an agent does not come up."""
        from hawker.cli.zygote import Zygote
        from hawker.client.settings import FILE, LOCK

        self._home.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(self._home / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(
                f"a market runs in {self._home} already", hint="use it, or give this one --dir and --port of its own"
            ) from None
        os.truncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())  # for `hawker dev --stop`
        self._check_alone()
        client = self._home / FILE
        client.unlink(missing_ok=True)
        self._market = write_market(self._home, self._regions, self._options)
        self._zygote = Zygote(self._market.configs)
        try:
            asyncio.run(self._live(client))
        finally:
            client.unlink(missing_ok=True)
            os.close(lock)

    async def _live(self, client: Path) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
                loop.add_signal_handler(number, self._stopping.set)
        self._keepers = [loop.create_task(self._keep(path), name=path.stem) for path in self._market.configs]
        try:
            if await self._ready():
                self._up_once = True
                found = {"endpoint": self._market.endpoint, "token": self._market.tokens["user"]}
                write_private(client, json.dumps(found))
                self._greet(client)
                await self._stopping.wait()
        finally:
            self._stopping.set()
            _say("hawker: stopping the market")
            await asyncio.gather(*self._keepers, return_exceptions=True)
        if self._failed:
            raise self._failed

    def _check_alone(self) -> None:
        """Raises `Refused` when workers of an earlier market still run here: its `hawker dev` was killed."""
        from hawker.worker.lock import LOCK, sole_holder

        for lock in self._home.glob(f"*/{LOCK}"):
            try:
                with sole_holder(lock.parent):
                    pass
            except Conflict as error:
                raise Refused(
                    f"a worker of an earlier market still runs: {error.message}",
                    hint=f"end the agents that were left, kill $(cat {self._home}/*.pid), and start again",
                ) from error

    # --- the agents --------------------------------------------------------------------------------------------------

    async def _keep(self, config: Path) -> None:
        """Run one agent, again whenever it dies, until the market stops; then see that it ended in order. One that
        dies before the market is up would do so again: it ends the market."""
        delay_s = RESTART_S
        log = os.open(config.with_suffix(".log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        log_began = os.fstat(log).st_size
        try:
            while not self._stopping.is_set():
                began = asyncio.get_running_loop().time()
                process = await self._spawn(config, log)
                ended = asyncio.create_task(process.wait())
                stopping = asyncio.create_task(self._stopping.wait())
                await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
                stopping.cancel()
                if self._stopping.is_set():
                    break
                if not self._up_once:
                    self._fail(config, f"ended with status {process.returncode} before it was ready", log_began)
                    break
                _say(f"hawker: {config.stem} ended with status {process.returncode}; starting it again")
                long_lived = asyncio.get_running_loop().time() - began > HEALTHY_S
                delay_s = RESTART_S if long_lived else min(delay_s * 2, RESTART_MOST_S)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), delay_s)
            await self._stop_in_order(process, config, log)
        finally:
            os.close(log)
            config.with_suffix(".pid").unlink(missing_ok=True)

    def _fail(self, config: Path, what: str, log_began: int) -> None:
        """Stop the market because of an agent, and show what that one wrote since `log_began`."""
        path = config.with_suffix(".log")
        with path.open("rb") as log:
            log.seek(log_began)
            lines = log.read().decode(errors="replace").splitlines()
        _say(f"hawker: the end of {path}:")
        for line in lines[-LOG_LINES:]:
            _say(f"  {line}")
        self._failed, self._failed_agent = HawkerError(f"{config.stem} {what}", hint=f"look into {path}"), config.stem
        self._stopping.set()

    async def _spawn(self, config: Path, log: int) -> Forked:
        try:
            process = await self._zygote.spawn(config, log)
        except HawkerError as error:
            self._failed = error
            self._stopping.set()
            raise
        write_private(config.with_suffix(".pid"), f"{process.pid}\n")
        return process

    async def _stop_in_order(self, process: Forked, config: Path, log: int) -> None:
        """SIGTERM. An agent that was killed, or not up yet, left its machines running: another one stops them."""
        status = await _stop(process)
        for _ in range(STOP_TRIES):
            if status == 0:
                return
            process = await self._spawn(config, log)
            await self._up(process, self._market.ports[config.stem])
            status = await _stop(process)
        if config.stem == self._failed_agent:
            return  # it never came up; that is told already
        _say(f"hawker: {config.stem} did not stop in order; see {config.with_suffix('.log')}")

    async def _up(self, process: Forked, port: int) -> None:
        """Wait until an agent serves, it ended, or the time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                while process.returncode is None:
                    with contextlib.suppress(OSError):
                        _, writer = await asyncio.open_connection("127.0.0.1", port)
                        writer.close()
                        return
                    await asyncio.sleep(0.02)

    async def _ready(self) -> bool:
        """Wait until every worker answers through the broker. False when the market was stopped meanwhile."""
        from hawker.client.connection import Peer
        from hawker.errors import Unreachable

        peer = Peer("127.0.0.1", self._market.ports["broker"])
        headers = {"authorization": f"Bearer {self._market.tokens['user']}"}
        try:
            async with asyncio.timeout(READY_S):
                while not self._stopping.is_set():
                    with contextlib.suppress(Unreachable):
                        reply = await peer.request("GET", "/v1/hawker/workers", headers=headers, timeout_s=5)
                        found = json.loads(reply.body) if reply.status == 200 else []
                        if {w["name"] for w in found if w["reachable"]} >= self._market.ports.keys() - {"broker"}:
                            return True
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise HawkerError(
                f"the market did not come up within {READY_S:g} s", hint=f"look into the logs in {self._home}"
            ) from None
        finally:
            await peer.close()
        return False

    def _greet(self, client: Path) -> None:
        endpoint, http = self._market.endpoint, self._market.http
        workers = len(self._regions) * self._options["workers"]
        click.echo(f"hawker: {workers} workers in {', '.join(self._regions)}; the API is at {endpoint}/v1")
        click.echo(f"  apps are served at http://APP.localhost:{http}")
        if _found_by_itself(self._home):
            click.echo(f"  token in {client}; the hawker command finds it there")
            click.echo("  try in another terminal:  hawker apps create hello")
        else:
            click.echo(f"  token in {client}; the hawker command finds it there when it is told the directory")
            click.echo(f"  try in another terminal:  export HAWKER_HOME={shlex.quote(str(self._home))}")
            click.echo("    hawker apps create hello")
        region = self._regions[0]
        run = f"hawker machine run --app hello --region {region} --port 80:8000"
        click.echo(f"    {run} host -- python3 -m http.server 8000")
        click.echo(f"    curl http://hello.localhost:{http}")
        click.echo("  Ctrl-C stops the market and its machines; the next start brings them back")


def _found_by_itself(home: Path) -> bool:
    """Whether the hawker command looks into this directory in a terminal where nobody set `HAWKER_HOME`."""
    from hawker.client.settings import dev_directory

    try:
        return dev_directory({**os.environ, "HAWKER_HOME": ""}).resolve() == home
    except Refused:  # without a home directory it looks nowhere
        return False


async def _stop(process: Forked) -> int:
    """SIGTERM, and after a while SIGKILL. Returns the exit status."""
    process.terminate()
    try:
        return await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        process.kill()
        return await process.wait()


def _say(text: str) -> None:
    """Write to the terminal, if it is still there."""
    with contextlib.suppress(OSError):
        output.note(text)

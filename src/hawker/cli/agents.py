"""`hawker agent`: one process on a host with the roles its configuration enables.

```toml
name = "ord-1"            # also the worker's name
region = "ord"
directory = "/var/lib/hawker"
stop_machines_on_exit = false   # true: machines end with the agent and are started again by the next one

[tokens]
cluster = "..."           # shared by all agents; speaks for any owner
[tokens.users]            # owner = token
alice = "..."

[worker]
listen = "0.0.0.0:4281"
capacity = { cpus_shared = 16, cpus_dedicated = 1, memory_mib = 2048, disk_mib = 20480, machines = 100 }

[broker]
listen = "0.0.0.0:4280"
policy = "curve"
workers = ["ord-1@ord=10.0.0.1:4281", "ord-2@ord=10.0.0.2:4281"]
```
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from hawker.errors import HawkerError, Invalid
from hawker.model.guest import Resources

if TYPE_CHECKING:
    from starlette.types import ASGIApp

BACKLOG = 1024
DRAIN_S = 3  # requests that still run at shutdown, such as long waits, are cut off after this


class TokenSettings(msgspec.Struct, forbid_unknown_fields=True):
    cluster: str
    users: dict[str, str] = {}


class WorkerRole(msgspec.Struct, forbid_unknown_fields=True):
    listen: str
    capacity: Resources | None = None
    cgroups: bool = True


class BrokerRole(msgspec.Struct, forbid_unknown_fields=True):
    listen: str
    workers: list[str]
    policy: str = "curve"


class AgentSettings(msgspec.Struct, forbid_unknown_fields=True):
    """The configuration file."""

    name: str
    region: str
    directory: Path
    tokens: TokenSettings
    worker: WorkerRole | None = None
    broker: BrokerRole | None = None
    stop_machines_on_exit: bool = False
    log_level: str = "info"


def read_settings(path: Path) -> AgentSettings:
    """Raises `Invalid` naming the file and the field."""
    try:
        return msgspec.convert(tomllib.loads(path.read_text()), AgentSettings, dec_hook=_path)
    except FileNotFoundError:
        raise Invalid("config", str(path), "there is no such file") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise Invalid("config", str(path), str(error)) from error


def _path(kind: type, value: Any) -> Path:
    """The one type of the settings that is not TOML's. Absolute: a driver changes its working directory."""
    if kind is not Path or not isinstance(value, str):
        raise TypeError(f"expected a path, got {value!r}")
    return Path(value).absolute()


@click.command("agent", help="Run an agent: a worker, a broker, or both, as its configuration says.")
@click.option("--config", type=click.Path(path_type=Path), required=True, help="The agent's TOML file.")
def agent_command(config: Path) -> None:
    settings = read_settings(config)
    asyncio.run(run_agent(settings))


async def run_agent(settings: AgentSettings) -> None:
    """Serve until SIGTERM or SIGINT. Raises what keeps a role from starting."""
    from hawker.host import live
    from hawker.http.app import AGENT, Tokens
    from hawker.telemetry import Metrics, set_up_logs

    set_up_logs(level=settings.log_level)
    users = {token: owner for owner, token in settings.tokens.users.items()}
    tokens = Tokens({settings.tokens.cluster: AGENT, **users})
    host, metrics = live(), Metrics()
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    if settings.worker is None and settings.broker is None:
        raise Invalid("config", settings.name, "enable a role: [worker], [broker] or both")
    try:
        async with asyncio.TaskGroup() as roles:
            if settings.worker:
                roles.create_task(_run_worker(settings, settings.worker, host, tokens, metrics, stopping))
            if settings.broker:
                roles.create_task(_run_broker(settings, settings.broker, host, tokens, metrics, stopping))
    except ExceptionGroup as group:
        raise group.exceptions[0] from None  # the other role was only cancelled because of it


async def _run_worker(
    settings: AgentSettings, role: WorkerRole, host: Any, tokens: Any, metrics: Any, stopping: asyncio.Event
) -> None:
    from hawker.worker.daemon import Worker, WorkerSettings
    from hawker.worker.drivers.process import ProcessDriver
    from hawker.worker.lock import sole_holder

    directory = settings.directory
    worker_settings = WorkerSettings(
        name=settings.name,
        region=settings.region,
        directory=directory,
        capacity=role.capacity or host_capacity(),
    )
    with sole_holder(directory):  # first of all: two daemons over one database would each undo the other's machines
        driver = ProcessDriver(directory / "process", cgroups=role.cgroups)
        sock = _listen(role.listen)
        worker = Worker(worker_settings, host, driver, metrics)
        app = await worker.open(tokens)
        watching = asyncio.create_task(_stop_when(worker.failed, stopping))
        try:
            await _serve(app, sock, stopping)
        finally:
            watching.cancel()
            await worker.close(stop_machines=settings.stop_machines_on_exit and not worker.failed.is_set())
    if worker.failed.is_set():
        raise HawkerError("the database cannot be written", hint="look at the disk, then start the agent again")


async def _stop_when(event: asyncio.Event, stopping: asyncio.Event) -> None:
    """The agent ends for whoever watches over it to start it again; its machines run on."""
    await event.wait()
    stopping.set()


async def _run_broker(
    settings: AgentSettings, role: BrokerRole, host: Any, tokens: Any, metrics: Any, stopping: asyncio.Event
) -> None:
    from hawker.broker.api import Broker
    from hawker.broker.fleet import Fleet, parse_address
    from hawker.core.ranking import policy

    addresses = [parse_address(text) for text in role.workers]
    if not addresses:
        raise Invalid("broker.workers", [], "list at least one worker: name@region=host:port")
    fleet = Fleet(addresses, settings.tokens.cluster, settings.region)
    broker = Broker(settings.name, fleet, host, policy(role.policy), metrics, settings.region)
    try:
        await _serve(broker.app(tokens), _listen(role.listen), stopping)
    finally:
        await broker.close()


async def _serve(app: ASGIApp, sock: socket.socket, stopping: asyncio.Event) -> None:
    """Serve on a socket until told to stop."""
    import uvicorn

    class Server(uvicorn.Server):
        def capture_signals(self) -> Any:  # the agent has its own handlers, one for all its roles
            from contextlib import nullcontext

            return nullcontext()

    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=DRAIN_S,
    )
    server = Server(config)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    waiting = asyncio.create_task(stopping.wait())
    await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    waiting.cancel()
    await serving


def _listen(address: str) -> socket.socket:
    """A listening socket for `host:port`. Raises `HawkerError` when the port is taken."""
    name, _, port = address.rpartition(":")
    name = name.strip("[]")
    # The protocol must be named: asyncio switches Nagle's delay off only for sockets that say they are TCP, and with it
    # every answer waits 40 ms for an acknowledgement.
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((name, int(port)))
        sock.listen(BACKLOG)
        return sock
    except ValueError:
        raise Invalid("listen", address, "write host:port") from None
    except OSError as error:
        raise HawkerError(f"cannot listen on {address}: {error.strerror}", hint="is another agent running?") from error


def host_capacity() -> Resources:
    """What this host has, when the configuration does not say: half the cores dedicated, the rest shared sixteenfold,
    three quarters of memory, four fifths of the free disk."""
    cores = os.cpu_count() or 1
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    disk = os.statvfs("/")
    return Resources(
        cpus_shared=max(1, cores - cores // 2) * 16,
        cpus_dedicated=cores // 2,
        memory_mib=pages * 3 // 4,
        disk_mib=(disk.f_bavail * disk.f_frsize >> 20) * 4 // 5,
        machines=1000,
    )

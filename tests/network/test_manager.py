"""Attaching and detaching machines: again, cut off anywhere, behind somebody's back, and by several workers at once."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from tests.kit.namespaces import missing_for_namespaces
from tests.kit.site import HOST4, INTERNET4, INTERNET6, PORT, Site, Try
from tests.kit.waiting import eventually, wait_until

from hawker.errors import Invalid
from hawker.network import addresses, netlink, nft, ruleset
from hawker.network.base import NetworkError, Settings, Wanted
from hawker.network.kernel import Kernel
from hawker.network.manager import Manager

pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(missing_for_namespaces()), reason=missing_for_namespaces())]
PUBLISHED = (("tcp", PORT, 8001), ("udp", 53, 5353))


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as site:
        yield site


def wanted(number: int, publish: tuple[tuple[str, int, int], ...] = PUBLISHED) -> Wanted:
    return Wanted(machine=f"{number:014x}", number=7, address=f"fdaa:0:7:0:1:0:{number:x}:2", publish=publish)


class Killed(BaseException):
    """What a process that is killed does not live to see."""


class Budget:
    """How many requests the kernel still gets."""

    left = sys.maxsize

    @classmethod
    def spend(cls) -> None:
        if cls.left <= 0:
            raise Killed
        cls.left -= 1


class CutSocket(netlink.Socket):
    def _exchange(self, kind: int, flags: int, message: Any) -> list[bytes]:
        Budget.spend()
        return super()._exchange(kind, flags, message)


class CutLibrary(nft.Library):
    def run(self, commands: str) -> list[dict[str, Any]]:
        Budget.spend()
        return super().run(commands)


class Ending(netlink.Socket):
    """A machine's program ends, and its link with it, before a request."""

    left = sys.maxsize
    device = ""

    def _exchange(self, kind: int, flags: int, message: Any) -> list[bytes]:
        if Ending.left == 0:
            subprocess.run(["ip", "link", "del", Ending.device], check=False)
        Ending.left -= 1
        return super()._exchange(kind, flags, message)


def cut_kernel(worker: str, settings: Settings) -> Kernel:
    return Kernel(worker, settings, netlink=CutSocket, library=CutLibrary)


async def restarted(manager: Manager) -> Manager:
    """As after a kill: nothing of what the other knew is left."""
    await manager.close()
    other = Manager("first", kernel=cut_kernel)
    await other.open()
    return other


@pytest.mark.slow
def test_cut_off_at_any_request_reconciling_leaves_nothing_and_attaching_again_completes(site: Site) -> None:
    pid = site.process("m")
    one, other = wanted(1), wanted(2, ())

    async def main() -> int:
        manager = Manager("first", kernel=cut_kernel)
        await manager.open()
        await manager.attach_namespace(other, site.process("n"))
        empty = site.state()
        await manager.attach_namespace(one, pid)
        full, inside = site.state(), site.state("m")
        await manager.detach(one.machine)
        assert site.state() == empty
        requests = 0
        while True:
            Budget.left = requests
            try:
                await manager.attach_namespace(one, pid)
                break
            except Killed:
                pass
            finally:
                Budget.left = sys.maxsize
            manager = await restarted(manager)
            if requests % 2:
                await manager.reconcile({other.machine: other})
                assert site.state() == empty, f"after {requests} requests"
            await manager.attach_namespace(one, pid)
            assert site.state() == full, f"after {requests} requests"
            assert site.state("m") == inside, f"after {requests} requests"
            Budget.left = requests % 4
            try:
                await manager.detach(one.machine)
            except Killed:
                Budget.left = sys.maxsize
                manager = await restarted(manager)
                await manager.reconcile({other.machine: other})
            Budget.left = sys.maxsize
            assert site.state() == empty, f"after {requests} requests, detached"
            requests += 1
        await manager.close()
        return requests

    assert site.run(main()) > 20


@pytest.mark.slow
def test_a_machine_that_ends_while_all_is_put_right_keeps_no_other_from_it(site: Site) -> None:
    pids = {1: site.process("m"), 2: site.process("n")}
    one, other = wanted(1), wanted(2, ())

    def kernel(worker: str, settings: Settings) -> Kernel:
        return Kernel(worker, settings, netlink=Ending)

    async def main() -> int:
        Ending.device = addresses.device("first", one.machine)
        requests = 0
        while True:
            manager = Manager("first")
            await manager.open()
            await manager.attach_namespace(other, pids[2])
            alone = site.state()
            await manager.attach_namespace(one, pids[1])
            await manager.close()
            site.ip("host", f"link set {Ending.device} down")  # there is something to put right
            manager = Manager("first", kernel=kernel)
            await manager.open()
            Ending.left = requests
            await manager.reconcile({one.machine: one, other.machine: other})
            came, Ending.left = Ending.left < 0, sys.maxsize
            if came:
                assert Ending.device not in site.state()
            await manager.detach(one.machine)
            assert site.state() == alone, f"after {requests} requests"
            await manager.detach(other.machine)
            await manager.close()
            if not came:
                return requests
            requests += 1

    assert site.run(main()) > 10


@pytest.mark.slow
def test_two_hundred_machines_come_and_go_and_leave_nothing(site: Site) -> None:
    pid = site.process("m")
    manager = site.worker("first")
    bare = site.state("m")

    async def come_and_go(first: int, last: int) -> None:
        for number in range(first, last):
            await manager.attach_namespace(wanted(number), pid)
            await manager.detach(f"{number:014x}")

    site.run(come_and_go(0, 1))
    before = site.state()
    site.run(come_and_go(1, 200))
    assert site.state() == before
    site.run(manager.close(remove=True))
    assert not any("hawker" in line or addresses.DEVICES in line or "fdaa" in line for line in site.state())
    assert {line for line in site.state("m") if "eth0" in line} == {line for line in bare if "eth0" in line}


def test_attaching_and_detaching_may_be_repeated(site: Site) -> None:
    manager, pid = site.worker("first"), site.process("m")
    made = site.run(manager.attach_namespace(wanted(1), pid))
    state, inside = site.state(), site.state("m")
    assert site.run(manager.attach_namespace(wanted(1), pid)) == made == manager.plan(wanted(1))
    assert (site.state(), site.state("m")) == (state, inside)
    site.run(manager.reconcile({"m": wanted(1)}))
    assert site.state() == state
    site.run(manager.detach(wanted(1).machine))
    gone = site.state()
    site.run(manager.detach(wanted(1).machine))
    site.run(manager.detach("00000000000099"))
    assert site.state() == gone


def test_nothing_is_made_on_a_host_before_its_first_machine(site: Site) -> None:
    before = site.state()
    manager = site.worker("first")
    site.run(manager.reconcile({}))
    site.run(manager.detach(wanted(1).machine))
    assert site.state() == before


async def left_alone(manager: Manager) -> None:
    """Nothing is done to it."""


@pytest.mark.parametrize("ending", [Manager.close, lambda manager: manager.reconcile({}), left_alone])
def test_nothing_is_left_on_a_host_after_its_last_machine(
    site: Site, ending: Callable[[Manager], Coroutine[Any, Any, None]]
) -> None:
    before = site.state()
    manager = Manager("first", idle_s=0.05 if ending is left_alone else 60)

    async def is_bare() -> bool:
        return await asyncio.to_thread(site.state) == before

    async def main() -> None:
        await manager.open()
        await manager.attach_namespace(wanted(1), pid)
        await manager.detach(wanted(1).machine)
        await ending(manager)
        if ending is left_alone:
            await eventually(is_bare, "the host is as it was")
        else:
            assert await is_bare()
        await manager.close()

    pid = site.process("m")
    site.run(main())


def test_a_machine_that_starts_anew_has_a_new_namespace_and_the_same_addresses(site: Site) -> None:
    manager = site.worker("first")
    first = site.run(manager.attach_namespace(wanted(1), site.process("old")))
    again = site.run(manager.attach_namespace(wanted(1), site.process("new")))
    assert again == first
    assert not any("eth0" in line for line in site.state("old"))
    site.listen("new")
    assert site.reached([Try("host", again.address6), Try("host", again.address4)])


def test_a_restarted_worker_finds_its_machines_as_they_were(site: Site) -> None:
    manager = site.worker("first")
    made = site.run(manager.attach_namespace(wanted(1), site.process("m")))
    state = site.state()
    site.run(manager.close())
    assert site.state() == state
    manager = site.worker("first")
    assert manager.plan(wanted(1)) == made
    site.run(manager.reconcile({"m": wanted(1)}))
    assert site.state() == state
    site.run(manager.detach(wanted(1).machine))
    assert made.interface not in " ".join(site.state())


def test_filters_and_routes_that_somebody_removed_are_put_back_with_the_next_change(site: Site) -> None:
    manager = site.worker("first")
    site.machine("m", "first", 7)
    state = site.state()
    for harm in ("nft flush ruleset", f"nft flush chain inet {ruleset.table('first')} entering"):
        with site.network.inside("host"):
            subprocess.run(harm.split(), check=True)
        site.ip("host", f"route del {site.attached['m'].address4}")
        site.run(manager.reconcile({"m": site.wanted["m"]}))
        assert site.state() == state
    with site.network.inside("host"):
        subprocess.run(["nft", "flush", "ruleset"], check=True)
    site.machine("n", "first", 7)
    assert state <= site.state()
    with site.network.inside("host"):
        subprocess.run(["nft", "flush", "ruleset"], check=True)
    site.run(manager.detach(site.wanted["n"].machine))
    site.run(manager.reconcile({"m": site.wanted["m"]}))
    assert site.state() == state


def test_filters_that_somebody_flushes_are_back_before_long(site: Site) -> None:
    manager = site.worker("first")
    site.machine("m", "first", 7)
    state = site.state()

    async def main() -> None:
        for harm in ("flush ruleset", f"delete element inet {ruleset.table('first')} machines4 " + "{ %s }"):
            harm = harm % site.attached["m"].address4 if "%" in harm else harm
            await asyncio.to_thread(flush, harm)

            async def is_back() -> bool:
                return await asyncio.to_thread(site.state) == state

            await eventually(is_back, "the filters are back")

    def flush(harm: str) -> None:
        with site.network.inside("host"):
            subprocess.run(["nft", harm], check=True)

    site.run(main())
    assert manager.plan(site.wanted["m"]) == site.attached["m"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("denied", ("10.0.0.0/33",)),
        ("allowed", ("everything",)),
        ("publish_on", ("eth0",)),
        ("resolvers", ("192.0.2.53:53",)),
        ("pool4", "100.64.0.0/30"),
        ("pool4", "fd00::/8"),
        ("mtu", 576),
        ("connections", -1),
    ],
)
def test_settings_that_make_no_sense_are_named_with_the_remedy(field: str, value: object) -> None:
    with pytest.raises(Invalid, match=rf"worker\.network\.{field}: .* is not valid: (write|give) "):
        Manager("first", Settings(**{field: value}))  # type: ignore[arg-type]


def test_the_host_forwards_from_its_first_machine_on_and_goes_on_listening_to_its_router(site: Site) -> None:
    def sysctl(name: str) -> str:
        with site.network.inside("host"), open(f"/proc/sys/net/{name}") as file:
            return file.read().strip()

    names = ("ipv4/ip_forward", "ipv6/conf/all/forwarding", "ipv6/conf/eth1/accept_ra")
    with site.network.inside("host"), open("/proc/sys/net/ipv4/ip_forward", "w") as forward:
        forward.write("0")  # a namespace has what the machine has
    manager = site.worker("first")
    site.run(manager.reconcile({}))
    assert [sysctl(name) for name in names] == ["0", "0", "1"]
    site.machine("m", "first", 7)
    assert [sysctl(name) for name in names] == ["1", "1", "2"]


def test_a_port_that_a_program_of_the_host_has_is_published_for_no_machine_that_comes_later(site: Site) -> None:
    manager, pid = site.worker("first"), site.process("m")
    before = site.state()
    holding = site.listen("host", 8001)
    refused = rf"port 8001/tcp of this host is held by .+ \(process {os.getpid()}\); stop that"
    with pytest.raises(NetworkError, match=refused):
        site.run(manager.attach_namespace(wanted(1), pid))
    assert site.state() == before
    holding.close()
    site.run(manager.attach_namespace(wanted(1), pid))
    site.listen("host", 8001)
    site.run(manager.attach_namespace(wanted(1), pid))  # it has the port


def test_ports_follow_what_is_wanted_and_a_port_is_one_machines(site: Site) -> None:
    manager, pid = site.worker("first"), site.process("m")
    site.run(manager.attach_namespace(wanted(1), pid))
    with pytest.raises(NetworkError, match="port 5353/udp of this host is published by another machine"):
        site.run(manager.attach_namespace(wanted(2, (("tcp", 80, 8002), ("udp", 53, 5353))), site.process("n")))
    assert manager.plan(wanted(2)).interface not in " ".join(site.state())
    site.run(manager.attach_namespace(wanted(1, (("tcp", PORT, 9001),)), pid))
    state = " ".join(site.state())
    assert "9001" in state
    assert "8001" not in state


def test_who_keeps_sending_to_a_published_port_reaches_the_machine_that_has_it_now(site: Site) -> None:
    manager = site.worker("first")
    caller = site.socket("internet", socket.AF_INET, socket.SOCK_DGRAM)
    for number, name in enumerate(("old", "new"), 1):
        site.run(manager.attach_namespace(wanted(number, (("udp", 53, 5353),)), site.process(name)))
        listener = site.listen(name, 53, socket.SOCK_DGRAM)
        listener.settimeout(5)
        caller.sendto(name.encode(), (HOST4, 5353))
        assert listener.recv(100) == name.encode()
        site.run(manager.detach(wanted(number).machine))


def test_what_cannot_be_attached_is_refused_and_leaves_nothing(site: Site) -> None:
    manager = site.worker("first")
    gone = subprocess.Popen(["true"])
    gone.wait()
    site.ip("host", "link set lo up")
    before = site.state()
    for pid, reason in ((gone.pid, "no network namespace"), (os.getpid(), "not one of its own")):
        with pytest.raises(NetworkError, match=reason):
            site.run(manager.attach_namespace(wanted(1), pid)) if pid == gone.pid else _as_host(site, manager)
    with pytest.raises(NetworkError, match="is not there"):
        site.run(manager.attach_tap(wanted(1)))
    pid = site.process("m")
    site.ip("m", "link add eth0 type bridge")
    with pytest.raises(NetworkError, match="exists"):
        site.run(manager.attach_namespace(wanted(1), pid))
    assert site.state() == before


def _as_host(site: Site, manager: Manager) -> None:
    with site.network.inside("host"):
        process = subprocess.Popen(["sleep", "infinity"])
    try:
        site.run(manager.attach_namespace(wanted(1), process.pid))
    finally:
        process.kill()
        process.wait()


def test_an_address_that_another_worker_took_meanwhile_is_not_given_twice(site: Site) -> None:
    manager, pid = site.worker("first"), site.process("m")
    planned = manager.plan(wanted(1))
    site.ip("host", f"route add {planned.address4}/32 dev eth1")
    made = site.run(manager.attach_namespace(wanted(1), pid))
    assert made.address4 != planned.address4
    assert made.address6 == planned.address6
    site.listen("m")
    site.listen("internet")
    assert site.reached([Try("m", INTERNET4)])


def test_a_tap_is_furnished_and_its_guest_reaches_out(site: Site) -> None:
    manager = site.worker("first")
    planned = manager.plan(wanted(1))
    site.ip("host", f"tuntap add {planned.interface} mode tap")
    assert site.run(manager.attach_tap(wanted(1))) == planned
    state = site.state()
    assert f"{planned.interface} {addresses.GATEWAY_MAC} True" in state
    site.run(manager.attach_tap(wanted(1)))
    assert site.state() == state
    site.run(manager.reconcile({"1": wanted(1)}))
    assert site.state() == state
    site.ip("host", f"link del {planned.interface}")  # its owner was killed
    site.run(manager.reconcile({"1": wanted(1)}))
    assert planned.interface not in " ".join(site.state())
    site.ip("host", f"tuntap add {planned.interface} mode tap")
    site.run(manager.attach_tap(wanted(1)))
    assert site.state() == state


def test_reconciling_keeps_a_tap_that_is_about_to_be_attached(site: Site) -> None:
    manager = site.worker("first")
    planned = manager.plan(wanted(1))
    site.ip("host", f"tuntap add {planned.interface} mode tap")
    site.machine("other", "first", 7)
    site.run(manager.reconcile({"other": site.wanted["other"]}))
    site.run(manager.attach_tap(wanted(1)))


@pytest.mark.parametrize("end", ["in its time", "close"])
def test_filters_that_go_with_the_last_machine_take_no_tap_along_that_is_about_to_be_attached(
    site: Site, end: str
) -> None:
    async def main() -> None:
        manager = Manager("first", idle_s=0.01)
        await manager.open()
        await manager.attach_namespace(wanted(2), site.process("m"))
        planned = manager.plan(wanted(1))
        await manager.detach(wanted(2).machine)
        site.ip("host", f"tuntap add {planned.interface} mode tap")
        if end == "close":
            await manager.close()
            await manager.open()
        else:
            await asyncio.sleep(0.1)  # what is to be shown is that time alone does nothing
            assert [line for line in site.state() if "hawker" in line], "it is put off"
        await manager.attach_tap(wanted(1))
        await manager.detach(wanted(1).machine)

        async def bare() -> bool:
            return not [line for line in site.state() if "hawker" in line or planned.interface in line]

        await eventually(bare, "nothing is left")
        await manager.close()

    site.run(main())


def test_two_managers_of_one_worker_are_one_too_many(site: Site) -> None:
    manager = site.worker("first")
    with pytest.raises(NetworkError, match="another process"):
        site.run(Manager("first").open())
    site.run(manager.close())
    site.worker("first")


def test_a_worker_leaves_another_workers_machines_alone(site: Site) -> None:
    site.worker("first")
    site.machine("a", "first", 7)
    before = site.state()
    second = site.worker("second")
    site.machine("b", "second", 7)
    site.run(second.reconcile({}))
    site.run(second.close(remove=True))
    assert site.state() == before


def test_many_attach_at_once_and_a_caller_that_gives_up_does_no_harm(site: Site) -> None:
    manager = site.worker("first")
    pids = [site.process(f"m{n}") for n in range(6)]

    async def main() -> None:
        given_up = asyncio.create_task(manager.attach_namespace(wanted(100), pids[0]))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        await manager.detach(wanted(100).machine)
        await asyncio.gather(*(manager.attach_namespace(wanted(n, ()), pid) for n, pid in enumerate(pids, 1)))

    site.run(main())
    site.listen("m0")
    site.listen("internet")
    others = [Try(f"m{n}", manager.plan(wanted(1)).address6) for n in range(1, 6)]
    out = [Try(f"m{n}", address) for n in range(6) for address in (INTERNET4, INTERNET6)]
    assert site.reached([*others, *out]) == {*others, *out}


SCRIPT = """
import asyncio, sys
from hawker.network.base import Wanted
from hawker.network.manager import Manager

async def main():
    manager = Manager("first")
    await manager.open()
    for number in range(1000000):
        address = f"fdaa:0:7:0:1:0:{number % 5 + 1:x}:2"
        publish = (("tcp", 80, 9000 + number % 5),)
        its = Wanted(machine=f"{number % 5 + 1:014x}", number=7, address=address, publish=publish)
        await manager.attach_namespace(its, int(sys.argv[1]))
        print(number, flush=True)
        await manager.detach(its.machine)

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_worker_that_is_killed_amid_changes_leaves_nothing_once_another_reconciled(site: Site) -> None:
    manager, pid = site.worker("first"), site.process("m")
    site.run(manager.attach_namespace(wanted(9), site.process("n")))
    state = site.state()
    for kills in range(1, 5):
        site.run(manager.close())
        with site.network.inside("host"):
            process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(pid)], stdout=subprocess.PIPE)
        with process:
            assert process.stdout is not None
            for _ in range(kills):
                assert process.stdout.readline()
            os.kill(process.pid, signal.SIGKILL)
        manager = Manager("first")
        site.run(manager.open())
        site.run(manager.reconcile({"n": wanted(9)}))
        wait_until(lambda: site.state() == state, "the host is as it was")
    site.run(manager.close())

"""How many connections a machine may have at once, and that its neighbours do not notice one that has too many."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

import pytest
from tests.kit.namespaces import missing_for_namespaces
from tests.kit.site import HOST4, INTERNET4, PORT, Site, Try

from hawker.network import addresses, ruleset
from hawker.network.base import Settings
from hawker.network.kernel import Connections
from hawker.network.manager import an_eighth_of_tracked

pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(missing_for_namespaces()), reason=missing_for_namespaces())]
MOST = 5


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Site() as site:
        site.worker("first", Settings(connections=MOST))
        site.machine("many", "first", 7, (("tcp", PORT, 8001),))
        site.machine("few", "first", 7)
        site.machine("asks", "first", 7)
        site.machine("stranger", "first", 9)
        for where in ("host", "internet"):
            site.listen(where)
        yield site


@pytest.fixture(autouse=True)
def _forgotten(site: Site) -> Iterator[None]:
    """Each test begins with none."""
    yield
    forget(site)


def forget(site: Site) -> None:
    with site.network.inside("host"):
        connections = Connections()
    for attached in site.attached.values():
        connections.forget(addresses.mark(attached.interface))
    connections.close()


def arrived(site: Site, listener: socket.socket, *senders: str) -> list[str]:
    """Who of them gets a datagram through, each from a new socket, one after the other."""
    for sender in senders:
        caller = site.socket(sender, socket.AF_INET, socket.SOCK_DGRAM)
        caller.sendto(sender.encode(), (INTERNET4, listener.getsockname()[1]))
    found: list[str] = []
    listener.settimeout(0.2)
    try:
        while len(found) < len(senders):
            found.append(listener.recv(100).decode())
    except TimeoutError:
        pass
    return sorted(found)


def test_a_machine_begins_no_more_than_so_many_and_its_neighbour_is_not_held_back(site: Site) -> None:
    listener = site.listen("internet", 9001, socket.SOCK_DGRAM)
    assert arrived(site, listener, *["many"] * (MOST + 3), "few") == ["few"] + ["many"] * MOST
    assert site.reached([Try("many", INTERNET4), Try("few", INTERNET4)]) == {Try("few", INTERNET4)}


def test_those_that_have_ended_count_no_more(site: Site) -> None:
    listener = site.listen("internet", 9002, socket.SOCK_DGRAM)
    assert arrived(site, listener, *["many"] * (MOST + 1)) == ["many"] * MOST
    forget(site)
    assert arrived(site, listener, *["many"] * (MOST + 1)) == ["many"] * MOST


def test_questions_to_the_resolver_count_too(site: Site) -> None:
    assert site.reached([Try("asks", INTERNET4)])
    for _ in range(MOST):
        asking = site.socket("asks", socket.AF_INET6, socket.SOCK_DGRAM)
        asking.sendto(b"?", (addresses.RESOLVER, 53))
    assert site.reached([Try("asks", INTERNET4)]) == set()


def test_who_is_not_let_through_uses_up_nothing_of_another(site: Site) -> None:
    for _ in range(4 * MOST):
        stranger = site.socket("stranger", socket.AF_INET6, socket.SOCK_DGRAM)
        stranger.sendto(b"?", (site.attached["many"].address6, PORT))
    assert called(site) == [0] * MOST + [errno.EAGAIN] * 2
    listener = site.listen("internet", 9003, socket.SOCK_DGRAM)
    assert arrived(site, listener, *["stranger"] * MOST) == ["stranger"] * MOST


def called(site: Site) -> list[int]:
    """What comes of calling a machine's published port, twice more often than it may be."""
    found = []
    for _ in range(MOST + 2):
        caller = site.socket("internet", socket.AF_INET, socket.SOCK_STREAM)
        caller.settimeout(0.2)
        found.append(caller.connect_ex((HOST4, 8001)))
    return found


def test_callers_of_a_published_port_are_counted_apart(site: Site) -> None:
    assert called(site) == [0] * MOST + [errno.EAGAIN] * 2
    own = {Try("many", INTERNET4), Try("host", site.attached["many"].address6)}  # of the host's none are counted
    assert site.reached(own) == own


def test_the_filters_are_taken_for_whole_while_machines_are_counted(site: Site) -> None:
    """What the kernel writes into the sets is nobody's harm."""
    assert site.reached([Try("many", INTERNET4)])
    before = site.state()
    site.run(site.managers["first"].reconcile(site.wanted))
    assert site.state() == before


def test_by_default_it_is_an_eighth_of_what_the_kernel_keeps_and_0_counts_nothing(site: Site) -> None:
    site.worker("second")
    site.machine("other", "second", 9)
    assert sum(f"ct count over {an_eighth_of_tracked()}" in line for line in site.state()) == 2  # begun, and taken
    assert "ct count" not in ruleset.text("w", Settings(connections=0))

"""The data planes that the behaviour tests run on, by name."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from tests.kit.routers import FakeDelegator, FakeRouter

import hawker.host
from hawker.host import Host
from hawker.proxy.base import Address
from hawker.proxy.certificates import Certificates
from hawker.proxy.data_plane import DataPlane
from hawker.proxy.embedded.context import Challenges, PlaneContext, PlaneParts
from hawker.proxy.embedded.plane import EmbeddedPlane
from hawker.proxy.embedded.settings import Settings
from hawker.proxy.embedded.upstreams import UpstreamPools
from hawker.proxy.haproxy.plane import HaproxyPlane
from hawker.proxy.haproxy.settings import HaproxySettings


class Plane(Protocol):
    """A data plane as tests have it. `http` is public port 80, `tls` the port 443, `backhaul` for other proxies, `own`
    public port 5432, which one app has to itself. `settings` are those of the embedded plane, and `certificates`, a
    directory. `context` is what the connections of Hawker's own code share. `keeps`: programs that keep connections to
    machines."""

    http: Address
    tls: Address
    backhaul: Address
    own: Address
    keeps: int

    @property
    def context(self) -> PlaneContext: ...

    async def open(self, router: FakeRouter, settings: dict[str, Any]) -> None: ...

    async def close(self) -> None:
        """Let finish what is in flight."""
        ...


class Embedded:
    http: Address
    tls: Address
    backhaul: Address
    own: Address
    plane: DataPlane
    activator: EmbeddedPlane
    keeps = 1

    def __init__(self, *, challenges: Challenges | None = None) -> None:
        self.challenges = challenges

    @property
    def context(self) -> PlaneContext:
        return self.activator.context

    async def open(self, router: FakeRouter, settings: dict[str, Any]) -> None:
        settings = dict(settings)
        directory: Path | None = settings.pop("certificates", None)
        host = hawker.host.live()
        certificates = None if directory is None else Certificates((directory,), host)
        if certificates is not None:
            await certificates.look()
        self.plane = self.made(router, Settings(**settings), host, certificates)
        self.http = await self.plane.listen("127.0.0.1", 0, public=80)
        self.tls = await self.plane.listen("127.0.0.1", 0, public=443)
        self.backhaul = await self.plane.listen_backhaul("127.0.0.1", 0)
        self.own = await self.plane.listen_own("127.0.0.1", 0, public=5432)

    def made(self, router: FakeRouter, settings: Settings, host: Host, certificates: Certificates | None) -> DataPlane:
        self.activator = EmbeddedPlane(self._parts(router, settings, host, certificates))
        return self.activator

    def _parts(
        self, router: FakeRouter, settings: Settings, host: Host, certificates: Certificates | None
    ) -> PlaneParts:
        return PlaneParts(
            router=router,
            settings=settings,
            host=host,
            upstreams=UpstreamPools(settings, host.sockets),
            certificates=certificates,
            challenges=self.challenges,
        )

    async def close(self) -> None:
        await self.plane.close()


class Haproxy(Embedded):
    """`directory` is HAProxy's."""

    keeps = 2
    delegator: FakeDelegator
    haproxy: HaproxyPlane

    def __init__(self, haproxy: HaproxySettings | None = None, *, challenges: Challenges | None = None) -> None:
        super().__init__(challenges=challenges)
        self.directory = Path(tempfile.mkdtemp(prefix="haproxy-"))
        self._haproxy = haproxy or HaproxySettings(look_s=0.02, backends=4)

    def made(self, router: FakeRouter, settings: Settings, host: Host, certificates: Certificates | None) -> DataPlane:
        self.delegator = FakeDelegator(router)
        parts = self._parts(router, settings, host, certificates)
        self.haproxy = HaproxyPlane(parts, self.delegator, self._haproxy, self.directory / "h")
        self.activator = self.haproxy.activator
        return self.haproxy

    async def close(self) -> None:
        await super().close()
        shutil.rmtree(self.directory, ignore_errors=True)


PLANES: dict[str, Callable[[], Plane]] = {"embedded": Embedded, "haproxy": Haproxy}
NEEDS = {"haproxy": "haproxy"}
"""Programs that planes need."""

_ALONE = "what does not pass HAProxy is the embedded plane's alone, and tested there"
_READING = "HAProxy reads it first, and repairs what is clear to it: test_haproxy_smuggling"
_CUT = "the machine closes while the user still writes: HAProxy resets what it could not read"
_REST = "HAProxy reads what is left of a body that was answered early, and keeps the connection"
APART: dict[str, dict[str, str]] = {
    "haproxy": {
        "test_backhaul": _ALONE,
        "test_embedded": _ALONE,
        "test_http2": _ALONE,
        "test_h2_backend": _ALONE,
        "test_compression": _ALONE,
        "test_retiring": "HAProxy goes on, whoever is behind it: tests/agent/test_running.py",
        "test_smuggling": _READING,
        "test_connections_over_the_limit_are_closed_when_they_come": "HAProxy lets them wait (`maxconn`)",
        "test_a_user_who_says_no_more_gets_its_answer": "to HAProxy a user who says no more has left",
        "test_a_kept_connection_that_breaks_in_the_very_moment_is_replaced_by_another_to_the_same_machine": (
            "an app with one machine: HAProxy would have to keep every request, which costs a seventh of all"
        ),
        "test_an_answer_without_a_length_that_is_reset_is_cut_also_for_http_1_0": (
            "HAProxy ends an answer to HTTP/1.0 that was cut like one that has ended"
        ),
        "test_early_hints_pass_but_not_to_http_1_0": "HAProxy cuts the answers off that follow: test_haproxy",
        "test_a_connection_may_be_limited_to_some_requests": "HAProxy 2.6 has no such limit",
        "test_a_tunnel_that_breaks_on_one_side_breaks_on_the_other": "HAProxy ends what breaks as what ends",
        "test_what_comes_back_is_what_comes_without_a_proxy[limits]": _CUT,
        "test_what_comes_back_is_what_comes_without_a_proxy[reserved opcodes]": _CUT,
        "test_a_body_that_stops_coming_is_408_and_lets_the_machine_go": _REST,
        "test_a_machine_may_refuse_a_body_before_it_is_sent": _REST,
        "test_a_machine_that_refuses_a_large_body_at_once_is_heard": f"{_REST}: test_haproxy",
        "test_closing_finishes_what_is_under_way": "a user who has said nothing yet has time to: test_haproxy",
        "test_a_connection_that_is_not_used_is_closed": "HAProxy has one such time for all users",
    }
}
"""Modules, tests, or tests with a parameter, that a plane does not take part in, and why."""

FULL: dict[str, frozenset[str]] = {
    "haproxy": frozenset(
        {
            "test_a_client_too_old_for_the_service_is_told_so",
            "test_a_machine_that_reads_slowly_slows_the_user_down",
            "test_a_port_of_its_own_may_speak_http",
            "test_a_request_may_come_in_any_pieces",
            "test_a_service_may_be_content_with_a_certificate_of_no_worth",
            "test_a_service_says_which_versions_are_spoken",
            "test_a_service_without_pg_tls_does_not_take_postgresql",
            "test_at_a_port_of_its_own_an_app_has_no_certificate_but_its_own",
            "test_bodies_of_any_size_pass_both_ways",
            "test_bytes_smuggled_in_before_tls_are_not_taken",
            "test_machines",
            "test_on_a_port_of_its_own_the_server_may_speak_first",
            "test_plain_ends",
            "test_postgresql_asks_for_tls_in_its_own_way",
            "test_replays",
            "test_tls_alone_ends_here_and_bytes_go_on",
            "test_tunnels",
            "test_websocket",
        }
    )
}
"""Modules and tests that a plane takes part in only in the full run: HAProxy hands what they are about to the embedded
plane behind it."""

"""Rows that make no sense: whatever they say, only the app that they are of may suffer."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import pytest
from bench.poison import Poisoner, feed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kit.fleets import REGION, Fleet
from tests.kit.tiers import costly

from hawker.core.routing import Wishes
from hawker.proxy.app_delegator import AppDelegator
from hawker.proxy.app_table import AppTable
from hawker.proxy.background.standby import Named
from hawker.proxy.base import Refused
from hawker.proxy.catalog_view.index import CatalogIndex
from hawker.proxy.catalog_view.port_claims import PortClaims
from hawker.proxy.machines.calls import Workers
from hawker.proxy.routing.router import ProxyRouter
from hawker.proxy.settings import RouterSettings

GOOD, ITS_PORT, BACKHAUL = "a-good-app", 5432, 4290
OTHERS = ("other", "x" * 300, "a.b", "\0", "")

port_numbers = st.sampled_from((0, 1, 80, ITS_PORT, 8080, 65535, 65536, 1 << 40))
port: st.SearchStrategy[Any] = st.fixed_dictionaries(
    {"first": port_numbers, "last": port_numbers},
    optional={
        "handlers": st.sampled_from((["http"], ["tls", "http"], [], ["teleport"], "http", [7], None)),
        "force_https": st.sampled_from((True, "yes", None)),
        "http": st.sampled_from(({}, [], {"idle_timeout_s": -1}, {"set_headers": [["é", "\U0001f600"]]}, {"x": {}})),
        "tls": st.sampled_from(({}, {"alpn": ["h9"]}, {"versions": [1]}, None)),
        "of the future": st.just([{}]),
    },
)
texts = st.sampled_from(("", "web", "[]", "{}", "[7]", "[1,", "null", "[" * 90 + "]" * 90, '{"a":1}', "\0", "é" * 900))
json_text = texts | st.lists(port, max_size=6).map(lambda ports: json.dumps(ports))
limits = texts | st.sampled_from(
    (
        '{"soft_limit":-1}',
        '{"hard_limit":0}',
        '{"soft_limit":9,"hard_limit":1}',
        '{"type":"moons"}',
        '{"soft_limit":1e99}',
    )
)
whole: st.SearchStrategy[Any] = st.sampled_from((0, 1, 80, 8080, 65536, 1 << 62, -1, True, None, "80", 1.5, [], {}))
app = st.sampled_from(OTHERS)
machine = st.sampled_from(("evil", "good", "e/v", ""))
worker = st.sampled_from(("bad", "ord-2", "nobody"))


def row(**columns: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Any of the columns, or others in their place, and some that nobody knows."""
    odd: st.SearchStrategy[Any] = st.sampled_from((None, 7, "x", [], {}, True, "y" * 5000, float("nan")))
    return st.fixed_dictionaries({}, optional={name: each | odd for name, each in columns.items()} | {"newer": odd})


ROWS = st.one_of(
    st.tuples(
        st.just("services"),
        st.sampled_from(("evil/tcp/8080", "evil/tcp/80", "good/tcp/8080", "evil", "/", "")),
        row(
            machine=machine,
            app=app | st.just(GOOD),
            protocol=st.sampled_from(("tcp", "udp", "sctp")),
            internal_port=whole,
            host_port=whole,
            ports=json_text,
            concurrency=limits,
            autostop=texts,
            min_machines_running=whole,
        ),
    ),
    st.tuples(
        st.just("machines"),
        st.sampled_from(("evil", "e/v", "")),
        row(
            app=app | st.just(GOOD),
            region=st.sampled_from((REGION, "", "mad")),
            state=st.sampled_from(("started", "stopped", "dreaming", "")),
            generation=whole,
            private_ip=texts,
            standbys=texts | st.just('["evil","good"]'),
            stood_for=texts,
        ),
    ),
    st.tuples(
        st.just("checks"),
        st.sampled_from(("evil/up", "good/up", "up", "")),
        row(machine=machine, app=app, kind=texts, service=texts, status=texts),
    ),
    st.tuples(
        st.just("apps"),
        app,
        row(org=texts, created_at_ms=st.sampled_from((0, 2, 1 << 62, -1)), stamp=whole, deleted=st.booleans()),
    ),
    st.tuples(st.just("app_regions"), app, row(region=texts, machines=whole)),
    st.tuples(st.just("workers"), st.sampled_from(("bad", "")), row(region=texts, host=texts, port=whole)),
)


class Served:
    """A proxy's view of a fleet with a good app, and what reads it."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        fleet.worker("ord-1")
        fleet.worker("ord-2", port=4282, proxy=BACKHAUL)
        fleet.app(GOOD, created_at_ms=1)
        fleet.machine("good", GOOD, worker="ord-2")
        fleet.service("good", GOOD, worker="ord-2", ports=((80, 80, ("http",)), (ITS_PORT, ITS_PORT, ())))
        fleet.check("good", GOOD, status="passing", worker="ord-2")
        self.directory, self.claims = CatalogIndex(fleet.replica, REGION), PortClaims(fleet.replica, (80,))
        self.named = Named(fleet.replica)
        self.workers = Workers("token", "")
        random = fleet.host.rng.random
        self.app_table = AppTable(
            self.directory, self.workers, RouterSettings(), worker="", region=REGION, token="token", random=random
        )
        self.delegator = AppDelegator(self.app_table)
        self.router = ProxyRouter(
            self.app_table,
            RouterSettings(),
            domain="example",
            claims=lambda port: self.claims.ports.get(port, ""),
            random=random,
        )

    async def served(self, *others: str) -> None:
        """All apps are asked for; the good one is as it was."""
        self.directory.settle()
        self.claims.settle()
        self.named.standing()
        for name in others:
            for port_ in (80, ITS_PORT, 8080):
                with suppress(Refused):
                    route = await self.router.load(port_, f"{name}.example")
                    for wishes in (Wishes(), Wishes(prefer_machine="evil"), Wishes(force_machine="good")):
                        lease = route.take(wishes)
                        if lease is not None:
                            lease.release()
                self.delegator.delegation(name, port_)
        assert self.claims.ports[ITS_PORT] == GOOD
        for port_, host in ((80, f"{GOOD}.example"), (ITS_PORT, "")):
            route = await self.router.load(port_, host)
            lease = route.take(Wishes(prefer_machine="good"))
            assert lease is not None
            assert (lease.machine, lease.address) == ("good", ("127.0.0.1", BACKHAUL))
            lease.release()

    async def close(self) -> None:
        await self.router.close()
        await self.workers.close()
        for each in (self.named, self.claims, self.directory):
            each.close()
        self.fleet.close()


@given(rows=st.lists(ROWS, min_size=1, max_size=8))
@settings(max_examples=costly(8), suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_rows_of_one_owner_that_make_no_sense_leave_the_other_apps_as_they_are(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str, dict[str, Any]]]
) -> None:
    async def check() -> None:
        it = Served(Fleet(tmp_path_factory.mktemp("fleet")))
        await it.served()
        for number, (table, key, values) in enumerate(rows):
            it.fleet.put("bad", table, **{key: values})
            if number % 2:
                await it.served(*OTHERS)
        await it.served(*OTHERS)
        await it.close()

    asyncio.run(check())


@pytest.mark.parametrize("seed", [1, 2])
def test_hundreds_of_rows_off_a_poisoned_wire_leave_a_good_app_as_it_is(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    async def check() -> None:
        it = Served(Fleet(tmp_path_factory.mktemp("fleet")))
        poisoner = Poisoner(seed, it.fleet.replica)
        for _ in range(10):
            feed(it.fleet.replica, poisoner, 60)
            found = it.fleet.replica.rows("select id from apps union select app from machines order by 1")
            await it.served(*(name for (name,) in found))
        await it.close()

    asyncio.run(check())

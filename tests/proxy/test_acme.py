"""Certificates by ACME, from a real server: ordered when they are needed, renewed in time, and never twice."""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.acme_servers import Pebble, running_pebble
from tests.kit.doors import free_port
from tests.kit.planes import Embedded, Haproxy
from tests.kit.raw_http import Upstream, User, hello
from tests.kit.routers import FakeMachine, FakeRoute, FakeRouter
from tests.kit.waiting import until

import hawker.host
from hawker.errors import Invalid
from hawker.host import Host
from hawker.proxy.acme import BACK_OFF_S, Issuer
from hawker.proxy.base import ServicePort
from hawker.proxy.certificates import Certificates
from hawker.proxy.embedded.context import Challenges
from hawker.proxy.embedded.settings import Settings
from hawker.proxy.settings import AcmeSettings

pebble_is_here = pytest.mark.skipif(not shutil.which("pebble"), reason="needs Debian's package pebble")
NOBODY = AcmeSettings(directory="https://localhost:1/dir", agree_terms=True, names=("web.example",))


@pytest.fixture(scope="module")
def http_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def pebble(tmp_path_factory: pytest.TempPathFactory, http_port: int) -> Iterator[Pebble]:
    with running_pebble(tmp_path_factory.mktemp("pebble"), http_port) as pebble:
        yield pebble


class Site:
    """A proxy for the app `web`, at `web.apps.example`, on the port that Pebble looks at, and one for TLS."""

    def __init__(self, issuer: Issuer, certificates: Certificates, tls: tuple[str, int]) -> None:
        self.issuer = issuer
        self.certificates = certificates
        self.tls = tls


@asynccontextmanager
async def site(
    directory: Path,
    pebble: Pebble,
    http_port: int,
    *,
    host: Host | None = None,
    turn: Callable[[str], int] = lambda name: 0,
    look_s: float = 0.05,
    plane: type[Embedded] = Embedded,
    answers: Callable[[Issuer], Challenges] = lambda issuer: issuer,
    gone: Collection[str] = (),
    **settings: Any,
) -> AsyncIterator[Site]:
    host = host or hawker.host.live()
    upstream = Upstream(hello)
    await upstream.open()
    route = FakeRoute("web", [FakeMachine("m1", upstream.address)], ServicePort(handlers=("tls", "http")))
    router = FakeRouter(route)
    router.routes["web.apps.example"] = route
    certificates = Certificates((directory / "live",), host)
    await certificates.open()
    asked = AcmeSettings(directory=pebble.directory, ca=str(pebble.ca), agree_terms=True, **settings)
    issuer = Issuer(
        asked,
        directory,
        host,
        certificates,
        token="secret",
        domain="apps.example",
        turn=turn,
        gone=lambda apps: [app for app in apps if app in gone],
        look_s=look_s,
        gone_s=0.2,
    )
    served = plane(challenges=answers(issuer))
    engine = served.plane = served.made(router, Settings(region="ams"), host, certificates)
    await engine.listen("127.0.0.1", http_port, public=80)
    tls = await engine.listen("127.0.0.1", 0, public=443)
    await issuer.open()
    try:
        yield Site(issuer, certificates, tls)
    finally:
        await issuer.close()
        await served.close()
        await certificates.close()
        await upstream.close()


async def asked(at: Site, pebble: Pebble, name: str = "web.apps.example") -> int:
    user = await User.at(at.tls, "", pebble.trusted(), name)
    try:
        return (await user.ask(f"GET / | Host: {name}")).status
    finally:
        await user.close()


@pytest.mark.slow
@pebble_is_here
@pytest.mark.parametrize(
    "plane",
    [
        Embedded,
        pytest.param(Haproxy, marks=pytest.mark.skipif(not shutil.which("haproxy"), reason="haproxy is not installed")),
    ],
)
async def test_the_first_user_of_an_app_waits_for_its_certificate(
    tmp_path: Path, pebble: Pebble, http_port: int, plane: type[Embedded]
) -> None:
    async with site(tmp_path, pebble, http_port, plane=plane) as at:
        answers = await asyncio.gather(*(asked(at, pebble) for _ in range(5)))
        assert answers == [200] * 5
        assert len(list((tmp_path / "versions").iterdir())) == 1  # one order for all of them
        kept = tmp_path / "live" / "web.apps.example"
        assert (kept / "privkey.pem").stat().st_mode & 0o777 == 0o600
    async with site(tmp_path, pebble, http_port) as at:
        assert await asked(at, pebble) == 200
        assert at.certificates.find("web.apps.example") is not None
        assert len(list((tmp_path / "versions").iterdir())) == 1


@pytest.mark.slow
@pebble_is_here
async def test_a_certificate_goes_with_its_app_and_comes_again_with_it(
    tmp_path: Path, pebble: Pebble, http_port: int
) -> None:
    """One that the configuration names stays, whether there is such an app or not."""
    gone: set[str] = {"shop"}
    async with site(tmp_path, pebble, http_port, gone=gone, names=("shop.apps.example",)) as at:
        for name in ("web.apps.example", "shop.apps.example"):
            await at.issuer.want(name)
            assert at.certificates.covers(name)
        gone.add("web")
        await until(lambda: not at.certificates.covers("web.apps.example"))
        assert [path.name for path in (tmp_path / "live").iterdir()] == ["shop.apps.example"]
        assert [path.name.startswith("shop.apps.example.") for path in (tmp_path / "versions").iterdir()] == [True]
        gone.discard("web")
        assert await asked(at, pebble) == 200
    async with site(tmp_path, pebble, http_port, gone=gone, names=("shop.apps.example",)) as at:
        gone.add("web")
        await until(lambda: not at.certificates.covers("web.apps.example"))
        assert at.certificates.covers("shop.apps.example")
        assert not at.issuer.problems


@pytest.mark.slow
@pebble_is_here
async def test_names_that_are_configured_are_ordered_without_a_user(
    tmp_path: Path, pebble: Pebble, http_port: int
) -> None:
    async with site(tmp_path, pebble, http_port, names=("shop.example",), automatic=False) as at:
        await until(lambda: at.certificates.covers("shop.example"))
        await at.issuer.want("web.apps.example")
        assert not at.certificates.covers("web.apps.example")


@pytest.mark.slow
@pebble_is_here
async def test_a_certificate_is_renewed_when_two_thirds_of_its_life_are_over(
    tmp_path: Path, pebble: Pebble, http_port: int
) -> None:
    later_s = 0.0
    host = Host(wall_s=lambda: time.time() + later_s, rng=random.SystemRandom())
    async with site(tmp_path, pebble, http_port, host=host, names=("shop.example",)) as at:
        await until(lambda: at.certificates.covers("shop.example"))
        first = at.certificates.find("shop.example")
        assert first is not None
        life_s = (first.ends_ms - first.begins_ms) / 1000
        begun = first.begins_ms / 1000
        later_s = begun + life_s * 0.66 - time.time()
        await at.certificates.look()
        assert at.certificates.find("shop.example") is first
        later_s = begun + life_s * 0.67 - time.time()
        await until(lambda: at.certificates.find("shop.example") is not first)
        assert len(list((tmp_path / "versions").iterdir())) == 1


@pytest.mark.slow
@pebble_is_here
async def test_a_name_that_the_server_cannot_reach_is_told_of_and_not_asked_for_again_soon(
    tmp_path: Path, pebble: Pebble, http_port: int
) -> None:
    class Wrong:
        def __init__(self, issuer: Issuer) -> None:
            self.want = issuer.want

        def answer(self, host: str, target: bytes) -> bytes:
            return b"wrong"

    async with site(tmp_path, pebble, http_port, names=("shop.example",), automatic=False, answers=Wrong) as at:
        await until(lambda: "shop.example" in at.issuer.problems)
        assert "shop.example" in at.issuer.problems["shop.example"]
        assert "unauthorized" in at.issuer.problems["shop.example"]
        with pytest.raises(StopIteration):  # it waits for nothing
            at.issuer.want("shop.example").send(None)
        assert at.certificates.find("shop.example") is None


async def started(directory: Path, **more: Any) -> Issuer:
    """An issuer that finds no server."""
    host = hawker.host.live()
    options: dict[str, Any] = {"token": "secret", "domain": "apps.example", "turn": lambda name: 0} | more
    settings = options.pop("settings", NOBODY)
    issuer = Issuer(settings, directory, host, Certificates((directory / "live",), host), **options)
    await issuer.open()
    return issuer


async def test_proxies_of_one_cluster_have_one_account_and_answer_for_each_other(tmp_path: Path) -> None:
    target = b"/.well-known/acme-challenge/" + b"t" * 43
    answers = []
    for directory, token in (("a", "secret"), ("b", "secret"), ("c", "other"), ("d", ""), ("d", "")):
        issuer = await started(tmp_path / directory, token=token)
        answers.append(issuer.answer("web.example", target))
        await issuer.close()
    one, two, other, own, again = answers
    assert one is not None
    assert one.startswith(b"t" * 43 + b".")
    assert one == two != other
    assert own == again not in (one, other)


@pytest.mark.parametrize(
    ("host", "target", "answered"),
    [
        ("web.example", b"/.well-known/acme-challenge/" + b"t" * 43, True),
        ("app.apps.example", b"/.well-known/acme-challenge/" + b"t" * 43, True),
        ("a.b.apps.example", b"/.well-known/acme-challenge/" + b"t" * 43, False),
        ("apps.example", b"/.well-known/acme-challenge/" + b"t" * 43, False),
        ("customer.example", b"/.well-known/acme-challenge/" + b"t" * 43, False),
        ("web.example", b"/.well-known/acme-challenge/", False),
        ("web.example", b"/.well-known/acme-challenge/../../etc/passwd", False),
        ("web.example", b"/.well-known/security.txt", False),
    ],
)
async def test_challenges_are_answered_for_names_that_are_managed_here(
    tmp_path: Path, host: str, target: bytes, answered: bool
) -> None:
    """Those of others are their apps' own."""
    issuer = await started(tmp_path)
    assert (issuer.answer(host, target) is not None) is answered
    await issuer.close()


async def test_proxies_order_one_after_another(tmp_path: Path) -> None:
    first, second = await started(tmp_path / "1"), await started(tmp_path / "2", turn=lambda name: 1)
    await until(lambda: "web.example" in first.problems)
    assert "web.example" not in second.problems
    await first.close()
    await second.close()


async def test_there_are_only_so_many_orders_an_hour(tmp_path: Path) -> None:
    names = tuple(f"n{n}.example" for n in range(4))
    settings = AcmeSettings(directory=NOBODY.directory, agree_terms=True, names=names, orders_per_hour=2)
    issuer = await started(tmp_path, settings=settings)
    await until(lambda: len(issuer.problems) == 4)
    assert sum("in this hour" in why for why in issuer.problems.values()) == 2
    await issuer.close()


def test_failures_are_waited_out_for_longer_and_longer() -> None:
    assert list(BACK_OFF_S) == sorted(BACK_OFF_S)
    assert sum(BACK_OFF_S[:5]) > 3600  # Let's Encrypt takes five failures of a name an hour


@pytest.mark.parametrize(
    "wrong",
    [
        {"directory": "http://acme.example"},
        {"agree_terms": False},
        {"names": ("*.example",)},
        {"names": ("Upper.example",)},
        {"names": ("localhost",)},
    ],
)
def test_wrong_settings_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(Invalid, match=rf"proxy\.acme\.{next(iter(wrong))}"):
        AcmeSettings(**{"directory": "https://acme.example", "agree_terms": True, **wrong}).check()


@given(st.text(max_size=80))
def test_no_name_leads_out_of_the_directory(name: str) -> None:
    issuer = Issuer(
        AcmeSettings(directory="https://acme.example", agree_terms=True),
        Path("/nowhere"),
        hawker.host.live(),
        Certificates((), hawker.host.live()),
        token="x",
        domain="apps.example",
        turn=lambda name: 0,
    )
    if issuer.manages(name + ".apps.example"):
        assert "/" not in name
        assert ".." not in name

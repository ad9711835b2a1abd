"""TLS that HAProxy ends by itself: for which names, with which certificates, and what it hands on."""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from tests.kit.authority import Authority
from tests.kit.http2 import User2, head2
from tests.kit.raw_http import User, echo, saying
from tests.kit.waiting import eventually, until
from tests.proxy.test_haproxy import Hot
from tests.proxy.test_replays import handing

from hawker.errors import Unreachable

pytestmark = pytest.mark.skipif(shutil.which("haproxy") is None, reason="the program haproxy is not installed")

AUTHORITY = Authority()
WEB = "web.example"
OTHER = "other.apps.example"


class Secure(Hot):
    """With certificates in `directory`, and an app that wants TLS."""

    def __init__(self, directory: Path) -> None:
        super().__init__(4, 0.02)
        self.directory = directory
        self.settings["certificates"] = directory
        self.serves(handlers=("tls", "http"))

    async def one(self, *, name: str = WEB, alpn: str = "http/1.1") -> User:
        return await self.user(tls=AUTHORITY.client(alpn), name=name)

    async def two(self, name: str = WEB) -> User2:
        return await User2.at(self.plane.tls, AUTHORITY.client("h2"), name)

    async def opened(self, name: str = WEB) -> None:
        """Have HAProxy end TLS for this name."""
        await (await self.one(name=name)).ask(f"GET /first | Host: {name}")
        await until(lambda: name in self.engine.opened(443))

    async def carried(self) -> None:
        """Have it carry the app, also what changes something."""
        await self.opened()
        user = await self.one()
        await user.ask("GET /second")
        await until(lambda: ("web", 443) in self.engine.carried)
        await user.ask("POST /third | Content-Length: 0")
        await until(lambda: ("web", 443) in self.engine.writing)


@asynccontextmanager
async def secure(directory: Path, *names: str) -> AsyncIterator[Secure]:
    AUTHORITY.write(directory, WEB)
    for name in names:
        AUTHORITY.write(directory, name)
    stage = Secure(directory)
    try:
        yield stage
    finally:
        await stage.close()


def serial(user: User | User2) -> str:
    said = user.writer.get_extra_info("peercert")["serialNumber"]
    assert isinstance(said, str)
    return said


async def test_what_a_machine_and_a_user_are_told_is_the_same_whoever_ends_tls_and_carries_the_request(
    tmp_path: Path,
) -> None:
    async with secure(tmp_path) as stage:
        machine = await stage.machine(
            saying(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Own: 1\r\nServer: it\r\n\r\nhi")
        )
        await stage.open()
        told = {}
        unlike = (b"fly-request-id", b"connection", b"accept")
        for way in ("embedded", "activator", "haproxy"):
            accept = " | accept: text/event-stream" if way == "activator" else ""
            for version in ("1.1", "2"):
                if version == "2":
                    user2 = await stage.two()
                    decided, shaken = stage.decided, stage.engine.counters.handshakes
                    answer2 = await user2.ask(f"GET /{way} | :authority: {WEB}{accept}")
                    fields = [field for field in answer2.fields if field[0] != b":status"]
                    await user2.close()
                else:
                    user = await stage.one()
                    decided, shaken = stage.decided, stage.engine.counters.handshakes
                    fields = (await user.ask(f"GET /{way}{accept}")).fields
                assert stage.decided - decided == (way != "haproxy")
                visit = machine.visits[-1]
                both = [
                    sorted((name, value) for name, value in each if name not in unlike)
                    for each in (visit.fields, fields)
                ]
                told[way, version] = both, {name for name, _ in fields} >= {b"fly-request-id", b"server", b"via"}
                assert (visit["x-forwarded-proto"], visit["x-forwarded-ssl"]) == ("https", "on")
                assert (visit["via"], visit["fly-client-ip"]) == (f"{version} hawker", "127.0.0.1")
                assert told[way, version] == told["embedded", version]
            if way == "embedded":
                assert shaken  # by the embedded plane
                await until(lambda: WEB in stage.engine.opened(443))
            elif way == "activator":
                await until(lambda: ("web", 443) in stage.engine.carried)


async def test_bodies_pass_over_http2_whatever_is_said_of_their_length(tmp_path: Path) -> None:
    async with secure(tmp_path) as stage:
        machine = await stage.machine(echo)
        await stage.carried()
        user = await stage.two()
        decided = stage.decided
        for method in ("POST", "GET"):
            for length in ([], [(b"content-length", b"5")]):
                stream = user.h2.get_next_available_stream_id()
                user.h2.send_headers(stream, [*head2(f"{method} /"), *length])
                await user.send()
                user.h2.send_data(stream, b"hello", end_stream=True)
                await user.send()
                assert (await user.answer(stream)).body == b"hello"
                assert machine.visits[-1].body == b"hello"
        assert stage.decided - decided == 3, "a POST that says how long it is needs no decision"
        await user.close()


async def test_a_certificate_is_changed_while_users_are_served_and_is_there_when_haproxy_begins_anew(
    tmp_path: Path,
) -> None:
    async with secure(tmp_path, "*.apps.example") as stage:
        await stage.machine()
        stage.router.routes[OTHER] = stage.web
        await stage.carried()
        await stage.opened(OTHER)
        kept, worker = await stage.one(), await stage.engine.workers()
        before = serial(kept), serial(await stage.one(name=OTHER))
        AUTHORITY.write(tmp_path, WEB, days=100)
        certificates = stage.plane.context.certificates
        assert certificates is not None
        await certificates.look()

        async def changed() -> bool:
            return serial(await stage.one()) != before[0]

        await eventually(changed, "new connections get the new certificate")
        assert (await kept.ask("GET /")).body == b"hello"
        assert serial(await stage.one(name=OTHER)) == before[1]
        assert await stage.engine.workers() == worker, "nothing was begun anew"

        now = serial(await stage.one())
        os.kill(worker.master, signal.SIGKILL)
        os.kill(worker.serving, signal.SIGKILL)

        async def again() -> bool:
            try:
                return serial(await stage.one()) == now and (await stage.engine.workers()).master != worker.master
            except (OSError, Unreachable):
                return False

        await eventually(again, "another HAProxy ends TLS with the same certificates")
        shaken = stage.engine.counters.handshakes
        assert serial(await stage.one(name=OTHER)) == before[1]
        assert stage.engine.counters.handshakes == shaken, "the embedded plane had no part in it"
        at = stage.plane.directory / "h" / "certs"  # type: ignore[attr-defined]
        assert stat.S_IMODE(at.stat().st_mode) == 0o700
        files = list(at.iterdir())
        assert len(files) == 3
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}

        (tmp_path / "any.apps.example.crt").unlink()
        await certificates.look()
        await until(lambda: len(list(at.iterdir())) == 2)  # nor is a key left that is of no use any more


async def test_users_of_tls_notice_nothing_of_a_reload(tmp_path: Path) -> None:
    async with secure(tmp_path, "other.example") as stage:
        await stage.machine()
        await stage.carried()
        user, before = await stage.one(), await stage.engine.workers()
        two = await stage.two()
        assert (await two.ask(f"GET / | :authority: {WEB}")).status == 200
        shaken = stage.engine.counters.handshakes
        # A service that wants something else of answers is a kind of its own, for which there are no backends yet.
        other = stage.app("other")
        other.port = msgspec.structs.replace(stage.web.port, pristine=True)
        await stage.machine(route=other)
        await stage.opened("other.example")
        await (await stage.one(name="other.example")).ask("GET / | Host: other.example")
        await until(lambda: ("other", 443) in stage.engine.carried)
        assert (await stage.engine.workers()).serving != before.serving
        assert (await user.ask("GET /")).body == b"hello"
        assert (await two.ask(f"GET / | :authority: {WEB}")).status == 200
        await two.close()
        assert (await (await stage.one()).ask("GET /")).body == b"hello"
        assert stage.engine.counters.handshakes == shaken + 1, "that of the other name's first user"


async def test_a_name_whose_app_or_certificate_wants_something_else_is_the_embedded_planes_again(
    tmp_path: Path,
) -> None:
    async with secure(tmp_path) as stage:
        await stage.machine()
        await stage.carried()
        for change in ({"tls_versions": ("TLSv1.3",)}, {"alpn": ("http/1.1",)}, {"handlers": ()}, {"h2_backend": True}):
            stage.serves(**change)
            stage.delegator.changed("web")
            await until(lambda: WEB not in stage.engine.opened(443))
            stage.serves(handlers=("tls", "http"), alpn=("h2", "http/1.1"), tls_versions=("TLSv1.2", "TLSv1.3"))
            stage.serves(h2_backend=False)
            await stage.opened()
        (tmp_path / f"{WEB}.crt").unlink()
        certificates = stage.plane.context.certificates
        assert certificates is not None
        await certificates.look()
        await until(lambda: WEB not in stage.engine.opened(443))
        with pytest.raises(ssl.SSLError, match="UNRECOGNIZED_NAME"):
            await stage.one()


async def test_what_is_asked_of_another_app_over_a_connection_is_refused_as_misdirected(tmp_path: Path) -> None:
    async with secure(tmp_path) as stage:
        await stage.machine()
        other = stage.app("other")
        other.port = stage.web.port
        stage.router.routes["www.example"] = stage.web
        await stage.machine(route=other)
        await stage.carried()
        user = await stage.two()
        assert (await user.ask("GET / | :authority: other.example")).status == 421
        assert (await user.ask("GET / | :authority: www.example")).status == 200
        assert (await user.ask("GET / | :authority: nobody.example")).status == 404
        await user.close()


async def test_a_request_that_is_handed_on_arrives_with_all_that_it_was(tmp_path: Path) -> None:
    async with secure(tmp_path) as stage:
        first = await stage.machine(echo)
        second = await stage.machine(echo)
        await stage.carried()
        first.behaviour = handing("instance=m2")
        user = await stage.two()
        stream = user.h2.get_next_available_stream_id()
        user.h2.send_headers(stream, [*head2("POST /a?b"), (b"content-length", b"5")])
        user.h2.send_data(stream, b"hello", end_stream=True)
        await user.send()
        assert (await user.answer(stream)).body == b"hello"
        visit = second.visits[0]
        assert (visit.target, visit.body, visit["x-forwarded-proto"], visit["via"]) == (
            "/a?b",
            b"hello",
            "https",
            "2 hawker",
        )
        await user.close()


async def test_handshakes_are_as_with_the_embedded_plane(tmp_path: Path) -> None:
    async with secure(tmp_path) as stage:
        await stage.machine()
        await stage.carried()
        shaken = stage.engine.counters.handshakes
        for newest in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            user = await stage.user(tls=AUTHORITY.client("h2", "http/1.1", newest=newest))
            tls = user.writer.get_extra_info("ssl_object")
            assert tls.selected_alpn_protocol() == "h2"
            assert tls.version() == newest.name.replace("_", ".").replace("TLSv1", "TLSv1", 1)
        weak = AUTHORITY.client(newest=ssl.TLSVersion.TLSv1_2)
        weak.set_ciphers("ECDHE+AES:!AESGCM:!AESCCM:@SECLEVEL=0")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await stage.user(tls=weak)
        assert stage.engine.counters.handshakes == shaken

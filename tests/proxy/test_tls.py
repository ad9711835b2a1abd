"""TLS from users: the certificate of the name they ask for, what the service says of it, and what is let through."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.kit.authority import Authority
from tests.kit.http2 import User2
from tests.kit.raw_http import Visit, echo, head
from tests.kit.waiting import until
from tests.proxy.conftest import Stage
from tests.proxy.test_tunnels import plain_machine

from hawker.proxy.embedded.protocol_sniffing import ProtocolSniffer

AUTHORITY = Authority()
TLS_HTTP = ("tls", "http")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates")
    AUTHORITY.write(directory, "web.example")
    AUTHORITY.write(directory, "db.example")
    return directory


@pytest.fixture
def secure(stage: Stage, directory: Path) -> Stage:
    """Has certificates, and a service that wants them."""
    stage.settings["certificates"] = directory
    stage.serves(handlers=TLS_HTTP)
    return stage


async def test_a_request_over_tls_is_answered_and_says_so_to_the_machine(secure: Stage) -> None:
    machine = await secure.machine()
    user = await secure.user(tls=AUTHORITY.client())
    assert (await user.ask("GET /")).body == b"hello"
    assert (await user.ask("GET /again")).body == b"hello"
    visit = machine.visits[1]
    assert (visit["x-forwarded-proto"], visit["x-forwarded-ssl"]) == ("https", "on")
    assert user.writer.get_extra_info("ssl_object").version() == "TLSv1.3"


async def test_bodies_of_any_size_pass_both_ways(secure: Stage) -> None:
    await secure.machine(echo)
    user = await secure.user(tls=AUTHORITY.client())
    body = bytes(range(256)) * 20_000
    assert (await user.ask(f"POST / | Content-Length: {len(body)}", body)).body == body


async def test_the_certificate_is_that_of_the_name(secure: Stage) -> None:
    await secure.machine()
    for name in ("web.example", "db.example"):
        user = await secure.user(tls=AUTHORITY.client(), name=name)
        assert user.writer.get_extra_info("peercert")["subjectAltName"] == (("DNS", name),)


async def test_a_name_that_nobody_has_a_certificate_for_is_refused_as_tls_says(secure: Stage) -> None:
    with pytest.raises(ssl.SSLError, match="UNRECOGNIZED_NAME"):
        await secure.user(tls=AUTHORITY.client(), name="web.elsewhere")


@pytest.mark.parametrize("some", [True, False])
async def test_a_service_may_be_content_with_a_certificate_of_no_worth(secure: Stage, some: bool) -> None:
    if not some:
        secure.settings["certificates"] = None
    secure.serves(self_signed=True)
    secure.router.routes["other.example"] = secure.web
    await secure.machine()
    context = AUTHORITY.client()
    with pytest.raises(ssl.SSLCertVerificationError):
        await secure.user(tls=context, name="other.example")
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    user = await secure.user(tls=context, name="other.example")
    assert (await user.ask("GET / | Host: other.example")).status == 200


async def test_a_hello_that_makes_no_sense_is_refused(secure: Stage) -> None:
    user = await secure.user("tls")
    await user.send(b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00")
    assert await user.bytes(7) == b"\x15\x03\x03\x00\x02\x02\x32"  # decode_error


@pytest.mark.parametrize(
    ("versions", "newest", "spoken"),
    [
        (("TLSv1.2", "TLSv1.3"), ssl.TLSVersion.TLSv1_3, "TLSv1.3"),
        (("TLSv1.2", "TLSv1.3"), ssl.TLSVersion.TLSv1_2, "TLSv1.2"),
        (("TLSv1.2",), ssl.TLSVersion.TLSv1_3, "TLSv1.2"),
    ],
)
async def test_a_service_says_which_versions_are_spoken(
    secure: Stage, versions: tuple[str, ...], newest: ssl.TLSVersion, spoken: str
) -> None:
    secure.serves(tls_versions=versions)
    await secure.machine()
    user = await secure.user(tls=AUTHORITY.client(newest=newest))
    assert user.writer.get_extra_info("ssl_object").version() == spoken


async def test_a_client_too_old_for_the_service_is_told_so(secure: Stage) -> None:
    secure.serves(tls_versions=("TLSv1.3",))
    await secure.machine()
    with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
        await secure.user(tls=AUTHORITY.client(newest=ssl.TLSVersion.TLSv1_2))


async def test_an_app_that_was_not_asked_for_before_is_known_before_the_handshake(secure: Stage) -> None:
    secure.router.later.add("web.example")
    secure.serves(alpn=("http/1.1",))
    await secure.machine()
    user = await secure.user(tls=AUTHORITY.client("h2", "http/1.1"))
    assert user.writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
    assert (await user.ask("GET /")).status == 200


async def test_a_hello_may_come_in_pieces(secure: Stage) -> None:
    await secure.machine()
    plane = await secure.open()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = AUTHORITY.client().wrap_bio(incoming, outgoing, server_hostname="web.example")
    reader, writer = await asyncio.open_connection(*plane.tls)

    async def step(call: Any) -> Any:
        while True:
            try:
                return call()
            except ssl.SSLWantReadError:
                for byte in outgoing.read():
                    writer.write(bytes([byte]))
                    await writer.drain()
                incoming.write(await reader.read(1 << 16))

    await step(tls.do_handshake)
    tls.write(head("GET / | Connection: close"))
    assert (await step(lambda: tls.read(100))).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_a_handshake_that_takes_too_long_ends(secure: Stage) -> None:
    secure.settings["handshake_timeout_s"] = 0.05
    user = await secure.user("tls")
    tls = AUTHORITY.client().wrap_bio(ssl.MemoryBIO(), outgoing := ssl.MemoryBIO(), server_hostname="web.example")
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    await user.send(outgoing.read())
    assert (await user.bytes(1)) == b"\x16"
    assert b"" in await asyncio.wait_for(user.reader.read(), 5)  # it ends


async def test_a_user_who_says_nothing_is_not_waited_for(secure: Stage) -> None:
    secure.settings["head_timeout_s"] = 0.05
    user = await secure.user("tls")
    assert await user.ended() in ("closed", "reset")


async def test_closing_does_not_wait_for_handshakes_that_nobody_ends(secure: Stage) -> None:
    user = await secure.user("tls")
    tls = AUTHORITY.client().wrap_bio(ssl.MemoryBIO(), outgoing := ssl.MemoryBIO(), server_hostname="web.example")
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    await user.send(outgoing.read())
    assert (await user.bytes(1)) == b"\x16"
    async with asyncio.timeout(15):  # half of `drain_s`
        await secure.plane.close()


# --- HTTP that should be HTTPS ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_service_may_send_its_users_to_https(secure: Stage, method: str) -> None:
    secure.serves(force_https=True)
    machine = await secure.machine()
    answer = await secure.ask(f"{method} /a/b?c=d&e=%20 | Host: web.example:80")
    assert (answer.status, answer["location"]) == (301, "https://web.example/a/b?c=d&e=%20")
    assert not machine.visits
    assert (await (await secure.user(tls=AUTHORITY.client())).ask("GET /")).status == 200


async def test_http_at_a_port_of_tls_is_told_so(secure: Stage) -> None:
    await secure.machine()
    answer = await secure.ask("GET /")
    assert answer.status == 400
    assert b"TLS" in answer.body


# --- bytes -----------------------------------------------------------------------------------------------------------


async def test_tls_alone_ends_here_and_bytes_go_on(secure: Stage) -> None:
    secure.router.routes["db.example"] = secure.web
    _, seen = await plain_machine(secure, handlers=("tls",), alpn=("postgres",))
    user = await secure.user(tls=AUTHORITY.client("postgres"), name="db.example")
    assert user.writer.get_extra_info("ssl_object").selected_alpn_protocol() == "postgres"
    await user.send(b"hello")
    assert await user.bytes(5) == b"HELLO"
    assert seen == [b"hello"]
    assert len(secure.plane.context.tunnels) == 1


@pytest.mark.parametrize("version", ["v1", "v2"])
async def test_a_machine_is_told_where_a_connection_over_tls_came_from(secure: Stage, version: str) -> None:
    _, seen = await plain_machine(secure, handlers=("tls", "proxy_proto"), proxy_protocol=version)
    user = await secure.user(tls=AUTHORITY.client(), name="db.example")
    own = user.writer.get_extra_info("sockname")[1]
    await user.send(b"hello")
    await until(lambda: b"".join(seen).endswith(b"hello"))
    if version == "v1":
        assert b"".join(seen).startswith(f"PROXY TCP4 127.0.0.1 127.0.0.1 {own} ".encode())
    else:
        assert struct.unpack("!H", b"".join(seen)[24:26]) == (own,)


async def test_an_app_that_opens_tls_itself_is_found_by_the_name_and_gets_every_byte(secure: Stage) -> None:
    """As for a port of bytes that several apps share."""
    inner = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    directory = secure.settings["certificates"]
    inner.load_cert_chain(directory / "db.example.crt", directory / "db.example.key")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"the app's own")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=inner)
    secure.servers.append(server)
    await plain_machine(secure)
    secure.router.routes["db.example"].machines[0].address = server.sockets[0].getsockname()
    secure.settings["certificates"] = directory.parent / "none"
    user = await secure.user(tls=AUTHORITY.client(), name="db.example")
    assert await user.bytes(13) == b"the app's own"


async def test_on_a_port_of_its_own_the_server_may_speak_first(secure: Stage) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 welcome")
        await reader.read()
        writer.close()

    await plain_machine(secure)
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    secure.servers.append(server)
    secure.router.routes["db.example"].machines[0].address = server.sockets[0].getsockname()
    user = await secure.user("own")
    assert await user.bytes(11) == b"220 welcome"


@pytest.mark.parametrize("handlers", [("http",), ("tls", "http")])
async def test_a_port_of_its_own_may_speak_http(secure: Stage, handlers: tuple[str, ...]) -> None:
    await secure.machine()
    secure.serves(handlers=handlers)
    secure.router.by_port[5432] = secure.web
    user = await secure.user("own", tls=AUTHORITY.client() if "tls" in handlers else None)
    assert (await user.ask("GET /")).status == 200


async def test_at_a_port_of_its_own_an_app_has_no_certificate_but_its_own(secure: Stage) -> None:
    """It would be the other one to that one's users, whose browsers send cookies whatever the port is."""
    await plain_machine(secure, handlers=("tls",))
    await secure.machine()
    plane = await secure.open()
    asked: list[str] = []

    class Orders:
        async def want(self, name: str) -> None:
            asked.append(name)

        def answer(self, host: str, target: bytes) -> None: ...

    plane.context.challenges = Orders()
    for name in ("web.example", "made-up.example"):
        with pytest.raises(ssl.SSLError, match="UNRECOGNIZED_NAME"):
            await secure.user("own", tls=AUTHORITY.client(), name=name)
    assert asked == [], "nor is one ordered for whatever name a user makes up"
    user = await secure.user("own", tls=AUTHORITY.client(), name="db.example")
    await user.send(b"mine")
    assert await user.bytes(4) == b"MINE"


@pytest.mark.parametrize("version", ["h2", "http/1.1"])
async def test_a_connection_that_was_made_for_one_app_serves_no_other(secure: Stage, version: str) -> None:
    await secure.machine()
    other = secure.app("db")
    other.port = msgspec.structs.replace(secure.web.port, tls_versions=("TLSv1.3",))
    machine = await secure.machine(route=other)
    context = AUTHORITY.client(version, newest=ssl.TLSVersion.TLSv1_2)  # which the other app does not speak
    if version == "h2":
        user2 = await User2.at((await secure.open()).tls, context, "web.example")
        answers = [await user2.ask(f"GET / | :authority: {host}") for host in ("db.example", "web.example")]
        await user2.close()
        assert [answer.status for answer in answers] == [421, 200]
    else:
        user = await secure.user(tls=context)
        assert [(await user.ask(f"GET / | Host: {h}")).status for h in ("db.example", "web.example")] == [421, 200]
    assert machine.visits == []


# --- PostgreSQL ------------------------------------------------------------------------------------------------------

SSL_REQUEST, GSS_REQUEST = struct.pack("!II", 8, 80877103), struct.pack("!II", 8, 80877104)


def postgres(address: tuple[str, int], first: bytes = b"") -> bytes:
    """What a client of PostgreSQL does: asks for TLS, speaks it, and says hello."""
    with socket.create_connection(address, timeout=10) as plain:
        if first:
            plain.sendall(first)
            assert plain.recv(1) == b"N"
        plain.sendall(SSL_REQUEST)
        assert plain.recv(1) == b"S"
        with AUTHORITY.client().wrap_socket(plain, server_hostname="db.example") as tls:
            tls.sendall(b"startup")
            return tls.recv(100)


@pytest.mark.parametrize("to", ["tls", "own"])
@pytest.mark.parametrize("first", [b"", GSS_REQUEST], ids=["", "gss"])
async def test_postgresql_asks_for_tls_in_its_own_way(secure: Stage, to: str, first: bytes) -> None:
    _, seen = await plain_machine(secure, handlers=("pg_tls",))
    plane = await secure.open()
    assert await asyncio.to_thread(postgres, getattr(plane, to), first) == b"STARTUP"
    assert seen == [b"startup"]


async def test_bytes_smuggled_in_before_tls_are_not_taken(secure: Stage) -> None:
    await plain_machine(secure, handlers=("pg_tls",))
    user = await secure.user("tls")
    await user.send(SSL_REQUEST + b"\x16\x03")
    assert await user.ended() in ("closed", "reset")


async def test_a_service_without_pg_tls_does_not_take_postgresql(secure: Stage) -> None:
    await secure.machine()
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.to_thread(postgres, (await secure.open()).tls)


async def test_machines_that_end_a_connection_end_it_for_the_user_too(secure: Stage) -> None:
    async def closing(visit: Visit) -> None:
        await visit.read()
        await visit.send(b"HTTP/1.1 200 OK\r\n\r\nall")
        visit.close()

    await secure.machine(closing)
    user = await secure.user(tls=AUTHORITY.client())
    assert (await user.ask("GET / | Connection: close")).body == b"all"
    assert await user.ended() == "closed"
    assert not [each for each in secure.plane.context.connections if isinstance(each, ProtocolSniffer)]


async def test_a_user_who_reads_slowly_gets_all_of_the_last_answer(secure: Stage) -> None:
    """Of which much is still in the proxy when it closes the connection."""
    large = b"x" * (16 << 20)
    secure.settings |= {"linger_s": 0.1, "window_bytes": 2 * len(large)}

    async def answering(visit: Visit) -> None:
        await visit.answer(large)

    await secure.machine(answering)
    user = await secure.user(tls=AUTHORITY.client())
    user.writer.transport.pause_reading()  # type: ignore[attr-defined]  # the stream's own transport can
    await user.send(head("GET / | Connection: close"))
    (machine,) = secure.web.machines
    await until(lambda: bool(machine.taken and not machine.in_flight))
    late = asyncio.get_running_loop().time() + 0.3
    await until(lambda: asyncio.get_running_loop().time() >= late)
    user.writer.transport.resume_reading()  # type: ignore[attr-defined]
    assert (await user.answer()).body == large

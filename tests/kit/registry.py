"""Registries for tests: Debian's docker-registry, a token server, and a front that stands before a registry and spoils
what passes.

```
registry = DockerRegistry(directory); registry.start()      # http://127.0.0.1:<port>
async with Front(registry.port) as front:                   # what it is asked is in front.requests
    front.spoil("blobs/", Cut(after=1000), times=1)
    await put(front.host, "app:1", image([...]))
```

`put` pushes a `tests.kit.oci.Made`. Every port is the system's choice, and all is on loopback.
"""

from __future__ import annotations

import asyncio
import base64
import datetime
import ipaddress
import json
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.x509.oid import NameOID
from tests.kit.oci import Made
from tests.kit.waiting import wait_until

USER, PASSWORD = "reader", "open sesame"
IDENTITY = "who-i-am"
"""An identity token that the token server takes in place of both."""
HTPASSWD = "reader:$2y$05$abcdefghijklmnopqrstuupx2xBUC4954936wVIjyyPHmUBFu0wCW\n"
"""The same, as bcrypt has it."""
SERVICE, ISSUER = "registry.test", "tokens.test"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class DockerRegistry:
    """Debian's docker-registry. `auth` and `tls`: as its configuration has them, JSON being YAML."""

    def __init__(
        self, directory: Path, auth: Mapping[str, object] | None = None, tls: Mapping[str, str] | None = None
    ) -> None:
        self.port = free_port()
        self._directory = directory
        self._auth = auth
        self._tls = tls
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        program = shutil.which("docker-registry")
        if program is None:
            pytest.skip("needs docker-registry (Debian: docker-registry)")
        self._directory.mkdir(parents=True, exist_ok=True)
        config = {
            "version": "0.1",
            "storage": {"filesystem": {"rootdirectory": str(self._directory / "storage")}},
            "http": {"addr": self.host, **({"tls": self._tls} if self._tls else {})},
            "log": {"level": "error", "accesslog": {"disabled": True}},
            **({"auth": self._auth} if self._auth else {}),
        }
        path = self._directory / "registry.yml"
        path.write_text(json.dumps(config))
        log = (self._directory / "log").open("wb")
        with log:
            self._process = subprocess.Popen([program, "serve", str(path)], stdout=log, stderr=log)
        wait_until(self._listens, "docker-registry listens")

    def _listens(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._directory / "log").read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self) -> None:
        """As a power cut would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerRegistry]:
    """One for a module; its tests take repositories of their own."""
    found = DockerRegistry(tmp_path_factory.mktemp("registry"))
    found.start()
    yield found
    found.stop()


async def put(host: str, name: str, made: Made, headers: Mapping[str, str] | None = None, ca: str | None = None) -> str:
    """Push an image to `http://host` as `repository:tag`; with `ca`, a file, to `https://host`. Returns its
    reference."""
    repository, _, tag = name.partition(":")
    base = f"{'https' if ca else 'http'}://{host}/v2/{repository}/"
    verify = ssl.create_default_context(cafile=ca) if ca else True
    async with httpx2.AsyncClient(base_url=base, headers=headers, trust_env=False, verify=verify) as client:
        for digest, data in made.blobs.items():
            begun = await client.post("blobs/uploads/")
            assert begun.status_code == 202, begun.text
            done = await client.put(begun.headers["location"], params=_with_digest(begun, digest), content=data)
            assert done.status_code == 201, done.text
        for digest, (media_type, data) in made.manifests.items():
            await _put_manifest(client, digest, media_type, data)
        await _put_manifest(client, tag or made.digest, made.media_type, made.manifest)
    return f"{host}/{repository}" + (f":{tag}" if tag else f"@{made.digest}")


def _with_digest(begun: httpx2.Response, digest: str) -> dict[str, str]:
    return {**httpx2.URL(begun.headers["location"]).params, "digest": digest}


async def _put_manifest(client: httpx2.AsyncClient, name: str, media_type: str, data: bytes) -> None:
    done = await client.put(f"manifests/{name}", content=data, headers={"Content-Type": media_type})
    assert done.status_code == 201, done.text


# Certificates and tokens


def certificate(name: str) -> tuple[rsa.RSAPrivateKey, x509.Certificate]:
    """A key and what vouches for it: itself. Good for 127.0.0.1, for a day."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    return key, made


def write_tls(directory: Path) -> dict[str, str]:
    """A certificate and its key in files, as `DockerRegistry` takes them: `certificate` and `key`."""
    key, made = certificate("registry.test")
    files = {"certificate": directory / "tls.pem", "key": directory / "tls.key"}
    files["certificate"].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    files["key"].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
    return {name: str(path) for name, path in files.items()}


class TokenServer:
    """Gives tokens that docker-registry takes (distribution.github.io/distribution/spec/auth/jwt/) to those who know
    USER and PASSWORD. `asked`: the query of each request, `lasts_s`: what it says of its tokens."""

    def __init__(self, directory: Path, lasts_s: int = 300) -> None:
        self.asked: list[dict[str, list[str]]] = []
        self.granted = 0
        self.lasts_s = lasts_s
        self.port = free_port()
        self._key, self._certificate = certificate(ISSUER)
        self._bundle = directory / "tokens.pem"
        directory.mkdir(parents=True, exist_ok=True)
        self._bundle.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    @property
    def realm(self) -> str:
        return f"http://127.0.0.1:{self.port}/token"

    @property
    def auth(self) -> dict[str, object]:
        """For `DockerRegistry`."""
        bundle = str(self._bundle)
        return {"token": {"realm": self.realm, "service": SERVICE, "issuer": ISSUER, "rootcertbundle": bundle}}

    async def __aenter__(self) -> TokenServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    def token(self, scopes: list[str]) -> str:
        access = []
        for scope in scopes:
            kind, name, actions = scope.split(":")
            access.append({"type": kind, "name": name, "actions": actions.split(",")})
        now = int(time.time())
        header = {
            "typ": "JWT",
            "alg": "RS256",
            "x5c": [base64.b64encode(self._certificate.public_bytes(serialization.Encoding.DER)).decode()],
        }
        claims = {"iss": ISSUER, "sub": USER, "aud": SERVICE, "exp": now + 300, "nbf": now - 10, "iat": now}
        signed = f"{_base64(json.dumps(header))}.{_base64(json.dumps({**claims, 'jti': 'x', 'access': access}))}"
        signature = self._key.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256())
        return f"{signed}.{_base64(signature)}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await read_request(reader)
        if request is not None:
            query = parse_qs(urlsplit(request.target).query)
            self.asked.append(query)
            wanted = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
            form = parse_qs(request.body.decode())
            known = request.headers.get("authorization") == wanted
            if form.get("refresh_token") == [IDENTITY] and form.get("grant_type") == ["refresh_token"]:
                known, query = True, {**form, "scope": form["scope"][0].split(" ")}
            if known:
                self.granted += 1
                body = json.dumps({"token": self.token(query.get("scope", [])), "expires_in": self.lasts_s}).encode()
                writer.write(answer(200, body, {"Content-Type": "application/json"}))
            else:
                writer.write(answer(401, b"{}"))
            await writer.drain()
        writer.close()


def _base64(data: str | bytes) -> str:
    raw = data.encode() if isinstance(data, str) else data
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


# The front


@dataclass(frozen=True)
class Asked:
    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True)
class Answer:
    """What the registry behind said."""

    status: int
    headers: Mapping[str, str]
    body: bytes


Spoil = Callable[[Asked, Answer, asyncio.StreamWriter], Awaitable[None]]
"""Writes an answer in the place of the true one; the connection is closed afterwards."""


def cut(after: int) -> Spoil:
    """Dies after so many bytes of the body."""

    async def spoil(asked: Asked, true: Answer, writer: asyncio.StreamWriter) -> None:
        whole = answer(true.status, true.body, true.headers)
        head = len(whole) - len(true.body)
        writer.write(whole[: head + after])
        await writer.drain()
        writer.transport.abort() if after == 0 else writer.close()

    return spoil


def corrupt(at: int = 0) -> Spoil:
    """One bit of the body is another."""

    async def spoil(asked: Asked, true: Answer, writer: asyncio.StreamWriter) -> None:
        body = bytearray(true.body)
        body[at] ^= 1
        writer.write(answer(true.status, bytes(body), true.headers))
        await writer.drain()

    return spoil


def shorten(to: int) -> Spoil:
    """A body of so many bytes, as if it were the whole."""

    async def spoil(asked: Asked, true: Answer, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(true.status, true.body[:to], true.headers))
        await writer.drain()

    return spoil


def replace(body: bytes) -> Spoil:
    async def spoil(asked: Asked, true: Answer, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(true.status, body, true.headers))
        await writer.drain()

    return spoil


def status(code: int, headers: Mapping[str, str] | None = None, body: bytes = b"") -> Spoil:
    async def spoil(asked: Asked, true: Answer, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(code, body, headers or {}))
        await writer.drain()

    return spoil


def passed() -> Spoil:
    """Not spoiled: for counting."""

    async def spoil(asked: Asked, true: Answer, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(true.status, true.body, true.headers))
        await writer.drain()

    return spoil


def redirect(to: Callable[[Asked], str]) -> Spoil:
    async def spoil(asked: Asked, true: Answer, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(307, b"", {"Location": to(asked)}))
        await writer.drain()

    return spoil


def hold(gate: asyncio.Event, after: int = 0) -> Spoil:
    """Stops after so many bytes of the body until the gate is open."""

    async def spoil(asked: Asked, true: Answer, writer: asyncio.StreamWriter) -> None:
        whole = answer(true.status, true.body, true.headers)
        head = len(whole) - len(true.body)
        writer.write(whole[: head + after])
        await writer.drain()
        await gate.wait()
        writer.write(whole[head + after :])
        await writer.drain()

    return spoil


@dataclass
class _Rule:
    part: str
    spoil: Spoil
    method: str
    times: int | None
    arrives: bool


@dataclass
class Front:
    """Listens on a port of its own and passes everything on to the registry at `to`, but for what is to be spoiled.

    `requests`: all that were asked, in order. `basic`: a user name and password that it wants to see first.
    `ranges` False: it does not pass ranges on.
    """

    to: int
    basic: tuple[str, str] | None = None
    ranges: bool = True
    requests: list[Asked] = field(default_factory=list)
    _rules: list[_Rule] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> Front:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def spoil(
        self, part: str, spoil: Spoil, *, times: int | None = None, method: str = "GET", arrives: bool = True
    ) -> None:
        """Spoil the answers to requests whose target contains `part`, the next so many; None: all. `arrives` False: the
        registry behind never sees them."""
        self._rules.append(_Rule(part, spoil, method, times, arrives))

    def heal(self) -> None:
        self._rules.clear()

    def asked(self, part: str, method: str = "GET") -> list[Asked]:
        return [one for one in self.requests if part in one.target and one.method == method]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            request = await read_request(reader)
            if request is not None:
                await self._answer(request, writer)
        except ConnectionError:
            pass  # the client left
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        self.requests.append(asked)
        if self.basic is not None:
            wanted = "Basic " + base64.b64encode(":".join(self.basic).encode()).decode()
            if asked.headers.get("authorization") != wanted:
                writer.write(answer(401, b"{}", {"WWW-Authenticate": 'Basic realm="front"'}))
                await writer.drain()
                return
        for rule in self._rules:
            if rule.part in asked.target and rule.method == asked.method and rule.times != 0:
                rule.times = None if rule.times is None else rule.times - 1
                await rule.spoil(asked, await self._true(asked) if rule.arrives else Answer(0, {}, b""), writer)
                return
        true = await self._true(asked)
        writer.write(answer(true.status, true.body, true.headers, head_only=asked.method == "HEAD"))
        await writer.drain()

    async def _true(self, asked: Asked) -> Answer:
        """By HTTP/1.0: the answer ends with the connection."""
        skipped = {"connection", "content-length", "transfer-encoding"}
        skipped |= {"authorization"} if self.basic else set()
        skipped |= set() if self.ranges else {"range"}
        headers = {name: value for name, value in asked.headers.items() if name not in skipped}
        headers["content-length"] = str(len(asked.body))
        reader, writer = await asyncio.open_connection("127.0.0.1", self.to)
        head = f"{asked.method} {asked.target} HTTP/1.0\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(head.encode() + b"\r\n" + asked.body)
        raw = await reader.read()
        writer.close()
        top, _, body = raw.partition(b"\r\n\r\n")
        first, *lines = top.decode().split("\r\n")
        found = dict(line.split(": ", 1) for line in lines)
        return Answer(int(first.split(" ")[1]), found, body)


async def read_request(reader: asyncio.StreamReader) -> Asked | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().removesuffix("\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.split("\r\n")
    method, target, _ = first.split(" ")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    body = b""
    if headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
    elif length := int(headers.get("content-length", "0")):
        body = await reader.readexactly(length)
    return Asked(method, target, headers, body)


def answer(code: int, body: bytes, headers: Mapping[str, str] | None = None, *, head_only: bool = False) -> bytes:
    kept = {name: value for name, value in (headers or {}).items() if name.lower() not in ("connection", "date")}
    if not (head_only and any(name.lower() == "content-length" for name in kept)):
        kept = {name: value for name, value in kept.items() if name.lower() != "content-length"}
        kept["Content-Length"] = str(len(body))
    lines = "".join(f"{name}: {value}\r\n" for name, value in kept.items())
    return f"HTTP/1.1 {code} Status\r\n{lines}Connection: close\r\n\r\n".encode() + (b"" if head_only else body)


async def pieces(data: bytes, size: int = 4096) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]

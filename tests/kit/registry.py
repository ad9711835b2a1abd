"""Registries for tests: Debian's docker-registry, a token server, and `put`, which pushes a `tests.kit.oci.Made`.

```
registry = DockerRegistry(directory); registry.start()      # http://127.0.0.1:<port>
await put(registry.host, "app:1", image([...]))
```

Every port is the system's choice, and all is on loopback. What spoils their answers is in `tests.kit.front`.
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
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.x509.oid import NameOID
from tests.kit.front import Front, answer, read_request
from tests.kit.oci import Made
from tests.kit.ports import free_port as free_port
from tests.kit.waiting import wait_until

USER, PASSWORD = "reader", "open sesame"
IDENTITY = "who-i-am"
"""An identity token that the token server takes in place of both."""
HTPASSWD = "reader:$2y$05$abcdefghijklmnopqrstuupx2xBUC4954936wVIjyyPHmUBFu0wCW\n"
"""The same, as bcrypt has it."""
SERVICE, ISSUER = "registry.test", "tokens.test"


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


@pytest.fixture
async def front(registry: DockerRegistry) -> AsyncIterator[Front]:
    """A front of the module's registry."""
    async with Front(registry.port) as found:
        yield found


async def put(host: str, name: str, made: Made, headers: Mapping[str, str] | None = None, ca: str | None = None) -> str:
    """Push an image to `http://host` as `repository:tag`; with `ca`, a file, to `https://host`. Returns its
    reference."""
    repository, _, tag = name.partition(":")
    base = f"{'https' if ca else 'http'}://{host}/v2/{repository}/"
    verify = ssl.create_default_context(cafile=ca) if ca else False  # what the system trusts takes long to read
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

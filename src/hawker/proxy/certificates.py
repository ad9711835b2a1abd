"""Serves certificates from files: finds them by the name that a client asks for, and reads them again when they change.

    certificates = Certificates((Path("/etc/hawker/certificates"),), host, default="")
    await certificates.open()
    found = certificates.find("www.example")                    # None: nobody has one for this name
    context = found.context(("h2", "http/1.1"), ("TLSv1.2", "TLSv1.3"))
    await certificates.close()

In a directory a certificate is `NAME.crt` with `NAME.key`, or `NAME/fullchain.pem` with `NAME/privkey.pem`, as certbot
keeps them. Which names it is for, it says itself. A pair that makes no sense is told of and passed over; what was read
from the same place before stays in use.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from hawker.core.metrics import Family
from hawker.host import Host
from hawker.model.services import TLS_VERSIONS
from hawker.telemetry import get_logger

LOOK_S = 10.0
"""How often the directories are looked at."""
WARN_DAYS = 21
"""How long before a certificate's end the proxy warns of it: those of Let's Encrypt are renewed with 30 days left."""
WARN_AGAIN_S = 86_400.0
SELF_SIGNED_KEPT = 1024
TLS12_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Ciphers of TLS 1.2 with forward secrecy and authenticated encryption; TLS 1.3 has no others (RFC 9325, 4.2)."""

_DAY_MS = 86_400_000
_VERSIONS = {"TLSv1.2": ssl.TLSVersion.TLSv1_2, "TLSv1.3": ssl.TLSVersion.TLSv1_3}
_Mark = tuple[tuple[int, int, int], ...]
"""The time, size and number of a pair's files: a changed pair differs in one of them."""


class Certificate:
    """`name` says where it is from; `names` are those it is for, in lower case. `pem` has chain and key.
    Times are Unix milliseconds."""

    def __init__(self, name: str, chain: bytes, key: bytes) -> None:
        """Raises `ValueError` when it is none, or the key is another's."""
        self.name = name
        certificate = x509.load_pem_x509_certificate(chain)
        self.names = _names_of(certificate)
        if not self.names:
            raise ValueError("the certificate names no server")
        self.begins_ms = int(certificate.not_valid_before_utc.timestamp() * 1000)
        self.ends_ms = int(certificate.not_valid_after_utc.timestamp() * 1000)
        self.pem = chain.rstrip() + b"\n" + key
        self._contexts: dict[tuple[tuple[str, ...], tuple[str, ...]], ssl.SSLContext] = {}
        self.context(())

    def context(self, alpn: Sequence[str], versions: Sequence[str] = TLS_VERSIONS) -> ssl.SSLContext:
        """The TLS context for a handshake in which the server speaks these protocols, the best first. No ALPN: whatever
        comes is the app's."""
        key = tuple(alpn), tuple(versions)
        context = self._contexts.get(key)
        if context is None:
            context = self._contexts[key] = self._made(*key)
        return context

    def _made(self, alpn: tuple[str, ...], versions: tuple[str, ...]) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        allowed = [_VERSIONS[version] for version in versions if version in _VERSIONS] or list(_VERSIONS.values())
        context.minimum_version, context.maximum_version = min(allowed), max(allowed)
        context.set_ciphers(TLS12_CIPHERS)
        context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
        if alpn:
            context.set_alpn_protocols(alpn)
        # OpenSSL takes files alone, and those on the disk may be others by now.
        with contextlib.closing(_Held(self.pem)) as held:
            try:
                context.load_cert_chain(held.path, password=lambda: b"")  # without one it would ask at a terminal
            except ssl.SSLError as error:
                raise ValueError(_explained(error)) from None
        return context


class Certificates:
    """`problems` are those of pairs that cannot be used, and of certificates that end soon, by where they are from.
    `version` is another one when there are other certificates."""

    def __init__(self, directories: Sequence[Path], host: Host, *, default: str = "", look_s: float = LOOK_S) -> None:
        """`default` is the name of the one for clients that ask for none of the names."""
        self._directories = tuple(directories)
        self._host = host
        self._default = default
        self._look_s = look_s
        self._known: dict[str, tuple[_Mark, Certificate | None]] = {}
        self._bad: dict[str, str] = {}
        self._by_name: dict[str, Certificate] = {}
        self._chosen: dict[Certificate, list[str]] = {}
        self.version = 0
        self._warned: dict[str, float] = {}
        self._listen_probe = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        await self.look()
        self._task = asyncio.create_task(self._watch(), name="certificates")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def all(self) -> list[Certificate]:
        return [certificate for _, certificate in self._known.values() if certificate is not None]

    def find(self, name: str) -> Certificate | None:
        """The certificate for this name, for the name itself or as `*.` of its parent; else the default one."""
        return self.named(name) or self._by_name.get("")

    def covers(self, name: str) -> bool:
        """Whether there is a certificate for this name, beside the default one."""
        return self.named(name) is not None

    def chosen(self, certificate: Certificate) -> list[str]:
        """Which of these names this certificate is used for, `*.` of a parent among them."""
        return self._chosen.get(certificate, [])

    def named(self, name: str) -> Certificate | None:
        """The certificate for this name, but not the default one."""
        return self._by_name.get(name) or self._by_name.get("*." + name.partition(".")[2])

    @property
    def problems(self) -> dict[str, str]:
        soon = self._host.now_ms() + WARN_DAYS * _DAY_MS
        found = dict(self._bad)
        for each in self.all:
            if each.ends_ms < soon:
                found.setdefault(each.name, self._ending(each))
        if self._default and "" not in self._by_name:
            found.setdefault(self._default, "there is no such certificate, and it is to be the default one")
        return found

    async def look(self) -> None:
        """Read at once what has changed."""
        async with self._listen_probe:
            await self._look()

    async def _look(self) -> None:
        known, bad = await asyncio.to_thread(_read, self._directories, self._known, self._bad)
        for name, why in bad.items():
            if self._bad.get(name) != why:
                _logger.warning("certificates.bad", name=name, error=why, cause="a look at the directory")
        for name, (_, certificate) in known.items():
            if certificate is not None and self._known.get(name, ((), None))[1] is not certificate:
                _logger.info("certificates.read", name=name, names=certificate.names, cause="a look at the directory")
        self._known, self._bad = known, bad
        self._sort()
        self._warn()

    def collect(self) -> Iterator[Family]:
        name = "hawker_proxy_certificate_expiry_timestamp_seconds"
        ends = Family("gauge", name, "When certificates end, in Unix time", ["name"])
        for each in self.all:
            ends.add(each.ends_ms / 1000, each.name)
        yield ends
        problems = Family("gauge", "hawker_proxy_certificate_problems", "Certificates unusable or soon to end")
        yield problems.add(len(self.problems))

    def _sort(self) -> None:
        """If several certificates are for one name, use the one that lasts longest."""
        by_name: dict[str, Certificate] = {}
        for each in sorted(self.all, key=lambda each: each.ends_ms):
            by_name |= dict.fromkeys(each.names, each)
            if each.name == self._default:
                by_name[""] = each
        chosen: dict[Certificate, list[str]] = {}
        for name, each in by_name.items():
            if name:
                chosen.setdefault(each, []).append(name)
        if chosen != self._chosen:
            self._chosen = chosen
            self.version += 1
        self._by_name = by_name

    def _ending(self, certificate: Certificate) -> str:
        left_ms = certificate.ends_ms - self._host.now_ms()
        if left_ms < 0:
            return f"the certificate ended {-left_ms // _DAY_MS} days ago"
        return f"the certificate ends in {left_ms // _DAY_MS} days"

    def _warn(self) -> None:
        now = self._host.now_ms() / 1000
        problems = self.problems
        self._warned = {name: at for name, at in self._warned.items() if name in problems}
        for name, why in problems.items():
            if name not in self._bad and now - self._warned.get(name, -WARN_AGAIN_S) >= WARN_AGAIN_S:
                self._warned[name] = now
                _logger.warning("certificates.ending", name=name, error=why, cause="a look at the directory")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._look_s)
            try:
                await self.look()
            except OSError as error:
                _logger.warning("certificates.not_read", error=str(error), cause="a look at the directory")


class SelfSigned:
    """Makes self-signed certificates for services that say `default_self_signed`, when they are asked for. They are
    forgotten with this process."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._made: dict[str, Certificate] = {}

    def find(self, name: str) -> Certificate:
        known = self._made.get(name)
        if known is None or known.ends_ms < self._host.now_ms() + _DAY_MS:
            if len(self._made) >= SELF_SIGNED_KEPT:
                del self._made[next(iter(self._made))]
            known = self._made[name] = self._make(name or "hawker.invalid")
        return known

    def _make(self, name: str) -> Certificate:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
        now = datetime.datetime.fromtimestamp(self._host.now_ms() / 1000, datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(key.public_key())
            .serial_number(self._host.rng.getrandbits(127) + 1)
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=30))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .sign(key, hashes.SHA256())
        )
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return Certificate(name, certificate.public_bytes(Encoding.PEM), private)


class _Held:
    """A file with these bytes that this process alone sees."""

    def __init__(self, data: bytes) -> None:
        self._descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
        self.path = f"/proc/self/fd/{self._descriptor}"
        with open(self._descriptor, "wb", closefd=False) as file:
            file.write(data)

    def close(self) -> None:
        os.close(self._descriptor)


def _read(
    directories: Sequence[Path], known: dict[str, tuple[_Mark, Certificate | None]], bad: dict[str, str]
) -> tuple[dict[str, tuple[_Mark, Certificate | None]], dict[str, str]]:
    """Read a directory: what is there now, and what of it cannot be used; what has not changed is taken as it was
    known."""
    now: dict[str, tuple[_Mark, Certificate | None]] = {}
    now_bad: dict[str, str] = {}
    for name, chain, key in _pairs(directories, now_bad):
        before = known.get(name)
        mark: _Mark = ()
        try:
            mark = _mark(chain), _mark(key)
            if before is not None and before[0] == mark:
                now[name] = before
                if name in bad:
                    now_bad[name] = bad[name]
                continue
            read = chain.read_bytes(), key.read_bytes()
            if mark != (_mark(chain), _mark(key)):
                mark = ()  # it changes at this moment: once more at the next look
            now[name] = mark, Certificate(name, *read)
        except (OSError, ValueError) as error:
            now_bad[name] = f"{chain} and {key} cannot be used: {error}"
            now[name] = mark, before[1] if before else None
    return now, now_bad


def _pairs(directories: Sequence[Path], bad: dict[str, str]) -> Iterator[tuple[str, Path, Path]]:
    """The pairs of files in the directories, by name; of two with the same name the first directory's counts."""
    seen = set()
    for directory in directories:
        try:
            entries = sorted(directory.iterdir())
        except FileNotFoundError:
            continue
        except OSError as error:
            bad[str(directory)] = f"{directory} cannot be read: {error.strerror}"
            continue
        for entry in entries:
            if entry.suffix == ".crt":
                name, chain, key = entry.stem, entry, entry.with_suffix(".key")
            elif (chain := entry / "fullchain.pem").exists():
                name, key = entry.name, entry / "privkey.pem"
            else:
                continue
            if name not in seen:
                seen.add(name)
                yield name, chain, key


def _mark(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def _names_of(certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names = [*alternatives.get_values_for_type(x509.DNSName)]
        names += [str(address) for address in alternatives.get_values_for_type(x509.IPAddress)]
    except x509.ExtensionNotFound:
        names = [str(each.value) for each in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    return tuple(dict.fromkeys(name.lower() for name in names))


def _explained(error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key is not the certificate's"
    return f"the certificate or its key is not readable, or the key is encrypted ({error.reason or error})"


_logger = get_logger()

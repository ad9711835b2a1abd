"""A certificate authority for tests: certificates for any names, made in a millisecond, and clients that trust them."""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


class Authority:
    """`pem` is its own certificate."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "an authority of tests")])
        certificate = self._built(self._name, self._key, x509.BasicConstraints(ca=True, path_length=None), 365)
        self.pem = certificate.public_bytes(Encoding.PEM).decode()

    def pair(self, *names: str, days: float = 90) -> tuple[bytes, bytes]:
        """Certificate and key as PEM, for `days` from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        alternatives = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
        certificate = self._built(subject, key, alternatives, days)
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return certificate.public_bytes(Encoding.PEM), private

    def write(self, directory: Path, *names: str, days: float = 90) -> None:
        """As `NAME.crt` and `NAME.key`, where NAME is the first one."""
        stem = names[0].replace("*", "any")
        directory.mkdir(parents=True, exist_ok=True)
        certificate, key = self.pair(*names, days=days)
        (directory / f"{stem}.crt").write_bytes(certificate)
        (directory / f"{stem}.key").write_bytes(key)

    def client(self, *alpn: str, newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
        """Trusts this authority alone."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=self.pem)
        context.maximum_version = newest
        if alpn:
            context.set_alpn_protocols(alpn)
        return context

    def _built(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, extension: x509.ExtensionType, days: float
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        ends = now + datetime.timedelta(days=days)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(min(now, ends) - datetime.timedelta(days=1))
            .not_valid_after(ends)
            .add_extension(extension, critical=False)
            .sign(self._key, hashes.SHA256())
        )

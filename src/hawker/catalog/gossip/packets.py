"""Sealed messages: every packet and body between members is encrypted and authenticated, and names its cluster.

AES-256-GCM-SIV (RFC 8452) under a random nonce: two messages that meet the same nonce by chance show whether they are
equal, and nothing else. A message is: version, cluster, key (1 + 4 + 1 bytes, so that a stranger's is told apart
without work), nonce (12), ciphertext and tag (16). The head is authenticated, too.

Several keys may be in force: the first one seals, all open. To change keys, add the new one at the end everywhere, then
put it first everywhere, then take the old one away.

The library that seals is imported with the first message: an agent without neighbours has 4 MiB less without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from random import Random
from typing import TYPE_CHECKING

import msgspec

from hawker.errors import Invalid

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCMSIV

UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""What decoding raises for bytes of a stranger: also text that is no UTF-8, and lists within lists without end."""
PACKET_MAX = 1232
"""Bytes of a UDP payload that pass everywhere: IPv6's 1280 less its 40 and UDP's 8."""
_VERSION = 1
_HEAD_BYTES = 6
_NONCE_BYTES = 12
SEAL_BYTES = _HEAD_BYTES + _NONCE_BYTES + 16
PAYLOAD_MAX = PACKET_MAX - SEAL_BYTES


class NotOurs(ValueError):
    """A message that does not open: `why` is one of a few fixed words, for counting."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Sealer:
    """Seals and opens messages of one cluster. `secrets` are texts of any length, the first one seals."""

    def __init__(self, cluster: str, secrets: Sequence[str], rng: Random) -> None:
        if not secrets:
            raise ValueError("a cluster has at least one key")
        self._rng = rng
        cluster_tag = blake2b(cluster.encode(), digest_size=4, person=b"hawker-cluster").digest()
        self._keys: dict[bytes, bytes] = {}  # by the head of a message
        self._ciphers: dict[bytes, AESGCMSIV] = {}  # of those that were used
        for secret in secrets:
            key = blake2b(secret.encode(), digest_size=32, person=b"hawker-catalog").digest()
            key_tag = blake2b(key, digest_size=1, person=b"hawker-key-id").digest()
            head = bytes([_VERSION]) + cluster_tag + key_tag
            if head in self._keys:
                raise Invalid(
                    "catalog.keys", "...", "two of these keys cannot be told apart by their tags: draw another"
                )
            self._keys[head] = key
        self._head = next(iter(self._keys))
        self._cluster = self._head[1:5]

    def seal(self, payload: bytes) -> bytes:
        nonce = self._rng.getrandbits(8 * _NONCE_BYTES).to_bytes(_NONCE_BYTES, "big")
        return self._head + nonce + self._cipher(self._head).encrypt(nonce, payload, self._head)

    def open(self, message: bytes) -> bytes:
        """Raises `NotOurs`: too short, of another version, cluster or key, or changed on its way."""
        if len(message) < SEAL_BYTES:
            raise NotOurs("short")
        head = message[:_HEAD_BYTES]
        if head not in self._keys:
            raise NotOurs(
                "version" if head[0] != _VERSION else "cluster" if head[1:5] != self._cluster else "unknown key"
            )
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher(head).decrypt(
                message[_HEAD_BYTES : _HEAD_BYTES + _NONCE_BYTES], message[_HEAD_BYTES + _NONCE_BYTES :], head
            )
        except InvalidTag:
            raise NotOurs("forged") from None

    def _cipher(self, head: bytes) -> AESGCMSIV:
        cipher = self._ciphers.get(head)
        if cipher is None:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCMSIV

            cipher = self._ciphers[head] = AESGCMSIV(self._keys[head])
        return cipher

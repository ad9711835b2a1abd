"""Who we are to a registry: credentials, the challenges that registries answer with, and what comes of them.

A registry that wants to know answers 401 with a challenge (RFC 9110, section 11.6.1): `Basic`, or `Bearer` with the
address of a token server (distribution.github.io/distribution/spec/auth/token/). Credentials belong to one host. They
go to it and to the token server that it names, and nowhere else.
"""

from __future__ import annotations

import base64
import re
from typing import Any

import msgspec

TOKEN_S = 60.0
"""How long a token lasts if it does not say so (token specification, `expires_in`)."""
TOKEN_S_MAX = 86_400.0
"""More than any registry gives. What is said may be a number of any length."""
TOKENS_MAX, TOKEN_BYTES_MAX = 1000, 32 << 10
"""Kept at a time: whoever names images chooses registries and scopes."""
_MARGIN_S = 5.0
_TOKEN68 = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_PART = re.compile(r'\s*,?\s*([!#$%&\'*+.^_`|~0-9A-Za-z-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s",]+))')
_SCHEME = re.compile(r"\s*,?\s*([!#$%&'*+.^_`|~0-9A-Za-z-]+)(?:\s+|$|(?=,))")


class Credentials(msgspec.Struct, frozen=True):
    """`token`: an identity token, exchanged for others at the token server; then there is no password."""

    username: str = ""
    password: str = ""
    token: str = ""

    def __bool__(self) -> bool:
        return bool(self.username or self.token)

    def __repr__(self) -> str:
        return f"Credentials({self.username!r})"  # into no log

    @property
    def basic(self) -> str:
        return "Basic " + base64.b64encode(f"{self.username}:{self.password}".encode()).decode()


class Challenge(msgspec.Struct, frozen=True):
    """`scheme` and the names of `values` are in lower case."""

    scheme: str
    values: dict[str, str] = {}


def read_challenges(header: str) -> list[Challenge]:
    """What a `WWW-Authenticate` header offers. What does not read as a challenge ends the list."""
    found: list[Challenge] = []
    at = 0
    while match := _SCHEME.match(header, at):
        at = match.end()
        values: dict[str, str] = {}
        while part := _PART.match(header, at):
            at = part.end()
            quoted = part[2]
            values[part[1].lower()] = re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else part[3]
        if not values and (lone := _TOKEN68.match(header, at)) and header[lone.end() :].lstrip()[:1] in ("", ","):
            at = lone.end()
        found.append(Challenge(match[1].lower(), values))
    return found


class Tokens:
    """What was granted, until it expires: `Authorization` headers by registry and scope. Times in seconds of one
    monotonic clock."""

    def __init__(self) -> None:
        self._granted: dict[tuple[str, str], tuple[str, float]] = {}

    def get(self, origin: str, scope: str, now_s: float) -> str | None:
        found = self._granted.get((origin, scope))
        return found[0] if found and now_s < found[1] else None

    def put(self, origin: str, scope: str, header: str, expires_s: float) -> None:
        self._granted.pop((origin, scope), None)
        self._granted[origin, scope] = header, expires_s - _MARGIN_S
        if len(self._granted) > TOKENS_MAX:
            del self._granted[next(iter(self._granted))]

    def drop(self, origin: str, scope: str) -> None:
        self._granted.pop((origin, scope), None)

    def __repr__(self) -> str:
        return f"Tokens({len(self._granted)})"


class _Granted(msgspec.Struct):
    token: str = ""
    access_token: str = ""
    expires_in: Any = None


def read_token(data: bytes) -> tuple[str, float] | None:
    """The token in a token server's answer, and for how many seconds it holds. None: there is none."""
    try:
        granted = msgspec.json.decode(data, type=_Granted)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    token = granted.token or granted.access_token
    if len(token) > TOKEN_BYTES_MAX or not re.fullmatch(r"[\x21-\x7e]+", token):
        return None
    lasts = granted.expires_in
    return token, float(min(max(lasts, TOKEN_S), TOKEN_S_MAX)) if isinstance(lasts, int | float) else TOKEN_S

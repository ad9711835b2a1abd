"""Credentials that Docker keeps for registries: in the file that `docker login` writes, and with credential helpers.

The file says `credHelpers`, a helper for some registries, `credsStore`, one for all others, and `auths`, those that are
in the file itself. A helper is a program `docker-credential-<name>`, looked up in PATH, that is given the server's name
on its standard input and answers with JSON (github.com/docker/docker-credential-helpers, "Development").
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import msgspec

from hawker.images.auth import Credentials
from hawker.images.settings import ImageSettings, docker_config_path

HELPER_S = 15.0
"""A helper that asks a person, as some key rings do, would wait for ever: nobody sees it here."""
_ANSWER_BYTES_MAX = 64 << 10
_HUB = "registry-1.docker.io"
_HUB_NAMES = (_HUB, "docker.io", "index.docker.io")
_HUB_SERVER = "https://index.docker.io/v1/"
_NOT_FOUND = "credentials not found in native keychain"
_IDENTITY = "<token>"
"""Stands in place of a user name when the secret is an identity token."""


class HelperFailed(Exception):
    """A credential helper gave no answer; the text says why, and names it."""


class _Auth(msgspec.Struct):
    auth: str = ""
    identitytoken: str = ""
    username: str = ""
    password: str = ""


class _Config(msgspec.Struct):
    auths: dict[str, _Auth] = {}
    cred_helpers: dict[str, str] = msgspec.field(default_factory=dict, name="credHelpers")
    creds_store: str = msgspec.field(default="", name="credsStore")


class _Answer(msgspec.Struct):
    username: str = msgspec.field(default="", name="Username")
    secret: str = msgspec.field(default="", name="Secret")


async def credentials_for(settings: ImageSettings, host: str) -> Credentials:
    """The credentials from the configuration, or else those that Docker has now; empty (false) where neither has any.
    Raises `HelperFailed`."""
    own = settings.registry(host)
    if own.username or own.token:
        return Credentials(own.username, own.password, own.token)
    path = docker_config_path(settings)
    return await docker_credentials(Path(path), host) if path else Credentials()


async def docker_credentials(path: Path, host: str, *, limit_s: float = HELPER_S) -> Credentials:
    """None of a file that is not there or that we cannot read or understand: it is somebody else's. What a helper does
    not have may be in the file. Raises `HelperFailed`."""
    try:
        config = msgspec.json.decode(await asyncio.to_thread(path.read_bytes), type=_Config)
    except (OSError, msgspec.DecodeError):
        return Credentials()
    names = _HUB_NAMES if host == _HUB else (host,)
    helper = next((name for key, name in config.cred_helpers.items() if _bare(key) in names), config.creds_store)
    if helper and (found := await _from_helper(helper, _HUB_SERVER if host == _HUB else host, path, limit_s)):
        return found
    return next(filter(None, (_of(auth) for key, auth in config.auths.items() if _bare(key) in names)), Credentials())


def _bare(key: str) -> str:
    return re.sub(r"^https?://|/.*$", "", key)


def _of(auth: _Auth) -> Credentials | None:
    username, password = auth.username, auth.password
    if auth.auth:
        try:
            username, _, password = base64.b64decode(auth.auth).decode().partition(":")
        except ValueError:
            return None
    if auth.identitytoken:
        return Credentials(username, "", auth.identitytoken)
    return Credentials(username, password)


async def _from_helper(name: str, server: str, path: Path, limit_s: float) -> Credentials:
    program = f"docker-credential-{name}"
    found = shutil.which(program) if "/" not in name else None
    if found is None:
        raise HelperFailed(f"{program}, which {path} names, is not in PATH")
    process = await asyncio.create_subprocess_exec(
        *(found, "get"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        limit=_ANSWER_BYTES_MAX,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(limit_s):
            said = await _asked(process, server)
    except BaseException as error:
        with suppress(ProcessLookupError):  # with all that it started
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if isinstance(error, TimeoutError):
            raise HelperFailed(f"{program} gave no answer for {server} within {limit_s:g} s") from error
        raise
    if process.returncode:
        if said.decode(errors="replace").strip() == _NOT_FOUND:
            return Credentials()
        raise HelperFailed(f"{program} for {server}: {_printable(said) or f'it ended with {process.returncode}'}")
    try:
        answer = msgspec.json.decode(said, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HelperFailed(f"{program} for {server}: its answer is no credentials") from error  # it may hold a secret
    if answer.username == _IDENTITY:
        return Credentials(token=answer.secret)
    return Credentials(answer.username, answer.secret)


async def _asked(process: asyncio.subprocess.Process, server: str) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError, ConnectionResetError):  # it does not want to know
        process.stdin.write(server.encode())
        await process.stdin.drain()
        process.stdin.close()
    said = bytearray()
    while len(said) < _ANSWER_BYTES_MAX and (piece := await process.stdout.read(_ANSWER_BYTES_MAX - len(said))):
        said += piece
    await process.wait()
    return bytes(said)


def _printable(said: bytes) -> str:
    first = said.decode(errors="replace").strip().partition("\n")[0]
    return "".join(character for character in first[:200] if character.isprintable())

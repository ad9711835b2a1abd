"""Gives HAProxy its certificates: over its runtime API while it runs, and as files for its next start.

    keyring = Keyring(directory, runtime)
    await keyring.follow({"9f86d081.pem": Key(pem, ("web.example",))})
    keyring.write()                                             # before HAProxy is begun, or begun anew

A certificate is a file with its chain and its private key. The list says by which names each is chosen. HAProxy reads
both when it starts, as root, and from then on it knows only what it is told.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from hawker.errors import Unreachable
from hawker.proxy.certificates import Certificate
from hawker.proxy.haproxy.runtime import Runtime, ask
from hawker.proxy.haproxy.tls_config import list_of
from hawker.telemetry import get_logger

MOST = 15_000
"""The most bytes of one certificate: a command has to fit HAProxy's buffer."""
_BLOCK = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----\n.*?-----END \1-----", re.DOTALL)
_LINE = re.compile(r"(\S+):(\d+)(?: |$)")


class Key(msgspec.Struct, frozen=True):
    """A certificate's chain and private key, and the names by which it is chosen, `*.` for any label."""

    pem: bytes
    names: tuple[str, ...]


def key_of(certificate: Certificate, names: tuple[str, ...]) -> Key:
    """The text as HAProxy reads it: an empty line would end it."""
    blocks = [match.group().replace(b"\r", b"") for match in _BLOCK.finditer(certificate.pem.replace(b"\r\n", b"\n"))]
    pem = b"\n".join(block.replace(b"\n\n", b"\n") for block in blocks) + b"\n"
    return Key(pem, names)


class Keyring:
    """`held` are the keys that HAProxy has, by file. It has not those that it refused, and is not asked again until
    they change."""

    def __init__(self, directory: Path, runtime: Runtime) -> None:
        self._at = directory / "certs"
        self._list = list_of(str(directory))
        self._runtime = runtime
        self._refused: dict[str, Key] = {}
        self.held: dict[str, Key] = {}

    async def adopt(self) -> None:
        """Take over what an HAProxy has that serves already: which files, but not what is in them. Raises
        `Unreachable`."""
        self.held = {Path(path).name: Key(b"", ()) for path, _ in await self._lines()}

    async def follow(self, wanted: Mapping[str, Key]) -> None:
        """Let HAProxy have these certificates, and no others. Raises `Unreachable`."""
        for file, key in wanted.items():
            held = self.held.get(file)
            if held is not key and held != key and self._refused.get(file) != key:
                await self._put(file, key, held or Key(b"", ()))
        for file in self.held.keys() - wanted.keys():
            await self._drop(file)
        self._refused = {file: key for file, key in self._refused.items() if file in wanted}

    def write(self) -> None:
        """Write the files that the next HAProxy starts with: nobody but who starts it may read them. Raises
        `OSError`."""
        self._at.mkdir(exist_ok=True, mode=0o700)
        lines = []
        for file, key in self.held.items():
            if not key.pem:
                continue  # it was another's certificate, and could not be replaced
            _write(self._at / file, key.pem)
            lines.append(_line(self._at / file, key))
        _write(Path(self._list), "".join(lines).encode())
        for path in self._at.glob("*.pem"):
            if path.name not in self.held:
                self._unlink(path.name)

    def remove(self) -> None:
        """Remove the files: there is no HAProxy any more that could start with them."""
        for path in self._at.glob("*"):
            path.unlink(missing_ok=True)

    def _unlink(self, file: str) -> None:
        (self._at / file).unlink(missing_ok=True)

    async def _put(self, file: str, key: Key, held: Key) -> None:
        path = str(self._at / file)
        if len(key.pem) > MOST:
            self._refuse(file, key, f"it has more than {MOST} bytes")
            return
        if held.pem != key.pem:
            steps = f"new ssl cert {path}\nset ssl cert {path} <<\n{key.pem.decode('latin-1')}\ncommit ssl cert {path}"
            said = await self._said(steps)
            if "Success!" not in said:
                await self._said(f"abort ssl cert {path}")
                self._refuse(file, key, said)
                return
        if held.names != key.names:
            said = await self._said(f"add ssl crt-list {self._list} <<\n{_line(self._at / file, key)}")
            if "Success!" not in said:
                self._refuse(file, key, said)
                return
            numbers = [number for where, number in await self._lines() if where == path]
            await self._leave(path, numbers[:-1])
        self.held[file] = key
        self._refused.pop(file, None)

    def _refuse(self, file: str, key: Key, said: str) -> None:
        self._refused[file] = key
        lines = said.strip().splitlines()
        _logger.warning("haproxy.not_secured", names=key.names, said=lines[-1:], cause="a certificate is needed")

    async def _drop(self, file: str) -> None:
        path = str(self._at / file)
        await self._leave(path, [number for where, number in await self._lines() if where == path])
        await self._said(f"del ssl cert {path}")
        del self.held[file]
        self._unlink(file)  # the reply has a private key in it

    async def _leave(self, path: str, numbers: list[int]) -> None:
        """Remove lines from the last one on: the others keep their numbers."""
        for number in sorted(numbers, reverse=True):
            await self._said(f"del ssl crt-list {self._list} {path}:{number}")

    async def _lines(self) -> list[tuple[str, int]]:
        """The files with their line numbers in the list, in its order."""
        said = await self._said(f"show ssl crt-list -n {self._list}")
        found = (_LINE.match(line) for line in said.splitlines())
        return [(match[1], int(match[2])) for match in found if match]

    async def _said(self, commands: str) -> str:
        said = await ask(self._runtime.path, [commands])
        if said.startswith("Unknown command"):
            raise Unreachable(f"HAProxy does not understand: {commands.partition(chr(10))[0]}")
        return said


def _line(path: Path, key: Key) -> str:
    return f"{path} {' '.join(key.names)}\n"


def _write(path: Path, data: bytes) -> None:
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
    os.replace(new, path)


_logger = get_logger()

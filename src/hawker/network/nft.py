"""libnftables: its library, called in this process. Rules go in as nftables' language, elements and answers are JSON.

Nothing is made or read by running `nft`, and nothing it prints for people is parsed: errors are passed on as they are.
A `Tables` is used by one thread at a time.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec

from hawker.network import ruleset
from hawker.network.base import NetworkError, Settings
from hawker.network.plan import Element

LIBRARY = "libnftables.so.1"
MISSING = f"{LIBRARY} is not installed: it is in Debian's package libnftables1 (apt install libnftables1)"
OUTPUT_JSON = 1 << 4
NETLINK_NETFILTER = 12
GETTABLE, TABLE_NAME = 10 << 8 | 1, 1
REQUEST, DUMP = 0x1, 0x300
NLMSG_ERROR, NLMSG_DONE = 2, 3
_HEADER = struct.Struct("=IHHII")
_Json = dict[str, Any]


class Library:
    """One context of libnftables. `OSError` from the constructor: the library is not there."""

    def __init__(self) -> None:
        nft = self._nft = ctypes.CDLL(LIBRARY)
        pointer, number, text = ctypes.c_void_p, ctypes.c_uint, ctypes.c_char_p
        for name, result, arguments in (
            ("nft_ctx_new", pointer, [ctypes.c_uint32]),
            ("nft_ctx_free", None, [pointer]),
            ("nft_ctx_output_set_flags", None, [pointer, number]),
            ("nft_ctx_buffer_output", ctypes.c_int, [pointer]),
            ("nft_ctx_buffer_error", ctypes.c_int, [pointer]),
            ("nft_ctx_get_output_buffer", text, [pointer]),
            ("nft_ctx_get_error_buffer", text, [pointer]),
            ("nft_run_cmd_from_buffer", ctypes.c_int, [pointer, text]),
        ):
            function = getattr(nft, name)
            function.restype, function.argtypes = result, arguments
        self._context = nft.nft_ctx_new(0)
        if not self._context:
            raise OSError("libnftables has no memory for a context")
        nft.nft_ctx_output_set_flags(self._context, OUTPUT_JSON)
        nft.nft_ctx_buffer_output(self._context)
        nft.nft_ctx_buffer_error(self._context)

    def run(self, commands: str) -> list[_Json]:
        """Run commands as one transaction: either form. Returns the objects listed. Raises `NetworkError`."""
        status = self._nft.nft_run_cmd_from_buffer(self._context, commands.encode())
        output = self._nft.nft_ctx_get_output_buffer(self._context)
        error = self._nft.nft_ctx_get_error_buffer(self._context)
        if status != 0:
            raise NetworkError(f"nftables: {' '.join(error.decode(errors='replace').split()) or 'no reason given'}")
        return list(msgspec.json.decode(output)["nftables"]) if output else []

    def close(self) -> None:
        if self._context:
            self._nft.nft_ctx_free(self._context)
            self._context = None


class Tables:
    """The two tables of one worker."""

    def __init__(self, worker: str, settings: Settings, library: Library) -> None:
        self._worker, self._settings, self._library = worker, settings, library
        self._name = ruleset.table(worker)
        self.mark = ruleset.mark(worker, settings)
        self._sizes = ruleset.sizes(worker, settings)

    def read(self) -> tuple[str, frozenset[Element]]:
        """The mark of what is there, and the elements that machines have. The mark is "" if rules were changed."""
        there = {
            table["family"]
            for each in self._run({"list": {"tables": None}})
            if (table := each.get("table")) and table["name"] == self._name
        }
        if there & {"inet", "arp"} != {"inet", "arp"}:
            return ("" if not there else "partly there"), frozenset()
        mark = ""
        elements: set[Element] = set()
        sizes: dict[tuple[str, str], int] = defaultdict(int)
        for family in ("inet", "arp"):
            for each in self._run({"list": {"table": {"family": family, "name": self._name}}}):
                if rule := each.get("rule"):
                    sizes[family, rule["chain"]] += 1
                elif (chain := each.get("chain")) and chain["name"].startswith(ruleset.MARK):
                    mark = chain["name"]
                elif (found := each.get("set") or each.get("map")) and found["name"] in ruleset.DYNAMIC:
                    elements |= {_element(family, found["name"], it) for it in found.get("elem", ())}
        changed = mark == self.mark and dict(sizes) != self._sizes
        return ("changed" if changed else mark or "not ours"), frozenset(elements)

    def make(self, mark: str) -> None:
        """Replace both tables, or remove them where the mark is empty."""
        self._library.run(ruleset.text(self._worker, self._settings) if mark else ruleset.removal(self._worker))

    def change(self, gone: Iterable[Element], new: Iterable[Element]) -> None:
        commands = [*self._commands("delete", gone), *self._commands("add", new)]
        if commands:
            self._run(*commands)

    def _commands(self, verb: str, elements: Iterable[Element]) -> list[_Json]:
        by_set: dict[tuple[str, str], list[Any]] = defaultdict(list)
        for it in sorted(elements):
            key = _json(it.key)
            by_set[it.family, it.set].append([key, _json(it.value)] if it.value and verb == "add" else key)
        return [
            {verb: {"element": {"family": family, "table": self._name, "name": name, "elem": elem}}}
            for (family, name), elem in by_set.items()
        ]

    def _run(self, *commands: _Json) -> list[_Json]:
        return self._library.run(msgspec.json.encode({"nftables": commands}).decode())


def table_names() -> frozenset[str]:
    """Those of all tables of this thread's network namespace, asked of the kernel itself: the library takes seven
    megabytes for that, and keeps them. Raises `OSError`."""
    found: set[str] = set()
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER) as asking:
        asking.bind((0, 0))
        asking.send(_HEADER.pack(_HEADER.size + 4, GETTABLE, REQUEST | DUMP, 1, 0) + bytes(4))
        while True:
            data, at = asking.recv(1 << 16), 0
            while at + _HEADER.size <= len(data):
                length, kind, _, _, _ = _HEADER.unpack_from(data, at)
                if kind == NLMSG_DONE:
                    return frozenset(found)
                if kind == NLMSG_ERROR:
                    number = -struct.unpack_from("=i", data, at + _HEADER.size)[0]
                    raise OSError(number, os.strerror(number))
                found.add(_name_in(data[at + _HEADER.size + 4 : at + length]))
                at += length + 3 & ~3


def _name_in(attributes: bytes) -> str:
    at = 0
    while at + 4 <= len(attributes):
        size, kind = struct.unpack_from("=HH", attributes, at)
        if size < 4:
            break
        if kind & 0x3FFF == TABLE_NAME:
            return attributes[at + 4 : at + size].rstrip(b"\0").decode(errors="replace")
        at += size + 3 & ~3
    return ""


def problem() -> str:
    """Why nftables cannot be used here, or ""."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return MISSING
    try:
        table_names()
    except OSError as error:
        return f"the kernel's nftables cannot be used: {error.strerror}"
    return ""


def _json(parts: tuple[str | int, ...]) -> Any:
    return parts[0] if len(parts) == 1 else {"concat": list(parts)}


def _element(family: str, name: str, it: Any) -> Element:
    if isinstance(it, list):
        return Element(family, name, _parts(it[0]), _parts(it[1]))
    return Element(family, name, _parts(it))


def _parts(it: Any) -> tuple[str | int, ...]:
    if isinstance(it, dict) and "elem" in it:  # an element with a comment or the like, that somebody else put there
        return _parts(it["elem"]["val"])
    return tuple(map(_plain, it["concat"])) if isinstance(it, dict) and "concat" in it else (_plain(it),)


def _plain(it: Any) -> str | int:
    """Addresses as Python writes them."""
    if isinstance(it, str) and ":" in it:
        return socket.inet_ntop(socket.AF_INET6, socket.inet_pton(socket.AF_INET6, it))
    return it if isinstance(it, str | int) else msgspec.json.encode(it).decode()

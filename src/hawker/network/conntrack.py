"""Forgetting a machine's connections. The kernel goes on translating those it has begun with: who keeps sending to a
published port would be led to a machine that is gone for as long as he does not pause."""

from __future__ import annotations

import os
import socket
import struct

NETLINK_NETFILTER = 12
DELETE = 1 << 8 | 2
REQUEST, ACK = 0x1, 0x4
MARK, MARK_MASK = 8, 21
_HEADER = struct.Struct("=IHHII")


class Connections:
    """Those of the network namespace it is made in. Raises `OSError`."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
        self._socket.bind((0, 0))

    def close(self) -> None:
        self._socket.close()

    def forget(self, mark: int) -> None:
        """All that carry a mark, of both families."""
        body = b"\0\0\0\0" + b"".join(
            struct.pack("=HHI", 8, kind, socket.htonl(it))
            for kind, it in (
                (MARK, mark),
                (MARK_MASK, 0xFFFF_FFFF),
            )
        )
        self._socket.send(_HEADER.pack(_HEADER.size + len(body), DELETE, REQUEST | ACK, 1, 0) + body)
        status = struct.unpack_from("=i", self._socket.recv(1 << 12), _HEADER.size)[0]
        if status:
            raise OSError(-status, os.strerror(-status))

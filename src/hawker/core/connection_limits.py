"""How many connections a server keeps in all and from one address.

Whoever connects has shown no token yet. Each connection takes a descriptor of the process, so those that say nothing
could take the descriptors that its databases, its machines and its proxy need.
"""

from __future__ import annotations

from typing import Final

OF_ONE_SHARE: Final = 4
"""One address may have the connections divided by this, because all users of an office may share the address."""


class ConnectionLimits:
    """Counts connections by address. At most `most` are kept, and at most `most_of_one` of one address; 0: a share of
    all. Of no address ("", or b"") there may be any number."""

    def __init__(self, most: int, most_of_one: int = 0) -> None:
        self.most = most
        self.most_of_one = most_of_one or max(16, most // OF_ONE_SHARE)
        self.kept = 0
        self._of: dict[str | bytes, int] = {}

    def has_room(self, address: str | bytes) -> bool:
        return self.kept < self.most and (not address or self._of.get(address, 0) < self.most_of_one)

    def enter(self, address: str | bytes) -> bool:
        """Count one more connection; False: there are too many, and it is not counted."""
        if not self.has_room(address):
            return False
        self.count(address)
        return True

    def count(self, address: str | bytes) -> None:
        """Count a connection that is there already."""
        self.kept += 1
        self._of[address] = self._of.get(address, 0) + 1

    def leave(self, address: str | bytes) -> None:
        """Count one less, of those that entered."""
        self.kept -= 1
        self._of[address] -= 1
        if not self._of[address]:
            del self._of[address]


def shares(descriptors: int) -> tuple[int, int]:
    """How many connections the API and the users of the proxy may have, of a process that may open `descriptors`.

    The API gets an eighth, and at most 4,096. A user's request takes two descriptors, one to its machine. 256 and a
    tenth stay for databases, machines, other agents and logs."""
    api = max(16, min(4096, descriptors // 8))
    spare = 256 + descriptors // 10
    return api, max(16, (descriptors - spare - api) // 2)

"""How many connections a server keeps, of everybody and of one address.

Whoever connects has shown no token yet. Each connection takes a descriptor of the process, so those that say nothing
could take the descriptors that its databases, its machines and its proxy need.
"""

from __future__ import annotations


class ConnectionLimits:
    """Counts connections by address. At most `most` are kept, and at most `most_of_one` of one address."""

    def __init__(self, most: int, most_of_one: int) -> None:
        self.most = most
        self.most_of_one = most_of_one
        self.kept = 0
        self._of: dict[str, int] = {}

    def enter(self, address: str) -> bool:
        """Count one more connection; False: there are too many, and it is not counted."""
        of_one = self._of.get(address, 0)
        if self.kept >= self.most or of_one >= self.most_of_one:
            return False
        self.kept += 1
        self._of[address] = of_one + 1
        return True

    def leave(self, address: str) -> None:
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

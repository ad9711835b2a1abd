"""What HAProxy is wished to carry, as long as it was not told of it. Pure."""

from __future__ import annotations

from hawker.proxy.haproxy.carried import HOSTS_MOST, Key


class Wish:
    """Hosts of an app's public port that HAProxy may carry; `writing`: those that were sent what changes something."""

    __slots__ = ("hosts", "writing")

    def __init__(self) -> None:
        self.hosts: set[str] = set()
        self.writing: set[str] = set()


class Wished:
    """All of them."""

    def __init__(self) -> None:
        self._wishes: dict[Key, Wish] = {}

    def add(self, key: Key, host: str, *, writing: bool) -> bool:
        """Whether that is news."""
        wish = self._wishes.setdefault(key, Wish())
        hosts = wish.writing if writing else wish.hosts
        if host in hosts or len(hosts) >= HOSTS_MOST:
            return False
        hosts.add(host)
        return True

    def again(self, key: Key, wish: Wish) -> None:
        """It could not be done yet."""
        known = self._wishes.setdefault(key, wish)
        known.hosts |= wish.hosts
        known.writing |= wish.writing

    def taken(self) -> dict[Key, Wish]:
        """All that there are, which are none any more."""
        wishes, self._wishes = self._wishes, {}
        return wishes

"""The apps and hosts that HAProxy may carry, and was not told of yet. Pure."""

from __future__ import annotations

from hawker.proxy.haproxy.backends import HOSTS_MOST, Key


class PendingHosts:
    """The hosts of an app's public port that HAProxy may carry; `writing`: those that were sent requests which change
    something."""

    __slots__ = ("hosts", "writing")

    def __init__(self) -> None:
        self.hosts: set[str] = set()
        self.writing: set[str] = set()


class Pending:
    """All that HAProxy was not told of, by app and public port."""

    def __init__(self) -> None:
        self._hosts: dict[Key, PendingHosts] = {}

    def add(self, key: Key, host: str, *, writing: bool) -> bool:
        """Add a host. Returns whether that is news."""
        new_hosts = self._hosts.setdefault(key, PendingHosts())
        hosts = new_hosts.writing if writing else new_hosts.hosts
        if host in hosts or len(hosts) >= HOSTS_MOST:
            return False
        hosts.add(host)
        return True

    def again(self, key: Key, new_hosts: PendingHosts) -> None:
        """Put hosts back that HAProxy could not be told of yet."""
        known = self._hosts.setdefault(key, new_hosts)
        known.hosts |= new_hosts.hosts
        known.writing |= new_hosts.writing

    def taken(self) -> dict[Key, PendingHosts]:
        """Take all that are there."""
        all_hosts, self._hosts = self._hosts, {}
        return all_hosts

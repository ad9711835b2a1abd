"""The protocol's constants and formulas: memberlist's, which the Lifeguard paper (arXiv 1707.00788) describes."""

from __future__ import annotations

import math

import msgspec
from msgspec.structs import replace


class Settings(msgspec.Struct, frozen=True):
    """Times in seconds. The defaults are for one region."""

    probe_interval: float = 1.0
    probe_timeout: float = 0.5
    """After this time helpers are asked. The member has until the end of the interval to answer."""
    helpers: int = 3
    gossip_interval: float = 0.2
    gossip_fanout: int = 3
    retransmit_mult: int = 4
    suspicion_mult: int = 4
    suspicion_max_mult: int = 6
    push_pull_interval: float = 15.0
    """This does not grow with the group, as it does in memberlist, because a digest is exchanged first."""
    gossip_to_dead: float = 30.0
    """A dead member gets gossip for so long, which gives it a chance to refute."""
    remember_dead: float = 86_400.0
    """This is longer than gossip carries anything, and long enough for a region that was cut off for a day to find
    back."""
    members_max: int = 65_536
    """Newcomers are refused once so many members are known, the dead included."""
    health_max: int = 7
    lifeguard: bool = True
    """False gives plain SWIM: a fixed suspicion timeout, and no nacks, local health, buddy rule or stream probe."""

    def suspicion_min(self, members: int) -> float:
        """The shortest timeout of a suspicion. It grows with the logarithm of the group's size, like the time of
        gossip."""
        return self.suspicion_mult * max(1.0, math.log10(max(1, members))) * self.probe_interval

    def suspicion_max(self, members: int) -> float:
        return self.suspicion_min(members) * (self.suspicion_max_mult if self.lifeguard else 1)

    def confirmations(self, members: int) -> int:
        """How many others must agree for the shortest timeout; 0 if the group has not so many."""
        wanted = self.suspicion_mult - 2
        return wanted if self.lifeguard and members - 2 >= wanted else 0

    def suspicion_timeout(self, confirmed: int, wanted: int, members: int) -> float:
        """`confirmed` counts accusers after the first. Lifeguard's "local health aware suspicion"."""
        shortest = self.suspicion_min(members)
        if wanted < 1:
            return shortest
        longest = self.suspicion_max(members)
        return max(shortest, longest - (longest - shortest) * math.log(confirmed + 1) / math.log(wanted + 1))

    def retransmits(self, members: int) -> int:
        """How often a rumour is sent by each who hears it."""
        return self.retransmit_mult * math.ceil(math.log10(members + 1))


LAN = Settings()
WAN = Settings(
    probe_interval=5.0,
    probe_timeout=3.0,
    gossip_interval=0.5,
    gossip_fanout=4,
    suspicion_mult=6,
    push_pull_interval=60.0,
    gossip_to_dead=60.0,
)


def plain(settings: Settings) -> Settings:
    """SWIM as it was before Lifeguard."""
    return replace(settings, lifeguard=False)

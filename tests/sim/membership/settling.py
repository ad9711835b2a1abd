"""What must hold of membership after its faults have stopped (L5), and when."""

from __future__ import annotations

from tests.sim.membership.watch import Broken
from tests.sim.membership.world import World

from hawker.core.swim import Settings, Status


def check_settled(world: World) -> None:
    """L5: whoever runs is alive everywhere, in its present life; whoever does not is alive nowhere."""
    for n, node in enumerate(world.nodes):
        if not world.up[n]:
            continue
        for subject, other in enumerate(world.nodes):
            view = node.members.get(other.me.name)
            if world.up[subject] and not other.beliefs.leaving:
                if view is None or view.status is not Status.alive or view.member != other.me:
                    raise Broken(f"m{n} believes of m{subject}, which runs: {view}")
            elif view is not None and view.status.live:
                raise Broken(f"m{n} believes of m{subject}, which is gone: {view}")


def settles_in(settings: Settings, members: int) -> float:
    """Seconds after the last fault by which L5 must hold: a suspicion that nobody else confirms; before that a first
    miss, at worst with health at its lowest; after it gossip, or else two rounds of push-pull."""
    periods = settings.probe_interval * (1 + settings.health_max)
    gossip = settings.retransmits(members) * settings.gossip_interval
    return settings.suspicion_max(members) + 4 * periods + gossip + 4 * settings.push_pull_interval

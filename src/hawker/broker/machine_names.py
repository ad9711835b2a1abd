"""Names for machines that were not given one: `adjective-noun-NNNN`, as clients of this API expect."""

from __future__ import annotations

from random import Random

_ADJECTIVES = (
    "amber bold brisk calm clear cold cool crisp dawn deep dry early fair fine gold green icy late lively long "
)
_MORE = "misty mild muddy new old pale plain quiet red rough shy small snowy still sunny warm white wild windy young"
_NOUNS = "bird brook cloud dew dust field fire flower fog forest glade grass haze hill lake leaf meadow moon mountain "
_OTHERS = "night paper pine pond rain river sea shadow sky smoke snow sound star sun surf tree violet water wave wind"


def machine_name(rng: Random) -> str:
    adjective = rng.choice((_ADJECTIVES + _MORE).split())
    return f"{adjective}-{rng.choice((_NOUNS + _OTHERS).split())}-{rng.randrange(10_000):04d}"

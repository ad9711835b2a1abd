"""What users notice of faults: `python -m bench.faults [NAME ...]` from the checkout; as root also those of networks.

A region of real agents, each a process of its own: workers with their proxies, an edge before them, an app with a
machine on each of two workers, a steady load at the edge on a schedule that waits for nobody. Then something breaks.
`tests/live/test_faults.py` holds short forms of the same steps to what is promised.
"""

from __future__ import annotations

from tests.kit.doors import ANSWERS
from tests.kit.edges import Region
from tests.kit.load import at_once
from tests.kit.waiting import eventually


async def both_at_once(it: Region, rounds: int) -> None:
    """A sleeping machine is asked for at both edges in the same moment, again and again. In every other round they know
    already that it sleeps; in the others they may still take it for running."""
    machine = await it.machine("both", program=ANSWERS)
    addresses = [it.agents[name].http for name in ("edge-1", "edge-2")]

    async def stopped() -> bool:
        return it.state(machine) == "stopped"

    for number in range(rounds):
        await eventually(stopped, "the machine has stopped")
        if not number % 2:
            await it.known([machine], "stopped")
        answers = await at_once(addresses, "both.localhost", 2)
        assert answers == {200: 2}, (number, answers)
        assert it.starts(machine) == number + 1
        await it.client.ok("POST", f"/apps/both/machines/{machine}/stop")

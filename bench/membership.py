"""Measure membership in simulation: `python -m bench.membership [--quick] [--json FILE]`.

Virtual time, the real core, packets of 1 to 5 ms: what is measured is the protocol, not this machine. Beside each
figure stands what was measured on another simulation of the same constants before this one was written ("before"; it
had no stream probes). A line that begins with GATE must hold, or the exit status is 1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from time import perf_counter

import msgspec
from tests.sim.membership.runs import Outcome, crashes, stalls

from bench.command import Table, options, told
from hawker.core.swim import LAN, Settings, plain


class Sizes(msgspec.Struct, frozen=True):
    """Members of each run, loss of each; the (members, loss) also run without stream probes, and with plain SWIM; how
    the stalls are drawn."""

    members: tuple[int, ...]
    losses: tuple[float, ...]
    probed_by_packets: tuple[tuple[int, float], ...]
    seconds: float
    stalled: int
    stall_seconds: float
    stall_seeds: int


FULL = Sizes(
    members=(300, 1_000, 10_000),
    losses=(0.0, 0.05, 0.1),
    probed_by_packets=((300, 0.05), (300, 0.1), (1_000, 0.05), (1_000, 0.1), (10_000, 0.02)),
    seconds=45.0,
    stalled=128,
    stall_seconds=300.0,
    stall_seeds=3,
)
QUICK = Sizes((60,), (0.0, 0.1), ((60, 0.1),), 40.0, 32, 60.0, 1)
PLAIN_MAX = 1_000
"""What is to be seen of plain SWIM is seen with so many members."""
BEFORE = {
    ("first", 300, 0.0): "11.7",
    ("first", 1_000, 0.0): "14.0",
    ("first", 10_000, 0.0): "18.0",
    ("all", 300, 0.0): "12.3",
    ("all", 1_000, 0.0): "14.6",
    ("all", 10_000, 0.0): "18.8",
    ("all", 1_000, 0.05): "15.1",
    ("all", 1_000, 0.1): "15.0",
    ("all", 10_000, 0.02): "18.3",
    ("packets", 1_000, 0.0): "4.3",
    ("packets", 1_000, 0.05): "13.6",
    ("packets", 1_000, 0.1): "18.9",
}
FALSE_BEFORE = "0 (86 with 6 rumours a packet)"
STALLS_BEFORE = {"plain SWIM": "43,000-47,000 (120)", "Lifeguard": "0"}


class Gates(Table):
    """The aim's column is what was measured before. Gates that failed are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.failed: list[str] = []

    def gate(self, what: str, holds: bool) -> None:
        print(f"GATE {'holds' if holds else 'FAILS'}: {what}", flush=True)
        if not holds:
            self.failed.append(what)


def measure(sizes: Sizes, table: Gates) -> None:
    stalled(table, sizes)
    quiet: dict[float, list[float]] = {loss: [] for loss in sizes.losses}
    known_s: dict[int, float] = {}
    for members in sizes.members:
        for loss in sizes.losses:
            found = measured(table, members, loss, "", LAN, True, sizes.seconds)
            quiet[loss].append(found.quiet_packets)
            judge(table, members, loss, found)
            known_s.setdefault(members, found.all_s)
            what = f"{members:,} members, {loss:.0%} loss: known to all as soon as without loss, within 10 %"
            table.gate(what, found.all_s <= 1.1 * known_s[members])
    for members, loss in sizes.probed_by_packets:
        found = measured(table, members, loss, ", no stream probes", LAN, False, sizes.seconds)
        table.gate(f"{members:,} members, {loss:.0%} loss, no stream probes: no false death", found.false_deaths == 0)
        if members <= PLAIN_MAX:
            measured(table, members, loss, ", plain SWIM", plain(LAN), False, sizes.seconds)
    for loss, packets in quiet.items():
        what = f"packets per member and second from {sizes.members[0]:,} to {sizes.members[-1]:,} members within 25 %"
        table.gate(f"{what}, {loss:.0%} loss", max(packets) <= 1.25 * min(packets))


def measured(
    table: Gates, members: int, loss: float, title: str, settings: Settings, streams: bool, seconds: float
) -> Outcome:
    began = perf_counter()
    found = crashes(members, seconds, loss=loss, streams=streams, settings=settings)
    took = perf_counter() - began

    def add(what: str, value: float, unit: str, key: str = "", note: str = "") -> None:
        before = BEFORE.get((key, members, loss), "") if settings.lifeguard and (not streams or not loss) else ""
        table.add(f"{members:,} members, {loss:.0%} loss{title}: {what}", value, unit, before, note)

    add("first 'dead'", found.first_s, "s", "first", f"at most {settings.suspicion_min(members) + 4:.1f}")
    add("known to all", found.all_s, "s", "all", f"at most {found.all_after_first_s:.1f} s after the first")
    table.add(
        f"{members:,} members, {loss:.0%} loss{title}: false deaths seen",
        found.false_deaths,
        "",
        FALSE_BEFORE if loss and members == 1_000 and not streams and settings.lifeguard else "",
        f"{found.suspicions:,} suspicions seen",
    )
    add("packets per member, quiet", found.quiet_packets, "1/s", "packets")
    add("packets per member, 8 crashes", found.packets, "1/s", "", f"{found.events / took:,.0f} events/s here")
    add("bytes per member, 8 crashes", found.bytes, "B/s", "", f"and {found.push_pull_bytes:.0f} B/s of push-pull")
    return found


def judge(table: Gates, members: int, loss: float, found: Outcome) -> None:
    what = f"{members:,} members, {loss:.0%} loss"
    first_s = LAN.suspicion_min(members) + 4 * LAN.probe_interval
    table.gate(f"{what}: no false death", found.false_deaths == 0)
    table.gate(f"{what}: first 'dead' within {first_s:.1f} s in the mean", found.first_s <= first_s)
    table.gate(f"{what}: known to all within 1.5 s of that", found.all_after_first_s <= 1.5)


def stalled(table: Gates, sizes: Sizes) -> None:
    """Some members stall 16 s out of 20. Messages lost, messages that wait, process stopped."""
    members, stalling = sizes.stalled, sizes.stalled // 16
    for fault, title in (("block", "messages wait"), ("cut", "messages lost"), ("pause", "process stopped")):
        seen = {}
        for name, settings in (("plain SWIM", plain(LAN)), ("Lifeguard", LAN)):
            worlds = [
                stalls(
                    settings,
                    seed=seed,
                    members=members,
                    stalling=stalling,
                    seconds=sizes.stall_seconds,
                    fault=fault,
                )
                for seed in range(sizes.stall_seeds)
            ]
            deaths = [world.tally.false_deaths for world in worlds]
            victims = max(len(world.tally.victims) for world in worlds)
            packets = sum(world.tally.packets for world in worlds) / len(worlds) / members / sizes.stall_seconds
            seen[name] = sum(deaths)
            table.add(
                f"{stalling} of {members} stalled, {title}, {name}: false deaths seen",
                sum(deaths) / len(deaths),
                "",
                STALLS_BEFORE[name] if fault == "block" else "",
                f"of {victims} members; {min(deaths):,} to {max(deaths):,}; {packets:.1f} packets per member and s",
            )
        if fault != "pause":
            what = f"{stalling} of {members} stalled, {title}: at least 50 times fewer than plain SWIM"
            table.gate(what, seen["plain SWIM"] >= 50 and seen["plain SWIM"] >= 50 * seen["Lifeguard"])


def main(arguments: Sequence[str] | None = None) -> int:
    given = options(__doc__).parse_args(arguments)
    table = Gates()
    began = perf_counter()
    measure(QUICK if given.quick else FULL, table)
    print(f"\n{perf_counter() - began:.0f} s; {len(table.failed)} gates failed")
    told(table, given)
    return 1 if table.failed else 0


if __name__ == "__main__":
    sys.exit(main())

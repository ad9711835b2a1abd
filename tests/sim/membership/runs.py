"""Whole runs of membership: crashes under loss, stalls, a long isolation, and everything at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import msgspec
from tests.sim.membership.settling import check_settled, settles_in
from tests.sim.membership.watch import Broken
from tests.sim.membership.world import Plan, World

from hawker.core.swim import LAN, Settings
from hawker.core.swim.beliefs import Beliefs

QUIET_S = 10.0
"""Before the first crash: what a group costs when nothing happens to it."""
STALL_S, STALL_EVERY_S = 16.0, 20.0


class Outcome(msgspec.Struct, frozen=True):
    """Times in seconds after a crash, means over the crashes; packets and bytes per member and second."""

    first_s: float
    all_s: float
    all_after_first_s: float
    false_deaths: int
    suspicions: int
    quiet_packets: float
    packets: float
    bytes: float
    push_pull_bytes: float
    events: int


def crashes(
    members: int,
    seconds: float,
    *,
    loss: float = 0.0,
    streams: bool = True,
    seed: int = 0,
    settings: Settings = LAN,
    crashed: int = 8,
    watched: bool = False,
    rules: type[Beliefs] = Beliefs,
) -> Outcome:
    """After a quiet while some members crash, 1 s apart: enough for a mean."""
    world = World(Plan(members, seed, settings, loss, streams=streams, watched=watched), rules=rules)
    chosen = Random(f"{seed}/crashes").sample(range(members), crashed)
    for k, n in enumerate(chosen):
        world.at(QUIET_S + k, lambda n=n: world.crash(n))  # type: ignore[misc]
    world.run(QUIET_S)
    quiet = world.tally.packets
    world.run(seconds)
    tally, deaths = world.tally, list(world.deaths.values())
    return Outcome(
        first_s=sum(death.first - death.at for death in deaths) / crashed,
        all_s=sum(death.all - death.at for death in deaths) / crashed,
        all_after_first_s=max(death.all - death.first for death in deaths),
        false_deaths=tally.false_deaths,
        suspicions=tally.suspicions,
        quiet_packets=quiet / members / QUIET_S,
        packets=tally.packets / members / seconds,
        bytes=tally.packet_bytes / members / seconds,
        push_pull_bytes=tally.stream_bytes / members / seconds,
        events=tally.events,
    )


def stalls(
    settings: Settings,
    *,
    seed: int = 0,
    members: int = 128,
    stalling: int = 8,
    seconds: float = 300.0,
    fault: str = "cut",
    watched: bool = False,
    rules: type[Beliefs] = Beliefs,
) -> World:
    """Some members are stalled 16 s out of 20, each at times of its own. `fault`: their messages are lost ("cut"), or
    wait ("block"), or the process stands still ("pause")."""
    world = World(Plan(members, seed, settings, watched=watched), rules=rules)
    stall: Callable[[int, bool], None] = {"cut": world.cut_off, "block": world.block, "pause": world.pause}[fault]
    rng = Random(f"{seed}/stalls")
    for n in range(stalling):
        world.healthy[n] = False
        began = rng.random() * STALL_EVERY_S
        while began < seconds:
            world.at(began, lambda n=n: stall(n, True))  # type: ignore[misc]
            world.at(began + STALL_S, lambda n=n: stall(n, False))  # type: ignore[misc]
            began += STALL_EVERY_S
    world.run(seconds)
    return world


def isolation(*, seed: int = 0, members: int = 20, rules: type[Beliefs] = Beliefs) -> World:
    """One member hears nobody for so long that it believes all others dead; then it does."""
    world = World(Plan(members, seed), rules=rules)
    world.healthy[0] = False
    world.at(1.0, lambda: world.cut_off(0, True))
    world.at(400.0, lambda: world.cut_off(0, False))
    world.run(400.0 + settles_in(LAN, members))
    check_settled(world)
    if world.tally.false_deaths:
        raise Broken(f"{world.tally.false_deaths} false deaths, on the word of one that was cut off")
    return world


def storm(
    *, seed: int, members: int = 12, seconds: float = 120.0, rules: type[Beliefs] = Beliefs, settings: Settings = LAN
) -> World:
    """Loss, duplicates, crashes, restarts, leaving, stalls of every kind, partitions; then peace, and L5."""
    rng = Random(f"{seed}/storm")
    plan = Plan(members, seed, settings, rng.choice((0.0, 0.05, 0.2)), rng.choice((0.0, 0.1)), rng.random() < 0.7)
    world = World(plan, rules=rules, strangers=True)
    for n in range(1, members):
        world.at(rng.random() * 5, lambda n=n: world.join(n, 0))  # type: ignore[misc]
    for _ in range(members):
        _draw(world, rng, 10 + rng.random() * (seconds - 10), seconds)
    world.run(seconds)
    world.heal()
    world.run(seconds + settles_in(settings, members))
    check_settled(world)
    return world


def _draw(world: World, rng: Random, time: float, latest: float) -> None:
    """One fault, and its end. Member 0 stays up: whoever restarts joins through it."""
    n = rng.randrange(1, len(world.members))
    until = min(latest, time + rng.choice((1.0, 5.0, 16.0, 60.0)))
    kind = rng.choice(("crash", "restart", "leave", "cut", "block", "pause", "part"))

    def if_up(act: Callable[[], None]) -> Callable[[], None]:
        return lambda: act() if world.up[n] and not world.nodes[n].beliefs.leaving else None

    if kind == "part":
        side = [rng.randrange(2) for _ in world.members]
        one_way = rng.random() < 0.5
        world.at(time, lambda: world.part(side, one_way=one_way))
        world.at(until, lambda: world.part([0] * len(world.members)))
    elif kind == "leave":
        world.at(time, if_up(lambda: world.leave(n)))
    elif kind in ("crash", "restart"):
        world.at(time, if_up(lambda: world.crash(n)))
        if kind == "restart":
            world.at(until, lambda: world.restart(n, 0) if not world.up[n] else None)
    else:
        stall = {"cut": world.cut_off, "block": world.block, "pause": world.pause}[kind]
        world.at(time, if_up(lambda: stall(n, True)))
        world.at(until, lambda: stall(n, False))


def check_speed(outcome: Outcome, members: int, settings: Settings = LAN) -> None:
    """The times of facts that hold where nobody is cut off: a death is first known after the shortest suspicion and
    four periods, and to all 1.5 s later."""
    most = settings.suspicion_min(members) + 4 * settings.probe_interval
    if not outcome.first_s <= most or not math.isfinite(outcome.all_s):
        raise Broken(f"first known after {outcome.first_s:.1f} s, at most {most:.1f} s")
    if outcome.all_after_first_s > 1.5:
        raise Broken(f"known to all {outcome.all_after_first_s:.1f} s after the first")

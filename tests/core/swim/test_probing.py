"""Probing, helping, suspecting, local health: what a member does as time passes."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from tests.core.swim.group import Group, member

from hawker.core.swim import LAN, WAN, Changed, Conflict, Noted, PushPull, Settings, Status, StreamProbe, plain
from hawker.core.swim.wire import Ack, Gossip, Nack, Packet, Ping, PingFor, decode_packet, encode

NAMES = ("a", "b", "c", "d", "e", "f")


def packets(group: Group, kind: type[Packet], sender: str = "", target: str = "") -> list[Packet]:
    """Those of one kind that were sent so far."""
    return [
        packet
        for by, to, payload in group.sent
        if isinstance(packet := decode_packet(payload)[0], kind) and sender in ("", by) and target in ("", to)
    ]


def actions(group: Group, kind: type, name: str = "") -> list[object]:
    return [action for by, action in group.done if isinstance(action, kind) and name in ("", by)]


def changes(group: Group, name: str) -> list[tuple[str, Status | None]]:
    return [(a.name, a.after) for by, a in group.done if isinstance(a, Changed) and by == name]


def test_every_member_probes_every_other_once_a_round() -> None:
    group = Group(NAMES)
    group.run(5.0)
    for name in NAMES:
        targets = [to for by, to, payload in group.sent if by == name and type(decode_packet(payload)[0]) is Ping]
        assert sorted(targets) == sorted(set(NAMES) - {name})
    assert len(packets(group, Ack)) == len(packets(group, Ping)) == 30


def test_a_member_alone_is_content() -> None:
    group = Group(["a"])
    group.run(100.0)
    assert group.sent == []
    assert group["a"].health == 0


def unanswered(settings: Settings = LAN, names: tuple[str, ...] = NAMES) -> Group:
    """Up to the first probe of "b", which does not answer, and further to the end of that period."""
    group = Group(names, settings)
    group.silence("b")
    while not packets(group, Ping, target="b"):
        group.run(group.now + 0.01)
    return group


def test_helpers_and_a_stream_are_tried_at_the_timeout_and_suspicion_waits_for_the_end_of_the_period() -> None:
    group = unanswered()
    began = group.now
    prober = packets(group, Ping, target="b")[0].sender
    group.run(began + 0.48)
    assert packets(group, PingFor, sender=prober) == []
    group.run(began + 0.52)
    assert len(packets(group, PingFor, sender=prober)) == 3
    probe = actions(group, StreamProbe, prober)[0]
    assert isinstance(probe, StreamProbe)
    assert probe.member == member("b")
    assert probe.deadline == pytest.approx(began + 1.0, abs=0.02)
    group.run(began + 0.88)
    assert packets(group, Nack, target=prober) == []
    group.run(began + 0.98)
    assert len(packets(group, Nack, target=prober)) == 3
    assert group.status(prober, "b") is Status.alive
    group.run(began + 1.02)
    assert group.status(prober, "b") is Status.suspect
    assert group[prober].health == 0  # the helpers were well: the fault is not mine


@pytest.mark.parametrize("how", ["late ack", "helper", "stream"])
def test_any_word_of_the_member_within_the_period_will_do(how: str) -> None:
    group = unanswered()
    ping = packets(group, Ping, target="b")[0]
    assert isinstance(ping, Ping)
    prober, began = ping.sender, group.now
    if how == "helper":
        group.lost = lambda sender, target: {sender, target} == {prober, "b"}
    group.run(began + 0.95)
    if how == "late ack":
        group[prober].on_packet(group.now, member("b").address, encode(Ack("b", 1_000, b"", [], ping.number)))
    elif how == "stream":
        group[prober].on_stream_probe(group.now, ping.number, True)
    group.run(began + 1.5)
    assert group.status(prober, "b") is Status.alive


def test_a_failed_stream_or_one_of_another_probe_changes_nothing() -> None:
    group = unanswered()
    ping = packets(group, Ping, target="b")[0]
    assert isinstance(ping, Ping)
    group[ping.sender].on_stream_probe(group.now, ping.number, False)
    group[ping.sender].on_stream_probe(group.now, ping.number + 1, True)
    group.run(group.now + 1.5)
    assert group.status(ping.sender, "b") is Status.suspect


def test_a_crash_is_known_to_all_and_a_stop_that_was_announced_at_once() -> None:
    group = Group(NAMES)
    group.run(10.0)
    group["a"].leave(group.now)
    group.run(11.0)
    assert {group.status(name, "a") for name in NAMES} == {Status.left}
    assert group["a"].farewell_told
    group.silence("a", "b")
    group.run(40.0)
    assert {group.status(name, "b") for name in NAMES[2:]} == {Status.dead}
    assert {group.status(name, "a") for name in NAMES[2:]} == {Status.left}


def test_who_left_probes_nobody_and_answers() -> None:
    group = Group(["a", "b"])
    group.run(2.0)
    group["a"].leave(group.now)
    before = len(packets(group, Ping, sender="a"))
    group.run(20.0)
    assert len(packets(group, Ping, sender="a")) == before
    group["a"].on_packet(20.0, member("b").address, encode(Ping("b", 1_000, b"", [], 1, "a")))
    group.deliver()
    assert isinstance(packets(group, Ack, sender="a")[-1], Ack)


def test_a_ping_tells_a_suspect_that_it_is_one() -> None:
    group = Group(NAMES)
    group["a"].beliefs.suspect(0.0, "b", 1_000, 0, "c")
    while group["a"].beliefs.rumours:
        group["a"].beliefs.rumours.take(1_000, 64, 1)
    group.lost = lambda sender, target: {sender, target} != {"a", "b"}
    group.run(8.0)
    assert group["b"].beliefs.incarnation == 1
    assert group.status("a", "b") is Status.alive


def test_who_is_held_dead_hears_it_with_the_first_ack_and_comes_back() -> None:
    group = Group(["a", "b"])
    group["a"].beliefs.dead(0.0, "b", 1_000, 0, "a")
    while group["a"].beliefs.rumours:
        group["a"].beliefs.rumours.take(1_000, 64, 1)
    group.run(3.0)
    assert group.status("a", "b") is Status.alive


def test_the_recently_dead_are_gossiped_to_and_the_long_dead_are_not() -> None:
    group = Group(["a", "b", "c"])
    group.silence("b")
    while group.status("a", "b") is not Status.dead:
        group.run(group.now + 0.1)
    died = group["a"].members["b"].since
    for at, hears in ((died + 20.0, True), (died + 60.0, False)):
        group.run(at)
        group.sent.clear()
        group["a"].update(group.now, meta=str(at))
        group.run(at + 3.0)
        assert bool(packets(group, Gossip, sender="a", target="b")) is hears


# Local health


def test_helpers_that_do_not_even_say_that_they_are_well_are_a_sign_that_the_fault_is_mine() -> None:
    group = Group([*NAMES, *"ghijklmnopqrstuvwxyz"])
    group.silence("a")
    group.run(1.99)  # the first probe is over
    assert group["a"].health == 3
    group.run(20.0)
    assert group["a"].health == LAN.health_max
    group.sent.clear()
    group.run(60.0)
    assert len(packets(group, Ping, sender="a")) == 5  # one every 8 s, where it was one a second


def test_success_lowers_it_again_and_having_to_refute_raises_it() -> None:
    group = Group(NAMES)
    group["a"].health = 2
    group.run(8.0)
    assert group["a"].health == 0
    dead = encode((0, "b", 1_000, b"", [(2, "a", 1_000, 0, "b")]))
    group["a"].on_packet(group.now, member("b").address, dead)
    assert group["a"].health == 1


def test_plain_swim_has_none_of_this() -> None:
    group = unanswered(plain(LAN))
    group.run(group.now + 1.2)
    assert packets(group, Nack) == []
    assert actions(group, StreamProbe) == []
    assert {node.health for node in group.nodes.values()} == {0}
    group.run(group.now + 4.5)
    assert group.status("a", "b") is Status.dead


def test_the_wide_setting_probes_every_five_seconds() -> None:
    group = Group(["a", "b"], WAN)
    group.run(50.0)
    assert Counter(by for by, _, payload in group.sent if type(decode_packet(payload)[0]) is Ping) == {"a": 10, "b": 10}


def test_a_process_that_stood_still_neither_suspects_nor_buries_anybody_for_it() -> None:
    group = Group(NAMES)
    group.silence("b")
    while group.status("a", "b") is Status.alive:
        group.run(group.now + 0.1)
    group.lost = lambda sender, target: "a" in (sender, target)  # the refutation of "b" does not reach "a"
    group.run(group.now + 1.0)
    group.run(group.now + 60.0, still="a")
    group.lost = lambda sender, target: False
    before = len(group.done)
    group.run(group.now + 0.01)
    assert group.status("a", "b") is Status.suspect  # its time was long up
    group.run(group.now + 10.0)
    assert group.status("a", "b") is Status.alive
    assert [c.after for by, c in group.done[before:] if by == "a" and isinstance(c, Changed)] == [Status.alive]


def test_suspicions_told_into_silence_are_told_again_when_somebody_is_heard() -> None:
    group = Group(NAMES)
    group.silence("a")
    group.run(12.0)
    held = [name for name in NAMES if group.status("a", name) is Status.suspect]
    assert held
    assert not group["a"].beliefs.rumours
    group.lost = lambda sender, target: False
    group.run(16.0)
    assert [name for name in NAMES if group.status("a", name) is not Status.alive] == []


# Push-pull, notes, conflicts


def test_push_pull_is_asked_for_every_fifteen_seconds_with_a_live_member_and_at_times_with_a_dead_one() -> None:
    group = Group(["a", "b", "c"])
    group.silence("c")
    group.run(1_000.0)
    partners = Counter(a.member.name for a in actions(group, PushPull, "a") if isinstance(a, PushPull))
    assert partners.total() == 67
    assert partners["b"] > 30
    assert partners["c"] > 10


def test_notes_come_with_pings_and_acks() -> None:
    group = Group(["a", "b"])
    group["a"].set_note(b"17")
    group.run(3.0)
    assert set(actions(group, Noted, "b")) == {Noted("a", b"17")}
    assert actions(group, Noted, "a") == []


def test_a_ping_meant_for_another_is_not_answered() -> None:
    group = Group(["a", "b"])
    group["a"].on_packet(0.1, member("b").address, encode(Ping("b", 1_000, b"", [], 1, "c")))
    group.deliver()
    assert packets(group, Ack) == []
    assert group["a"].counts.misdirected == 1


def test_an_older_life_that_still_speaks_from_elsewhere_is_a_conflict_and_hears_of_the_later() -> None:
    group = Group(["a", "b"])
    group.run(5.0)
    ping = encode(Ping("b", 900, b"", [], 1, "a"))
    group["a"].on_packet(group.now, member("b").address, ping)  # a packet of its own past, late
    group["a"].take()
    group.names["elsewhere", 7946] = "b"
    group.lost = lambda sender, target: True
    group["a"].on_packet(group.now, ("elsewhere", 7946), ping)
    group.deliver()
    assert actions(group, Conflict, "a") == [Conflict(member("b"), member("b", 900, "elsewhere"))]
    (told,) = packets(group, Ack, sender="a", target="b")[-1].rumours
    assert told.member == member("b")  # type: ignore[union-attr]


def test_a_newcomer_is_known_to_all_within_a_second_or_two_of_joining() -> None:
    group = Group(NAMES)
    late = Group(["g"])["g"]
    group.nodes["g"] = late
    group.names[member("g").address] = "g"
    group.run(5.0)
    late.join(group.now, [(member("a"), 0, Status.alive)])
    group.run(7.0)
    assert {group.status(name, "g") for name in NAMES} == {Status.alive}


def test_my_new_particulars_are_known_to_all() -> None:
    group = Group(NAMES)
    group["a"].update(0.0, roles=("worker",), meta="4 cores")
    group.run(3.0)
    assert {(group[n].members["a"].member.roles, group[n].members["a"].member.meta) for n in NAMES} == {
        (("worker",), "4 cores")
    }


def test_a_shell_that_drains_nothing_costs_a_bounded_memory() -> None:
    group = Group(["a", "b"])
    ping = encode(Ping("b", 1_000, b"", [], 1, "a"))
    for _ in range(20_000):
        group["a"].on_packet(0.1, member("b").address, ping)
    assert len(group["a"].take()) == 16_384


def test_packets_are_small_when_there_is_nothing_to_tell() -> None:
    group = Group(NAMES)
    group.run(10.0)
    assert max(len(payload) for _, _, payload in group.sent) < 24
    assert msgspec.msgpack.decode(group.sent[0][2])[0] in (1, 2)

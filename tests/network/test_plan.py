"""What a host's network should be, and that the difference leads there: decided from values."""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Address
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hawker.network import addresses, plan, ruleset
from hawker.network.base import Attachment, Settings, Wanted
from hawker.network.plan import Add, Address, Configure, Elements, Link, RemoveLink, Rules, State

WORKER = "ord-1"
POOL = IPv4Network("100.64.0.0/10")


def wanted(number: int, publish: tuple[tuple[str, int, int], ...] = ()) -> Wanted:
    address = f"fdaa:0:{number % 3 + 1:x}:0:1:0:{number:x}:2"
    return Wanted(machine=f"{number:014x}", number=number % 3 + 1, address=address, publish=publish)


def machine(number: int, publish: tuple[tuple[str, int, int], ...] = ()) -> tuple[Wanted, Attachment]:
    its = wanted(number, publish)
    return its, plan.attachment(WORKER, its, addresses.pick4(WORKER, its.machine, POOL, frozenset()), 1500)


published = st.lists(
    st.tuples(st.sampled_from(["tcp", "udp"]), st.integers(1, 65_535), st.integers(1, 65_535)), max_size=2, unique=True
).map(tuple)
machines = st.dictionaries(st.integers(1, 9), published, max_size=6).map(
    lambda found: [machine(number, publish) for number, publish in found.items()]
)
marks = st.sampled_from(["", "made-1", "changed"])


@st.composite
def actual(draw: st.DrawFn) -> State:
    """Whatever is left by cuts, by earlier versions and by others."""
    whole = plan.union([State(rules=draw(marks)), *(plan.of_machine(WORKER, *its) for its in draw(machines))])
    kept = {
        field: frozenset(it for it in getattr(whole, field) if draw(st.booleans()))
        for field in ("elements", "links", "addresses", "neighbours", "routes")
    }
    links = frozenset(replace(link, ready=draw(st.booleans()), loopback=draw(st.booleans())) for link in kept["links"])
    names = {link.name for link in links} | {"lo"}
    on_links = {
        field: frozenset(it for it in kept[field] if it.device in names)
        for field in kept
        if field[-1] == "s" and field not in ("links", "elements")
    }
    elements = kept["elements"] if whole.rules else frozenset()
    return State(rules=whole.rules, elements=elements, links=links, **on_links)


def carried_out(state: State, operations: list[plan.Operation]) -> State:
    for operation in operations:
        state = plan.after(state, operation)
    return state


@given(actual(), machines, st.data())
def test_the_difference_leads_to_what_is_wanted_and_then_there_is_none(
    state: State, its: list[tuple[Wanted, Attachment]], data: st.DataObject
) -> None:
    there = {link.name for link in state.links}
    goal = plan.desired(WORKER, "made-1", its, there)
    operations = plan.difference(state, goal)
    assert carried_out(state, operations) == goal
    assert plan.difference(goal, goal) == []
    # Cut off anywhere, and begun again, it leads to the same.
    cut = data.draw(st.integers(0, len(operations)))
    halfway = carried_out(state, operations[:cut])
    rest = plan.desired(WORKER, "made-1", its, {link.name for link in halfway.links})
    assert carried_out(halfway, plan.difference(halfway, rest)) == rest == goal


@given(machines)
def test_one_more_machine_changes_a_few_elements_and_its_own_link_only(its: list[tuple[Wanted, Attachment]]) -> None:
    one = machine(99, (("tcp", 80, 8080),))
    names = {attached.interface for _, attached in [*its, one]}
    before = plan.desired(WORKER, "made-1", its, names)
    bare = plan.union([before, State(links=frozenset({Link(one[1].interface, ready=False)}))])
    operations = plan.difference(bare, plan.desired(WORKER, "made-1", [*its, one], names))
    assert not any(isinstance(each, Rules | RemoveLink) for each in operations)
    changed = [each for each in operations if isinstance(each, Elements)]
    assert len(changed) == 1
    assert (len(changed[0].gone), len(changed[0].new)) == (0, 11)
    assert {each.it.device for each in operations if isinstance(each, Add)} == {one[1].interface}
    assert [each.link for each in operations if isinstance(each, Configure)] == [Link(one[1].interface, loopback=True)]


@given(machines)
def test_a_state_falls_into_the_parts_of_its_links_and_one_of_none(its: list[tuple[Wanted, Attachment]]) -> None:
    goal = plan.desired(WORKER, "made-1", its, {attached.interface for _, attached in its})
    parts = plan.parts(goal)
    assert plan.union(parts.values()) == goal
    clashing = len({it.key for it in goal.elements if it.is_port}) != sum(1 for it in goal.elements if it.is_port)
    for one in its:
        if not clashing:
            assert parts[one[1].interface] == plan.of_machine(WORKER, *one)
    assert parts[""] == State(rules="made-1", addresses=frozenset({Address("lo", addresses.worker_address(WORKER))}))


def test_a_machine_without_its_link_gets_nothing() -> None:
    assert plan.desired(WORKER, "made-1", [machine(1)], ()) == plan.of_worker(WORKER, "made-1")


@given(st.text(max_size=40), st.text(max_size=40))
def test_names_of_interfaces_fit_and_show_whose_they_are(worker: str, its: str) -> None:
    name = addresses.device(worker, its)
    assert len(name) == 15
    assert name.isascii()
    assert name.isalnum()
    assert name.startswith(addresses.device_prefix(worker))


@given(st.text(max_size=40), st.text(max_size=40))
def test_hardware_addresses_are_of_one_machine_and_locally_administered(worker: str, its: str) -> None:
    octets = bytes.fromhex(addresses.mac(worker, its).replace(":", ""))
    assert len(octets) == 6
    assert octets[0] & 3 == 2
    assert addresses.link_local("02:00:00:00:00:01") == "fe80::ff:fe00:1"


def test_addresses_say_which_network_and_worker_they_belong_to() -> None:
    assert addresses.number("fdaa:1234:5678:9:9:9:9:2") == 0x12345678
    assert addresses.network("fdaa:0:7:1:2:0:1:2") == "fdaa:0:7::"
    own = IPv6Address(addresses.worker_address("ord-1"))
    assert own in addresses.SPACE6
    assert addresses.number(str(own)) == 0
    assert str(own) != addresses.RESOLVER


def test_an_address_is_found_as_long_as_one_is_free_and_no_other_machines() -> None:
    pool = IPv4Network("100.64.0.0/29")
    every = {f"100.64.0.{n}" for n in range(1, 7)}
    for taken in (set(some) for count in range(6) for some in combinations(every, count)):
        found = addresses.pick4(WORKER, "00000000000001", pool, taken)
        assert found in every - taken
        assert addresses.is_machine(found, pool)
    with pytest.raises(LookupError, match="all 6 addresses"):
        addresses.pick4(WORKER, "1", pool, every)


def test_the_rules_name_what_they_are_made_of() -> None:
    plain = ruleset.mark(WORKER, Settings())
    assert plain == ruleset.mark(WORKER, Settings())
    assert len({plain, ruleset.mark(WORKER, Settings(denied=("192.0.2.0/24",))), ruleset.mark("b", Settings())}) == 3
    assert ruleset.table("weird/name with spaces").startswith("hawker-weird_name_with_spaces-")

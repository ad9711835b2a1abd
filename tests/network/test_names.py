"""Private names: what each is answered with, for which networks, and how a name that is not there is told."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawker.network.names import TEXT_MOST, UNKNOWN, Answer, Machine, Network, answer, owner


def machine(number: int, region: str = "ord", **more: object) -> Machine:
    fields = {"id": f"{number:014x}", "app": "web", "region": region, "address": f"fdaa:0:7:1:2:0:{number:x}:2"}
    return Machine(**{**fields, **more})  # type: ignore[arg-type]


WEB = (
    machine(1),
    machine(2, group="worker"),
    machine(3, "mad"),
    machine(4, "syd"),
    machine(5, state="stopped"),
    machine(6, cordoned=True),
    machine(7, "syd", hidden=True),
)
NETWORK = Network(
    here="ord",
    machines={"web": WEB, "empty": ()},
    regions=frozenset({"ord", "mad", "syd", "nrt"}),
    distance={"mad": 110.0, "syd": 200.0},
)


def ask(name: str, network: Network = NETWORK) -> Answer:
    return answer(network, tuple(name.split(".")) if name else ())


def ids(found: Answer) -> list[int]:
    assert found.kind == "AAAA"
    return [int(address.split(":")[6], 16) for address in found.addresses]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("web", [1, 2, 3, 4]),
        ("global.web", [1, 2, 3, 4]),
        ("mad.web", [3]),
        ("syd.web", [4]),
        ("nrt.web", []),
        ("00000000000003.vm.web", [3]),
        ("00000000000006.vm.web", [6]),
        ("00000000000007.vm.web", [7]),
        ("00000000000005.vm.web", []),
        ("worker.process.web", [2]),
        ("app.process.web", [1, 3, 4]),
        ("empty", []),
    ],
)
def test_an_address_name_gives_the_started_machines_that_take_traffic(name: str, expected: list[int]) -> None:
    assert ids(ask(name)) == expected


def test_the_nearest_are_of_the_own_region_first_then_by_what_is_known_of_distance() -> None:
    assert set(ids(ask("top2.nearest.of.web"))) == {1, 2}
    assert ids(ask("top3.nearest.of.web"))[2] == 3
    assert ids(ask("top9.nearest.of.web"))[2:] == [3, 4]
    assert ask("top9.nearest.of.web").ordered


def test_askers_share_the_nearest_among_each_other_and_each_keeps_its_own() -> None:
    near = Network(here="ord", machines={"web": tuple(machine(n) for n in range(1, 5))})
    firsts = [answer(near, ("top1", "nearest", "of", "web"), f"fdaa::{n}").addresses for n in range(64)]
    assert len(set(firsts)) == 4
    assert firsts == [answer(near, ("top1", "nearest", "of", "web"), f"fdaa::{n}").addresses for n in range(64)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("vms.empty", ""),
        ("regions.web", "mad,ord,syd"),
        ("all.regions.web", "mad,ord,syd"),
        ("_apps", "empty,web"),
    ],
)
def test_lists_are_texts(name: str, text: str) -> None:
    assert (ask(name).kind, ask(name).text) == ("TXT", text)


def test_lists_of_machines_have_the_started_ones_and_with_all_every_one() -> None:
    assert ask("vms.web").text.split(",")[0] == "00000000000001 ord"
    assert len(ask("vms.web").text.split(",")) == 6
    assert len(ask("all.vms.web").text.split(",")) == 7
    assert ask("_instances").text.split(";")[0] == "instance=00000000000001,app=web,ip=fdaa:0:7:1:2:0:1:2,region=ord"
    assert len(ask("all._instances").text.split(";")) == 7


@pytest.mark.parametrize(
    "name",
    [
        "other",
        "mars.web",
        "x.mad.web",
        "00000000000009.vm.web",
        "none.process.web",
        *(f"top{count}.nearest.of.web" for count in ("", "0", "-1", "1x", "12345", "\N{ARABIC-INDIC DIGIT ONE}")),
        "a._apps",
        "_peer",
    ],
)
def test_there_are_no_other_names(name: str) -> None:
    assert ask(name) == UNKNOWN


@pytest.mark.parametrize("name", ["", "vm.web", "process.web", "of.web", "nearest.of.web"])
def test_what_only_has_names_below_exists_without_records(name: str) -> None:
    assert ask(name) == Answer()


def test_an_address_has_the_name_of_its_machine() -> None:
    assert owner(NETWORK, "fdaa:0:7:1:2:0:3:2") == "00000000000003.vm.web"
    assert owner(NETWORK, "fdaa:0:7:1:2:0:99:2") == ""


LABELS = st.sampled_from(
    [
        "web",
        "empty",
        "vm",
        "process",
        "of",
        "nearest",
        "top3",
        "global",
        "all",
        "vms",
        "regions",
        "ord",
        "_apps",
        "_instances",
        "_api",
        "worker",
        "00000000000001",
        "",
        "x",
    ]
) | st.text(string.printable, max_size=8)


@given(st.lists(LABELS, max_size=6))
def test_whatever_is_asked_the_answer_has_only_what_is_there(labels: list[str]) -> None:
    found = answer(NETWORK, tuple(labels))
    assert set(found.addresses) <= {each.address for each in WEB}
    assert found.exists or (found.kind is None and not found.addresses and not found.text)
    assert len(found.addresses) == len(set(found.addresses))


@given(st.lists(LABELS, max_size=5))
def test_a_name_with_records_has_no_ancestor_that_is_not_there(labels: list[str]) -> None:
    if answer(NETWORK, tuple(labels)).exists:
        for cut in range(1, len(labels) + 1):
            assert answer(NETWORK, tuple(labels[cut:])).exists, f"{labels[cut:]} above {labels}"


@pytest.mark.parametrize("name", ["_instances", "all._instances"])
def test_a_list_of_all_machines_is_made_once_for_all_who_ask(name: str) -> None:
    assert ask(name).text
    assert ask(name) is ask(name)


def test_a_list_that_is_too_long_for_a_message_ends_with_a_whole_item() -> None:
    many = Network(here="ord", machines={"web": tuple(machine(n) for n in range(5000))})
    text = ask("vms.web", many).text
    assert TEXT_MOST - 50 < len(text) <= TEXT_MOST
    assert text.split(",")[-1].endswith(" ord")

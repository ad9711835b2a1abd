"""Which machines stand by for others, as the catalog tells of it."""

from __future__ import annotations

from pathlib import Path

from tests.kit.fleets import REGION, Fleet

from hawker.proxy.standby import Named, Standby


def test_only_what_changes_is_read_again_and_nothing_is_missed(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)

    def machine(name: str, standbys: str, state: str = "stopped", worker: str = "ord-1") -> None:
        row = {"app": "web", "region": REGION, "state": state, "standbys": standbys, "generation": 1}
        fleet.put(worker, "machines", **{name: row})

    machine("m0", "[]")
    machine("m1", '["m0"]')
    named = Named(fleet.replica)
    first = Standby("m1", "web", "ord-1", ("m0",))
    assert named.standing() == [first]
    machine("m2", '["m0","m1"]')
    machine("m3", '["m0"]', state="started")
    machine("m4", "[7]")
    second = Standby("m2", "web", "ord-1", ("m0", "m1"))
    assert named.standing() == [first, second]
    machine("m1", "[]")
    machine("m3", '["m0"]')
    assert named.standing() == [second, Standby("m3", "web", "ord-1", ("m0",))]
    fleet.put("ord-1", "machines", m2=None)
    assert [each.machine for each in named.standing()] == ["m3"]
    fleet.replica.forget("ord-1")
    assert named.standing() == []
    named.close()
    assert fleet.replica.on_rows == []
    fleet.close()

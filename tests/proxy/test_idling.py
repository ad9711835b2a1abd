"""Machines that nobody needs are put to rest, with a real worker, and no request ever meets one that is stopping."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from tests.kit.doors import house
from tests.kit.waiting import until

from hawker.model import door as words
from hawker.proxy.settings import RouterSettings

QUICK = RouterSettings(idle_s=0.1, idle_look_s=0.03)
STOP: dict[str, Any] = {"autostop": "stop"}


async def test_an_idle_machine_is_stopped_and_wakes_again(tmp_path: Path) -> None:
    async with house(tmp_path, QUICK) as it:
        machine = await it.machine("web", service=STOP)
        for _ in range(2):
            assert (await it.get("web"))[0] == 200
            await it.in_state(machine, "stopped")
        assert words.AUTOSTOP in it.causes(machine)
        assert it.story(machine).count("start starting") == 2


async def test_a_machine_that_nobody_ever_asked_for_is_stopped_too(tmp_path: Path) -> None:
    async with house(tmp_path, QUICK) as it:
        machine = await it.machine("web", service=STOP, started=True)
        await it.in_state(machine, "stopped")


async def test_a_machine_may_be_suspended_in_the_place_of_being_stopped(tmp_path: Path) -> None:
    async with house(tmp_path, QUICK) as it:
        machine = await it.machine("web", service={"autostop": "suspend"}, started=True)
        await it.in_state(machine, "suspended")
        assert (await it.get("web"))[0] == 200


async def test_a_request_keeps_its_machine_however_long_it_takes(tmp_path: Path) -> None:
    async with house(tmp_path, QUICK) as it:
        machine = await it.machine("web", service=STOP, env={"ANSWER_S": "0.5"})
        asked_ms = time.time() * 1000
        assert (await it.get("web"))[0] == 200
        await it.in_state(machine, "stopped")
        assert it.at_ms(machine, "stop stopping") > asked_ms + 499


async def test_as_many_machines_as_are_wanted_run_on(tmp_path: Path) -> None:
    async with house(tmp_path, QUICK) as it:
        service = {"autostop": "stop", "min_machines_running": 1}
        machines = [await it.machine("web", service=service, started=True) for _ in range(3)]
        await until(lambda: sorted(map(it.shown, machines)) == ["started", "stopped", "stopped"])
        await it.proxy.idling.look()
        assert sorted(map(it.shown, machines)) == ["started", "stopped", "stopped"]


async def test_machines_without_autostop_run_on(tmp_path: Path) -> None:
    async with house(tmp_path, QUICK) as it:
        stays = await it.machine("web", started=True)
        goes = await it.machine("other", service=STOP, started=True)
        await it.in_state(goes, "stopped")
        assert it.shown(stays) == "started"


async def test_under_load_that_comes_and_goes_every_request_is_answered(tmp_path: Path) -> None:
    settings = RouterSettings(idle_s=0.02, idle_look_s=0.01)
    async with house(tmp_path, settings) as it:
        machine = await it.machine("web", service=STOP)
        for number in range(8):
            answers = await asyncio.gather(*(it.get("web") for _ in range(1 + number % 3 * 4)))
            assert {status for status, _ in answers} == {200}
            if number % 2:
                await it.in_state(machine, "stopped")
        assert it.story(machine).count("stop stopped") >= 4

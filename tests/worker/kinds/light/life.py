"""The life of a light: what a wish begins, and what an end that came early undoes. Pure."""

from __future__ import annotations

from typing import Literal

State = Literal["off", "on"]

BEGINS: dict[tuple[State, State], tuple[str, ...]] = {
    ("off", "on"): ("power", "tell"),
    ("on", "off"): ("power", "tell"),
    ("off", "off"): (),
    ("on", "on"): (),
}
"""The steps by what a light is and what somebody wishes it to be."""


def page() -> str:
    rows = [f"| {now} | {wish} | {', '.join(steps) or 'nothing'} |" for (now, wish), steps in BEGINS.items()]
    return "\n".join(["| a light that is | wished | steps |", "| --- | --- | --- |", *rows])

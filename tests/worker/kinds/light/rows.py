"""What a worker keeps of its lights."""

from __future__ import annotations

from typing import ClassVar, Literal

from hawker.model.guest import Resources
from hawker.model.rows import Row


class LightRow(Row, frozen=True, kw_only=True):
    """`booked`: it holds a place from the moment that somebody wishes it on, until it is off again."""

    table: ClassVar[str] = "light"

    id: str
    state: Literal["off", "on"] = "off"
    booked: bool = False

    def held(self) -> Resources:
        return Resources(machines=1) if self.booked else Resources()

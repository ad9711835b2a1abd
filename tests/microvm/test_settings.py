"""What an operator may set."""

from __future__ import annotations

from typing import Any

import pytest

from hawker.worker.drivers.microvm.settings import Settings


def test_a_table_of_the_configuration_is_read() -> None:
    assert Settings.of({}, cgroups=False) == Settings(cgroups=False)
    read = Settings.of({"accelerator": "tcg", "kernel": "/srv/kernel", "templates": False}, cgroups=True)
    assert (read.accelerator, read.kernel, read.templates) == ("tcg", "/srv/kernel", False)


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({"accelerator": "fast"}, r"'fast' - at `\$.accelerator`"),
        ({"template": True}, "unknown field `template`"),
        ({"templates": "yes"}, r"at `\$.templates`"),
    ],
)
def test_what_is_wrong_in_it_is_named(table: dict[str, Any], why: str) -> None:
    with pytest.raises(TypeError, match=why):
        Settings.of(table, cgroups=True)

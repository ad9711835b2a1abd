"""A configuration that is looked at again and again is checked once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hawker.errors import Invalid
from hawker.model.config import KNOWN_BYTES_MOST, check_config, known_config

CONFIG: dict[str, Any] = {"image": "app:1", "env": {"A": "b"}, "services": [{"internal_port": 80, "protocol": "tcp"}]}


def test_what_has_the_same_content_is_checked_once() -> None:
    assert known_config(CONFIG) is known_config(json.loads(json.dumps(CONFIG)))


def test_it_is_what_a_check_gives() -> None:
    assert known_config(CONFIG) == check_config(CONFIG)


def test_what_a_caller_does_to_its_own_copy_changes_nothing_for_others() -> None:
    mine: dict[str, Any] = json.loads(json.dumps(CONFIG))
    known_config(mine)
    mine["env"]["A"] = "c"
    assert known_config(CONFIG).env == {"A": "b"}
    assert known_config(mine).env == {"A": "c"}


def test_a_large_one_is_checked_each_time_and_not_kept() -> None:
    large = {**CONFIG, "env": {"A": "b" * KNOWN_BYTES_MOST}}
    assert known_config(large) == known_config(large)
    assert known_config(large) is not known_config(large)


def test_a_wrong_one_is_refused_each_time() -> None:
    for _ in range(2):
        with pytest.raises(Invalid, match="image"):
            known_config({"image": 1})

"""Which endpoint and token a command uses, and which token never goes where."""

from __future__ import annotations

from pathlib import Path

import pytest

from hawker.client.settings import Settings, dev_directory, find_settings
from hawker.errors import Refused

DEV = "http://127.0.0.1:4280"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "client.json").write_text(f'{{"endpoint": "{DEV}", "token": "dev", "later": "ignored"}}')
    return tmp_path


@pytest.mark.parametrize(
    ("environ", "directory"),
    [
        ({"HOME": "/h"}, "/h/.local/state/hawker/dev"),
        ({"HOME": "/h", "XDG_STATE_HOME": "/s"}, "/s/hawker/dev"),
        ({"HOME": "/h", "XDG_STATE_HOME": "relative"}, "/h/.local/state/hawker/dev"),
        ({"HOME": "/h", "XDG_STATE_HOME": "/s", "HAWKER_HOME": "/mine"}, "/mine"),
        ({"HOME": "/h", "HAWKER_HOME": ""}, "/h/.local/state/hawker/dev"),
    ],
)
def test_the_directory_of_dev_follows_the_environment(environ: dict[str, str], directory: str) -> None:
    assert dev_directory(environ) == Path(directory)


def test_without_a_home_the_directory_is_asked_for() -> None:
    with pytest.raises(Refused) as caught:
        dev_directory({})
    assert "HAWKER_HOME" in caught.value.hint


HAWKER = {"HAWKER_ENDPOINT": "http://h", "HAWKER_TOKEN": "ht"}
FLY = {"FLY_FLAPS_BASE_URL": "http://f", "FLY_API_TOKEN": "ft"}


@pytest.mark.parametrize(
    ("environ", "flags", "expected"),
    [
        ({**HAWKER, **FLY}, ("http://x", "xt"), Settings("http://x", "xt", "--endpoint")),
        ({**HAWKER, **FLY}, ("", ""), Settings("http://h", "ht", "HAWKER_ENDPOINT")),
        (FLY, ("", ""), Settings("http://f", "ft", "FLY_FLAPS_BASE_URL")),
        (FLY, ("", "xt"), Settings("http://f", "xt", "FLY_FLAPS_BASE_URL")),
        ({"HAWKER_TOKEN": "ht"}, ("http://x", ""), Settings("http://x", "ht", "--endpoint")),
        ({"HAWKER_TOKEN": "", "HAWKER_ENDPOINT": ""}, (DEV + "/", ""), Settings(DEV + "/", "dev", "--endpoint")),
        ({"HAWKER_ENDPOINT": DEV}, ("", ""), Settings(DEV, "dev", "HAWKER_ENDPOINT")),
    ],
)
def test_the_first_place_that_names_an_endpoint_decides(
    home: Path, environ: dict[str, str], flags: tuple[str, str], expected: Settings
) -> None:
    assert find_settings({**environ, "HAWKER_HOME": str(home)}, *flags) == expected


@pytest.mark.parametrize(
    ("environ", "flag_token", "token"),
    [({}, "", "dev"), ({"HAWKER_TOKEN": "ht"}, "", "ht"), ({"HAWKER_TOKEN": "ht"}, "xt", "xt")],
)
def test_with_no_endpoint_named_the_market_of_this_machine_is_used(
    home: Path, environ: dict[str, str], flag_token: str, token: str
) -> None:
    found = find_settings({**environ, "HAWKER_HOME": str(home)}, "", flag_token)
    assert found == Settings(DEV, token, str(home / "client.json"))


def test_a_fly_token_left_in_the_environment_does_not_go_to_the_market_of_this_machine(home: Path) -> None:
    assert find_settings({"FLY_API_TOKEN": "secret", "HAWKER_HOME": str(home)}).token == "dev"


@pytest.mark.parametrize(
    ("environ", "endpoint", "variable"),
    [
        ({"FLY_API_TOKEN": "secret"}, "http://elsewhere", "HAWKER_TOKEN"),
        ({"FLY_API_TOKEN": "secret", "HAWKER_ENDPOINT": "http://elsewhere"}, "", "HAWKER_TOKEN"),
        ({"HAWKER_TOKEN": "secret", "FLY_FLAPS_BASE_URL": "http://elsewhere"}, "", "FLY_API_TOKEN"),
    ],
)
def test_no_token_goes_to_an_endpoint_it_was_not_meant_for(
    home: Path, environ: dict[str, str], endpoint: str, variable: str
) -> None:
    with pytest.raises(Refused, match="http://elsewhere") as caught:
        find_settings({**environ, "HAWKER_HOME": str(home)}, endpoint)
    assert variable in caught.value.hint


def test_with_nothing_named_and_nothing_running_the_way_to_start_is_told(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"client\.json") as caught:
        find_settings({"HAWKER_HOME": str(tmp_path / "absent")})
    assert "hawker dev" in caught.value.hint


@pytest.mark.parametrize("content", ["", "{", '{"endpoint": 1, "token": "t"}', '{"endpoint": "http://x"}'])
def test_a_damaged_file_is_named_and_stops_nobody_who_does_not_need_it(tmp_path: Path, content: str) -> None:
    (tmp_path / "client.json").write_text(content)
    environ = {"HAWKER_HOME": str(tmp_path)}
    with pytest.raises(Refused, match=r"client\.json") as caught:
        find_settings(environ)
    assert "hawker dev" in caught.value.hint
    assert find_settings(environ, "http://x", "xt").token == "xt"
    with pytest.raises(Refused, match="no token"):
        find_settings(environ, "http://x")

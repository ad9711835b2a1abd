"""A machine's configuration: checked, defaults filled in, everything unknown kept."""

from __future__ import annotations

import signal
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawker.errors import Invalid, NotBuilt, Refused
from hawker.model.config import (
    _NOT_BUILT_IN,
    CONFIG_BYTES_MAX,
    NOT_BUILT,
    Restart,
    Stop,
    accept_config,
    check_config,
)
from hawker.model.guest import Guest
from hawker.model.values import parse_signal

PROGRAM: dict[str, Any] = {"image": "host", "init": {"exec": ["/bin/true"]}}

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
durations = st.integers(0, 300 * 10**9) | st.sampled_from(["5s", "1m0s", "1.5s", "250ms", "12.34567s", "1ns", "0"])
KNOWN: dict[str, st.SearchStrategy[Any]] = {
    "init": st.fixed_dictionaries(
        {"exec": st.lists(st.text(min_size=1).filter(lambda t: "\0" not in t), min_size=1, max_size=3)},
        optional={"cmd": st.none(), "tty": st.just(False), "new": json_values},
    ),
    "guest": st.none()
    | st.fixed_dictionaries({}, optional={"cpus": st.sampled_from([None, 1, 2, 8]), "new": json_values}),
    "size": st.sampled_from([None, "", "shared-cpu-4x", "performance-2x"]),
    "restart": st.none()
    | st.fixed_dictionaries(
        {},
        optional={
            "policy": st.sampled_from([None, "", "no", "on-failure", "always"]),
            "max_retries": st.none() | st.integers(0, 99),
            "new": json_values,
        },
    ),
    "stop_config": st.none()
    | st.fixed_dictionaries(
        {},
        optional={
            "timeout": st.none() | durations,
            "signal": st.sampled_from([None, "", "SIGTERM", "term", 9, 15]),
            "new": json_values,
        },
    ),
    "env": st.none()
    | st.dictionaries(st.sampled_from(["A", "PATH", "a.b"]), st.text().filter(lambda t: "\0" not in t)),
    "metadata": st.none() | st.dictionaries(st.text(), st.text(), max_size=3),
    "auto_destroy": st.none() | st.booleans(),
    "dns": st.none() | st.just({"skip_registration": True}),
    **{name: st.sampled_from([None, [], {}, ""]) for name in NOT_BUILT},
}
good_configs = st.builds(
    lambda new, known: {**new, **PROGRAM, **known},
    st.dictionaries(st.text(max_size=8), json_values, max_size=3).map(
        lambda fields: {f"new_{name}": value for name, value in fields.items()}
    ),
    st.fixed_dictionaries({}, optional=KNOWN),
)


@given(good_configs)
def test_checking_what_was_given_back_gives_the_same_config(raw: dict[str, Any]) -> None:
    config = check_config(raw)
    assert check_config(config.raw) == config
    travelled = msgspec.json.decode(msgspec.json.encode(config.raw))
    assert check_config(travelled) == config


@given(good_configs)
def test_every_field_survives_whether_it_is_known_or_not(raw: dict[str, Any]) -> None:
    config = check_config(raw)
    for name, value in raw.items():
        if name in ("guest", "restart", "stop_config"):
            for inner, kept in (value or {}).items():
                if inner == "new":
                    assert config.raw[name][inner] == kept
        elif name != "init" or value:
            assert config.raw[name] == value


def refusal_of(raw: Any) -> Refused | None:
    try:
        config = check_config(raw)
    except Refused as error:
        return error
    assert check_config(config.raw) == config
    return None


@given(st.dictionaries(st.sampled_from(["image", *KNOWN]), json_values) | json_values)
def test_whatever_is_given_is_accepted_or_refused_by_name(raw: Any) -> None:
    if error := refusal_of(raw):
        assert isinstance(error, Invalid)
        assert error.field.split(".")[0] == "config"
        assert error.message.startswith(f"{error.field}: ")
        assert error.remedy


def test_defaults_are_filled_in() -> None:
    config = check_config(PROGRAM)
    assert config.guest == Guest(cpu_kind="shared", cpus=1, memory_mb=256)
    assert config.restart == Restart(policy="on-failure", max_retries=10)
    assert config.stop == Stop(signal=signal.SIGINT, timeout_s=5.0)
    assert (config.env, config.metadata, config.auto_destroy) == ({}, {}, False)
    assert config.raw == {
        **PROGRAM,
        "guest": {"cpu_kind": "shared", "cpus": 1, "memory_mb": 256},
        "restart": {"policy": "on-failure", "max_retries": 10},
    }


def test_a_named_size_gives_the_guest_unless_one_is_given() -> None:
    assert check_config({**PROGRAM, "size": "performance-2x"}).guest.memory_mb == 4096
    both = check_config({**PROGRAM, "size": "performance-2x", "guest": {"cpus": 2}})
    assert both.guest == Guest(cpus=2, memory_mb=512)


# --- not built ---


def meaning_something(name: str) -> Any:
    return {"schedule": "daily", "metrics": {"port": 9}}.get(name, [{"x": 1}])


@pytest.mark.parametrize("name", sorted(NOT_BUILT))
def test_a_field_that_is_not_built_is_refused_by_name(name: str) -> None:
    with pytest.raises(NotBuilt, match=rf"^config\.{name}: .*leave the field out$") as caught:
        check_config({**PROGRAM, name: meaning_something(name)})
    assert caught.value.field == f"config.{name}"


@pytest.mark.parametrize("name", sorted(NOT_BUILT))
@pytest.mark.parametrize("empty", [None, [], {}, "", 0, False])
def test_a_field_that_is_not_built_is_accepted_empty_and_given_back(name: str, empty: Any) -> None:
    assert check_config({**PROGRAM, name: empty}).raw[name] == empty


INNER = [(outer, inner) for outer, fields in _NOT_BUILT_IN.items() for inner in fields]


@pytest.mark.parametrize(("outer", "inner"), INNER)
def test_an_inner_field_that_is_not_built_is_refused_by_name(outer: str, inner: str) -> None:
    given = {**PROGRAM.get(outer, {}), inner: ["something"]}
    with pytest.raises(NotBuilt, match=rf"^config\.{outer}\.{inner}: "):
        check_config({**PROGRAM, outer: given})
    nothing: list[Any] = [None, [], "", 0, False]
    for empty in nothing:
        kept = check_config({**PROGRAM, outer: {**given, inner: empty}}).raw[outer][inner]
        assert kept == empty


def test_spot_prices_are_not_built() -> None:
    with pytest.raises(NotBuilt, match="spot prices"):
        check_config({**PROGRAM, "restart": {"policy": "spot-price"}})


# --- stop ---


@pytest.mark.parametrize(
    ("given", "stop", "written"),
    [
        ({"timeout": 10**10}, Stop(timeout_s=10.0), {"timeout": "10s", "signal": "SIGINT"}),
        ({"timeout": "90s", "signal": "SIGTERM"}, Stop(signal=15, timeout_s=90.0), {"timeout": "1m30s"}),
        ({"timeout": 1}, Stop(timeout_s=1e-9), {"timeout": "1ns"}),
        ({"signal": 9}, Stop(signal=9), {"timeout": "5s", "signal": "SIGKILL"}),
        ({"signal": "usr1"}, Stop(signal=10), {"signal": "SIGUSR1"}),
        ({"timeout": "0s"}, Stop(timeout_s=0.0), {"timeout": "0s"}),
    ],
)
def test_the_durations_of_stop_config_come_out_as_strings(
    given: dict[str, Any], stop: Stop, written: dict[str, str]
) -> None:
    config = check_config({**PROGRAM, "stop_config": given})
    assert config.stop == stop
    assert config.raw["stop_config"].items() >= written.items()


def test_a_stop_takes_at_most_five_minutes() -> None:
    assert check_config({**PROGRAM, "stop_config": {"timeout": "5m"}}).stop.timeout_s == 300.0
    with pytest.raises(Invalid, match=r"config\.stop_config\.timeout: .*at most 300s"):
        check_config({**PROGRAM, "stop_config": {"timeout": "5m0.001s"}})


def test_the_documented_signals_by_name_or_number() -> None:
    for name in (
        *("ABRT", "ALRM", "FPE", "HUP", "INT", "ILL", "KILL"),
        *("PIPE", "QUIT", "SEGV", "TERM", "TRAP", "USR1", "USR2"),
    ):
        number = signal.Signals[f"SIG{name}"]
        assert parse_signal("signal", f"SIG{name}") == parse_signal("signal", name.lower()) == number
        assert parse_signal("signal", int(number)) == number
    others: list[Any] = ["SIGSTOP", "SIGCHLD", "", "SIG", 0, 19, 64, -9, True, None, 9.0, [], {}]
    for other in others:
        with pytest.raises(Invalid, match="use one of SIGABRT, "):
            parse_signal("signal", other)


# --- the rest, field by field ---


@pytest.mark.parametrize(
    ("change", "field", "remedy"),
    [
        ({"image": ""}, "config.image", "name an image"),
        ({"image": None}, "config.image", "name an image"),
        ({"image": 5}, "config.image", "name an image"),
        ({"image": "a b"}, "config.image", "name an image"),
        ({"init": {}}, "config.init.exec", "has no program of its own"),
        ({"init": {"exec": [""]}}, "config.init.exec", "has no program of its own"),
        ({"init": {"exec": "sh -c 'open"}}, "config.init.exec", "No closing quotation"),
        ({"init": {"exec": 7}}, "config.init.exec", "give a list of strings"),
        ({"init": {}, "processes": [{}, {}]}, "config.processes", "several processes"),
        ({"init": {"exec": ["a\0b"]}}, "config.init.exec", "give a list of strings"),
        ({"init": {"exec": ["a"], "cmd": [1]}}, "config.init.cmd", "give a list of strings"),
        ({"init": ["/bin/true"]}, "config.init", "give an object"),
        ({"guest": "small"}, "config.guest", "give an object"),
        ({"guest": {"cpus": 3}}, "config.guest.cpus", "shared machines have"),
        ({"size": 4}, "config.size", "give a string"),
        ({"size": "huge"}, "config.size", "use shared-cpu-"),
        ({"env": ["A=1"]}, "config.env", "give an object"),
        ({"env": {"A": 1}}, "config.env.A", "give a string"),
        ({"env": {"A": None}}, "config.env.A", "give a string"),
        ({"env": {"A": "x\0y"}}, "config.env.A", "give a string"),
        ({"env": {"": "x"}}, "config.env.", "at least one character"),
        ({"env": {"A=B": "x"}}, "config.env.A=B", "neither '=' nor NUL"),
        ({"env": {"A\0": "x"}}, "config.env.A\0", "neither '=' nor NUL"),
        ({"metadata": {"k": 1}}, "config.metadata.k", "give a string"),
        ({"metadata": "k"}, "config.metadata", "give an object"),
        ({"auto_destroy": "yes"}, "config.auto_destroy", "give true or false"),
        ({"restart": "always"}, "config.restart", "give an object"),
        ({"restart": {"policy": "sometimes"}}, "config.restart.policy", "use no, on-failure or always"),
        ({"restart": {"max_retries": -1}}, "config.restart.max_retries", "give a count"),
        ({"restart": {"max_retries": True}}, "config.restart.max_retries", "give a count"),
        ({"restart": {"max_retries": 1.5}}, "config.restart.max_retries", "give a count"),
        ({"stop_config": "now"}, "config.stop_config", "give an object"),
        ({"stop_config": {"timeout": "soon"}}, "config.stop_config.timeout", "write a duration"),
        ({"stop_config": {"timeout": True}}, "config.stop_config.timeout", "write a duration"),
        ({"stop_config": {"signal": "SIGSTOP"}}, "config.stop_config.signal", "use one of"),
    ],
)
def test_an_error_names_the_field_the_value_and_the_remedy(change: dict[str, Any], field: str, remedy: str) -> None:
    with pytest.raises(Invalid) as caught:
        check_config({**PROGRAM, **change})
    error = caught.value
    assert error.field == field
    assert error.message.startswith(f"{field}: ")
    assert remedy in error.message
    assert error.details is not None
    assert error.details["value"] == error.value


def test_a_machine_stands_by_for_others_by_their_ids() -> None:
    of = ["0123456789abcd", "fedcba98765432", "0123456789abcd"]
    config = check_config({**PROGRAM, "standbys": of})
    assert (config.standbys, config.raw["standbys"]) == (tuple(of[:2]), of)
    for wrong, field in (("x", "config.standbys"), (["web"], "config.standbys[0]"), ([7], "config.standbys[0]")):
        with pytest.raises(Invalid) as caught:
            check_config({**PROGRAM, "standbys": wrong})
        assert caught.value.field == field


def test_a_restart_without_retries_is_meant_only_by_on_failure() -> None:
    def retries(policy: str) -> int:
        return check_config({**PROGRAM, "restart": {"policy": policy, "max_retries": 0}}).restart.max_retries

    assert retries("on-failure") == 0
    assert retries("always") == retries("no") == 10  # clients that mean nothing by it send 0


def test_the_command_line_is_exec_or_else_entrypoint_and_cmd() -> None:
    def argv(**init: list[str]) -> tuple[str, ...]:
        return check_config({"image": "host", "init": init}).argv

    assert argv(exec=["a", "b"], entrypoint=["c"], cmd=["d"]) == ("a", "b")
    assert argv(entrypoint=["c"], cmd=["d"]) == ("c", "d")
    assert argv(cmd=["d"]) == ("d",)
    assert check_config({"image": "nginx"}).argv == ()


def test_names_of_metadata_are_free_and_those_of_env_nearly() -> None:
    config = check_config({**PROGRAM, "metadata": {"": "x", "a=b": ""}, "env": {"a.b-c": "", "ä": "ö"}})
    assert config.metadata == {"": "x", "a=b": ""}
    assert config.env == {"a.b-c": "", "ä": "ö"}


def test_another_place_is_named_when_the_config_came_from_there() -> None:
    with pytest.raises(Invalid, match=r"^machine\.config\.image: "):
        check_config({}, at="machine.config")


def test_a_command_line_in_one_string_is_split_as_a_shell_would_and_given_back_as_it_came() -> None:
    config = check_config({"image": "host", "init": {"exec": "sh -c 'sleep 5'"}})
    assert config.argv == ("sh", "-c", "sleep 5")
    assert config.raw["init"] == {"exec": "sh -c 'sleep 5'"}


def test_the_one_element_of_processes_names_the_program_where_init_does_not() -> None:
    process = {"name": "main", "entrypoint": ["sleep"], "cmd": ["5"], "env": {"A": "1"}}
    config = check_config({"image": "host", "env": {"A": "0", "B": "2"}, "processes": [process]})
    assert config.argv == ("sleep", "5")
    assert config.env == {"A": "1", "B": "2"}
    assert check_config({"image": "host", "init": {"exec": ["true"]}, "processes": [process]}).argv == ("true",)


def test_a_configuration_of_a_client_has_a_largest_size_with_its_defaults() -> None:
    defaults = len(msgspec.json.encode(check_config({**PROGRAM, "metadata": {"note": ""}}).raw))
    largest = {**PROGRAM, "metadata": {"note": "x" * (CONFIG_BYTES_MAX - defaults)}}
    read = accept_config(largest).raw
    assert accept_config(read).raw == read
    larger = {**PROGRAM, "metadata": {"note": "x" * (CONFIG_BYTES_MAX - defaults + 1)}}
    with pytest.raises(Invalid, match=r"262145 bytes.*at most 262144 bytes") as refused:
        accept_config(larger)
    assert refused.value.field == "config"
    assert check_config(larger), "what is kept already is read back"

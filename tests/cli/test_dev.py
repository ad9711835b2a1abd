"""`hawker dev`: what it takes, what it says, and what it leaves for a shell to read."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from tests.cli.programs import hawker
from tests.kit.markets import running_market
from tests.kit.waiting import wait_until

from hawker.cli import dev, dev_files
from hawker.cli.main import run
from hawker.core import ranking

ONE_WORKER = ("--region", "mad", "--workers", "1", "--no-cgroups")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_greeting_says_how_the_command_finds_a_market_and_names_one_of_its_regions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "my market"
    with running_market(elsewhere, ONE_WORKER):
        out = elsewhere / "dev.out"
        wait_until(lambda: "Ctrl-C" in out.read_text(), "the greeting is told")  # the market is up a moment before
        told = out.read_text()
        assert f"export HAWKER_HOME='{elsewhere}'\n" in told
        assert "--region mad --port 80:8000 host" in told
        assert hawker("workers", env={"HAWKER_HOME": str(elsewhere)}).status == 0
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    default = tmp_path / "hawker" / "dev"
    with running_market(default, ONE_WORKER) as market:
        assert "HAWKER_HOME" not in (default / "dev.out").read_text()
        assert hawker("workers").status == 0
        pids = "".join(path.read_text() for path in default.glob("*.pid"))
        assert sorted(pids.splitlines()) == sorted(str(market.pid(agent)) for agent in ("broker", "mad-1")), (
            "together they are what kill takes"
        )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--workers", "0"), "Invalid value for '--workers': 0 is not in the range x>=1."),
        (("--cpus", "0"), "Invalid value for '--cpus': 0 is not in the range x>=1."),
        (("--dedicated", "-1"), "Invalid value for '--dedicated': -1 is not in the range x>=0."),
        (("--memory", "-4"), "Invalid value for '--memory': -4 is not in the range x>=1."),
        (("--machines", "0"), "Invalid value for '--machines': 0 is not in the range x>=1."),
        (("--policy", "nope"), "Invalid value for '--policy': 'nope' is not one of 'curve', "),
        (("--region", "bad region!"), "Invalid value for '--region': 'bad region!' is not a region's code: "),
        (("--region", ""), "Invalid value for '--region': '' is not a region's code: "),
    ],
)
def test_what_no_market_can_have_is_refused(
    arguments: tuple[str, ...], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["dev", "--dir", str(tmp_path / "d"), *arguments]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"error: {sentence}")
    assert second == "  try: hawker dev --help"
    assert not (tmp_path / "d").exists()


def test_no_two_agents_of_a_market_get_the_same_port() -> None:
    with contextlib.ExitStack() as held:
        ports = [dev_files.free_port(held) for _ in range(400)]
    assert len(set(ports)) == 400  # of so many that are not held some are the same, all but always


def test_the_policies_to_choose_from_are_those_there_are() -> None:
    assert set(dev.POLICIES) == set(ranking.POLICIES)


@pytest.mark.slow
def test_an_agent_that_cannot_start_ends_the_market_and_its_last_words_are_shown(tmp_path: Path) -> None:
    (tmp_path / "mad-1").write_text("a file where its directory belongs")
    (tmp_path / "mad-1.log").write_text("of an earlier market\n")
    ended = hawker("dev", "--dir", tmp_path, "--port", "0", *ONE_WORKER)
    assert ended.status == 1
    begin, *words, stopping, sentence, hint = ended.err.splitlines()
    assert begin == f"hawker: the end of {tmp_path / 'mad-1.log'}:"
    assert "File exists" in "".join(words)
    assert "an earlier market" not in ended.err
    assert stopping == "hawker: stopping the market"
    assert sentence == "error: mad-1 ended with status 1 before it was ready"
    assert hint == f"  try: look into {tmp_path / 'mad-1.log'}"
    assert list(tmp_path.glob("*.pid")) == []

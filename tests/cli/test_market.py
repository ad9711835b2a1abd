"""The command against a real market, as a new user would go about it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.cli.programs import ENDS_S, PROGRAM, Ended, environment, hawker, on_terminal
from tests.kit.markets import Market, running_market
from tests.kit.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

STUBBORN = 'trap "" INT TERM; echo ready; while :; do sleep 0.05; done'


@pytest.fixture(scope="module")
def market(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Market]:
    with running_market(tmp_path_factory.mktemp("cli"), ("--region", "ord", "--region", "mad")) as market:
        yield market


class User:
    """Runs commands that find the market where `hawker dev` left it."""

    def __init__(self, market: Market, app: str) -> None:
        self.env = {"HAWKER_HOME": str(market.home)}
        self.app = app
        self.market = market

    def __call__(self, *arguments: str | Path, status: int = 0, stdin: str = "") -> Ended:
        ended = hawker(*arguments, env=self.env, stdin=stdin)
        assert ended.status == status, (arguments, ended)
        return ended

    def json(self, *arguments: str | Path) -> Any:
        at = arguments.index("--") if "--" in arguments else len(arguments)
        return self(*arguments[:at], "--json", *arguments[at:]).json()

    def run(self, *arguments: str, command: tuple[str, ...] = ("sleep", "600")) -> Any:
        """A started machine of the app."""
        return self.json("machine", "run", "--app", self.app, *arguments, "host", "--", *command)


@pytest.fixture
def user(market: Market, request: pytest.FixtureRequest) -> Iterator[User]:
    """Somebody with an app of their own, which goes with everything in it."""
    app = re.sub("[^a-z]+", "-", request.node.name.removeprefix("test_"))[:40].strip("-")
    user = User(market, app)
    user("apps", "create", app)
    yield user
    if any(a["name"] == app for a in user.json("apps", "list")):
        user("apps", "destroy", app, "--force")


def test_the_first_ten_minutes(user: User) -> None:
    assert user("apps", "list").out.splitlines()[0].split() == ["name", "organisation", "status", "machines"]
    order = ("machine", "run", "--app", user.app, "--region", "mad", "--name", "web", "host", "--")
    shown = dict(line.split(maxsplit=1) for line in user(*order, "sleep", "600").out.splitlines())
    assert list(shown) == ["machine", "name", "region", "worker", "state", "times"]
    assert (shown["name"], shown["region"], shown["state"]) == ("web", "mad", "started")
    assert re.fullmatch(r"offers .+ ms, reserve .+ ms, confirm .+ ms, total .+ ms", shown["times"])
    header, row = user("machine", "list", "--app", user.app).out.splitlines()
    assert header.split() == ["id", "name", "app", "state", "region", "worker", "size"]
    size = "1 shared, 256 MiB"
    assert row.split(maxsplit=6) == [shown["machine"], "web", user.app, "started", "mad", shown["worker"], size]
    for given in ("web", shown["machine"]):
        assert "sleep 600" in user("machine", "status", given).out
    for command, sentence in (
        (("stop",), "is stopped"),
        (("start",), "is started"),
        (("restart", "--force"), "is started again"),
        (("cordon",), "is cordoned"),
        (("uncordon",), "is in traffic"),
        (("wait", "--timeout", "5"), "is started"),
        (("destroy", "--force"), "is destroyed"),
    ):
        verb, *options = command
        assert user("machine", verb, "web", *options).out == f"machine {shown['machine']} (web) {sentence}\n"
    assert user("machine", "list", "--app", user.app).out == ""
    assert shown["machine"] in user("machine", "list", "--app", user.app, "--all").out
    assert user("apps", "destroy", user.app).out == f"app {user.app} is destroyed\n"


def test_regions_and_workers_show_what_is_free_and_a_cordoned_worker_makes_no_offers(user: User) -> None:
    assert [line.split()[0] for line in user("regions").out.splitlines()] == ["region", "ord", "mad"]
    assert [r["code"] for r in user.json("regions")["Regions"]] == ["ord", "mad"]
    user("workers", "cordon", "ord-1")
    try:
        states = {line.split()[0]: line.split()[2] for line in user("workers", "--region", "ord").out.splitlines()[1:]}
        assert states == {"ord-1": "cordoned", "ord-2": "ok"}
        assert user.run("--region", "ord")["hawker"]["worker"] == "ord-2"
        assert "ord-1 refused: it was cordoned." in explained(user)
    finally:
        user("workers", "uncordon", "ord-1")
    assert [w["cordoned"] for w in user.json("workers", "list")] == [False] * 4
    assert "no worker is called x" in user("workers", "cordon", "x", status=3).err


def test_a_region_given_to_workers_holds_for_its_list_and_for_nothing_else(user: User) -> None:
    for arguments in (
        ("--region", "mad", "list"),
        ("list", "--region", "mad"),
        ("--region", "ord", "list", "--region", "mad"),
    ):
        assert [w["name"] for w in user.json("workers", *arguments)] == ["mad-1", "mad-2"]
    refused = user("workers", "--region", "mad", "runs", status=2)
    assert refused.err.splitlines() == ["error: --region has no meaning for runs", "  try: hawker workers --help"]


def explained(user: User) -> str:
    (machine,) = user.json("machine", "list", "--app", user.app)
    return user("explain", machine["id"]).out


def test_a_placement_is_explained_with_every_candidate_and_every_term(user: User) -> None:
    machine = user.run("--region", "ord", "--name", "explained")
    told = user("explain", "explained").out
    decision = user.json("explain", machine["id"])["decision"]
    for scored in decision["ranking"]:
        assert re.search(rf"^{scored['worker']}( \(won\))? ", told, re.MULTILINE)
        for term in scored["terms"]:
            assert re.search(rf" {term['name']} .* {term['utility']:.3f} .* {term['weight']:.3f}", told), term
    assert len([line for line in told.splitlines() if line.endswith(".")]) == 2, "a sentence for each worker"
    assert f"\n{machine['hawker']['worker']} won: " in told


def test_an_impossible_order_is_told_worker_by_worker(user: User) -> None:
    order = ("machine", "run", "--app", user.app, "--region", "ord", "--guest", "performance-64x", "host", "--", "ls")
    refused = user(*order, status=4)
    assert refused.out == ""
    sentence, header, *rows, hint = refused.err.splitlines()
    assert sentence.startswith("error: insufficient resources")
    assert header.split() == ["worker", "reason", "resource", "wanted", "free"]
    assert [row.split() for row in rows] == [[f"ord-{n}", "full", "cpus", "dedicated", "64", "2"] for n in (1, 2)]
    assert hint.startswith("  try: ")
    refused = user(*order[:-2], "--json", *order[-2:], status=4)
    assert json.loads(refused.err)["status"] == "insufficient_capacity"


def test_a_program_that_cannot_start_is_an_error_that_says_why(user: User) -> None:
    order = ("machine", "run", "--app", user.app, "host", "--", "/no/such/program")
    ended = user(*order, status=1)
    assert re.search(r"^state +failed$", ended.out, re.MULTILINE), "what became of the machine is shown, too"
    assert "did not start: /no/such/program: not found" in ended.err


def test_a_run_that_goes_with_its_program_shows_its_output_and_ends_as_it_does(user: User) -> None:
    order = ("machine", "run", "--app", user.app, "--rm", "host", "--", "sh", "-c")
    ended = user(*order, "echo out; echo err >&2; exit 3", status=3)
    assert (ended.out, ended.err) == ("out\n", "err\n")
    user(*order, "kill -KILL $$", status=128 + 9)
    assert "machine " in user(*order[:4], "--rm", "--detach", "host", "--", "true").out


def test_the_same_key_gives_the_same_machine(user: User) -> None:
    first, second = user.run("--key", "k"), user.run("--key", "k")
    assert first["id"] == second["id"]
    assert first["timings_ms"].keys() == {"offers", "reserve", "confirm", "total"}
    assert second["timings_ms"] == {}
    user("machine", "destroy", first["id"], "--force")
    gone = user("machine", "run", "--app", user.app, "--key", "k", "host", "--", "sleep", "600", status=1)
    assert gone.err.splitlines() == [
        f"error: machine {first['id']} ({first['name']}) was ordered with this key and is destroyed",
        "  try: give another --key to order a new one",
    ]
    assert user.run("--rm", "--key", "short", command=("true",))["id"], "one that has gone on its own is no error"


def test_what_is_wrong_is_told_in_the_terms_of_the_command_line(user: User, tmp_path: Path) -> None:
    sentence = "error: the image host has no program of its own: put the command after --\n"
    for verb in ("run", "create"):
        refused = user("machine", verb, "--app", user.app, "host", status=2)
        assert refused.err == f"{sentence}  try: hawker machine {verb} ... -- COMMAND\n"
    machine = user.run()["id"]
    (tmp_path / "c.json").write_text('{"image": "host", "init": {"exec": [7]}}')
    refused = user("machine", "update", machine, "--config", tmp_path / "c.json", status=2)
    assert "give a list of strings" in refused.err, "another fault of the same field keeps its sentence"
    (tmp_path / "c.json").write_text('{"image": "host"}')
    assert user("machine", "update", machine, "--config", tmp_path / "c.json", status=2).err.startswith(sentence)
    refused = user("apps", "destroy", user.app, status=4)
    assert refused.err.splitlines() == [
        f"error: app {user.app} still has machines: 1",
        f"  try: hawker apps destroy {user.app} --force destroys them too",
    ]
    refused = user("apps", "destroy", "nope", status=3)
    assert refused.err == "error: app not found: nope\n  try: hawker apps list\n"
    refused = user("machine", "status", "0123456789ABCD", status=3)
    assert refused.err.splitlines() == [
        "error: no machine has the id or name 0123456789ABCD",
        "  try: ids are in lower case: 0123456789abcd",
    ]


def test_options_become_the_machine_s_configuration(user: User, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"stop_config": {"signal": "SIGTERM"}}')
    more = ("--cpus", "2", "--memory", "1024", "--restart", "no", "--config", str(tmp_path / "c.json"))
    command = ("sh", "-c", 'echo "A is $A"; sleep 600')
    machine = user.run("--env", "A=b c", "--metadata", "role=web", *more, command=command)
    config = machine["config"]
    assert config["guest"] == {"cpu_kind": "shared", "cpus": 2, "memory_mb": 1024}
    assert config["restart"]["policy"] == "no"
    assert config["metadata"] == {"role": "web"}
    assert config["stop_config"]["signal"] == "SIGTERM"
    assert user("machine", "exec", machine["id"], "--", "printenv", "A").out == "b c\n"


def test_create_does_not_start_and_update_changes_a_machine_at_rest_and_a_running_one(user: User) -> None:
    argv = ("machine", "create", "--app", user.app, "--name", "m", "host", "--", "sleep", "600")
    assert re.search(r"^state +(created|stopped)$", user(*argv).out, re.MULTILINE)
    updated = user.json("machine", "update", "m", "--memory", "512", "--env", "A=1")
    assert (updated["state"], updated["config"]["guest"]["memory_mb"]) == ("stopped", 512)
    user("machine", "start", "m")
    updated = user.json("machine", "update", "m", "--env", "B=2", "--", "sleep", "601")
    assert updated["state"] == "started"
    assert updated["config"]["env"] == {"A": "1", "B": "2"}
    assert updated["config"]["init"]["exec"] == ["sleep", "601"]


def test_a_clone_has_the_configuration_and_may_be_elsewhere(user: User) -> None:
    user.run("--region", "ord", "--name", "m", "--env", "A=1")
    user("machine", "clone", "m", "--region", "mad", "--name", "n")
    first, second = (user.json("machine", "status", name) for name in ("m", "n"))
    assert second["config"] == first["config"]
    assert (second["region"], second["state"]) == ("mad", "started")


def test_one_name_is_one_machine_in_an_app_and_that_of_two_apps_asks_for_an_id(user: User) -> None:
    first = user.run("--name", "twin")["id"]
    wait_until(lambda: user.json("sql", "select id from machines where name = 'twin'")["rows"], "the name is known")
    taken = user("machine", "run", "--app", user.app, "--name", "twin", "host", "--", "true", status=4)
    assert taken.err.splitlines() == [
        f"error: machine {first} of app {user.app} has the name twin",
        "  try: give another name, or none: the market finds one",
    ]
    other = f"{user.app}-2"
    user("apps", "create", other)
    second = user.json("machine", "run", "-a", other, "--name", "twin", "host", "--", "sleep", "600")["id"]
    refused = user("machine", "status", "twin", status=1).err
    assert "2 machines are called twin" in refused
    assert f"{first} ({user.app})" in refused
    assert f"{second} ({other})" in refused
    user("apps", "destroy", other, "--force")
    assert "no machine has the id or name nobody" in user("machine", "status", "nobody", status=3).err
    assert "no machine has the id or name twin in app" not in refused
    assert "app not found" in user("machine", "status", "twin", "--app", "no-such-app", status=3).err


def test_ids_alone_are_for_other_commands(user: User) -> None:
    machine = user.run()["id"]
    assert user("machine", "list", "-a", user.app, "-q").out == f"{machine}\n"
    assert user.app in user("apps", "list", "-q").out.splitlines()
    user("machine", "stop", machine)
    assert "is started" in user("machine", "restart", machine).out, "one that is stopped is started"


def test_a_filter_that_leaves_nothing_is_told_as_that(user: User) -> None:
    machine = user.run()
    listing = ("machine", "list", "--app", user.app)
    for narrowed in (("--state", "stopped"), ("--region", "nope")):
        assert user(*listing, *narrowed) == Ended(0, "", "no such machines\n")
    assert machine["id"] in user(*listing, "--state", "started", "--state", "stopped").out
    assert user("workers", "--region", "nope") == Ended(0, "", "no such workers\n")
    assert user.json("workers", "--region", "nope") == []
    assert user("workers", "runs", "--worker", "ord-1", "--machine", machine["id"]).err == "no such runs\n"
    refused = user("workers", "runs", "--worker", "nope", status=3)
    assert refused.err == "error: no worker is called nope\n  try: hawker workers lists them\n"


def test_machines_of_a_silent_worker_are_not_taken_for_gone(user: User) -> None:
    machine, other = user.run("--region", "ord", "--name", "hidden"), user.run("--region", "mad")
    worker = machine["hawker"]["worker"]
    pid = user.market.pid(worker)
    os.kill(pid, signal.SIGSTOP)  # it neither answers nor refuses
    try:
        with ThreadPoolExecutor() as at_once:
            listed = at_once.submit(user, "machine", "list", "--app", user.app)
            missed = at_once.submit(user, "machine", "status", "hidden", "--app", user.app, status=1)
            workers = at_once.submit(user, "workers")
        assert [line.split()[0] for line in listed.result().out.splitlines()] == ["id", other["id"]]
        assert listed.result().err == f"these workers did not answer, their machines are not listed: {worker}\n"
        assert f"on the workers that answered; {worker} did not" in missed.result().err
        assert re.search(rf"^{worker} +ord +no answer ", workers.result().out, re.MULTILINE)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert user.json("machine", "status", "hidden")["id"] == machine["id"]


def test_exec_passes_input_output_and_status_on(user: User) -> None:
    machine = user.run()["id"]
    script = "read line; echo got $line; echo oops >&2; exit 3"
    ended = user("machine", "exec", "--stdin", machine, "--", "sh", "-c", script, status=3, stdin="hello\n")
    assert (ended.out, ended.err) == ("got hello\n", "oops\n")
    user("machine", "exec", machine, "--", "sh", "-c", "kill -KILL $$", status=128 + 9)
    user("machine", "exec", machine, "--", "no-such-program", status=127)
    late = user("machine", "exec", "--timeout", "1", machine, "--", "sh", "-c", "echo so far; sleep 9", status=124)
    assert (late.out, "killed after 1 s" in late.err) == ("so far\n", True)


def test_suspend_freezes_and_start_wakes(user: User) -> None:
    if not all(w["driver"]["capabilities"]["suspend"] for w in user.json("workers")):
        ended = user("machine", "suspend", user.run()["id"], status=1)
        assert "cannot suspend on this host" in ended.err
        return
    machine = user.run()["id"]
    assert "is suspended" in user("machine", "suspend", machine).out
    assert "is started" in user("machine", "start", machine).out


def test_logs_are_printed_and_followed_until_ctrl_c(user: User) -> None:
    machine = user.run("--name", "talks", command=("sh", "-c", "echo out; echo err >&2; exec sleep 600"))["id"]
    argv = [*PROGRAM, "machine", "logs", "--follow", machine]
    with subprocess.Popen(argv, env=environment(user.env), stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert sorted(following.stdout.readline() for _ in range(2)) == ["err\n", "out\n"]
        following.send_signal(signal.SIGINT)
        assert following.wait(ENDS_S) == 130
    lines = sorted(user("machine", "logs", "-t", "talks").out.splitlines(), key=lambda line: line.split()[1])
    assert [line.split(maxsplit=1)[1] for line in lines] == ["stderr err", "stdout out"]
    decoded = [json.loads(line) for line in user("machine", "logs", "talks", "--json").out.splitlines()]
    assert sorted((line["stream"], line["message"]) for line in decoded) == [("stderr", "err"), ("stdout", "out")]
    assert len(user("machine", "logs", "talks", "--tail", "1").out.splitlines()) == 1


@pytest.mark.parametrize("destroyed_by", ["itself", "a person"])
def test_followed_logs_end_with_the_last_line_of_a_machine_that_is_destroyed(user: User, destroyed_by: str) -> None:
    script = "mkfifo go; echo first; cat go; seq 3000"
    options, then = (("--rm",), "") if destroyed_by == "itself" else ((), "; echo done; exec sleep 600")
    machine = user.run(*options, "--name", "ends", command=("sh", "-c", script + then))["id"]
    argv = [*PROGRAM, "machine", "logs", "--follow", machine]
    with subprocess.Popen(argv, env=environment(user.env), stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert following.stdout.readline() == "first\n"
        user("machine", "exec", machine, "--", "sh", "-c", "echo second > go")
        if then:
            assert "done\n" in iter(following.stdout.readline, "")
            user("machine", "destroy", machine, "--force")
            assert following.stdout.read() == ""
        else:
            assert following.stdout.read().splitlines() == ["second", *map(str, range(1, 3001))]
        assert following.wait(ENDS_S) == 0
    said = user("machine", "logs", "--follow", machine, "--tail", "1").out
    assert said == ("done\n" if then else "3000\n"), "those of one that is gone are there, and end at once"


def test_what_nobody_asked_for_is_told_as_the_workers_doing(user: User) -> None:
    machine = user.run("--restart", "no", command=("true",))["id"]
    user("machine", "wait", machine, "--state", "stopped")
    exited = re.search(r"^\S+ +exit +stopped +(.*)$", user("machine", "status", machine).out, re.MULTILINE)
    assert exited
    assert exited[1].split() == ["worker", "exit", "status", "0"]


def test_a_wait_that_is_too_long_ends_with_status_5(user: User) -> None:
    machine = user.run()["id"]
    ended = user("machine", "wait", machine, "--state", "stopped", "--timeout", "1", status=5)
    assert "failed to reach desired state, stopped, currently started" in ended.err


def test_a_running_machine_is_destroyed_only_by_force_and_on_a_terminal_only_after_a_yes(user: User) -> None:
    machine = user.run("--name", "m")["id"]
    refused = user("machine", "destroy", machine, status=4)
    assert refused.err.endswith(f"  try: hawker machine stop {machine} first, or give --force\n")
    user("machine", "stop", machine)
    asked = on_terminal("machine", "destroy", "m", env=user.env, typed="n\n")
    assert f"Destroy machine {machine} (m) of app {user.app}, stopped? [y/N]: " in asked.out
    assert asked.status == 1
    assert asked.out.endswith("error: nothing was done: the answer was no\n")
    assert user.json("machine", "status", "m")["state"] == "stopped"
    asked = on_terminal("machine", "destroy", "m", env=user.env, typed="y\n")
    assert asked.status == 0
    assert asked.out.endswith(f"machine {machine} (m) is destroyed\n")


def test_what_takes_long_shows_that_it_goes_on(user: User) -> None:
    user.run("--name", "stubborn", command=("sh", "-c", STUBBORN))
    shown = on_terminal("machine", "stop", "stubborn", "--timeout", "1.5", env=user.env)
    assert "stopping, 1 s" in shown.out
    assert shown.out.rpartition("\x1b[2K")[2].endswith("is stopped\n")


def test_an_app_with_machines_is_destroyed_only_by_force(user: User) -> None:
    user.run()
    assert "still has machines: 1" in user("apps", "destroy", user.app, status=4).err
    user("apps", "destroy", user.app, "--force")
    assert "app not found" in user("machine", "list", "--app", user.app, status=3).err


def test_a_name_that_is_taken_and_a_machine_that_runs_are_refused_with_a_remedy(user: User) -> None:
    taken = user("apps", "create", user.app, status=4).err
    assert taken.splitlines() == [
        "error: Validation failed: Name has already been taken",
        f"  try: choose another name, or use the app {user.app}",
    ]
    machine = user.run()["id"]
    refused = user("machine", "destroy", machine, status=4).err
    assert refused.splitlines()[1:] == [f"  try: hawker machine stop {machine} first, or give --force"]


def test_a_run_that_takes_too_long_is_seen_and_given_up(user: User) -> None:
    machine = user.run("--region", "mad", command=("sh", "-c", STUBBORN))
    argv = [*PROGRAM, "machine", "stop", machine["id"], "--timeout", "300"]
    with subprocess.Popen(argv, env=environment(user.env), stdout=subprocess.PIPE, text=True) as stopping:
        wait_until(lambda: bool(user.json("workers", "runs", "--machine", machine["id"])), "the stop has begun")
        header, row = user("workers", "runs", "--worker", machine["hawker"]["worker"]).out.splitlines()
        assert header.split() == ["run", "worker", "flow", "machine", "status", "step", "error"]
        run, *shown = row.split()
        assert shown == [machine["hawker"]["worker"], "machine.stop", machine["id"], "active", "stop", "-"]
        told = f"run {run} (machine.stop of machine {machine['id']}) is"
        ended = user("workers", "cancel", run).out
        assert ended.startswith(
            f"run {run} (machine.stop of machine {machine['id']}) is cancelled: cancelled by request "
        )
        assert ended.endswith(" by dev\n")
        assert stopping.wait(ENDS_S) == 0
    assert user.json("machine", "status", machine["id"])["state"] == "stopped"
    assert "nothing is under way" in user("workers", "runs").err
    assert user("workers", "retry", run).out.startswith(f"{told} cancelled"), "it is not parked, and stays as it is"
    assert "run not found" in user("workers", "retry", "unknown", status=3).err
    ended = user.json("workers", "runs", "--machine", machine["id"], "--status", "cancelled", "--status", "done")
    assert [(r["flow"], r["status"]) for r in ended] == [("machine.stop", "cancelled"), ("machine.create", "done")]


def test_sql_asks_every_worker_or_one(user: User) -> None:
    machine = user.run("--region", "mad")
    query = f"select id, body ->> 'state' as state from machine where id = '{machine['id']}'"
    header, row = user("sql", "--workers", query).out.splitlines()
    assert header.split() == ["worker", "id", "state"]
    assert row.split() == [machine["hawker"]["worker"], machine["id"], "started"]
    assert user.json("sql", query, "--worker", "ord-1")["rows"] == []
    assert "syntax error" in user("sql", "--workers", "selec", status=2).err


def test_sql_that_nobody_answers_is_an_error(user: User) -> None:
    pids = [user.market.pid(worker) for worker in user.market.workers()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        everyone = user("sql", "--workers", "select 1", status=1)
        one = user("sql", "select 1", "--worker", "ord-1", status=1)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert (everyone.out, everyone.err) == ("", "error: no worker answered\n  try: hawker workers\n")
    assert (one.out, one.err) == ("", "error: worker ord-1 did not answer\n  try: hawker workers\n")
    wait_until(lambda: all(w["reachable"] for w in user.json("workers")), "the workers answer again")


def test_a_running_worker_s_database_can_be_verified(user: User) -> None:
    worker = user.run()["hawker"]["worker"]
    assert "no faults" in user("worker", "verify", user.market.home / worker).out


def test_the_shell_completes_what_the_market_knows(user: User) -> None:
    machine = user.run("--name", "completed")["id"]
    for words, expected in (
        ("machine status comp", ["completed"]),
        (f"machine status {machine[:12]}", [machine]),
        ("machine run --region m", ["mad"]),
        ("workers cordon ord", ["ord-1", "ord-2"]),
        (f"apps destroy {user.app[:-2]}", [user.app]),
    ):
        line = f"hawker {words}"
        asking = {"_HAWKER_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        ended = hawker(env={**user.env, **asking})
        assert [answer.partition(",")[2] for answer in ended.out.split()] == expected


def test_an_endpoint_given_to_a_group_holds_for_its_commands(user: User) -> None:
    args = ("workers", "--endpoint", user.market.endpoint, "--token", user.market.token, "list")
    assert hawker(*args, env={"HAWKER_HOME": "/nonexistent"}).status == 0
    wrong = hawker("apps", "list", "--endpoint", user.market.endpoint, "--token", "wrong")
    assert wrong.status == 4
    assert "token" in wrong.err

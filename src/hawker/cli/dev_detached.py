"""`hawker dev --detach` and `--stop`: a market that outlives the command that starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

from hawker.cli import output
from hawker.client.settings import FILE, LOCK, runs
from hawker.errors import HawkerError, Refused

LOG = "dev.log"
UP_S, DOWN_S = 120.0, 120.0
_LOOK_S = 0.05


def detach(home: Path) -> None:
    """Start this very command once more without a terminal, and return once its market is up. Raises `HawkerError`
    with its last words when it ends before."""
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    if runs(home):
        raise Refused(f"a market runs in {home} already", hint="use it, or end it with hawker dev --stop")
    (home / FILE).unlink(missing_ok=True)
    argv = [sys.executable, "-m", "hawker", *(word for word in sys.argv[1:] if word != "--detach")]
    log = os.open(home / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    os.close(log)
    with output.working("starting the market"):
        deadline = monotonic() + UP_S
        while not (home / FILE).exists():
            if process.poll() is not None or monotonic() > deadline:
                last = (home / LOG).read_text(errors="replace").rstrip().rpartition("error: ")[
                    2
                ] or "it did not come up"
                raise HawkerError(f"the market did not start: {last}", hint=f"look into {home / LOG}")
            sleep(_LOOK_S)
    process.returncode = 0  # it goes on without us
    output.say((home / LOG).read_text(errors="replace").rstrip())
    output.say("hawker dev --stop ends it")


def stop(home: Path) -> None:
    """End the market of a directory and its machines, as Ctrl-C would. Raises `Refused` when none runs."""
    if not runs(home):
        raise Refused(f"no market runs in {home}", hint="hawker dev --detach starts one")
    with suppress(ProcessLookupError):
        os.kill(int((home / LOCK).read_text()), signal.SIGTERM)
    with output.working("stopping the market"):
        deadline = monotonic() + DOWN_S
        while runs(home):
            if monotonic() > deadline:
                raise HawkerError(f"the market in {home} does not end", hint=f"look into {home / LOG}")
            sleep(_LOOK_S)
    output.say(f"the market in {home} has ended")

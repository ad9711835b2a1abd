"""Every benchmark, each in a process of its own: `python -m bench.all --quick [NAME...]` from the checkout, as root.

`--quick` runs each in its smallest size, two side by side, and is a stage of `.ci/run`, so that a change that breaks a
benchmark is seen at once. A benchmark fails by its exit status, by taking longer than it may, and by leaving a process
or a file; then all that it said is printed. One that leaves something out because a program is not installed says so.

Without `--quick` they are measured one after the other, which takes some hours; `--into DIRECTORY` keeps each one's
rows as `NAME.json`, and as `NAME.md` the table that docs/ has.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import msgspec

from bench.command import PARTLY

ROOT = Path(__file__).parent.parent
BENCHMARKS = (
    "microvm",
    "churn",
    "containers",
    "regions",
    "run",
    "faults",
    "waking",
    "lives",
    "torture",
    "membership",
    "new_apps",
    "autostop",
    "proxy",
    "proxy_tls",
    "images",
    "market_images",
    "proxy_catalog",
    "h2spec",
    "checks",
    "websocket",
    "region",
    "catalog",
    "network",
    "packets",
    "poison",
)
"""Those that take longest in their smallest size come first, so that none of them is left running alone at the end."""
QUICK_S = 180.0
"""So long may one take in its smallest size, beside another one on a busy machine."""
GONE_S = 10.0
"""So long may it take until all processes that a benchmark started have ended."""
MARK = "HAWKER_BENCH"
"""A variable that what a benchmark starts inherits, so that what it leaves is found."""


class Outcome(msgspec.Struct, frozen=True):
    """`core_s`: time on a core, also of what it waited for. `failed`: why, "": it did not. `partly`: it left something
    out."""

    name: str
    seconds: float
    core_s: float
    said: str
    failed: str = ""
    partly: bool = False

    def __str__(self) -> str:
        left_out = self.said.rstrip().rpartition("\n")[2] if self.partly else ""
        result = f"FAILED: {self.failed}" if self.failed else f"ok, {left_out}" if left_out else "ok"
        return f"{self.name:<16}{self.seconds:>6.1f} s {self.core_s:>6.1f} s of a core  {result}"


def run(
    name: str, options: Sequence[str], limit_s: float | None, *, python: Path = Path(sys.executable), code: Path = ROOT
) -> Outcome:
    """One benchmark of the checkout `code`, with a directory for temporary files that must be empty afterwards."""
    place = Path(tempfile.mkdtemp(prefix="hb-"))  # short: it has Unix sockets, whose paths may have 107 bytes
    place.chmod(0o755)  # containers have users of their own
    environment = {**os.environ, "TMPDIR": str(place), MARK: str(place)}
    command = [str(python), "-m", f"bench.{name}", *options]
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=code, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL
        )
        watch = threading.Timer(limit_s or threading.TIMEOUT_MAX, process.kill)
        watch.start()
        _, ended_how, used = os.wait4(process.pid, 0)
        watch.cancel()
        status = process.returncode = os.waitstatus_to_exitcode(ended_how)
        seconds = time.monotonic() - began
        output.seek(0)
        said = output.read()
    failed = ""
    if status not in (0, PARTLY):
        failed = f"took more than {limit_s:g} s" if limit_s and seconds >= limit_s else f"status {status}"
    left = [f"process {pid}: {command}" for pid, command in ended(str(place), GONE_S if not failed else 0.0)]
    left += [f"file {path}" for path in sorted(place.iterdir())]
    shutil.rmtree(place, ignore_errors=True)
    failed = failed or ("it left something behind" if left else "")
    return Outcome(name, seconds, used.ru_utime + used.ru_stime, "\n".join([said, *left]), failed, status == PARTLY)


def ended(mark: str, within_s: float) -> list[tuple[int, str]]:
    """Wait until the processes with this mark have ended; kill, and return, those that have not by then."""
    deadline = time.monotonic() + within_s
    while (found := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid, _ in found:
        os.kill(pid, signal.SIGKILL)
    return found


def marked(mark: str) -> list[tuple[int, str]]:
    """Processes with this mark in their environment: pid, command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append((int(entry.name), command.strip()))
        except OSError:  # it has ended meanwhile
            continue
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="these alone; default: all")
    parser.add_argument("--quick", action="store_true", help="each in its smallest size")
    parser.add_argument("--into", type=Path, metavar="DIRECTORY", help="keep the rows there")
    parser.add_argument("--jobs", type=int, default=0, help="how many side by side; default: 2 with --quick, else 1")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(sorted(BENCHMARKS))}")
    if given.into:
        given.into.mkdir(parents=True, exist_ok=True)

    def options(name: str) -> list[str]:
        found = ["--quick"] if given.quick else []
        if given.into:
            at = given.into.resolve() / name
            found += [f"--json={at}.json", f"--markdown={at}.md"]
        return found

    began = time.monotonic()
    failed = []
    with ThreadPoolExecutor(given.jobs or (2 if given.quick else 1)) as pool:
        limit_s = QUICK_S if given.quick else None
        names = [name for name in BENCHMARKS if name in (given.names or BENCHMARKS)]
        runs = [pool.submit(run, name, options(name), limit_s) for name in names]
        for each in as_completed(runs):
            outcome = each.result()
            print(outcome, flush=True)
            if outcome.failed:
                failed.append(outcome)
    for outcome in failed:
        print(f"\n--- {outcome.name}: {outcome.failed} ---\n{outcome.said}")
    print(f"\n{len(runs) - len(failed)} of {len(runs)} benchmarks ran, in {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""What a machine tries against its host and its neighbours from inside a container, and what comes of it.

The tries are real: `tests/kit/attempts.c` in an image, run as the container's root unless said otherwise. Each try must
end in one of the errors that are expected of it: a refusal for another reason fails the test, for then nothing was
tried. A neighbour of another app answers during and after each. docs/isolation.md has the same table; the last test
holds the two together.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tests.kit.disks import loop_of, most_a_second, through
from tests.kit.fort import API_PORT, CONNECTIONS, PORT, Fort, compiled, missing_for_fort
from tests.kit.site import INTERNET4, Site
from tests.kit.tiers import full

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "isolation.md"

missing = missing_for_fort()
pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(missing), reason=missing)]


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """`name` is as `attempts.c` has it. `errors` are those that a try may be refused with; with `some_missing` also
    ENOENT, for what this kernel does not have. `arguments` are made once there is something to try it against."""

    name: str
    errors: str = ""
    some_missing: bool = False
    user: str = ""
    arguments: Callable[[Fort], list[str]] = lambda fort: []


def secret(fort: Fort) -> list[str]:
    return [str(fort.secret)]


def processes(fort: Fort) -> list[str]:
    return [str(os.getpid()), str(fort.neighbour_pid)]


UNREACHED = "EINPROGRESS EAGAIN ECONNREFUSED ENETUNREACH EHOSTUNREACH EACCES"
ATTEMPTS = [
    Attempt(name="raw-sockets", errors="EPERM"),
    Attempt(name="packet-sockets", errors="EPERM"),
    Attempt(name="spoofing", errors="EPERM EADDRNOTAVAIL", arguments=lambda fort: [fort.neighbour_address]),
    Attempt(name="reach", errors=UNREACHED, arguments=lambda fort: [str(PORT), fort.neighbour_address]),
    Attempt(name="abstract-socket", errors="ECONNREFUSED", arguments=lambda fort: [fort.abstract]),
    Attempt(name="host-files", errors="ENOENT EACCES", arguments=secret),
    Attempt(name="chroot-escape", errors="ENOENT", arguments=secret),
    Attempt(name="by-handle", errors="EPERM"),
    Attempt(name="devices", errors="EPERM", some_missing=True),
    Attempt(name="image-devices", errors="EPERM EACCES", arguments=lambda fort: ["/nodes/mem", "/nodes/disk"]),
    Attempt(name="kernel-files", errors="EROFS EACCES EPERM", some_missing=True),
    Attempt(name="sysctls", errors="EROFS EACCES", some_missing=True),
    Attempt(name="sys-files", errors="EROFS EACCES", some_missing=True),
    Attempt(name="control-groups", errors="EROFS EPERM EACCES", some_missing=True),
    Attempt(name="mounts", errors="EPERM"),
    Attempt(name="remounts", errors="EPERM EACCES EROFS EBUSY ETXTBSY"),
    Attempt(name="host-processes", errors="ESRCH ENOENT", arguments=processes),
    Attempt(name="init", errors="EACCES EPERM"),
    Attempt(name="namespaces", errors="EPERM ENOSYS EACCES"),
    Attempt(name="suid", errors="EPERM EACCES", user="1000:1000", arguments=lambda fort: ["/bin/suid"]),
    *(
        Attempt(name=name, errors="EPERM")
        for name in ("modules", "bpf", "perf", "keys", "kexec", "restart", "clocks", "names", "rings", "faults")
    ),
    Attempt(name="other-entry"),
    Attempt(name="capabilities", errors="EPERM"),
]
USED_UP = ("fork-bomb", "memory-bomb", "fill", "fill-memory", "flood", "descriptors", "worker-api", "connections")


RUNTIMES = ["crun", *full("runc", "crun, no user namespace")]


@pytest.fixture(scope="module", params=RUNTIMES)
def fort(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fort]:
    with Site() as site:
        runtime, _, without = request.param.partition(",")
        fort = Fort(site, tmp_path_factory.mktemp(runtime), runtime, user_namespaces=not without)
        try:
            fort.open()
            yield fort
        finally:
            fort.close()


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: attempt.name)
def test_an_attempt_comes_to_nothing(fort: Fort, attempt: Attempt) -> None:
    spec = fort.spec(attempt.name, *attempt.arguments(fort), user=attempt.user)
    fort.start(spec)
    ended, said = fort.ended(spec)
    fort.destroy(spec)
    assert (ended.code, [line for line in said if line.startswith("THROUGH")]) == (0, []), "\n".join(said)
    reasons = {line.rpartition(": ")[2] for line in said if line.startswith("refused")}
    expected = set(attempt.errors.split())
    assert reasons - expected <= ({"ENOENT"} if attempt.some_missing else set()), "\n".join(said)
    assert reasons & expected or not expected, "\n".join(said)
    fort.neighbour_undisturbed()


def test_root_of_a_machine_is_nobody_on_the_host_where_there_are_user_namespaces(fort: Fort) -> None:
    status = Path(f"/proc/{fort.neighbour_pid}/status").read_text()
    users = {
        int(user) for line in status.splitlines() if line.startswith(("Uid:", "Gid:")) for user in line.split()[1:]
    }
    assert (users == {0}) == (not fort.user_namespaces)
    assert min(users) >= 100_000 or not fort.user_namespaces


def test_no_service_of_the_host_is_reached(fort: Fort) -> None:
    spec = fort.spec("reach", str(API_PORT), *fort.services())
    fort.start(spec)
    ended, said = fort.ended(spec)
    fort.destroy(spec)
    assert ended.code == 0, "\n".join(said)
    assert len(said) == len(fort.services())
    fort.neighbour_undisturbed()


def test_one_machine_cannot_have_all_connections_that_the_host_keeps(fort: Fort) -> None:
    spec = fort.spec("connections", str(PORT), INTERNET4)
    fort.start(spec)
    ended, said = fort.ended(spec)
    fort.neighbour_undisturbed()
    other = fort.spec("reach", str(PORT), INTERNET4)  # the neighbour's app may still begin one
    fort.start(other)
    reached = fort.ended(other)
    for each in (spec, other):
        fort.destroy(each)
    assert (ended.code, said) == (0, ["refused one more connection: EINPROGRESS", f"made {CONNECTIONS}"])
    assert reached[1] == [f"THROUGH {INTERNET4}"]


def test_a_fork_bomb_stays_within_its_machine_and_goes_with_it(fort: Fort) -> None:
    spec = fort.spec("fork-bomb")
    fort.start(spec)
    fort.says(spec, "refused one more process: EAGAIN")
    fort.neighbour_undisturbed()
    assert len(fort.run(fort.driver.processes(spec.key))) <= spec.limits.pids
    ended = fort.run(fort.driver.stop(spec.key, signal=15, grace_s=0.1))
    assert ended.status in (128 + 15, 128 + 9)
    fort.destroy(spec)
    fort.neighbour_undisturbed()


def test_a_memory_bomb_ends_its_own_machine_and_is_reported(fort: Fort) -> None:
    spec = fort.spec("memory-bomb")
    fort.start(spec)
    ended, _ = fort.ended(spec)
    fort.destroy(spec)
    assert (ended.signal, ended.oom_killed) == (9, True)
    fort.neighbour_undisturbed()


@pytest.mark.parametrize(("path", "most_mib"), [("/tmp/full", 8), ("/dev/shm/full", 64), ("/full", 32)])
def test_what_is_written_is_bounded(fort: Fort, path: str, most_mib: int) -> None:
    spec = fort.spec("fill", path, root_mib=32)
    fort.start(spec)
    ended, said = fort.ended(spec)
    fort.destroy(spec)
    in_memory = path == "/dev/shm/full"  # as large as the machine's memory: it may be ended for it
    if not (in_memory and ended.oom_killed):
        assert (ended.code, said[0]) == (0, "refused one more block: ENOSPC"), "\n".join(said)
        assert int(said[-1].split()[1]) <= most_mib
    fort.neighbour_undisturbed()


def test_a_flood_of_the_disk_is_held_to_what_the_machine_may_write_at_once_and_later(fort: Fort) -> None:
    spec = fort.spec("flood", "/later", "/now", root_mib=32)
    spec = replace(spec, limits=dataclasses.replace(spec.limits, disk_bytes=2 << 20, disk_operations=500))
    fort.start(spec)
    fort.says(spec, "floods /later")
    fort.says(spec, "floods /now")
    device = loop_of(fort.directory, spec.machine)
    assert fort.run(most_a_second(lambda: through(device), 4 << 20)) <= 3 * (2 << 20)  # reading, writing, and later
    fort.neighbour_undisturbed()
    fort.destroy(spec)
    fort.neighbour_undisturbed()


def test_descriptors_are_counted_for_each_process(fort: Fort) -> None:
    spec = fort.spec("descriptors")
    fort.start(spec)
    ended, said = fort.ended(spec)
    fort.destroy(spec)
    assert (ended.code, said[0]) == (0, "refused one more descriptor: EMFILE"), "\n".join(said)
    fort.neighbour_undisturbed()


@pytest.mark.parametrize("name", ["capabilities", "mounts", "namespaces", "rings", "sysctls"])
def test_a_command_run_beside_the_program_is_held_to_the_same(fort: Fort, name: str) -> None:
    done = fort.run(fort.driver.exec(fort.neighbour.key, ["/bin/attempts", name], timeout_s=10))
    assert (done.code, b"THROUGH" in done.stdout) == (0, False), done.stdout + done.stderr
    fort.neighbour_undisturbed()


def test_the_attempts_tell_when_they_get_through(tmp_path: Path) -> None:
    """On the host itself, as root, in namespaces of their own so that nothing comes of it."""
    compiled(tmp_path)
    alone = ["unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--cgroup"]
    for name in ("raw-sockets", "mounts", "namespaces", "names", "by-handle", "capabilities", "sysctls"):
        done = subprocess.run([*alone, tmp_path / "attempts", name], capture_output=True, text=True)
        assert (done.returncode, "THROUGH" in done.stdout) == (1, True), f"{name}: {done.stdout}"


def test_the_document_has_every_attempt() -> None:
    listed = re.findall(r"^\| `([a-z-]+)`", DOCUMENT.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted([*(attempt.name for attempt in ATTEMPTS), *USED_UP])

"""What a supervisor reads of processes."""

from __future__ import annotations

import os
import resource

from hawker.supervisor.proc import environ_of_program


def test_nobody_waits_for_the_environment_of_a_program_that_has_ended() -> None:
    """Its parent may be the one who asks: it has one thread for all machines."""
    pid = os.posix_spawn("/bin/true", ["true"], {"A": "b"})
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    assert environ_of_program(pid) == {}
    os.waitpid(pid, 0)
    assert environ_of_program(pid) == {}
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before < 100, "it has slept"

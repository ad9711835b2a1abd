"""What a supervisor does with what a killed one left: it takes over what runs, and removes what was only being made."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from typing import Final

from hawker.supervisor import proc
from hawker.supervisor.common import Common
from hawker.supervisor.container_set import Containers
from hawker.supervisor.files import RECORD, RecordFile
from hawker.supervisor.instance import Instance, Record, remove_empty
from hawker.supervisor.protocol import GATE
from hawker.supervisor.status_file import STATUS, words

ENDED_S: Final = 5.0  # how long a killed process may take


def take_over(common: Common, containers: Containers | None) -> dict[str, Instance]:
    """All that was recorded, by key, also what has ended since. A program that there was no time to write down is
    ended."""
    found = (_recorded(path, common, containers) for path in common.files.recorded())
    instances = {instance.record.key: instance for instance in found if instance}
    _clear_unrecorded(instances, common, containers)
    return instances


def one_that_runs(directory: str) -> int:
    """A process of an earlier supervisor's instances; 0 for none."""
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(f"{directory}/run"):
            if entry.name.endswith(RECORD):
                known = RecordFile(entry.path.removesuffix(RECORD)).read()
                now = proc.stat(known.get("pid", 0))
                if now and now.start == known.get("start_ticks") and "exit" not in known:
                    return now.pid
    return 0


def _recorded(path: str, common: Common, containers: Containers | None) -> Instance | None:
    """None when it was killed before it had written anything, or before the program of a container was seen to begin,
    or was released: the daemon that asked for it was not told, and asks again."""
    known = RecordFile(path).read()
    if not known:
        return None
    try:
        record = Record(**{each.name: known[each.name] for each in fields(Record) if each.name in known})
    except TypeError as error:  # a power cut took the line that it began with: all that there is to know
        print(f"{path}: {error}", file=sys.stderr)
        RecordFile(path).remove()
        return None
    if record.waits and os.path.exists(path + GATE):  # nobody let it go, and it has ended with who would have
        if record.fresh:
            remove_empty(common.files.work(record.machine))
        RecordFile(path).remove()
        return None
    if record.kind in Containers.kinds and "exit" not in known and not _began(path):
        _end(record)
        RecordFile(path).remove()
        return None
    if containers and record.kind in Containers.kinds:
        instance: Instance = containers.recorded(record, common.mark(record.machine, record.key))
    else:
        instance = common.instance(record)
    instance.take_over(known)
    return instance


def _began(path: str) -> bool:
    return any("started" in said for said in words(path + STATUS))


def _end(record: Record) -> None:
    """Kill the first process of a container, which may be about to start its program. All others end with it."""
    pidfd = proc.open_pidfd(record.pid, record.start_ticks)
    if pidfd < 0:
        return
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        select.select([pidfd], [], [], ENDED_S)
    except ProcessLookupError:
        pass  # it ended by itself
    finally:
        os.close(pidfd)


def _clear_unrecorded(instances: Mapping[str, Instance], common: Common, containers: Containers | None) -> None:
    """Remove what an earlier supervisor began to start and had no time to write down: processes, groups, files.

    Their start was not acknowledged, so nobody relies on them; the same key may then be started once more.
    """
    known = {i.mark for i in instances.values()}
    for pid in proc.everyone():
        mark = proc.marker(pid)
        if mark.startswith(f"{common.id}:") and mark not in known:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    if common.groups:
        running = {i.record.group for i in instances.values() if i.exit is None}
        for name in common.groups.names():
            if name not in running:
                common.remove_group(name)
    clearing = [common.files.remove_unrecorded]
    if containers:
        clearing.append(partial(containers.clear_unrecorded, instances.values()))
    for clear in clearing:
        try:
            clear()
        except OSError:  # what is left takes room, but machines run: they need a supervisor
            traceback.print_exc()

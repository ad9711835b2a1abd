"""Drives a client library that lives in another process: one JSON object a line in, one out.

Each library runs in the environment it was installed into, untouched by ours: the Python SDK pins an HTTP stack older
than the one Hawker runs on, and the other speaks JavaScript. A driver in front of it (`sdk/driver.py`,
`node/driver.mjs`) calls the method that a line names and answers with what it returned, or with the error it raised.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


class ClientError(Exception):
    """The library raised. `kind` is the name of its error class."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


class Driven:
    """One library's process. It answers calls in turn; one that takes too long is ended by the test's time limit."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def call(self, target: str, *args: Any, **on: Any) -> Any:
        """Call `target` with `args`. `on` tells the driver which object it is called on."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"call": target, "args": args, "on": on}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the driver ended with status {self._process.wait()}"
        answer = json.loads(line)
        if "error" in answer:
            raise ClientError(answer["error"]["kind"], answer["error"]["message"])
        return answer.get("ok")


@contextlib.contextmanager
def driven(command: Sequence[str], directory: Path, environment: Mapping[str, str]) -> Iterator[Driven]:
    """Start a driver; end it by closing its input."""
    process = subprocess.Popen(
        command, cwd=directory, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:  # closes the pipes and waits
        try:
            yield Driven(process)
        except BaseException:
            process.kill()
            raise

"""The README's lines, pasted as one script: each does what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.slow
def test_the_lines_to_learn_it_by_work_when_pasted_as_a_script(tmp_path: Path) -> None:
    script = re.search(r"```sh\n(\. \.venv/bin/activate.*?)```", README.read_text(), re.DOTALL)
    assert script
    lines = script[1].splitlines()[1:]
    assert len(lines) == 14
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "HAWKER_HOME": str(tmp_path / "dev"),
    }
    try:
        ended = subprocess.run(
            ["sh", "-eu"], input="\n".join(lines), env=environment, capture_output=True, text=True, timeout=55
        )
        assert ended.returncode == 0, ended
        shown = ended.stdout
        assert "Directory listing for /" in shown, "what curl got"
        assert re.search(r"^.*\bstopped\b", shown, re.MULTILINE)
        assert re.search(r"^  200 in .*\bstart [\d.]+, boot ", shown, re.MULTILINE), "the first request woke it"
        assert "\nLinux\n" in shown, "the program of the machine that went away"
        assert "error: insufficient resources" in ended.stderr
        assert shown.rstrip().endswith("has ended")
    finally:
        subprocess.run(["hawker", "dev", "--stop"], env=environment, capture_output=True, timeout=55)

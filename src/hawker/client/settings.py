"""Where the broker is and which token to bring: flags, the environment, or the market that `hawker dev` runs here.

The endpoint is taken from the first place that names one: a flag, `HAWKER_ENDPOINT`, `FLY_FLAPS_BASE_URL` (which
clients of the public API use), `client.json` in `hawker dev`'s directory. A token goes only where it belongs: Fly's
`FLY_API_TOKEN` to the endpoint of `FLY_FLAPS_BASE_URL`, the token of `client.json` to the endpoint of that file. Else a
variable left over from other work would hand one service's secret to another.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from hawker.errors import Refused

FILE = "client.json"
LOCK = "dev.lock"
"""The file that `hawker dev` keeps locked as long as it runs."""
_START = "start a market on this machine with hawker dev"


class Settings(msgspec.Struct, frozen=True):
    """`source` says where the endpoint came from, for messages: "--endpoint", a variable or a file."""

    endpoint: str
    token: str
    source: str


class _File(msgspec.Struct, frozen=True):
    """What `client.json` holds."""

    endpoint: str
    token: str


def dev_directory(environ: Mapping[str, str]) -> Path:
    """Where `hawker dev` keeps its state: `HAWKER_HOME` itself, or `hawker/dev` in the user's state directory.

    Raises `Refused` when the environment has no `HOME` to find that in.
    """
    if home := environ.get("HAWKER_HOME"):
        return Path(home)
    state = environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(state):  # the XDG specification: ignore a relative one
        return Path(state) / "hawker" / "dev"
    if not environ.get("HOME"):
        raise Refused("neither HAWKER_HOME nor HOME is set", hint="set HAWKER_HOME to a directory for Hawker's state")
    return Path(environ["HOME"]) / ".local" / "state" / "hawker" / "dev"


def runs(home: Path) -> bool:
    """Whether a `hawker dev` keeps its state in this directory now."""
    try:
        with (home / LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def coming_up(environ: Mapping[str, str]) -> bool:
    """Whether `hawker dev` runs and has not written down yet where its market is; False where the environment names
    another market."""
    if any(environ.get(name) for name in ("HAWKER_ENDPOINT", "FLY_FLAPS_BASE_URL")):
        return False
    try:
        home = dev_directory(environ)
        return not (home / FILE).exists() and runs(home)
    except (OSError, Refused):
        return False


def find_settings(environ: Mapping[str, str], flag_endpoint: str = "", flag_token: str = "") -> Settings:
    """The endpoint and its token. Empty flags and variables count as absent. Raises `Refused` when one is missing."""
    hawker_token = environ.get("HAWKER_TOKEN", "")
    for source, endpoint, own_token in (
        ("--endpoint", flag_endpoint, hawker_token),
        ("HAWKER_ENDPOINT", environ.get("HAWKER_ENDPOINT", ""), hawker_token),
        ("FLY_FLAPS_BASE_URL", environ.get("FLY_FLAPS_BASE_URL", ""), environ.get("FLY_API_TOKEN", "")),
    ):
        if endpoint:
            token = flag_token or own_token or _token_of_file(environ, endpoint)
            if not token:
                variable = "FLY_API_TOKEN" if source.startswith("FLY") else "HAWKER_TOKEN"
                raise Refused(
                    f"there is no token for {endpoint} (from {source})", hint=f"give --token, or set {variable}"
                )
            return Settings(endpoint, token, source)
    path = dev_directory(environ) / FILE
    found = _read(path)
    if found is None:
        raise Refused(
            f"no market was named, and none runs on this machine (no {path})",
            hint=f"{_START}, or give --endpoint and --token",
        )
    return Settings(found.endpoint, flag_token or hawker_token or found.token, str(path))


def _token_of_file(environ: Mapping[str, str], endpoint: str) -> str:
    try:
        found = _read(dev_directory(environ) / FILE)
    except Refused:
        return ""  # the file was not asked for: what is wrong with it need not stop anyone
    return found.token if found and found.endpoint.rstrip("/") == endpoint.rstrip("/") else ""


def _read(path: Path) -> _File | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_File)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise Refused(f"cannot read {path}: {error.strerror}", hint="hawker dev must run as the same user") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(f"{path} is not what hawker dev writes: {error}", hint=f"remove it and {_START}") from error

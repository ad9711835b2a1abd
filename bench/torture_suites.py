"""Requests of public suites for HTTP/1.1 servers, each with what the suite says is to become of it.

`gunicorn`: the requests that gunicorn's parser is held against, of its source distribution on PyPI. `llhttp`: those of
Node's parser, of aiohttp's. `Http11Probe`: those that its documentation shows, of a repository that git can read. They
are as they are, but that one of HTTP/1.1 without Host is given one where the suite is a parser's, which minds none.
"""

from __future__ import annotations

import importlib.util
import io
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from tests.proxy.test_smuggling import CHUNKED, CHUNKS, INNER, POST, REFUSED, TAKEN

SDISTS = {
    "gunicorn": ("27.0.1", "b1514965361c8b7e8107a80aa2a92636878df1ccfac6dd204a676426e04d9e3e"),
    "aiohttp": ("3.14.5", "5558a7f5a05af9ecf744af91e5baefc436f93c9333e656c27ec253f9a6bbe178"),
}
"""Name on PyPI -> version, SHA-256."""
PROBE = "95bc6a991b2ad2bddd61d58c92c36d543d895ffa"
"""The commit of github.com/MDA2AV/Http11Probe."""

Wants = Literal["taken", "refused", "either"]
Verdict = Literal["taken", "refused", "stricter", "laxer", "wrong"]
"""`taken`, `refused`: as the suite says. `stricter`: refused where it takes. `laxer`: taken, with one reading, where it
refuses; also what follows in its connection. `wrong`: two readings, or not what was sent."""


class Asked(NamedTuple):
    """A request as a machine is to see it."""

    method: str
    target: str
    body: bytes


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """`parts` are sent one after another, each when the one before was answered. `wants`: what is to become of it.
    `requests`: what a machine sees then; of one that is refused, those before it. `fields`: among others, of the first.
    `open`: it stops in the middle of one that follows these. `ends`: if it is taken, its connection ends."""

    suite: str
    name: str
    parts: tuple[bytes, ...]
    wants: Wants
    requests: tuple[Asked, ...] | None = None
    fields: frozenset[tuple[bytes, bytes]] = frozenset()
    open: bool = False
    ends: bool = False


def sdist(name: str, directory: Path) -> Path:
    """A source distribution, unpacked."""
    version, digest = SDISTS[name]
    wanted = directory / f"{name}.txt"
    wanted.write_text(f"{name}=={version} --hash=sha256:{digest}\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    packed = directory / f"{name}-{version}.tar.gz"
    if not packed.exists():
        subprocess.run([*pip, "--no-binary", name, "--require-hashes", "-r", wanted, "-d", directory], check=True)
    with tarfile.open(packed) as archive:
        archive.extractall(directory, filter="data")
    return directory / f"{name}-{version}"


def hosted(data: bytes, requests: int) -> bytes:
    """So many requests of HTTP/1.1, with a Host where they have none."""
    at = 0
    for _ in range(max(requests, 1)):
        line = re.compile(rb"[^\r\n]+ HTTP/1\.([01])\r?\n").search(data, at)
        if line is None or (at == 0 and data[: line.start()].strip()):
            break
        end = data.find(b"\r\n\r\n", line.end() - 2)
        if line[1] == b"1" and re.search(rb"(?im)^host\s*:", data[line.end() : end if end > 0 else None]) is None:
            named = re.search(rb" https?://(?:[^/? ]*@)?([^/? ]+)", line[0])
            host = named[1] if named else b"web.example"
            data = data[: line.end()] + b"Host: " + host + b"\r\n" + data[line.end() :]
        at = data.find(b"\r\n\r\n", line.end() - 2)
        if at < 0:
            break
    return data


def _path(target: str) -> str:
    """What a proxy makes of an absolute target (RFC 9112 3.2.1)."""
    match = re.fullmatch(r"https?://[^/?]*(/?)(.*)", target, re.IGNORECASE)
    return target if match is None else "/" + match[2]


# --- gunicorn --------------------------------------------------------------------------------------------------------

_OF_SETTINGS = {"limit_request_line", "limit_request_field_size", "http_parser"}
"""Settings of that server that make it take what it would take anyway, were they larger."""
_HOP = {b"connection", b"host", b"transfer-encoding", b"content-length", b"keep-alive"}


def gunicorn(directory: Path) -> Iterator[Case]:
    root = sdist("gunicorn", directory)
    sys.path.insert(0, str(root))
    spec = importlib.util.spec_from_file_location("gunicorn_treq", root / "tests" / "treq.py")
    assert spec is not None
    assert spec.loader is not None
    treq: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(treq)
    for path in sorted((root / "tests" / "requests").glob("*/*.http")):
        expected = treq.load_py(str(path.with_suffix(".py")))
        settings = expected["cfg"].settings
        changed = {name for name, setting in settings.items() if setting.get() != type(setting)().get()}
        valid = path.parent.name == "valid"
        if changed - _OF_SETTINGS and expected["cfg"].header_map != "refuse":
            continue  # they are about a setting
        if not valid and "Limit" in expected["request"].__name__:
            continue  # about that server's limits
        read = treq.request(str(path), expected["request"])
        name = f"{path.parent.name}/{path.stem}"
        if not valid:
            stops = expected["request"].__name__ in ("NoMoreData", "ChunkMissingTerminator")
            parts = (hosted(read.data, 1),)
            yield Case(suite="gunicorn", name=name, parts=parts, wants="refused", requests=(), open=stops)
            continue
        requests = [Asked(each["method"], _path(each["uri"]["raw"]), each["body"] or b"") for each in read.expect]
        fields = {(key.lower().encode(), value.encode("latin-1").strip()) for key, value in read.expect[0]["headers"]}
        length = dict(fields).get(b"content-length", b"0")
        stops = int(length) > len(requests[0].body)
        yield Case(
            suite="gunicorn",
            name=name,
            parts=(hosted(read.data, len(requests)),),
            wants="taken",
            requests=() if stops else tuple(requests),
            fields=frozenset(field for field in fields if field[0] not in _HOP),
            open=stops,
        )


# --- llhttp ----------------------------------------------------------------------------------------------------------

_PIECES = re.compile(
    r"^#+ (?P<title>[^\n]+)$|^<!-- meta=(?P<meta>\{[^\n]*\}) -->$|^```(?P<kind>http|log)\n(?P<text>.*?)^```$",
    re.M | re.S,
)
PAUSED, UPGRADED, _HTTP_2, _AFTER_CLOSE = 21, 22, 23, 5
"""Codes of what is no error of a request."""
_SIGNS = {"r": "\r", "n": "\n", "t": "\t", "f": "\f"}


def llhttp(directory: Path) -> Iterator[Case]:
    for name, data, log in parsed(directory, "request"):
        case = _of_log(name, data, log)
        if case is not None:
            yield case


def parsed(directory: Path, kind: str) -> Iterator[tuple[str, bytes, str]]:
    """The tests of a kind, "request" or "response", in its strict form: name, what is read, what the parser tells."""
    root = sdist("aiohttp", directory) / "vendor" / "llhttp" / "test" / kind
    for path in sorted(root.glob("*.md")):
        title = text = ""
        meta: dict[str, Any] = {}
        for number, piece in enumerate(_PIECES.finditer(path.read_text())):
            if piece["title"]:
                title = piece["title"]
            elif piece["meta"]:
                meta = msgspec.json.decode(piece["meta"])
            elif piece["kind"] == "http":
                text = piece["text"]
            elif meta.get("type") == kind and not meta.keys() & {"pause", "skipBody"}:
                yield f"{path.stem}/{title} ({number})", _unescaped(text), piece["text"]


def _unescaped(text: str) -> bytes:
    text = re.sub(r"\\\n", "", text.removesuffix("\n")).replace("\n", "\r\n")
    text = re.sub(r"\\([rntf])", lambda match: _SIGNS[match[1]], text)
    text = re.sub(r"\\x([0-9a-fA-F]+)", lambda match: chr(int(match[1], 16)), text)
    return re.sub(r"\\([0-7]{1,3})", lambda match: chr(int(match[1], 8)), text).encode()


def _of_log(name: str, data: bytes, log: str) -> Case | None:
    """By what the parser says of these bytes."""
    requests: list[Asked] = []
    spans: dict[str, bytes] = {}
    code = 0
    begun = False
    for line in log.splitlines():
        if line.endswith("message begin"):
            begun, spans = True, {}
        elif span := re.match(r"off=(\d+) len=(\d+) span\[(method|url|body)\]", line):
            at, size = int(span[1]), int(span[2])
            spans[span[3]] = spans.get(span[3], b"") + data[at : at + size]
        elif line.endswith("message complete"):
            method, target = spans["method"].decode("latin-1"), spans.get("url", b"").decode("latin-1")
            requests.append(Asked(method, _path(target), spans.get("body", b"")))
            begun = False
        elif error := re.match(r"off=(\d+) error code=(\d+)", line):
            code = int(error[2])
            if code == UPGRADED:
                data = data[: int(error[1])]
    if code in (PAUSED, _HTTP_2):
        return None
    wants: Wants = "taken" if code in (0, UPGRADED, _AFTER_CLOSE) else "refused"
    parts = (hosted(data, len(requests)),)
    stops = wants == "taken" and (begun or not requests)
    return Case(suite="llhttp", name=name, parts=parts, wants=wants, requests=tuple(requests), open=stops)


# --- Http11Probe -----------------------------------------------------------------------------------------------------

_OF_THE_ORIGIN = re.compile(r"`(?:405|406|415|417|426)`")
_UNREADABLE = re.compile(r"\.\.\.|\[256|\(zero|total\}")


def probe(repository: str) -> tuple[list[Case], int]:
    """Its cases, and how many are not shown byte for byte."""
    packed = subprocess.run(
        ["git", "-C", repository, "archive", PROBE, "docs/content/docs"], check=True, capture_output=True
    ).stdout
    cases: list[Case] = []
    unread = 0
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in sorted(archive.getmembers(), key=lambda each: each.name):
            file = archive.extractfile(member)
            text = file.read().decode() if file else ""
            row = dict(re.findall(r"^\| \*\*([^*]+)\*\* \| (.*) \|$", text, re.M))
            if "Test ID" not in row or row["Category"] == "Capabilities":
                continue
            said = re.split(r"^## What it sends$", text, maxsplit=1, flags=re.M)
            if len(said) == 1:
                said = re.split(r"^## What it does$", text, maxsplit=1, flags=re.M)
            shown = re.split(r"^## ", said[-1], maxsplit=1, flags=re.M)[0] if len(said) > 1 else ""
            blocks = "\n\n".join(
                block.removesuffix("\n") for block in re.findall(r"^```\w*\n(.*?)^```$", shown, re.M | re.S)
            )
            blocks = re.sub(
                r"(?:\w{4})\.\.\.\{([\d,]+) \S '(.)'\}\.\.\.",
                lambda match: match[2] * int(match[1].replace(",", "")),
                blocks,
            )
            if not blocks or _UNREADABLE.search(blocks):
                unread += 1
                continue
            cases.append(_of_row(row, tuple(_shown(part) for part in blocks.split("\n\n"))))
    return cases, unread


def _shown(part: str) -> bytes:
    """A line that ends without a line's end is the last of a body, or its end is shown."""
    text = re.sub(r"(\\[rn])\n", r"\1", part + "\n").removesuffix("\n").replace("[TAB]", "\t")
    text = re.sub(r"\\(?:([rnt])|0(?![0-9])|x([0-9a-fA-F]{2}))", _sign, text)
    return text.encode("latin-1")


def _sign(match: re.Match[str]) -> str:
    if match[1]:
        return _SIGNS[match[1]]
    return chr(int(match[2], 16)) if match[2] else "\0"


def _of_row(row: dict[str, str], parts: tuple[bytes, ...]) -> Case:
    expected = row["Expected"]
    taken = bool(re.search(r"2xx|`20\d|[Aa]ny |Not |not |Non-|non-|Sensitive|preserve|IMF|[Ww]arn|through", expected))
    refused = bool(re.search(r"`?(?:40\d|41\d|43\d|50\d)|close(?!d)|[Rr]eject", expected))
    if _OF_THE_ORIGIN.search(expected) and "400" not in expected:
        taken = refused = True  # a machine's to say
    ends = bool(re.search(r"2xx` (?:\+|with) (?:connection )?close|, or connection close", expected))
    taken |= ends
    wants: Wants = "either" if taken and refused else "taken" if taken else "refused"
    suite = "Http11Probe: smuggling" if row["Category"] == "Smuggling" else "Http11Probe"
    return Case(suite=suite, name=row["Test ID"].strip("`"), parts=parts, wants=wants, ends=ends)


# --- our own ---------------------------------------------------------------------------------------------------------


def own() -> Iterator[Case]:
    """Those of tests/proxy, with a request that is to follow none of them."""
    for name, data in REFUSED.items():
        yield Case(suite="own", name=name, parts=(data + INNER,), wants="refused", requests=())
    for name, data in CHUNKS.items():
        parts = (POST + CHUNKED + b"\r\n" + data + INNER,)
        yield Case(suite="own", name=f"chunks: {name}", parts=parts, wants="refused", requests=())
    for name, (data, _) in TAKEN.items():
        yield Case(suite="own", name=name, parts=(data,), wants="taken")

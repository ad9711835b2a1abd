"""What a proxy does to the header fields of what it passes on: RFC 9110, section 7.6, and the fields of Fly's proxy.

    edge = Edge(b"203.0.113.7", b"https", 443, b"ams", b"2")       # one for each connection of a user
    fields = edge.request(fields, request_id)                        # to a machine, or to its worker's proxy
    fields = inner_request(fields)                                   # there, to the machine
    fields = inner_answer(fields)                                    # there, to the edge
    fields = Answer(...).fields(fields, request_id)                  # at the edge, to the user

Fields are pairs of bytes, names in lower case. None of these writes `Connection`, but for an upgrade, nor
`Transfer-Encoding`: where a message ends is for whoever writes it. `Content-Length` and `Host` stay as they are.

Fields that only a proxy may set are taken off what users send. So are names that an app would take for them which reads
`_` as `-`, as CGI does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from hawker.core.routing import ANY, Wishes

Field = tuple[bytes, bytes]

SERVER = b"hawker"
PSEUDONYM = b"hawker"
"""What this proxy is called in `Via`."""
REQUEST_ID = b"fly-request-id"
UNAVAILABLE = b"fly-preferred-instance-unavailable"

HOP_BY_HOP = frozenset(
    (
        *(b"connection", b"proxy-connection", b"keep-alive", b"te", b"transfer-encoding", b"upgrade"),
        *(b"proxy-authenticate", b"proxy-authorization", b"proxy-authentication-info"),
    )
)
"""RFC 9110, section 7.6.1; and what is said to this proxy as one."""
OF_PROXIES = frozenset(
    (
        *(b"fly-client-ip", b"fly-forwarded-port", b"fly-forwarded-proto", b"fly-forwarded-ssl", b"fly-region"),
        *(REQUEST_ID, UNAVAILABLE, b"fly-replay-src", b"fly-replay-failed", b"fly-replay-cache-status"),
        *(b"x-forwarded-proto", b"x-forwarded-port", b"x-forwarded-ssl"),
    )
)
"""What a user says of these is not passed on."""
TO_PROXIES = frozenset(
    (b"fly-replay", b"fly-replay-cache", b"fly-replay-cache-ttl-secs", b"fly-replay-cache-allow-bypass")
)
"""What an app says to the edge in an answer; users never see it."""
PRISTINE = frozenset((b"server", b"via", REQUEST_ID, b"fly-cache-status"))
_NEVER_LISTED = frozenset((b"host", b"content-length", b"authorization", b"cookie", b"cache-control", b"content-type"))
"""A `Connection` that lists these means harm or is a mistake: they are for all recipients."""
_NAMES_KEPT = 4096

_KEEP, _DROP, _CONNECTION, _FORWARDED_FOR, _VIA, _TE = range(6)


class _Verdicts(dict[bytes, int]):
    """What becomes of a field, by its name: worked out once for each name, and looked up from then on."""

    def __init__(self, known: Mapping[bytes, int], *, guarded: bool) -> None:
        super().__init__(known)
        self._guarded = guarded
        self._own = {name for name, what in known.items() if what in (_DROP, _FORWARDED_FOR)} - HOP_BY_HOP

    def __missing__(self, name: bytes) -> int:
        what = _KEEP
        plain = name.replace(b"_", b"-") if self._guarded else name
        if plain.startswith(b"hawker-") or (plain is not name and plain in self._own):
            what = _DROP
        if len(self) < _NAMES_KEPT and len(name) <= 64:
            self[name] = what
        return what


_HOPS = {**dict.fromkeys(HOP_BY_HOP, _DROP), b"connection": _CONNECTION, b"te": _TE}
_FROM_USER = _Verdicts(
    {**_HOPS, **dict.fromkeys(OF_PROXIES, _DROP), b"x-forwarded-for": _FORWARDED_FOR, b"via": _VIA}, guarded=True
)
_INNER = _Verdicts(_HOPS, guarded=False)


class Edge:
    """A user's connection: the address it comes from, `http` or `https`, the public port, this proxy's region, and the
    version of HTTP on it ("1.0", "1.1", "2"), as `Via` has it. `peer`: who brought it here, where that is not the
    user; `asked`: the port that the user went to, where it is another than that of the connection here."""

    __slots__ = ("_client", "_fixed", "_via")

    def __init__(
        self,
        client_ip: bytes,
        proto: bytes,
        port: int,
        region: bytes,
        version: bytes = b"1.1",
        peer: bytes = b"",
        asked: int = 0,
    ) -> None:
        self._client = peer or client_ip
        self._via = version + b" " + PSEUDONYM
        self._fixed: tuple[Field, ...] = (
            (b"fly-client-ip", client_ip),
            (b"x-forwarded-proto", proto),
            (b"x-forwarded-port", b"%d" % (asked or port)),
            (b"x-forwarded-ssl", b"on" if proto == b"https" else b"off"),
            (b"fly-forwarded-port", b"%d" % port),
            (b"fly-region", region),
        )

    def request(
        self, fields: Iterable[Field], request_id: bytes, *, h2: bool = False, upgrade: bytes = b""
    ) -> list[Field]:
        """A user's request as it goes on. `h2`: over HTTP/2, where `TE: trailers` passes (RFC 9113, section 8.2.2).
        `upgrade`: the protocol that the user asks for and the proxy lets through."""
        passed: list[Field] = []
        add = passed.append
        forwarded = via = listed = b""
        verdicts = _FROM_USER
        for field in fields:
            what = verdicts[field[0]]
            if not what:
                add(field)
            elif what == _FORWARDED_FOR and field[1]:
                forwarded += field[1] + b", "
            elif what == _VIA and field[1]:
                via += field[1] + b", "
            elif what == _CONNECTION:
                listed += field[1] + b","
            elif what == _TE and h2 and b"trailers" in field[1].lower():
                add((b"te", b"trailers"))
        if listed:
            passed = _without_listed(passed, listed)
        passed += self._fixed
        passed += ((b"x-forwarded-for", forwarded + self._client), (b"via", via + self._via), (REQUEST_ID, request_id))
        if upgrade:
            passed += ((b"connection", b"upgrade"), (b"upgrade", upgrade))
        return passed


def inner_request(fields: Iterable[Field], *, h2: bool = False, upgrade: bytes = b"") -> list[Field]:
    """A request that came over the backhaul, as it goes to the machine."""
    return _passed(fields, _INNER, h2, upgrade)


def inner_answer(fields: Iterable[Field], *, upgrade: bytes = b"") -> list[Field]:
    """A machine's answer as it goes back over the backhaul. A machine's `hawker-` fields are its own invention."""
    return _passed(fields, _INNER, False, upgrade)


class Answer:
    """What a service's public port does to answers. `set_fields` take the place of the app's of the same names.
    `pristine`: nothing of the proxy's is added, and the app's own `Server` and `Via` go as well, as documented."""

    __slots__ = ("_added", "_pristine", "_verdicts", "_via")

    def __init__(
        self, pristine: bool = False, set_fields: Sequence[Field] = (), removed: Collection[bytes] = ()
    ) -> None:
        given = [field for field in set_fields if field[0] not in removed]
        cut = {*removed, *(name for name, _ in given), *(PRISTINE if pristine else (b"server", REQUEST_ID))}
        self._via = b"via" not in cut
        known = {**_HOPS, **dict.fromkeys((*TO_PROXIES, *cut), _DROP), **({b"via": _VIA} if self._via else {})}
        self._verdicts = _Verdicts(known, guarded=False)
        own = not pristine and b"server" not in removed and not any(name == b"server" for name, _ in given)
        self._added = (*(((b"server", SERVER),) if own else ()), *given)
        self._pristine = pristine or REQUEST_ID in removed

    def fields(
        self, fields: Iterable[Field], request_id: bytes, *, version: bytes = b"1.1", upgrade: bytes = b""
    ) -> list[Field]:
        """An answer as the user gets it. `version`: of HTTP towards whoever answered."""
        via = version + b" " + PSEUDONYM if self._via else b""
        passed = _passed(fields, self._verdicts, False, upgrade, via)
        passed += self._added
        if not self._pristine:
            passed.append((REQUEST_ID, request_id))
        return passed


def wishes_of(fields: Iterable[Field]) -> Wishes:
    """What a request asks for by its fields."""
    found: dict[str, str | tuple[str, ...]] = {}
    for name, value in fields:
        asked = _WISHES.get(name)
        if asked is not None:
            text = value.decode("latin-1").strip().lower()
            found[asked] = text if asked.endswith("machine") else regions_of(text)
    return Wishes(**found) if found else ANY  # type: ignore[arg-type]  # each of the type of its attribute


def without_overruled(fields: Iterable[Field], wishes: Wishes) -> list[Field]:
    """A request's fields as another proxy gets them that chooses by `wishes`: without those that name other machines,
    as those of a user do after a replay."""
    passed = []
    for field in fields:
        asked = _WISHES.get(field[0], "")
        if not asked.endswith("machine") or field[1].decode("latin-1").strip().lower() == getattr(wishes, asked):
            passed.append(field)
    return passed


def regions_of(text: str) -> tuple[str, ...]:
    """The regions of a comma list, which may be in quotes."""
    return tuple(dict.fromkeys(code for part in text.strip().strip('"').split(",") if (code := part.strip().lower())))


def unavailable(wishes: Wishes, machine: str) -> tuple[Field, ...]:
    """What to add to a request that goes to `machine`, when another was preferred."""
    wanted = wishes.prefer_machine
    return ((UNAVAILABLE, wanted.encode("latin-1", "replace")),) if wanted and wanted != machine else ()


_WISHES = {
    b"fly-force-instance-id": "force_machine",
    b"fly-prefer-instance-id": "prefer_machine",
    b"fly-force-region": "force_regions",
    b"fly-prefer-region": "prefer_regions",
}


def _passed(fields: Iterable[Field], verdicts: _Verdicts, h2: bool, upgrade: bytes, via: bytes = b"") -> list[Field]:
    passed: list[Field] = []
    add = passed.append
    before = listed = b""
    for field in fields:
        what = verdicts[field[0]]
        if not what:
            add(field)
        elif what == _CONNECTION:
            listed += field[1] + b","
        elif what == _VIA and field[1]:
            before += field[1] + b", "
        elif what == _TE and h2 and b"trailers" in field[1].lower():
            add((b"te", b"trailers"))
    if listed:
        passed = _without_listed(passed, listed)
    if via:
        passed.append((b"via", before + via))
    if upgrade:
        passed += ((b"connection", b"upgrade"), (b"upgrade", upgrade))
    return passed


def _without_listed(fields: list[Field], listed: bytes) -> list[Field]:
    """Without the fields that `Connection` names: they were meant for this hop."""
    names = {name.strip() for name in listed.lower().split(b",")} - _NEVER_LISTED
    names -= {b"", b"close", b"keep-alive", b"upgrade"}
    return [field for field in fields if field[0] not in names] if names else fields

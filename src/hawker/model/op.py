"""How a call is declared: once, as the struct of its request.

    class StopMachine(OfMachine[Ok]):
        \"\"\"Stop a machine.\"\"\"

        op = Op("Machines_stop", "POST", f"{MACHINE}/stop", refuses=(409, 412))
        signal: str | int | None = None

Everything else follows from that: the route and what it reads (`model/request_codec.py`), the OpenAPI document, the
calls of clients and of agents, each with the reply's type, and the page `docs/api.md`. Fields that the path names stand
there; those that `query` and `headers` name stand there, as do all the others of a GET or DELETE in the query; the rest
is the body.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from inspect import cleandoc
from typing import Any, ClassVar, Generic, Literal, TypeVar, dataclass_transform, get_args

import msgspec

Served = Literal["broker", "worker", "any"]
R = TypeVar("R", covariant=True)

JSON = "application/json"
NDJSON = "application/x-ndjson"
EVENTS = "text/event-stream"
EVENTS_QUIET_S = 45.0
"""Three of the comments that a stream of events is never without."""
BYTES = "application/octet-stream"


class Op(msgspec.Struct, frozen=True):
    """What is said of a call beside the fields of its request and the type of its reply.

    `served`: who answers; a broker passes on to a worker what a worker serves. `callers`: agents' own calls are not
    found by anybody else. `query` names fields that stand in the query, `either` fields of the body that may stand
    there, too; `headers` gives fields the header that they stand in; `raw` names the field that is the body as it is.
    `batch`: many requests travel as one list, and each gets an answer in a list. `idempotent`: it may be sent again
    when no answer came. `deadline_s` is how long a caller waits, `quiet_s`
    after which silence a stream has lost its server. `needs` is the permission. `refuses` lists the
    statuses of refusals beside 400, 401 and 404. `also` is another form of the reply. `extension`: Hawker's own.
    """

    name: str
    method: str
    path: str
    served: Served = "worker"
    callers: Literal["users", "agents"] = "users"
    query: tuple[str, ...] = ()
    either: tuple[str, ...] = ()
    headers: dict[str, str] = {}
    raw: str = ""
    batch: bool = False
    idempotent: bool = False
    deadline_s: float = 60.0
    quiet_s: float | None = None
    needs: str = ""
    success: int = 200
    refuses: tuple[int, ...] = ()
    extension: bool = False
    media: str = JSON
    also: Any = None
    example: dict[str, Any] = {}

    @property
    def permission(self) -> str:
        """`needs`, or what the name says: `Machines_stop` needs `machines:stop`."""
        return self.needs or self.name.lower().replace("_", ":", 1)

    @property
    def in_path(self) -> tuple[str, ...]:
        return tuple(re.findall(r"{(\w+)}", self.path))


class _Declaring(msgspec.StructMeta):
    """Fields are given by name, but where a class says `kw_only=False`."""

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> Any:
        return super().__new__(mcls, name, bases, namespace, **{"frozen": True, "kw_only": True, **options})


@dataclass_transform(kw_only_default=True, field_specifiers=(msgspec.field,))
class Declared(msgspec.Struct, Generic[R], metaclass=_Declaring):
    """Base of requests. `R` is the reply, or what a stream is made of. `common_headers` gives fields of a base their
    header, as `op.headers` does."""

    op: ClassVar[Op]
    common_headers: ClassVar[dict[str, str]] = {}


class Request(Declared[R], Generic[R]):
    """A call with one reply."""


class StreamRequest(Declared[R], Generic[R]):
    """A call whose answer comes bit by bit: lines of JSON, events, or bytes, as `op.media` says."""


@cache
def reply_of(kind: type[Declared[Any]]) -> Any:
    """The type of a declared call's reply; `NoneType` where it has none."""
    for base in kind.__dict__.get("__orig_bases__", ()):
        (reply,) = get_args(base)
        return type(None) if reply is None else reply
    raise TypeError(f"{kind.__name__} does not say what its reply is: derive it from Request[...]")


def summary_of(kind: type[Declared[Any]]) -> tuple[str, str]:
    """The first paragraph of a call's docstring without its full stop, and the rest."""
    summary, _, rest = cleandoc(kind.__doc__ or "").partition("\n\n")
    return " ".join(summary.split()).removesuffix("."), " ".join(rest.split())


def declared_in(names: Mapping[str, Any]) -> tuple[type[Declared[Any]], ...]:
    """The public calls among a module's names, in the order in which they are declared."""
    kinds = [each for each in names.values() if isinstance(each, type) and "op" in vars(each)]
    return tuple(kind for kind in kinds if issubclass(kind, Declared) and kind.op.callers == "users")

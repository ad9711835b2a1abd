"""`python -m hawker.images.tree.child REQUEST` works on a tree. Started by `unpacking`, not by people.

The request is JSON, the blob or a longer request is its standard input, and one line of JSON on its standard output is
the answer: `{"done": ...}`, `{"refused": reason}` or `{"failed": text, "errno": number}`.
"""

from __future__ import annotations

import json
import os
import sys

from hawker.images.tree import confine, merging
from hawker.images.tree.extract import Extraction
from hawker.images.tree.headers import entries
from hawker.images.tree.refused import LayerRefused
from hawker.images.tree.streams import Limits, TarStream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def main() -> None:
    request = json.loads(sys.argv[1])
    confine.die_with(request["parent"])
    os.umask(0)
    try:
        answer: dict[str, Any] = {"done": _do(request)}
    except LayerRefused as refused:
        answer = {"refused": refused.reason}
    except OSError as error:
        answer = {"failed": str(error), "errno": error.errno}
    except MemoryError:
        answer = {"refused": "unpacking it takes more memory than is allowed"}
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)  # a thread may still be decompressing what nobody wants any more


def _do(request: dict[str, Any]) -> dict[str, Any] | None:
    if request["do"] == "unpack":
        return _unpack(request)
    if os.geteuid() != 0:
        confine.enter_user_namespace()  # an ordinary user's other users are there alone
    if request["do"] == "remove":
        merging.remove(request["tree"])
    else:
        _settle(request)
    return None


def _unpack(request: dict[str, Any]) -> dict[str, Any]:
    limits = request["limits"]
    if request["zstd"]:
        import zstandard  # noqa: F401  # there is no importing behind the new root
    several = True
    if os.geteuid() != 0:
        several = confine.enter_user_namespace()
    confine.enter_namespaces()
    os.chdir(request["into"])
    os.chroot(".")
    confine.give_up_powers(limits["cpu_s"], limits["memory"], limits["bytes"])
    stream = TarStream(0, Limits(limits["bytes"], limits["ratio"], limits["ratio_from"]))
    extraction = Extraction(
        stream,
        entries=limits["entries"],
        depth=limits["depth"],
        xattrs=limits["xattrs"],
        lists=limits["lists"],
        free=limits["free"],
        devices=limits["devices"],
    )
    extraction.make_all(entries(stream, limits["header"]))
    if stream.digest != request["diff_id"]:
        raise LayerRefused(f"its tar is {stream.digest} where the image says {request['diff_id']}")
    confine.write_back(".")
    return {
        "diff_id": stream.digest,
        "entries": extraction.entries,
        "bytes": extraction.bytes,
        "implied": _texts(extraction.implied),
        "removed": _texts(extraction.removed),
        "opaque": _texts(extraction.opaque),
        "left_out": extraction.left_out,
        "collapsed": not several,
    }


def _settle(request: dict[str, Any]) -> None:
    confine.limit_time(request["cpu_s"])
    lists = json.load(sys.stdin)
    merging.merge(
        os.fsencode(request["tree"]),
        [os.fsencode(lower) for lower in request["lowers"]],
        implied=[os.fsencode(path) for path in lists["implied"]],
        removed=[os.fsencode(path) for path in lists["removed"]],
        opaque=[os.fsencode(path) for path in lists["opaque"]],
        namespace=request["namespace"].encode(),
    )


def _texts(paths: dict[bytes, None]) -> list[str]:
    return [os.fsdecode(path) for path in paths]


if __name__ == "__main__":
    main()

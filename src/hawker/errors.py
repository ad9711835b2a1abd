"""Every error a caller can meet, told apart by what happens next.

```
HawkerError
├── Refused              the caller's doing; nothing was changed          4xx
│   ├── Invalid            a field is wrong; names field, value, remedy    400
│   │   └── NotBuilt         documented upstream, not built here yet       422
│   ├── Unauthorized       no token, or one we do not know                 401
│   ├── NotFound           no such app, machine, lease, version            404
│   ├── DeadlineExceeded   the wait ended before the state came            408
│   ├── Conflict           someone else holds or changed it                409
│   │   └── NoCapacity       no offer filled the order; says why, worker by worker
│   ├── NameTaken          an app of this name exists                      422
│   ├── PreconditionFailed the machine is in the wrong state for this      412
│   ├── TooManyRequests    slow down                                       429
│   └── ImageError         an image that cannot be had or must not be used 422
│       └── ImageNotFound    its registry does not know it                   404
├── Unreachable          a peer did not answer in time; the outcome is in doubt   500
├── StepError            raised inside a step of a flow
│   ├── Retry              run the step again after a delay
│   ├── Abort              stop here, run the final step, report the reason
│   └── Broken             stop and wake a person; the run is parked
└── StoreError           the database refused
    ├── DiskFull           no room for another record; what runs keeps running   500
    └── Corrupt            a record's checksum does not match; names the record
```

Errors carry fields; the sentence is made once, here, and shown unchanged by API and CLI. The public API never
answers 502 or 503 on purpose: clients of that API retry those with an empty body and show the wrong error. Only
/health does, which load balancers ask.
"""

from __future__ import annotations

from typing import Any


class HawkerError(Exception):
    """Base of everything raised on purpose. `status` is the HTTP status, `code` the API's machine-readable word."""

    status: int = 500
    code: str = "unknown"

    def __init__(self, message: str, *, hint: str = "", details: Any = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details

    def body(self) -> dict[str, Any]:
        """The API's error form: `{"error": text, "status": word, "details"?: ...}`."""
        body: dict[str, Any] = {"error": self.message, "status": self.code}
        details = self.details
        if self.hint:
            details = {**(details or {}), "hint": self.hint}
        if details is not None:
            body["details"] = details
        return body


class Refused(HawkerError):
    """The caller's doing. Nothing was changed; the same request will be refused again."""

    status = 400


class Invalid(Refused):
    """A field has a wrong value. The message names the field, the value and the remedy."""

    status = 400
    code = "invalid_argument"

    def __init__(self, field: str, value: Any, remedy: str) -> None:
        super().__init__(
            f"{field}: {_brief(value)} is not valid: {remedy}",
            details={"field": field, "value": value, "remedy": remedy},
        )
        self.field = field
        self.value = value
        self.remedy = remedy


class NotBuilt(Invalid):
    """A field or call that the public API documents and Hawker does not build yet."""

    status = 422
    code = "not_built"


class Unauthorized(Refused):
    status = 401
    code = "unauthorized"


class Misdirected(Refused):
    """The request was meant for another worker: the address is somebody else's by now."""

    status = 421
    code = "misdirected"


class NotFound(Refused):
    status = 404
    code = "not_found"


class DeadlineExceeded(Refused):
    status = 408
    code = "deadline_exceeded"


class Conflict(Refused):
    status = 409
    code = "conflict"


class NoCapacity(Conflict):
    """No worker filled the order. `details["refusals"]` has one entry per worker, with its true figures."""

    code = "insufficient_capacity"


class NameTaken(Refused):
    status = 422
    code = "name_taken"


class PreconditionFailed(Refused):
    status = 412
    code = "failed_precondition"


class TooManyRequests(Refused):
    status = 429
    code = "rate_limited"


class ImageError(Refused):
    """An image that must not or cannot be used: corrupt, of another platform, a layer that tries to leave its root."""

    status = 422
    code = "image"

    def __init__(self, image: str, problem: str, *, hint: str = "") -> None:
        super().__init__(f"image {image}: {problem}", hint=hint)
        self.image = image


class ImageNotFound(ImageError):
    status = 404
    code = "image_not_found"


class Unreachable(HawkerError):
    """A peer did not answer in time or the connection broke: whether it acted is not known."""

    status = 500
    code = "unreachable"


class StepError(HawkerError):
    """What a step of a flow raises to say what happens next."""


class Retry(StepError):
    """Run the same step again, not before `after_s` seconds from now (None: the flow's own backoff)."""

    def __init__(self, message: str, *, after_s: float | None = None) -> None:
        super().__init__(message)
        self.after_s = after_s


class Abort(StepError):
    """Stop the flow: the steps left are skipped, the final step runs and undoes, the reason is reported."""


class Broken(StepError):
    """Ours, not the caller's: park the run with an alarm and wait for a person."""


class StoreError(HawkerError):
    """The database refused. Nothing of the transaction was kept."""


class DiskFull(StoreError):
    """No room for another record. New orders are refused; what runs keeps running."""

    code = "disk_full"


class DiskFailed(StoreError):
    """The disk did not do what it was told to, such as EIO says. A new start reads back what it holds."""

    code = "disk_failed"


class Corrupt(StoreError):
    """What was read is not what was written. `seq` names the log's record whose checksum says so, if one does."""

    code = "corrupt"

    def __init__(self, message: str, *, seq: int | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint, details={"seq": seq})
        self.seq = seq


def _brief(value: Any) -> str:
    text = repr(value) if not isinstance(value, str) else f'"{value}"'
    return text if len(text) <= 80 else text[:77] + "..."

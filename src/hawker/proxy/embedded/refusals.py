"""Answers of the proxy itself: short, with a code that can be looked up, and Proxy-Status (RFC 9209) for programs."""

from __future__ import annotations

from hawker.proxy.base import Failure, Header, Refused

OF_FAILURES: dict[Failure, tuple[int, str, str]] = {
    "refused": (502, "PC01", "connection_refused"),
    "reset": (502, "PC02", "connection_terminated"),
    "timeout": (504, "PC05", "connection_timeout"),
    "elsewhere": (502, "PR02", "destination_not_found"),
    "crowded": (503, "PR04", "connection_limit_reached"),
    "unhealthy": (502, "PC03", "http_protocol_error"),
}
"""Why the last machine that was tried did not answer -> status, code, error type (RFC 9209 2.3)."""

_ERRORS = {
    "PA01": "http_request_error",
    "PA02": "proxy_loop_detected",
    "PA03": "http_protocol_error",
    "PA04": "destination_not_found",
    "PA05": "http_request_denied",
    "PH01": "http_request_error",
    "PH02": "http_request_error",
    "PH03": "http_request_error",
    "PR01": "destination_unavailable",
    "PR02": "destination_not_found",
    "PH04": "http_request_error",
    "PH05": "http_request_denied",
    "PR03": "destination_unavailable",
    "PM01": "destination_unavailable",
    "PM11": "destination_unavailable",
    "PL01": "connection_limit_reached",
    "PL02": "connection_limit_reached",
} | {code: error for _, code, error in OF_FAILURES.values()}


def of_head(problem: str, status: int) -> Refused:
    """The refusal of a request that cannot be read."""
    return Refused(status, "PH02" if status == 431 else "PH01", f"this is no request that is taken: {problem}")


def answer(refusal: Refused, proxy: str, request_id: bytes) -> tuple[list[Header], bytes]:
    """Fields and body of a refusal for a client. The body is one line of text, for people who look at an app that is
    not theirs."""
    error = _ERRORS.get(refusal.code, "proxy_internal_response")
    text = f"{refusal.code}: {refusal.message}"
    if refusal.hint:
        text += f" ({refusal.hint})"
    body = text.encode("utf-8", "replace") + b"\n"
    headers = [
        (b"content-length", b"%d" % len(body)),
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"cache-control", b"no-store"),
        (b"proxy-status", f'{proxy}; error={error}; details="{refusal.code}"'.encode("ascii", "replace")),
    ]
    if refusal.retry_after_s:
        headers.append((b"retry-after", b"%d" % refusal.retry_after_s))
    if request_id:
        headers.append((b"fly-request-id", request_id))
    return headers, body

"""How anything that goes wrong is answered: the one table from reason to HTTP status.

Every error body is `{"error": "<sentence>"}` with content type exactly `application/json` (clients
compare it literally). Sentences name the field at fault and never carry a trace. Reasons are the
scheduler's (`Reason`) and those that only HTTP knows.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Final

import msgspec

Headers = list[tuple[bytes, bytes]]
#: Status, headers (without content-length) and body.
Answer = tuple[int, Headers, bytes]

JSON: Final = (b"content-type", b"application/json")
RAW: Final = (b"content-type", b"application/octet-stream")

#: The one table. A reason that is not here is a bug of ours and answers 500.
STATUS: Final[dict[str, int]] = {
    "malformed": 400,
    "handler_rejected": 400,
    "unknown_tenant": 404,
    "unknown_route": 404,
    "wrong_verb": 405,
    "body_timeout": 408,
    "too_large": 413,
    # At admission: trying again later, or with a longer deadline, may succeed.
    "deadline": 429,
    "tenant_quota": 429,
    "over_share": 429,
    "window_full": 429,
    "memory": 429,
    # The client is gone: nobody reads the answer, it is only counted.
    "client_gone": 499,
    "cancelled": 499,
    "internal": 500,
    "handler_failed": 500,
    "launch_failed": 500,
    "compile_failed": 500,
    # Retriable: the same request may succeed on the same address soon.
    "draining": 503,
    "restarting": 503,
    "stale": 503,
    "device_lost": 503,
    "replica_full": 503,
    "loading": 503,
    "failed": 503,
    "tenant_failed": 503,
    "expired": 504,
}
#: Statuses whose answer says when to try again.
RETRIABLE: Final = frozenset({429, 503})
#: A failed tenant needs somebody who changes its settings.
FAILED_RETRY_S: Final = 60
INTERNAL: Final = "internal error"
#: The beginning of a JSON string up to an escape that is half of a surrogate pair; what may be
#: between a key and a string that belongs to it.
_HALF: Final = re.compile(
    rb'"(?:[^"\\]|\\[^u]|\\u[^dD]|\\u.[0-7]|\\u.[89abAB]..\\u[dD][c-fC-F])*+\\u[dD][89a-fA-F]'
)
_OPENING: Final = re.compile(rb"\s*(\{\s*|\[[^\]{}]*)?")


class HttpError(Exception):
    """An answer that is not 200. `reason` is a key of `STATUS`."""

    def __init__(
        self, reason: str | Enum, message: str, retry_after_ns: int = 0, *, closes: bool = False
    ) -> None:
        super().__init__(message)
        self.reason: str = str(reason.value) if isinstance(reason, Enum) else reason
        self.retry_after_ns = retry_after_ns
        #: The rest of the body is not read, so the connection cannot be used again.
        self.closes = closes
        #: Answered by the scheduler, which then counted it.
        self.is_counted = False
        #: Of a request that the scheduler had done, and counted as answered.
        self.is_done = False

    @property
    def status(self) -> int:
        return STATUS.get(self.reason, 500)

    def answer(self) -> Answer:
        headers: Headers = [JSON]
        if self.closes:
            headers.append((b"connection", b"close"))
        if self.status in RETRIABLE:
            # Whole seconds; never 0, which clients read as "at once".
            least = FAILED_RETRY_S if self.reason == "failed" else 1
            seconds = max(least, -(-self.retry_after_ns // 1_000_000_000))
            headers.append((b"retry-after", b"%d" % seconds))
        return self.status, headers, msgspec.json.encode({"error": str(self)})


def malformed(message: str) -> HttpError:
    return HttpError("malformed", message)


def explain(error: Exception, inside: str = "", given: bytes | None = None) -> HttpError:
    """What a decoder said, as a 400 whose sentence starts with the path of the field.

    msgspec writes "Expected `int`, got `str` - at `$.inputs[0].shape[1]`". Half of a surrogate pair
    in what was `given` it takes for the end of the data, or names its byte.
    """
    if given == b"":
        return malformed("body: empty")
    if isinstance(error, RecursionError):
        return malformed(f"{inside or 'body'}: nested too deeply")
    if isinstance(error, UnicodeDecodeError):
        return malformed(f"{inside or 'body'}: not UTF-8")
    text = given or b""
    half = None if isinstance(error, msgspec.ValidationError) else _HALF.search(text, 0, 1 << 20)
    if half is not None:
        head, _, between = text[: half.start()].rpartition(b":")
        key = head.rstrip()[:-1].rpartition(b'"')[2] if _OPENING.fullmatch(between) else b""
        path = key[:60].decode(errors="replace")
        return malformed(f"{path or 'body'}: an escape is half of a surrogate pair")
    sentence, _, path = str(error).partition(" - at `$")
    path = inside + path.rstrip("`")
    sentence = sentence.replace("JSON is malformed", "not valid JSON")
    return malformed(f"{path.lstrip('.') or 'body'}: {sentence[:1].lower()}{sentence[1:]}")

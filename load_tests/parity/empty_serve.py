"""An empty Ray Serve deployment: reads the body, answers two bytes. The floor of any path."""

from __future__ import annotations

from ray import serve
from starlette.requests import Request
from starlette.responses import Response


@serve.deployment(name="EmptyServe", num_replicas=1, max_ongoing_requests=512)
class Empty:
    async def __call__(self, request: Request) -> Response:
        await request.body()
        return Response(b"ok", media_type="application/octet-stream")

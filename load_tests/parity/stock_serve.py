"""The baseline: stock Ray Serve, one replica per tenant, each with the whole model in torch.

Tuned with care: `@serve.batch` (size and wait set by `tune` to what measured best), raw float32
bodies without JSON, one torch thread each, inference mode, HAProxy and the throughput flags.
"""

from __future__ import annotations

from typing import Any

from ray import serve
from starlette.requests import Request
from starlette.responses import Response

#: (max_batch_size, batch_wait_timeout_s) tried before measuring.
CANDIDATES = ((8, 0.0), (16, 0.002), (32, 0.005), (32, 0.015))


def name_of(head: int) -> str:
    return f"stock-{head}"


@serve.deployment(num_replicas=1, max_ongoing_requests=512, ray_actor_options={"num_cpus": 0.1})
class Stock:
    def __init__(self, head: int) -> None:
        import torch

        from load_tests.parity.models import build_backbone

        torch.set_num_threads(1)
        self._torch: Any = torch
        self._module = build_backbone(head)

    def tune(self, batch_size: int, wait_s: float) -> None:
        self.infer.set_max_batch_size(batch_size)
        self.infer.set_batch_wait_timeout_s(wait_s)

    @serve.batch(max_batch_size=16, batch_wait_timeout_s=0.002)
    async def infer(self, bodies: list[bytes]) -> list[bytes]:
        torch = self._torch
        with torch.inference_mode():
            flat = torch.frombuffer(bytearray(b"".join(bodies)), dtype=torch.float32)
            answers = self._module(flat.view(len(bodies), -1)).numpy()
        return [answer.tobytes() for answer in answers]

    async def __call__(self, request: Request) -> Response:
        answer = await self.infer(await request.body())
        return Response(answer, media_type="application/octet-stream")

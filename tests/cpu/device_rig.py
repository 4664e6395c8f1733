"""Runs programs on the CPU device, many requests per launch, beside the interpreter."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np

from coissue.kernels.cpu.border import Arrival, Border, Reader, enter
from coissue.kernels.cpu.device import DeviceSegment
from coissue.kernels.cpu.ops import run_opaque
from coissue.kernels.interpreter import interpret
from coissue.kernels.lowered import Lowered
from coissue.kernels.passes.fuse import fuse
from coissue.kernels.passes.layouts import prove


def digest_of(array) -> str:
    array = np.ascontiguousarray(array)
    return hashlib.sha256(f"{array.dtype} {array.shape}".encode() + array.tobytes()).hexdigest()


def to_wire(array, type_):
    """bf16 travels as its bits, the upper half of an f32."""
    if type_.dtype == "bf16":
        return (np.asarray(array, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return np.asarray(array)


def from_wire(array, type_):
    if type_.dtype == "bf16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array


class Tenant:
    """A program with weights on a device. `weights` by the digest the program names."""

    def __init__(
        self, device, program, weights, lower=lambda program: fuse(program, *prove(program))
    ):
        by_new = {digest_of(weights[w.digest]): weights[w.digest] for w in program.weights}
        renamed = [
            msgspec.structs.replace(w, digest=digest_of(weights[w.digest])) for w in program.weights
        ]
        self.program = msgspec.structs.replace(program, weights=tuple(renamed))
        self.weights, self.device = by_new, device
        device.load_weights(by_new)
        self.lowered: Lowered = lower(self.program)
        self.kernels = [device.bind(self.lowered, i) for i in range(len(self.lowered.kernels))]

    def request(self, inputs, rows, tokens) -> Request:
        return Request(self, inputs, rows, tokens)

    def detach(self):
        self.kernels = []
        self.device.drop_weights(self.weights)


class Request:
    def __init__(self, tenant, inputs, rows, tokens):
        self.tenant, self.inputs, self.rows, self.tokens = tenant, inputs, rows, tokens
        self.border = Border(tenant.lowered)
        program = tenant.program
        arrays = {p.name: to_wire(inputs[p.name], program.types[p.value]) for p in program.inputs}
        (self.buffers,) = enter([Arrival(self.border, arrays, rows, tokens)])

    def segment(self, kernel_index):
        kernel = self.tenant.kernels[kernel_index]
        return DeviceSegment(kernel, self.rows, self.tokens, self.buffers)

    def outputs(self):
        program = self.tenant.program
        arrays = Reader().read(self.border, self.buffers, self.rows, self.tokens)
        return {
            port.name: from_wire(array, program.types[port.value])
            for port, array in zip(program.outputs, arrays, strict=True)
        }

    def check(self, tolerance):
        """Equal to the interpreter on this request alone, relatively or absolutely."""
        found = self.outputs()
        if self.rows == 0:
            types = {
                p.name: self.tenant.program.types[p.value] for p in self.tenant.program.outputs
            }
            assert {k: a.shape for k, a in found.items()} == {
                k: t.at(0, self.tokens) for k, t in types.items()
            }
            return
        program, weights = self.tenant.program, self.tenant.weights
        for name, wanted in interpret(program, self.inputs, weights, run_opaque).items():
            assert found[name].dtype == wanted.dtype
            if not tolerance:  # in f64, large whole numbers look equal when they are not
                np.testing.assert_array_equal(found[name], wanted)
            np.testing.assert_allclose(found[name], wanted, rtol=tolerance, atol=tolerance)


def run_together(requests):
    """All requests through all kernels of their programs, one launch per kernel."""
    for index in range(len(requests[0].tenant.kernels)):
        run_kernel(requests, index)


def run_kernel(requests, index):
    requests[0].tenant.device.run([request.segment(index) for request in requests])

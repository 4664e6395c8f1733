"""Requests in any company: other partners, orders, memory and parts, and their answers in bits."""

from __future__ import annotations

import dataclasses
import itertools

import device_rig
import numpy as np
import torch

from coissue.kernels.cpu.device import Slice
from coissue.kernels.passes.fuse import fuse
from coissue.kernels.passes.layouts import prove
from coissue.kernels.passes.link import cut
from coissue.kernels.passes.pipeline import lower


def lower_exact(program):
    return lower(program, exact=True)


def lower_exact_whole(program):
    """As one joined kernel."""
    return cut({"one": lower_exact(program)}, lambda kernel: 1, 10**9)["one"]


def fuse_exact(program):
    """Without the rewriting passes, so that the op stays what it is."""
    return fuse(program, *prove(program), True)


def bits(outputs):
    """Name -> shape, dtype and bytes. A NaN is a NaN: its payload depends on a vector's lane."""
    found = {}
    for name, array in outputs.items():
        plain = np.array(array, copy=True)
        if plain.dtype.kind == "f":
            plain[np.isnan(plain)] = np.nan
        found[name] = plain.shape, plain.dtype, plain.tobytes()
    return found


def move(request, offset: int):
    """Puts the request's buffers `offset` elements off their alignment."""
    for value, own in request.buffers.items():
        old = own.tensor if isinstance(own, Slice) else own
        moved = torch.empty(old.numel() + offset, dtype=old.dtype)[offset:].view(old.shape)
        moved.copy_(old)
        is_slice = isinstance(own, Slice)
        request.buffers[value] = Slice(moved, own.start, own.stop) if is_slice else moved


def run_alone(tenant, inputs, rows, tokens):
    request = tenant.request(inputs, rows, tokens)
    device_rig.run_together([request])
    return request.outputs()


def row_of(program, inputs, row):
    """A request of one row, out of `inputs`."""
    found = {}
    for port in program.inputs:
        first, array = program.types[port.value].shape[:1], inputs[port.name]
        by_row = bool(first) and first[0].rows == 1
        scale = first[0].scale if by_row else 0
        found[port.name] = array[row * scale : (row + 1) * scale] if by_row else array
    return found


def is_separable(lowered) -> bool:
    return all(kernel.splittable for kernel in lowered.kernels)


def part(request, index, start, stop):
    return dataclasses.replace(request.segment(index), part=(start, stop))


def run_in_parts(request, cuts, partners=()):
    """Through all kernels; where they can be split, at these rows. Partners join the first part."""
    device = request.tenant.device
    bounds = sorted({0, request.rows, *(cut % (request.rows + 1) for cut in cuts)})
    for index, bound in enumerate(request.tenant.kernels):
        others = [other.segment(index) for other in partners]
        if not bound.splittable or request.rows < 2:
            device.run([request.segment(index), *others])
            continue
        for start, stop in itertools.pairwise(bounds):
            device.run([*others, part(request, index, start, stop)])
            others = []

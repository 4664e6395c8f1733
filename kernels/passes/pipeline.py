"""The way from a captured program to kernels: each pass in its place."""

from __future__ import annotations

from coissue.kernels.ir import Program
from coissue.kernels.lowered import Lowered
from coissue.kernels.passes.canonicalise import canonicalise
from coissue.kernels.passes.fuse import fuse
from coissue.kernels.passes.layouts import prove
from coissue.kernels.passes.masks import recognise_masks

#: Program -> Program, in order; each keeps inputs, outputs and meaning.
REWRITES = (canonicalise, recognise_masks, canonicalise)


def lower(program: Program, *, exact: bool = False) -> Lowered:
    """`program`, which `spec.check_program` accepts, ready for devices and `link`.

    `exact`: a row's bits must not depend on what shares its launches, at the cost of speed.
    """
    for rewrite in REWRITES:
        program = rewrite(program)
    return fuse(program, *prove(program), exact)

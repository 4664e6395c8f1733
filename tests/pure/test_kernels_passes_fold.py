"""Which batch norms are folded into the convolution before them."""

from __future__ import annotations

import programs
from programs import ABSENT, R

from coissue.kernels.passes.fold import find_folds
from coissue.kernels.passes.fuse import fuse
from coissue.kernels.passes.layouts import prove

WINDOW = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}


def folds(build, exact: bool = False) -> int:
    """How many norms are folded in what `build` makes of a convolution and a norm's weights."""
    b = programs.Builder("folds", 0, tokens_limit=0)
    x = b.input("x", R, 2, 5, 5)
    y = b.op("conv", x, b.weight(3, 2, 3, 3), ABSENT, out=(), **WINDOW)
    norm = [b.weight(3), b.weight(array=b.rng.uniform(0.5, 2, 3))]
    program = b.build(**build(b, y, norm)).program
    lowered = fuse(program, *prove(program), exact)
    return sum(len(find_folds(lowered, kernel)) for kernel in lowered.kernels)


def normed(b, y, norm):
    return b.op("batch_norm", y, *norm, ABSENT, ABSENT, eps=1e-5)


def test_a_norm_that_alone_reads_the_convolution():
    assert folds(lambda b, y, norm: {"y": normed(b, y, norm)}) == 1


def test_not_if_others_read_what_is_between():
    assert folds(lambda b, y, norm: {"y": b.op("add", y, normed(b, y, norm))}) == 0
    assert folds(lambda b, y, norm: {"y": normed(b, y, norm), "z": y}) == 0


def test_not_behind_another_op():
    assert folds(lambda b, y, norm: {"y": normed(b, b.op("relu", y), norm)}) == 0


def test_not_with_weights_that_are_computed():
    def build(b, y, norm):
        return {"y": normed(b, y, [b.op("neg", norm[0]), norm[1]])}

    assert folds(build) == 0


def test_not_in_exact_kernels():
    assert folds(lambda b, y, norm: {"y": normed(b, y, norm)}, exact=True) == 0

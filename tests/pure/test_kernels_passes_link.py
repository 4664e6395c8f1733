"""Joining kernels: bounded in time, cut where attached programs stop being alike."""

from __future__ import annotations

import numpy as np
from packed import run_packed
from programs import Builder, bert, mlp

from coissue.kernels.interpreter import interpret
from coissue.kernels.ir import R
from coissue.kernels.passes.link import cut
from coissue.kernels.passes.pipeline import lower


def one(kernel):
    return 1


def signatures(lowered):
    return [kernel.signature for kernel in lowered.kernels]


def backbone(classes, head_seed, depth=3, hidden=0):
    """The same `depth` layers for everyone, then a head of one's own."""
    b = Builder("backbone", seed=1, tokens_limit=0)
    x = b.input("x", R, 8)
    for _ in range(depth):
        x = b.op("relu", b.linear(x, 8))
    b.rng = np.random.default_rng(head_seed)
    if hidden:
        x = b.op("relu", b.linear(x, hidden))
    return b.build(y=b.linear(x, classes))


def link(models, bound_ns=100, predict=one):
    return cut({n: lower(m.program) for n, m in models.items()}, predict, bound_ns)


def test_alone_a_program_is_joined_up_to_the_bound():
    lowered = lower(mlp((4,) * 8).program)
    assert len(lowered.kernels) == 7
    for bound, count in ((100, 1), (7, 1), (3, 3), (2, 4), (1, 7), (0, 7)):
        joined = cut({"a": lowered}, one, bound)["a"]
        assert len(joined.kernels) == count
        assert [op for k in joined.kernels for op in k.ops] == [
            op for k in lowered.kernels for op in k.ops
        ]


def test_heads_of_other_widths_share_the_backbone():
    found = link({"two": backbone(2, 5), "four": backbone(4, 6), "two_again": backbone(2, 7)})
    assert signatures(found["two"])[0] == signatures(found["four"])[0]
    assert signatures(found["two"])[1] != signatures(found["four"])[1]
    assert signatures(found["two"]) == signatures(found["two_again"])
    assert [len(lowered.kernels) for lowered in found.values()] == [2, 2, 2]


def test_heads_of_one_form_but_own_weights_are_cut_off():
    found = link({"a": backbone(2, 5), "b": backbone(2, 6)})
    assert signatures(found["a"]) == signatures(found["b"])
    (shared, own), (its_shared, its_own) = (lowered.kernels for lowered in found.values())
    digests = [
        [[digest_of(found[name], v) for v in kernel.weights] for kernel in found[name].kernels]
        for name in ("a", "b")
    ]
    assert digests[0][0] == digests[1][0]
    assert digests[0][1] != digests[1][1]
    assert len(shared.ops) == len(its_shared.ops) == 6
    assert len(own.ops) == len(its_own.ops) == 1


def digest_of(lowered, value):
    (found,) = [w.digest for w in lowered.program.weights if w.value == value]
    return found


def test_equal_programs_are_not_cut():
    found = link({"a": backbone(2, 5), "b": backbone(2, 5)})
    assert [len(lowered.kernels) for lowered in found.values()] == [1, 1]


def test_programs_without_a_common_start_are_not_cut():
    found = link({"a": backbone(2, 5), "other": mlp((4, 8, 3))})
    assert [len(lowered.kernels) for lowered in found.values()] == [1, 1]


def test_a_third_program_of_own_weights_is_cut_like_its_likes():
    """`own` has the others' structure but no weights of theirs: it must still be able to join."""
    own = mlp((8, 8, 8, 8, 2), seed=9)
    found = link({"a": backbone(2, 5), "b": backbone(2, 6), "own": own})
    assert signatures(found["own"]) == signatures(found["a"])


def test_a_program_that_is_the_start_of_another_shares_all_of_it():
    short, long = backbone(8, 1, depth=2), mlp((8, 8, 8, 8, 5), seed=3)
    found = link({"short": short, "long": long})
    assert set(signatures(found["long"])) & set(signatures(found["short"]))


def test_a_long_kernel_stays_alone():
    model = mlp((4, 5, 6, 7))
    kernels = lower(model.program).kernels
    slow = kernels[1].signature
    found = link({"a": model}, 5, lambda kernel: 50 if kernel.signature == slow else 1)["a"]
    assert [len(k.ops) for k in found.kernels] == [len(k.ops) for k in kernels]


def test_joined_kernels_compute_the_same():
    models = {
        "first": bert(head_seed=3),
        "mean": bert(pool="mean", head_seed=4),
        "wide": bert(classes=5, head_seed=5),
    }
    found = link(models, 4)
    assert signatures(found["first"])[0] == signatures(found["mean"])[0]
    rng = np.random.default_rng(0)
    for name, model in models.items():
        requests = [model.request(*size, rng) for size in ((2, 3), (1, 6))]
        for request, y in zip(
            requests, run_packed(found[name], requests, model.weights), strict=True
        ):
            wanted = interpret(model.program, request, model.weights)
            np.testing.assert_allclose(y["y"], wanted["y"], rtol=1e-4, atol=1e-5)


def test_the_result_does_not_depend_on_the_order_of_attaching():
    models = {"two": backbone(2, 5), "four": backbone(4, 6), "deep": backbone(2, 7, hidden=8)}
    forwards = link(models)
    backwards = link(dict(reversed(models.items())))
    assert {n: signatures(x) for n, x in forwards.items()} == {
        n: signatures(x) for n, x in backwards.items()
    }

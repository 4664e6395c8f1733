"""Every graph gets a legal plan, and the plan run block by block is the graph."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from stitch_blocks import PlanRun, evaluate, fill, move_parameters
from stitch_check import check_plan
from stitch_random import graphs

from coissue.kernels.stitch.plan import StitchPlan
from coissue.kernels.stitch.price import cpu, gpu
from coissue.kernels.stitch.search import Search, plan
from coissue.kernels.stitch.tune import Settings, Tuner

SETTINGS = st.sampled_from([(1, 0), (1, 256), (1, 2**15), (64, 128), (256, 2**15), (32, 2**20)])


@settings(max_examples=300, deadline=None)
@given(graphs(), SETTINGS, st.integers(0, 9))
def test_a_plan_is_legal_and_means_the_graph(graph, setting, seed):
    threads, budget_bytes = setting
    found = plan(graph, budget_bytes=budget_bytes, threads=threads)
    check_plan(found, budget_bytes)
    # With long rows split, which rounds otherwise, it is that graph (test_stitch_split.py).
    parameters = move_parameters(fill(graph, np.random.default_rng(seed)), graph, found.graph)
    values = evaluate(found.graph, parameters)
    assert len(found.graph.outputs) == len(graph.outputs)
    for index, made in zip(found.graph.outputs, PlanRun(found, parameters).outputs(), strict=True):
        np.testing.assert_array_equal(made, values[index])


@settings(max_examples=200, deadline=None)
@given(graphs(steps=6), SETTINGS, st.data())
def test_every_candidate_is_legal_and_means_the_graph(graph, setting, data):
    """Not only the cheapest: most have more blocks."""
    threads, budget_bytes = setting
    tuner = Tuner(graph, Settings(budget_bytes, threads, gpu(threads)))
    found = list(tuner.candidates(frozenset(tuner.work)))
    if not found:
        return
    kernel = data.draw(st.sampled_from(found)).kernel
    made = StitchPlan(graph, (kernel,))
    check_plan(made, budget_bytes)
    parameters = fill(graph, np.random.default_rng(0))
    values = evaluate(graph, parameters)
    for index, array in zip(graph.outputs, PlanRun(made, parameters).outputs(), strict=True):
        np.testing.assert_array_equal(array, values[index])


@settings(max_examples=100, deadline=None)
@given(graphs(), st.sampled_from([1, 128]))
def test_patterns_never_wait_for_each_other_in_a_circle(graph, threads):
    machine = cpu() if threads == 1 else gpu(threads)
    tuner = Tuner(graph, Settings(2**15, threads, machine))
    for state in Search(tuner).run():
        earlier = set()
        for pattern in state.patterns:
            for index in pattern:
                assert set(tuner.readers[index]) <= earlier | pattern
            earlier |= pattern
        assert earlier == set(tuner.work)

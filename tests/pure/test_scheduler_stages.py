"""Admission, pick and coalescing: who is let in, who leads, who joins."""

from __future__ import annotations

from random import Random

import pytest
from scheduler_fakes import (
    LATER,
    Bench,
    chain,
    kernel,
    launched,
    launches,
    tenant,
)

from coissue.scheduler.admission import BUCKETS, HORIZON_NS, ONE, WIDTH_NS, Backlog
from coissue.scheduler.messages import (
    Attached,
    Complete,
    Detached,
    LaunchDone,
    LaunchId,
    Outcome,
    PolicyChosen,
    Reason,
    RequestId,
    SignatureId,
    Submitted,
    Woke,
)
from coissue.scheduler.null_device import LinearCost
from coissue.scheduler.program import GROUP, Program, parts_of
from coissue.scheduler.ready import LATE, Ready
from coissue.scheduler.states import KERNEL_EDGES, REQUEST_EDGES, render_diagram
from coissue.scheduler.window import Request, Tenant


def rejected(commands) -> list[tuple[int, Reason]]:
    return [
        (c.request, c.reason)
        for c in commands
        if isinstance(c, Complete) and c.outcome is Outcome.REJECTED
    ]


# --- admission: limit k admits k


@pytest.mark.parametrize("limit", [1, 3])
def test_the_quota_admits_exactly_its_number(limit):
    bench = Bench(tenant("a", *chain(7), limit=limit), tenant("b", *chain(7)))
    commands = bench.send(*[bench.submit(i) for i in range(limit + 1)], bench.submit(9, "b"))
    assert rejected(commands) == [(limit, Reason.TENANT_QUOTA)]
    bench.land(launches(commands)[0])
    assert rejected(bench.send(bench.submit(10))) == []


@pytest.mark.parametrize("limit", [1, 3])
def test_the_window_admits_exactly_its_number(limit):
    bench = Bench(tenant("a", *chain(7)), window=limit)
    commands = bench.send(*[bench.submit(i) for i in range(limit + 1)])
    assert rejected(commands) == [(limit, Reason.WINDOW_FULL)]


def test_memory_admits_exactly_its_bytes_and_gets_them_back():
    bench = Bench(tenant("a", *chain(7)), bytes=100)
    commands = bench.send(bench.submit(1, bytes_needed=60), bench.submit(2, bytes_needed=40))
    assert rejected(commands) == []
    assert rejected(bench.send(bench.submit(3, bytes_needed=1))) == [(3, Reason.MEMORY)]
    bench.land(launches(commands)[0])
    assert rejected(bench.send(bench.submit(4, bytes_needed=100))) == []


def test_a_deadline_that_even_an_idle_device_misses_is_refused_for_good():
    bench = Bench(tenant("a", *chain(7, 8)))
    (refusal,) = bench.send(bench.submit(1, deadline_ns=220))
    assert refusal == Complete(RequestId(1), Outcome.REJECTED, Reason.DEADLINE)
    assert launched(bench.send(bench.submit(2, deadline_ns=221))) == [[(2, 0)]]


def test_work_that_is_served_first_counts_and_retry_after_says_by_how_much():
    bench = Bench(tenant("a", *chain(7)), tenant("b", *chain(8)), tenant("c", *chain(9)))
    bench.send(bench.submit(1, "a"), bench.submit(2, "b", 5000))
    # 1 or 2 runs for 110 more, the other takes 110, then 110 of its own: 331.
    (refusal,) = bench.send(bench.submit(3, "c", 330))
    assert refusal.retry_after_ns == 1
    assert rejected(bench.send(bench.submit(4, "c", 331))) == []


def test_less_urgent_work_does_not_count():
    bench = Bench(tenant("a", *chain(7)), tenant("b", *chain(8), priority=2))
    late_ns = 10 * WIDTH_NS
    bench.send(bench.submit(0, deadline_ns=LATER))
    bench.send(*[bench.submit(i, "b", late_ns) for i in range(1, 60)])
    assert rejected(bench.send(bench.submit(90, "a", 240))) == []
    assert bench.core.stats().backlog_ns > 500


def test_followers_are_charged_their_share_of_a_common_launch():
    """50 requests that travel together fit where 50 lone ones would not."""
    bench = Bench(tenant("a", *chain(7)))
    requests = [bench.submit(i, deadline_ns=1300) for i in range(100)]
    admitted = 100 - len(rejected(bench.send(*requests)))
    share_ns = (100 + 10 * GROUP) // GROUP
    assert admitted == 1 + (1300 - 1 - 110) // share_ns > 1300 // 110


def test_without_admission_only_limits_reject():
    bench = Bench(tenant("a", *chain(7)), admission=False)
    assert rejected(bench.send(*[bench.submit(i, deadline_ns=120) for i in range(50)])) == []


def test_caution_rises_with_misses_and_falls_with_hits():
    bench = Bench(tenant("a", *chain(7)))

    def cautions():
        return bench.core.window.tenants["a"].caution, bench.core.admission.caution

    (first,) = launches(bench.send(bench.submit(1)))
    bench.send(bench.submit(2, deadline_ns=bench.now_ns + 230))  # 110 of 120 spare ns are waited
    (launch,) = launches(bench.land(first))
    bench.land(launch, after_ns=121)
    assert cautions() == (1_100_000, 1_010_000)
    (launch,) = launches(bench.send(bench.submit(3)))
    bench.land(launch)
    assert cautions() == (1_099_000, 1_009_900)


def test_a_miss_that_much_more_caution_would_have_let_in_does_not_raise_it():
    bench = Bench(tenant("a", *chain(7)))
    (first,) = launches(bench.send(bench.submit(1)))
    bench.send(bench.submit(2, deadline_ns=bench.now_ns + 300))  # 110 of 190
    (launch,) = launches(bench.land(first))
    bench.land(launch, after_ns=200)
    assert bench.core.window.tenants["a"].caution == bench.core.admission.caution == ONE


def test_priorities_are_clamped():
    bench = Bench(tenant("a", *chain(7), priority=400))
    bench.send(bench.submit(1), bench.submit(2, priority=-5))
    assert [request.priority for request in bench.core.window.open.values()] == [16, 1]


def test_the_backlog_agrees_with_a_plain_sum():
    """Against a list of (priority, deadline bucket, work), over several turns of the ring."""
    rng = Random(3)
    backlog, plain, now_ns = Backlog(), [], 0
    spec = tenant("a", kernel(7))
    program = Program(parts_of(spec), 10**9)
    for step in range(3000):
        now_ns += rng.randrange(WIDTH_NS)
        deadline_ns = now_ns + rng.randrange(BUCKETS // 2 * WIDTH_NS)
        event = Submitted(now_ns, RequestId(step), "a", 1, 0, deadline_ns, 0, 0)
        profile = program.profile(1, 0, now_ns, LinearCost(100, 10, 0), {})
        request = Request(event, Tenant(spec), program, profile, rng.randint(1, 3))
        request.charges = [rng.randrange(1000)]
        backlog.add(request, now_ns)
        plain.append((request.priority, deadline_ns // WIDTH_NS, request))
        first = now_ns // WIDTH_NS
        for item in [p for p in plain if p[1] < first or rng.random() < 0.05]:
            plain.remove(item)
            backlog.remove(item[2], 0)
        bucket = deadline_ns // WIDTH_NS
        wanted = sum(
            r.charges[0] for p, b, r in plain if p < 2 or (p == 2 and first <= b <= bucket)
        )
        assert backlog.ahead_ns(2, deadline_ns, now_ns) == wanted
    assert backlog.total_ns == sum(item[2].charges[0] for item in plain)


def test_work_that_is_due_far_later_is_never_taken_for_urgent_however_long_it_waits():
    """The ring of deadlines turns every `BUCKETS` of them; who waits for a turn stays as far."""
    bench = Bench(tenant("a", *chain(7)))
    backlog, far_ns = bench.core.admission.backlog, 100 * HORIZON_NS
    bench.send(bench.submit(1, deadline_ns=far_ns), bench.submit(2, deadline_ns=far_ns))
    bench.core.handle(bench.submit(3, deadline_ns=far_ns))  # waits behind the launch
    assert backlog.total_ns > 0
    for now_ns in range(1, 3 * HORIZON_NS, WIDTH_NS // 2):
        assert backlog.ahead_ns(1, now_ns + 5 * WIDTH_NS, now_ns) == 0
    assert backlog.ahead_ns(1, now_ns + 2 * HORIZON_NS, now_ns) == backlog.total_ns


def test_caution_learned_under_one_policy_does_not_count_under_another():
    bench = Bench(tenant("a", *chain(7)))
    bench.core.window.tenants["a"].caution = bench.core.admission.caution = 3 * ONE
    bench.send(PolicyChosen(bench.now_ns, "fifo"))
    assert bench.core.window.tenants["a"].caution == bench.core.admission.caution == ONE


def test_the_larger_of_both_cautions_counts():
    bench = Bench(tenant("a", *chain(7)), tenant("b", *chain(7)), tenant("c", *chain(8)))
    core = bench.core
    bench.send(bench.submit(1, "c"))  # 110 to wait, then 110 of its own: 221 with time to spare
    for own, shared, name, is_let_in in (
        (1, 1, "a", True), (2, 1, "a", False), (2, 1, "b", True), (1, 2, "b", False),
    ):  # fmt: skip
        core.window.tenants["a"].caution, core.admission.caution = own * ONE, shared * ONE
        number = 10 * own + shared + (100 if name == "b" else 0)
        refused = rejected(bench.send(bench.submit(number, name, bench.now_ns + 260)))
        assert (not refused) == is_let_in


def test_profiles_are_never_optimistic_about_sizes_between():
    program = Program(parts_of(tenant("a", kernel(7, per_token=True))), 10**9)
    cost = LinearCost(100, 10, 0)
    for tokens in range(1, 400):
        profile = program.profile(1, tokens, 0, cost, {})
        exact_ns = cost.predict_ns(SignatureId(7), tokens, 1, 1)
        assert exact_ns <= profile.own_ns[0] <= 1.13 * exact_ns
    assert program.profile(1, 9, 0, cost, {}) is program.profile(1, 9, 999_999_999, cost, {})
    later = program.profile(1, 9, 1_000_000_000, LinearCost(200, 10, 0), {})
    assert later.own_ns == [290]


def test_tenants_that_differ_in_weights_share_a_program_and_its_predictions():
    """Also how many weights share a launch is predicted anew whenever a version comes or goes."""
    bench = Bench(*[tenant(name, *chain(1, 2, weights=i)) for i, name in enumerate("abc")])
    window = bench.core.window
    assert len(window.programs) == 1
    bench.send(*[bench.submit(id, name) for id, name in enumerate("aabc")])
    first, *others = [request.profile for request in window.open.values()]
    assert all(profile is first for profile in others)
    bench.send(Attached(1, tenant("c", *chain(1, weights=2))))
    assert [program.users for program in window.programs.values()] == [2, 1]
    bench.send(bench.submit(9, "a"))
    assert window.open[RequestId(9)].profile is not first
    bench.send(*[Detached(1, name) for name in "abc"])
    assert window.programs == {}


def test_slack_counts_the_longest_path():
    diamond = kernel(1), kernel(2, 0, 0), kernel(3, 0, 0), kernel(4, 0, 1, 2)
    cost = LinearCost(100, 0, 0, own={SignatureId(3): (700, 0)})
    profile = Program(parts_of(tenant("a", *diamond)), 10**9).profile(1, 0, 0, cost, {})
    assert profile.tail_ns == [900, 200, 800, 100]
    assert profile.path_ns == 900


# --- pick ---


def test_least_slack_leads_not_earliest_deadline():
    bench = Bench(tenant("a", *chain(1)), tenant("b", *chain(2, 3, 4, 5)), tenant("c", *chain(6)))
    bench.send(bench.submit(0, "c"))
    bench.send(bench.submit(1, "a", 2000), bench.submit(2, "b", 2100))
    assert launched(bench.send(LaunchDone(50, LaunchId(1), 50))) == [[(2, 0)]]


def test_priority_goes_before_slack_and_a_request_may_have_its_own():
    bench = Bench(tenant("a", *chain(1), priority=2), tenant("b", *chain(2)))
    bench.send(bench.submit(0, "b"))
    bench.send(bench.submit(1, "a", 3000), bench.submit(2, "b"))
    assert launched(bench.send(LaunchDone(50, LaunchId(1), 50))) == [[(2, 0)]]
    bench.now_ns = 50
    bench.send(bench.submit(3, "a", priority=1, deadline_ns=9000), bench.submit(4, "b"))
    assert launched(bench.send(LaunchDone(90, LaunchId(2), 40))) == [[(3, 0), (1, 0)]]


def test_lost_requests_go_behind_all_that_can_be_served_in_time():
    bench = Bench(
        tenant("a", *chain(1)), tenant("b", *chain(2)), tenant("c", *chain(3)), admission=False
    )
    bench.send(bench.submit(0, "c"))
    bench.send(bench.submit(1, "a", 600), bench.submit(2, "b"))
    second = bench.send(LaunchDone(580, LaunchId(1), 579))
    assert launched(second) == [[(2, 0)]]
    assert len(bench.core.window.ready.levels[LATE]) == 1
    bench.send(Woke(600))
    assert bench.core.stats().outcomes[Outcome.EXPIRED] == 1


def test_ready_against_a_plain_list():
    """Random pushes, takes and withdrawals: the head is always the least of what is there."""
    rng = Random(5)
    ready, plain = Ready(), {}
    spec = tenant("a", *[kernel(s) for s in range(6)])
    program = Program(parts_of(spec), 10**9)
    profile = program.profile(1, 0, 0, LinearCost(100, 10, 0), {})
    for step in range(4000):
        choice = rng.random()
        if choice < 0.4:
            event = Submitted(step, RequestId(step), "a", 1, 0, rng.randrange(10**6), 0, 0)
            request = Request(event, Tenant(spec), program, profile, rng.randint(1, 3))
            for index in rng.sample(range(6), rng.randint(1, 6)):
                ready.push(request, index)
            plain[step] = request
        elif choice < 0.6 and plain:
            ready.withdraw(plain.pop(rng.choice(list(plain))))
        elif plain:
            request = plain[rng.choice(list(plain))]
            if request.ready:
                ready.take(rng.choice(list(request.ready.values())))
        kernels = [k for request in plain.values() for k in request.ready.values()]
        assert ready.count == len(kernels)
        for priority in (1, 2, 3):
            here = [
                queue.heap[0][3].latest_ns
                for queue in ready.queues.values()
                if queue.head() and queue.heap[0][0] == priority
            ]
            top = ready.top(priority)
            assert (top.heap[0][3].latest_ns if top else None) == min(here, default=None)
        entries = sum(len(queue.heap) for queue in ready.queues.values())
        assert entries <= 2 * len(kernels) + 6 * 18  # the dead are cleared away


# --- coalesce ---


def test_a_group_stays_within_the_preemption_bound():
    bench = Bench(tenant("a", *chain(7)), preemption_bound_ns=150)
    commands = bench.send(*[bench.submit(i) for i in range(12)])
    assert launched(commands) == [[(i, 0) for i in range(5)]]
    assert launches(commands)[0].predicted_ns == 150


def test_one_member_alone_may_exceed_the_bound():
    bench = Bench(tenant("a", *chain(7)), preemption_bound_ns=150)
    commands = bench.send(bench.submit(1, rows=50), bench.submit(2))
    assert launched(commands) == [[(1, 0)]]


def test_a_group_has_at_most_its_limit_of_members():
    bench = Bench(tenant("a", *chain(7)), segments=3)
    assert launched(bench.send(*[bench.submit(i) for i in range(5)])) == [[(0, 0), (1, 0), (2, 0)]]


@pytest.mark.parametrize(("deadline_ns", "size"), [(131, 3), (140, 3), (141, 4), (201, 10)])
def test_no_member_misses_for_the_sake_of_another(deadline_ns, size):
    bench = Bench(tenant("a", *chain(7)), admission=False)
    first = bench.submit(0, deadline_ns=deadline_ns)
    commands = bench.send(first, *[bench.submit(i) for i in range(1, 10)])
    assert len(launches(commands)[0].segments) == size


@pytest.mark.parametrize(("deadline_ns", "size"), [(240, 2), (250, 3), (LATER, 20)])
def test_nobody_who_waits_misses_for_the_sake_of_a_member(deadline_ns, size):
    """b must start 110 before its deadline; a leads, as its own deadline is closer."""
    bench = Bench(tenant("a", *chain(7)), tenant("b", *chain(8)), admission=False)
    lead = bench.submit(0, "a", 225)
    others = [bench.submit(i, "a", LATER + 9) for i in range(1, 20)]
    commands = bench.send(lead, *others, bench.submit(99, "b", deadline_ns))
    assert len(launches(commands)[0].segments) == min(size, 12)


def test_who_is_lost_anyway_limits_nobody():
    bench = Bench(tenant("a", *chain(7)), tenant("b", *chain(8)), admission=False)
    lead = bench.submit(0, "a", 150)
    others = [bench.submit(i, "a") for i in range(1, 4)]
    # b would have to start at 60, when not even the lead alone is done.
    commands = bench.send(lead, *others, bench.submit(99, "b", 170))
    assert launched(commands) == [[(0, 0), (1, 0), (2, 0), (3, 0)]]


def test_lost_members_do_not_lengthen_a_launch_that_is_in_time():
    bench = Bench(tenant("a", *chain(7)), tenant("b", *chain(8)), admission=False)
    bench.send(bench.submit(0, "b"))
    bench.send(bench.submit(1, "a", 600), bench.submit(2, "a"))
    assert launched(bench.send(LaunchDone(590, LaunchId(1), 589))) == [[(2, 0)]]


def test_the_largest_group_is_found_as_by_trying_every_size():
    rng = Random(8)
    for _ in range(200):
        bound_ns = rng.randrange(100, 1500)
        bench = Bench(tenant("a", *chain(7)), admission=False, preemption_bound_ns=bound_ns)
        rows = [rng.randint(1, 9) for _ in range(rng.randint(1, 60))]
        deadlines = sorted(rng.randrange(200, 3000) for _ in rows)
        requests = [
            bench.submit(i, "a", d, rows=r)
            for i, (d, r) in enumerate(zip(deadlines, rows, strict=True))
        ]
        (launch,) = launches(bench.send(*requests))
        order = sorted(range(len(rows)), key=lambda i: (deadlines[i] - 100 - 10 * rows[i], i))
        best = 1
        for size in range(2, len(rows) + 1):
            took_ns = 100 + 10 * sum(rows[i] for i in order[:size])
            still = [i for i in order[:size] if deadlines[i] - 100 - 10 * rows[i] >= 1]
            if took_ns <= bound_ns and all(1 + took_ns <= deadlines[i] for i in still):
                best = size
        assert len(launch.segments) == best


# --- tables ---


def test_tables_are_complete_and_drawn():
    for edges in (KERNEL_EDGES, REQUEST_EDGES):
        states = type(next(iter(edges)))
        assert list(edges) == list(states)
        drawn = render_diagram(edges)
        assert drawn.startswith(f"stateDiagram-v2\n    [*] --> {next(iter(states)).name}\n")
        assert drawn.count("-->") == 1 + sum(len(ends) or 1 for ends in edges.values())


def answer_hopeless(bench, numbers, spare_ns):
    """Whether each request, with so much time for 110, is let in; it is served if so."""
    found = []
    for number in numbers:
        ask = bench.submit(number, deadline_ns=bench.now_ns + spare_ns)
        commands = bench.send(ask)
        found.append(bool(launches(commands)))
        if found[-1]:
            bench.land(launches(commands)[0], after_ns=20)
    return found


def test_one_of_eight_that_look_hopeless_is_let_in_where_nothing_is_open():
    """What is never launched is never corrected. It teaches nobody caution, nor to hurry."""
    bench = Bench(tenant("a", kernel(7)), admission=True)
    assert answer_hopeless(bench, range(1, 17), 50) == ([False] * 7 + [True]) * 2
    assert bench.core.admission.caution == ONE
    assert bench.core.window.ready.tight_ns == 0


def test_what_looks_hopeless_is_refused_where_others_wait_or_its_time_is_over():
    bench = Bench(tenant("a", kernel(7)), admission=True)
    assert not any(answer_hopeless(bench, range(1, 33), 0)), "its deadline has come"
    bench.send(bench.submit(100))
    assert not any(answer_hopeless(bench, range(101, 133), 50)), "one is open"

"""The balancer's threshold against the integer program, solved by PuLP, and against small cases by hand."""

import numpy as np
import pulp
import pytest

from moe_spac.policies.balancer import ExpertTimes, best_threshold
from moe_spac.policies.interface import Costs
from moe_spac.policies.spac import SlotKeys


def threshold_by_integer_program(utility, absent, gpu_ns, cpu_ns, keys, free, copy_ns, budget_ns, cpu_first_ns, top):
    """The paper's program in words: x[e], expert e is hot and runs on the GPU, all others on the CPU; y[tau], the
    threshold is tau; z[r], resident r of the pool is evicted. Least |T_cpu - T_gpu|, subject to: hot are those at or
    above the threshold; the copies fit the link's time (I/O); and the memory: each copy takes a free slot or that of an
    evicted resident, which must be colder than the threshold. Times are whole, so one objective also breaks ties
    upwards."""
    experts = range(len(utility))
    program = pulp.LpProblem("balance", pulp.LpMinimize)
    x = [pulp.LpVariable(f"x{e}", cat="Binary") for e in experts]
    y = {tau: pulp.LpVariable(f"y{tau}", cat="Binary") for tau in range(1, top + 2)}
    z = [pulp.LpVariable(f"z{r}", cat="Binary") for r in range(len(keys))]
    any_cpu = pulp.LpVariable("any_cpu", cat="Binary")
    gap = pulp.LpVariable("gap", lowBound=0)
    program += gap * (top + 2) - pulp.lpSum(tau * y[tau] for tau in y)
    program += pulp.lpSum(y.values()) == 1
    for e in experts:
        program += x[e] == pulp.lpSum(y[tau] for tau in y if tau <= utility[e])
    working = [e for e in experts if cpu_ns[e] > 0]
    for e in working:
        program += any_cpu >= 1 - x[e]
    program += any_cpu <= pulp.lpSum(1 - x[e] for e in working)
    t_gpu = pulp.lpSum(int(gpu_ns[e]) * x[e] for e in experts)
    t_cpu = pulp.lpSum(int(cpu_ns[e]) * (1 - x[e]) for e in experts) + cpu_first_ns * any_cpu
    program += gap >= t_cpu - t_gpu
    program += gap >= t_gpu - t_cpu
    copies = pulp.lpSum(x[e] for e in experts if absent[e])
    program += copy_ns * copies <= budget_ns
    for evicted, key in zip(z, keys, strict=True):
        program += evicted <= pulp.lpSum(y[tau] for tau in y if tau > key)
    program += copies <= free + pulp.lpSum(z)
    assert program.solve(pulp.PULP_CBC_CMD(msg=False)) == pulp.LpStatusOptimal
    return next(tau for tau in y if round(float(y[tau].varValue or 0)) == 1)


def instance(seed, experts):
    """All that the program asks of one layer."""
    rng = np.random.default_rng(seed)
    top = int(rng.integers(1, 6))
    used = rng.random(experts) < 0.7
    return {
        "utility": rng.integers(0, top + 1, experts),
        "absent": rng.random(experts) >= 0.4,
        "gpu_ns": used * rng.integers(1, 6, experts),
        "cpu_ns": used * rng.integers(1, int(rng.choice([4, 20])), experts),
        "keys": rng.integers(0, top + 2, int(rng.integers(0, experts))).tolist(),  # top + 1 is frozen
        "free": int(rng.integers(0, 3)),
        "copy_ns": int(rng.integers(1, 5)),
        "budget_ns": int(rng.integers(0, 2 * experts)),
        "cpu_first_ns": int(rng.integers(0, 4)),
        "top": top,
    }


def threshold(keys, free, top, **given):
    """As the policy asks: the pool's residents by key, on top of the free slots."""
    pool = SlotKeys(1, max(len(keys), 1), top)
    for id_, key in enumerate(keys):
        pool.add(id_, key)
    return best_threshold(room=[free + colder for colder in pool.colder()], **given)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PuLP 3 announces 4, PuLP 2 has only these names
def test_equals_the_integer_optimum():
    given = [instance(seed, 3 + seed % 10) for seed in range(40)] + [instance(seed, 128) for seed in (50, 51, 52)]
    chosen = [threshold(**one) for one in given]
    assert len(set(chosen)) >= 5  # the instances ask for different answers
    assert chosen == [threshold_by_integer_program(**one) for one in given]


NO_LIMIT = [9, 9, 9, 9]


@pytest.mark.parametrize(
    ("budget", "room", "tau"),
    [
        (100, NO_LIMIT, 2),  # hot {2, 2}: GPU 4, CPU 6; tau 1 gives 6 against 3, tau 3 gives 0 against 12
        (9, NO_LIMIT, 3),  # two copies cost 10
        (100, [9, 9, 1, 9], 1),  # no room for two at tau 2; three fit at tau 1
        (100, [0, 0, 0, 0], 3),
    ],
)
def test_by_hand(budget, room, tau):
    utility, everybody = np.array([2, 2, 1, 0]), np.ones(4, bool)
    gpu, cpu = np.full(4, 2), np.full(4, 3)
    assert best_threshold(utility, everybody, gpu, cpu, room, 5, budget) == tau


def test_ties_copy_less():
    # Nothing has work: all thresholds balance.
    nothing = np.zeros(3, int)
    assert best_threshold(np.array([1, 2, 2]), np.ones(3, bool), nothing, nothing, NO_LIMIT, 1, 100) == 3


def test_times_follow_the_costs():
    costs = Costs(8, 2, 1.0, 0, 10, 30, 20.0, 0, 0, 0)
    times = ExpertTimes(costs)
    for loads, tokens in (([0.0, 0.4, 1.2], [0, 0, 1]), ([4.6, 40.0, 2.0], [5, 40, 2])):
        gpu, cpu = times.of(np.array(loads), max(tokens))
        assert gpu.tolist() == [costs.gpu_ns(n) if n else 0 for n in tokens]
        assert cpu.tolist() == [costs.cpu_ns(n) if n else 0 for n in tokens]

"""Evaluators against each other and against what is known in closed form."""

import random
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
from random_programs import legal_size, plain_program, random_program, seeds

from moesim.bounds import Durations, Runs, screen_structure, step_bound
from moesim.critical import critical_paths
from moesim.engine import run
from moesim.paths import step_seconds
from moesim.play import play
from moesim.schedules import SCHEDULES, Pair, flatten
from moesim.sharing import max_min

SIZES = [(1, 1), (1, 5), (2, 2), (2, 7), (4, 4), (4, 8), (4, 13), (8, 16)]


def bubble(timeline):
    """Share of the ranks' time without compute."""
    busy = sum(timeline.busy(r) for r in range(timeline.num_ranks))
    return 1.0 - busy / (timeline.num_ranks * timeline.makespan)


@pytest.mark.parametrize(("pp", "num_microbatches"), SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b_bubble(name, pp, num_microbatches):
    """(p - 1) / (m + p - 1): Narayanan et al., https://arxiv.org/abs/2104.04473, section 2.2.1 (there over ideal time)."""
    program = plain_program(name, pp, num_microbatches)
    for evaluate in (play, run):
        assert bubble(evaluate(program)) == pytest.approx((pp - 1) / (num_microbatches + pp - 1), abs=1e-9)
    assert step_bound(program) == pytest.approx(play(program).makespan, abs=1e-9)


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize(("pp", "num_microbatches"), [(2, 4), (4, 8), (4, 16), (8, 8)])
def test_interleaved_bubble(pp, num_microbatches, chunks):
    """(p - 1) / (v m + p - 1) where p divides m: https://arxiv.org/abs/2104.04473, section 2.2.2."""
    program = plain_program("interleaved", pp, num_microbatches, chunks)
    for evaluate in (play, run):
        assert bubble(evaluate(program)) == pytest.approx((pp - 1) / (chunks * num_microbatches + pp - 1), abs=1e-9)
    assert step_bound(program) == pytest.approx(play(program).makespan, abs=1e-9)


@pytest.mark.parametrize(("name", "pp", "num_microbatches"), [("zbv", 2, 4), ("zbv", 4, 8), ("zbv", 8, 16), ("interleaved_zb", 4, 8), ("interleaved_zb", 8, 16)])
def test_zero_bubble_idles_no_longer_than_its_paper_says(name, pp, num_microbatches):
    """With F = I = W no rank of ZB-H1 idles longer than (p - 1)(T_F + T_I - T_W) = (p - 1) T_F, with times of a whole rank:
    Qi et al., https://arxiv.org/abs/2401.10241, table 2. Both schedules here claim to be at least as good."""
    program = plain_program(name, pp, num_microbatches, 2, seconds=lambda stage, letter: 2.0 if letter == "B" else 1.0)
    timeline = run(program)
    idle = timeline.makespan - min(timeline.busy(r) for r in range(pp))
    assert idle <= (pp - 1) * 2 * 1.0 + 1e-9
    one_f_one_b = (pp - 1) * 2 * (1.0 + 2.0)
    assert idle < one_f_one_b


def test_bound_path_engine_in_this_order_on_random_programs():
    kinds = set()
    for i, rng in enumerate(seeds(540)):
        program = random_program(rng, sorted(SCHEDULES)[i % len(SCHEDULES)], contention=i // 6 % 3 > 0)
        bound, path, simulated = step_bound(program), step_seconds([program])[0], run(program, spans=False).makespan
        assert bound <= path + 1e-9 and path <= simulated + 1e-9
        if i // 6 % 3 == 0:
            assert simulated == pytest.approx(path, abs=1e-9)
        elif simulated > path + 1e-6:
            kinds.add(sorted(SCHEDULES)[i % len(SCHEDULES)])
    assert kinds == set(SCHEDULES)  # contention does show in every schedule


def test_simulated_lies_between_the_longest_part_and_the_sum_of_all():
    for rng in seeds(60):
        program = random_program(rng, contention=True)
        slowest = 4 * 1.3 * 132 / 42  # four lanes share a resource beside the largest gamma and reservation: no task is slower
        played = [program.bodies[k] for row in program.body_index for k in row] + [*program.prologue, *program.epilogue]
        device = sum(task.seconds for body in played for task in body)
        host = sum(task.host_s for body in played for task in body)
        hops = sum(t.seconds for t in (program.transfer_forward, program.transfer_backward)) * sum(map(len, program.orders)) * 2
        for timeline, factor in ((play(program), 1.0), (run(program), slowest)):
            longest = max(timeline.busy(r, stream) for r in range(timeline.num_ranks) for stream in range(6))
            assert longest <= timeline.makespan <= factor * (device + hops) + host + 1e-9


def sojourns(rng, arrival_rate, draw_size, num_flows):
    """Poisson arrivals on one link shared by `max_min`: how long each flow stays."""
    time, coming, left, since, stays = 0.0, 0.0, {}, {}, []
    while len(stays) < num_flows:
        rate = dict(zip(left, max_min([1.0] * len(left), [(("link", 1.0),)] * len(left))))
        ending = min(((left[i] / rate[i], i) for i in left), default=(float("inf"), -1))
        step = min(coming - time, ending[0])
        left = {i: size - step * rate[i] for i, size in left.items()}
        time += step
        if step == ending[0]:
            left.pop(ending[1])
            stays.append(time - since.pop(ending[1]))
        else:
            name = len(stays) + len(left)
            left[name], since[name] = draw_size(rng), time
            coming = time + rng.expovariate(arrival_rate)
    return np.array(stays)


@pytest.mark.parametrize("service", ["exponential", "two sizes"])
def test_a_fair_link_keeps_flows_as_long_as_processor_sharing(service):
    """M/G/1 with processor sharing: mean stay = E[S] / (1 - rho) = 1 / (mu - lambda), whatever the sizes' distribution (first
    come first served would give 1.9 times that with the two sizes). 99% interval of 40 batch means, fixed seed."""
    draw = {"exponential": lambda rng: rng.expovariate(1.0), "two sizes": lambda rng: 0.5 if rng.random() < 0.95 else 10.5}[service]
    batches = sojourns(random.Random(7), 0.5, draw, 40 * 600).reshape(40, -1).mean(axis=1)
    error = batches.std(ddof=1) / np.sqrt(40)
    assert abs(batches.mean() - 1.0 / (1.0 - 0.5)) < 2.71 * error < 0.35


def times(rng, num_stages, spread):
    """Stage times by letter with `spread` around F = 1, B = 2, I = W = 1."""
    return {letter: [t * rng.uniform(1 - spread, 1 + spread) for _ in range(num_stages)] for letter, t in zip("FBIW", (1.0, 2.0, 1.0, 1.0))}


def structure_of(name, pp, chunks, paired=False):
    schedule = SCHEDULES[name]

    def structure(num_microbatches):
        orders = schedule.orders(pp, num_microbatches, chunks)
        return tuple(map(pair_up, orders)) if paired else orders, schedule.placement(pp, chunks)

    return structure


def pair_up(order):
    """A backward and the forward after it, of another microbatch, become a pair."""
    paired = []
    for action in order:
        before = paired[-1] if paired else None
        if action.letter == "F" and before and not isinstance(before, Pair) and before.letter == "B" and before.microbatch != action.microbatch:
            paired[-1] = Pair(action, before)
        else:
            paired.append(action)
    return tuple(paired)


def program_of(structure, num_microbatches, seconds, hop):
    """Pairs run first one action, then the other: their path is what `Durations.pair` says of compute."""
    orders, placement = structure(num_microbatches)
    by_stage = lambda stage, letter: seconds[letter][stage]  # noqa: E731
    bodies, index, known = [], [], {}
    shell = plain_program("gpipe", 1, 1)
    for order in orders:
        row = []
        for entry in order:
            actions = list(flatten((entry,)))
            key = tuple((a.stage, a.letter) for a in actions)
            if key not in known:
                known[key] = len(bodies)
                task = shell.bodies[0][0]
                bodies.append(tuple(replace(task, seconds=by_stage(a.stage, a.letter), lag_s=-1.0, input=j, output=j) for j, a in enumerate(actions)))
            row.append(known[key])
        index.append(tuple(row))
    hops = replace(shell.transfer_forward, seconds=hop)
    return replace(shell, orders=orders, placement=placement, bodies=tuple(bodies), body_index=tuple(index), transfer_forward=hops, transfer_backward=hops)


def durations_of(layouts, hop, runs=True):
    """Each half of a pair is one compute run."""
    path = {letter: np.array([seconds[letter] for seconds in layouts]) for letter in "FBIW"}
    lanes = {letter: np.stack([values, 0.3 * values]) for letter, values in path.items()}
    return Durations(path, lanes, np.full(len(layouts), hop), Runs(dict.fromkeys(path, np.ones_like(path["F"])), path) if runs else None)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_screen_is_a_tight_bound_for_any_number_of_microbatches(name, paired):
    if paired and SCHEDULES[name].splits_backward:
        return
    ratios = []
    for rng in seeds(12):
        pp, _, chunks = legal_size(rng, name, max_pp=5)
        structure, hop = structure_of(name, pp, chunks, paired), rng.choice([0.0, 0.1, 0.4])
        layouts = [times(rng, len(SCHEDULES[name].placement(pp, chunks)), spread) for spread in (0.0, 0.1, 0.3)]
        for num_microbatches in rng.sample(range(1, 40), 6) + [8 * pp, 11 * pp]:
            if SCHEDULES[name].legal(pp, num_microbatches, chunks):
                continue
            bounds = screen_structure(structure, num_microbatches, durations_of(layouts, hop))
            seconds = step_seconds([program_of(structure, num_microbatches, layout, hop) for layout in layouts])
            assert (bounds <= seconds + 1e-9).all()
            assert (screen_structure(structure, num_microbatches, durations_of(layouts, hop, runs=False)) <= bounds + 1e-9).all()
            ratios += list(bounds / seconds)
    assert median(ratios) > 0.97 and min(ratios) > 0.8


def test_screen_of_even_1f1b_and_gpipe_is_the_path():
    for name in ("1f1b", "gpipe"):
        structure = structure_of(name, 6, 1)
        even = {letter: [t] * 6 for letter, t in zip("FBIW", (1.0, 2.0, 1.0, 1.0))}
        for num_microbatches in (1, 6, 20, 64, 129):
            bound = screen_structure(structure, num_microbatches, durations_of([even], 0.0))[0]
            assert bound == pytest.approx(3.0 * (num_microbatches + 5))


def test_large_structures_are_bounded_by_paths_of_smaller_ones():
    for name, chunks in (("1f1b", 1), ("interleaved", 2), ("interleaved_zb", 2), ("zbv", 2), ("dualpipev", 2)):
        found = critical_paths(structure_of(name, 4, chunks), 256)
        assert found.period and found.num_microbatches < 32


def test_bound_is_close_to_the_engine_on_layouts_like_those_in_use():
    """Uneven stages, small transfers, a little contention: median bound / engine >= 0.85 for every schedule."""
    for name in sorted(SCHEDULES):
        ratios = []
        for rng in seeds(12):
            pp = rng.choice([2, 4])
            chunks = SCHEDULES[name].num_chunks
            seconds = times(rng, pp * chunks, 0.15)
            program = plain_program(name, pp, 4 * pp, chunks, seconds=lambda v, letter: seconds[letter][v], transfer=0.05)  # noqa: B023
            ratios.append(step_bound(program) / run(program).makespan)
        assert median(ratios) >= 0.85

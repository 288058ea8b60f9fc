"""Programs for tests: random ones that use every feature, and plain ones with one task an action."""

import random
from dataclasses import replace

from moesim.program import COMM, COMPUTE, DATA, REDUCE, CoRun, Program, Task, Transfer
from moesim.schedules import SCHEDULES, Pair, flatten

KINDS = {COMPUTE: ("gemm", "attention"), COMM: ("a2a",), DATA: ("gather",), REDUCE: ("reduce",)}
USES = {"gemm": (("hbm", 0.5),), "attention": (), "a2a": (("nic", 1.0), ("hbm", 0.3)), "gather": (("nic", 0.7),), "reduce": (("nic", 0.9),)}


def legal_size(rng, name, max_pp=4, max_microbatches=9):
    """(pp, microbatches, chunks) that a schedule takes."""
    schedule = SCHEDULES[name]
    while True:
        chunks = rng.randint(1, 3) if schedule.shape == "loop" and schedule.num_chunks > 1 else schedule.num_chunks
        size = rng.randint(1, max_pp), rng.randint(1, max_microbatches), chunks
        if schedule.legal(*size) is None:
            return size


def random_body(rng, num_tasks, num_actions, *, host=True, single=False):
    """Tasks on all lanes with random deps; `num_actions` inputs at the start and outputs at the end."""
    tasks = []
    for k in range(num_tasks):
        stream = COMPUTE if single else rng.choice((COMPUTE, COMPUTE, COMM, DATA, REDUCE))
        kind, seconds = rng.choice(KINDS[stream]), rng.uniform(0.5, 2.0)
        tasks.append(
            Task(
                f"{kind}{k}", kind, stream, seconds,
                host_s=rng.uniform(0.0, 0.5) if host else 0.0,
                deps=tuple(sorted(rng.sample(range(k), min(k, rng.randint(0, 2))))),
                input=k if k < num_actions else -1,
                output=k - (num_tasks - num_actions) if k >= num_tasks - num_actions else -1,
                blocks_host=host and rng.random() < 0.05,
                terms=((kind, f"term.{kind}", 0.75 * seconds), ("other", "term.other", 0.25 * seconds)),
            )
        )
    return tuple(tasks)


def with_bodies(name, pp, num_microbatches, num_chunks, make, **fields):
    """A program of a schedule; make(rank, entry) -> body, asked once for each rank and (stage, letter) pattern."""
    schedule = SCHEDULES[name]
    orders, known, bodies, index = schedule.orders(pp, num_microbatches, num_chunks), {}, [], []
    for rank, order in enumerate(orders):
        row = []
        for entry in order:
            key = (rank, *((action.stage, action.letter) for action in flatten((entry,))))
            if key not in known:
                known[key] = len(bodies)
                bodies.append(make(rank, entry))
            row.append(known[key])
        index.append(tuple(row))
    return Program(orders, schedule.placement(pp, num_chunks), tuple(index), tuple(bodies), **fields)


def random_program(rng, name=None, *, host=True, contention=False, size=None, num_tasks=7):
    """Every feature at once: uneven stages, transfers, gates, epilogue with barriers, run-ahead limits, host waits."""
    name = name or rng.choice(sorted(SCHEDULES))
    pp, num_microbatches, chunks = size or legal_size(rng, name)
    make = lambda rank, entry: random_body(rng, num_tasks, 2 if isinstance(entry, Pair) else 1, host=host)  # noqa: E731
    gather = lambda j: Task(f"gather{j}", "gather", DATA, rng.uniform(0.1, 3.0), 0.1)  # noqa: E731
    program = with_bodies(
        name, pp, num_microbatches, chunks, make,
        transfer_forward=Transfer(rng.uniform(0.0, 1.0)), transfer_backward=Transfer(rng.uniform(0.0, 1.0)),
        prologue=tuple(tuple(gather(j) for j in range(chunks)) for _ in range(pp)),
        gates=tuple(tuple(range(chunks)) for _ in range(pp)),
        epilogue=tuple(epilogue(rng, chunks) for _ in range(pp)),
        run_ahead=rng.choice((1, 2, 3, 10**9)),
    )
    return contended(rng, program) if contention else program


def epilogue(rng, chunks):
    reduce = lambda chunk: Task(f"reduce{chunk}", "reduce", REDUCE, rng.uniform(0.1, 1.0), 0.1, after=chunk)  # noqa: E731
    return (
        *(reduce(chunk) for chunk in range(chunks)),
        Task("norm", "norm", COMM, 0.2, 0.1, barrier=0, deps=tuple(range(chunks))),
        Task("optimizer", "optimizer", COMPUTE, rng.uniform(0.5, 1.0), 0.1, deps=(chunks,), after=0),
        Task("gather", "gather", DATA, rng.uniform(0.1, 1.0), 0.1, barrier=1, deps=(chunks + 1,)),
    )


def contended(rng, program):
    """The same program with shared resources, SMs and co-run slowdown."""
    load = lambda task: replace(task, uses=USES.get(task.kind, ()), sms=rng.choice((0, 20, 90)) if task.stream in (COMM, REDUCE) else 0)  # noqa: E731
    ends = {which: tuple(tuple(map(load, body)) for body in getattr(program, which)) for which in ("bodies", "prologue", "epilogue")}
    nic = (("nic", 1.0),)
    return replace(
        program, **ends, num_sms=132, gammas=(CoRun("gemm", "a2a", 0.25), CoRun("attention", "a2a", 0.1), CoRun("a2a", "gather", 0.3)),
        transfer_forward=replace(program.transfer_forward, uses=nic), transfer_backward=replace(program.transfer_backward, uses=nic),
    )


def plain_program(name, pp, num_microbatches, num_chunks=1, seconds=lambda stage, letter: {"F": 1.0, "B": 2.0}.get(letter, 1.0), transfer=0.0, **fields):
    """One compute task an action, no host cost; a pair runs first one, then the other."""

    def make(_, entry):
        actions = list(flatten((entry,)))
        return tuple(Task(a.letter, a.letter, COMPUTE, seconds(a.stage, a.letter), input=j, output=j) for j, a in enumerate(actions))

    return with_bodies(name, pp, num_microbatches, num_chunks, make, transfer_forward=Transfer(transfer), transfer_backward=Transfer(transfer), **fields)


def seeds(num):
    return [random.Random(seed) for seed in range(num)]

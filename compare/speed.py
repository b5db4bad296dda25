"""Step times of the same model under every norm: rounds of shuffled blocks, in fresh processes."""

import random
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from compare import child, statistics
from compare.child import Kept, Progress
from compare.setup import Settings, Step, batches, make_model
from compare.timing import (
    busy,
    host_us,
    no_garbage_collection,
    ready_step,
    synchronize,
    time_block,
)
from kernels.bench.environment import clocks

AA = "A/A"  # the second copy of the baseline
BATCHES = 16  # generated beforehand, used in turn


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Args:
        rounds: In each of them every variant has one block.
        block_steps: Steps of a block.
        warmup_steps: At least; more if something is still compiled.
        processes: In which all rounds are run anew.
    """

    rounds: int
    block_steps: int
    warmup_steps: int
    processes: int


def plan(settings: Settings, rounds: int | None = None) -> Plan:
    """Enough for an interval on a GPU; on a CPU, whose times say nothing, enough to be seen."""
    if settings.device.type == "cuda":
        return Plan(rounds or 30, block_steps=3, warmup_steps=20, processes=5)
    return Plan(rounds or 5, block_steps=2, warmup_steps=2, processes=1)


def run(settings: Settings, progress: Progress, keep: Kept, plan: Plan) -> dict:
    """Everything about step time, as results.json has it under "speed"."""

    def measured(number: int) -> dict:
        return child.call(
            "compare.speed:measure",
            settings.config,
            lambda what, done, total: progress(what, number * total + done, plan.processes * total),
            plan=asdict(plan),
            seed=number,
        )

    processes = [
        keep(f"process {number} of {plan}", lambda number=number: measured(number))
        for number in range(plan.processes)
    ]
    return summary(settings, plan, processes, first_calls(settings, progress, keep))


def measure(settings: Settings, progress: Progress, plan: dict, seed: int) -> dict:
    """One process: milliseconds of every step, and per variant its host time and busy GPU.

    Returns:
        steps_ms: for each arm (norms and A/A) a list of rounds, each a list of its block's steps;
        host_us and busy: for each norm; clocks: of the GPU just after the last block.
    """
    plan = Plan(**plan)
    arms = dict(zip([*settings.norms, AA], [*settings.norms, settings.baseline], strict=True))
    total = len(arms) + plan.rounds + 1
    steps, data = {}, batches(settings, BATCHES, settings.data.seed)
    for done, (arm, norm) in enumerate(arms.items()):
        progress(f"warming up {arm}", done, total)
        steps[arm] = ready_step(settings, norm, data, plan.warmup_steps)
    steps_ms = take_turns(
        steps, data, plan, seed, lambda done: progress("timing", len(arms) + done, total)
    )
    at_work = clocks() if settings.device.type == "cuda" else None
    progress("host time and busy GPU", total - 1, total)
    return {
        "steps_ms": steps_ms,
        "host_us": {norm: host_us(steps[norm], data) for norm in settings.norms},
        "busy": {norm: busy(steps[norm], data) for norm in settings.norms},
        "clocks": at_work,
    }


def take_turns(
    steps: dict[str, Step],
    data: list[Tensor],
    plan: Plan,
    seed: int,
    report: Callable[[int], None],
    ready: Callable[[], None] = lambda: None,
) -> dict[str, list[list[float]]]:
    """Milliseconds of every step: for each arm a list of rounds, each a list of its block's steps.

    Args:
        steps: By arm.
        seed: Of the arms' order in each round.
        report: Gets the number of rounds that are done.
        ready: Called before every block.
    """
    steps_ms = {arm: [] for arm in steps}
    shuffled, order = random.Random(seed), list(steps)
    with no_garbage_collection():
        for number in range(plan.rounds):
            report(number)
            shuffled.shuffle(order)
            first = number * plan.block_steps
            block = [data[(first + i) % len(data)] for i in range(plan.block_steps)]
            for arm in order:
                ready()
                steps_ms[arm].append(time_block(steps[arm], block))
    return steps_ms


def first_calls(settings: Settings, progress: Progress, keep: Kept) -> dict[str, dict[str, float]]:
    """Seconds of a process's first step by norm, with empty and then with filled caches."""

    def report(what: str, done: int) -> None:
        progress(what, done, 2 * len(settings.norms))

    return {
        norm: keep(
            f"first calls of {norm}",
            lambda number=number, norm=norm: cold_and_warm(
                settings, norm, lambda what, done: report(what, 2 * number + done)
            ),
        )
        for number, norm in enumerate(settings.norms)
    }


def cold_and_warm(
    settings: Settings, norm: str, report: Callable[[str, int], None]
) -> dict[str, float]:
    """`first_call` in two fresh processes, whose caches are in a folder of their own."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="compare-caches-") as folder:
        caches = {
            "TRITON_CACHE_DIR": str(Path(folder) / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor"),
        }
        for done, cache in enumerate(("cold", "warm")):
            report(f"first call of {norm}, {cache} caches", done)
            found[cache] = child.call(
                "compare.speed:first_call",
                settings.config,
                lambda *_: None,
                environment=caches,
                norm=norm,
            )
    return found


def first_call(settings: Settings, progress: Progress, norm: str) -> float:
    """Seconds of the first training step of this process, with all that is loaded and compiled."""
    lit = make_model(settings, norm, settings.seed)
    step = Step(settings, lit, lit.optimizer())
    [batch] = batches(settings, 1, settings.data.seed)
    synchronize(settings.device)
    start = time.perf_counter()
    step(batch)
    synchronize(settings.device)
    return time.perf_counter() - start


def summary(
    settings: Settings, plan: Plan, processes: list[dict], first: dict[str, dict[str, float]]
) -> dict:
    """The figures of "speed" from the raw samples of every process."""
    medians = {
        arm: [
            [statistics.percentiles(block)["p50"] for block in measured["steps_ms"][arm]]
            for measured in processes
        ]
        for arm in [*settings.norms, AA]
    }
    aa = statistics.speedup(medians[settings.baseline], medians[AA])
    variants = {}
    for norm in settings.norms:
        step_ms = statistics.percentiles([m["steps_ms"][norm] for m in processes])
        variants[norm] = {
            "step_ms": step_ms,
            "vs": {
                other: statistics.speedup(medians[other], medians[norm])._asdict()
                for other in settings.norms
                if other != norm
            },
            "first_call_s": first[norm],
            "host_us": _median(measured["host_us"][norm] for measured in processes),
            "busy": _median(measured["busy"][norm] for measured in processes),
            "tokens_per_s": 1e3 * settings.tokens_per_step / step_ms["p50"],
            "samples_ms": medians[norm],
            "steps_ms": [measured["steps_ms"][norm] for measured in processes],
        }
        if norm != settings.baseline:
            variants[norm] |= _against_baseline(settings, medians, norm, aa)
    return {
        "rounds": plan.rounds,
        "block_steps": plan.block_steps,
        "variants": variants,
        "aa": {**aa._asdict(), "samples_ms": medians[AA]},
        "clocks": {
            f"process {number}": measured["clocks"]
            for number, measured in enumerate(processes, start=1)
            if measured["clocks"]
        },
    }


def _against_baseline(
    settings: Settings, medians: dict[str, list], norm: str, aa: statistics.Interval
) -> dict:
    arms = medians[settings.baseline], medians[norm]
    found = statistics.speedup(*arms)
    return {
        "speedup": {
            "vs": settings.baseline,
            **found._asdict(),
            "difference": statistics.differs(found, aa),
        },
        "processes": [process._asdict() for process in statistics.process_speedups(*arms)],
    }


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.percentiles(known)["p50"] if known else None

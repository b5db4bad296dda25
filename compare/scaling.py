"""Step times on several devices: every rank's, and how much work all do together.

torchrun starts a process for each device. Rank 0 reads the command line, prepares the data and
writes; the others measure with it what it asks for.
"""

import dataclasses
import functools
import gc
import os
import signal
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from lightning import Fabric
from lightning.fabric.strategies import ModelParallelStrategy, Strategy
from torch.distributed.device_mesh import DeviceMesh

from compare import child, statistics
from compare.child import Kept, Progress
from compare.setup import Settings, Step, batches, from_config, make_model
from compare.speed import BATCHES, Plan, take_turns
from compare.timing import compilations, ready_step, warm_up
from kernels.bench.environment import clocks
from model.lit import LitGPT

STRATEGIES = ("ddp", "fsdp")
LAUNCH = "torchrun --nproc-per-node 2 -m compare scaling"
PATIENCE = timedelta(hours=6)  # of ranks that wait for rank 0, which may have a text to tokenise

Samples = dict[str, list[list[float]]]  # milliseconds by norm, round and step


def rank() -> int:
    """Of this process among those that torchrun started."""
    return int(os.environ["RANK"]) if dist.is_torchelastic_launched() else 0


def world_size() -> int:
    """Processes that torchrun started, 1 without it."""
    return int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1


def places() -> dict[str, int]:
    """The processes as Lightning counts them: devices a node, and nodes."""
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    return {"devices": devices, "num_nodes": world_size() // devices}


def launcher() -> list[str]:
    """The words that start a process like this one."""
    if world_size() == 1:
        return ["python"]
    devices, nodes = places().values()
    several = [f"--nnodes={nodes}"] if nodes > 1 else []
    return ["torchrun", *several, f"--nproc-per-node={devices}"]


@functools.cache
def hosts() -> dist.ProcessGroup:
    """All ranks, joined in the first call. To wait in this group keeps no CPU or GPU at work."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=PATIENCE)
    return dist.new_group(backend="gloo", timeout=PATIENCE)


def follow() -> None:
    """Measure with rank 0 until it dismisses this rank."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once, even if it waits
    while task := _from_rank_0(None):
        config, plan, strategy = task
        together(from_config(config), lambda *_: None, plan, strategy)
    dist.destroy_process_group()


def dismiss() -> None:
    """Let the other ranks end, at the end of rank 0."""
    if world_size() > 1:
        _from_rank_0(None)
        dist.destroy_process_group()


def _from_rank_0(value: tuple | None) -> tuple | None:
    """What rank 0 calls this with, in every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=0, group=hosts())
    return values[0]


def run(
    settings: Settings, progress: Progress, keep: Kept, plan: Plan, strategies: Sequence[str]
) -> dict:
    """Entries of "scaling" in results.json, in rank 0: first it measures alone, then all do, once
    with each strategy."""

    def entry(strategy: str) -> dict:
        _from_rank_0((settings.config, plan, strategy))
        samples, at_work = zip(*together(settings, progress, plan, strategy), strict=True)
        return summary(settings, plan, strategy, one, samples) | {"clocks": at_work}

    values = dataclasses.asdict(plan)
    one = keep(
        f"one device, {plan}",
        lambda: child.call("compare.scaling:alone", settings.config, progress, plan=values),
    )
    return {
        f"{strategy}-{world_size()}": keep(
            f"{strategy}, {world_size()} devices, {plan}", partial(entry, strategy)
        )
        for strategy in strategies
    }


def alone(settings: Settings, progress: Progress, plan: dict) -> Samples:
    """One device without a strategy; to be called in a process that ends and leaves it free."""
    plan, steps = Plan(**plan), {}
    data = batches(settings, BATCHES, settings.data.seed)
    total = len(settings.norms) + plan.rounds
    for done, norm in enumerate(settings.norms):
        progress(f"one device: warming up {norm}", done, total)
        steps[norm] = ready_step(settings, norm, data, plan.warmup_steps)
    done = len(steps)
    return take_turns(
        steps, data, plan, 0, lambda number: progress("one device: timing", done + number, total)
    )


def together(
    settings: Settings, progress: Progress, plan: Plan, strategy: str
) -> list[tuple[Samples, dict | None]] | None:
    """All devices at once: in every rank at the same time. Rank 0 gets what each returned."""
    found = in_this_rank(settings, progress, plan, strategy)
    gc.collect()
    torch.cuda.empty_cache()  # for the process that measures one device in the next scope
    gathered = [None] * world_size() if rank() == 0 else None
    dist.gather_object(found, gathered, group=hosts())
    return gathered


def in_this_rank(
    settings: Settings, progress: Progress, plan: Plan, strategy: str
) -> tuple[Samples, dict | None]:
    """Times of this rank's device, and a GPU's clocks just after the last block."""
    fabric = Fabric(accelerator=settings.device.type, strategy=_strategy(strategy), **places())
    fabric.launch()
    settings, steps = dataclasses.replace(settings, device=fabric.device), {}
    data = [
        settings.data.train_batch(step, rank(), world_size()).to(fabric.device)
        for step in range(BATCHES)
    ]
    what, total = f"{world_size()} devices, {strategy}", len(settings.norms) + plan.rounds
    for done, norm in enumerate(settings.norms):
        progress(f"{what}: warming up {norm}", done, total)
        steps[norm] = parallel_step(settings, norm, fabric)
        warm_up(steps[norm], data, plan.warmup_steps, _compilations)
    done = len(steps)
    samples = take_turns(
        steps,
        data,
        plan,
        0,  # the order of the blocks is the same in all ranks
        lambda number: progress(f"{what}: timing", done + number, total),
        lambda: dist.barrier(hosts()),
    )
    return samples, clocks() if fabric.device.type == "cuda" else None


def parallel_step(settings: Settings, norm: str, fabric: Fabric) -> Step:
    """The training step of a new model that the ranks train together."""
    lit = fabric.setup_module(make_model(settings, norm, settings.seed))
    lit.mark_forward_method("loss")
    return Step(settings, lit, lit.optimizer())


def _strategy(name: str) -> str | Strategy:
    if name == "ddp":
        return name
    return ModelParallelStrategy(_shard, data_parallel_size=world_size(), tensor_parallel_size=1)


def _shard(lit: LitGPT, mesh: DeviceMesh) -> LitGPT:
    lit.shard(mesh)
    return lit


def _compilations() -> int:
    """Those of all ranks, which have to agree on the last step of a warm-up."""
    total = torch.tensor(compilations())
    dist.all_reduce(total, group=hosts())
    return int(total)


def summary(
    settings: Settings, plan: Plan, strategy: str, one: Samples, ranks: Sequence[Samples]
) -> dict:
    """The figures of an entry of "scaling" from the samples of one device and of all ranks."""
    variants = {}
    for norm in settings.norms:
        alone, *blocks = (_block_medians(samples[norm]) for samples in (one, *ranks))
        one_ms, *rank_ms = (statistics.percentiles(medians)["p50"] for medians in (alone, *blocks))
        slowest = max(range(len(ranks)), key=rank_ms.__getitem__)
        tokens = 1e3 * settings.tokens_per_step
        variants[norm] = {
            "one": {"step_ms": one_ms, "tokens_per_s": tokens / one_ms},
            "rank_ms": rank_ms,
            "slowest_rank": slowest,
            "step_ms": rank_ms[slowest],
            "tokens_per_s": len(ranks) * tokens / rank_ms[slowest],
            "efficiency": statistics.efficiency(alone, blocks[slowest])._asdict(),
            "one_steps_ms": one[norm],
            "rank_steps_ms": [samples[norm] for samples in ranks],
        }
    return {
        "strategy": strategy,
        "devices": len(ranks),
        "batch_per_device": settings.data.batch_size,
        "rounds": plan.rounds,
        "block_steps": plan.block_steps,
        "variants": variants,
    }


def _block_medians(rounds: list[list[float]]) -> list[float]:
    return [statistics.percentiles(block)["p50"] for block in rounds]

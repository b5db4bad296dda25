"""Loss curves under two norms, against those of runs that differ by reduction order alone.

The third tier of parity. Every seed has three runs from the same weights and batches: one under
the reference norm, a null run, which is the same mathematics added up in another order, and one
under the candidate.
"""

import math
import os
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from compare import child
from compare.child import Child, Kept, Progress
from compare.setup import Settings, Step, batches, make_model
from compare.statistics import paired_interval, rms, smooth
from kernels import Norm, RMSNorm
from model.lit import LitGPT, lr_factor

# The candidate's root mean square against the largest of the null runs: seeds drift up to ten times
# as far as others, so that with five of them the root mean squares of two equal sets would differ
# by more than 1.5 times in one case of eight (results/LOG.md).
NULL_FACTOR = 1.5
WINDOW = 20  # steps of the moving mean: drift stays, the noise of single batches goes
# A loss is recorded in float32. Where reduction order changes nothing, as it may on a CPU, what
# differs by less than one unit in its last place is still the same.
LOSS_RESOLUTION = torch.finfo(torch.float32).eps
# The final losses are equivalent if two one-sided tests at 5% each say that they differ by less
# than half a standard deviation between seeds, which nobody could tell from another seed.
CONFIDENCE = 0.90
MARGIN_IN_SEED_SD = 0.5

AT_ONCE = 4  # processes; a step of so few tokens keeps a host busier than a GPU
CONTEXT_BYTES = 2**30  # of a GPU's memory, that a process takes beside its tensors


def training_tier(
    settings: Settings,
    norm: str,
    seeds: int,
    steps: int,
    tokens: int,
    progress: Progress,
    keep: Kept,
) -> dict:
    """Trainings under `norm` judged against those under the reference.

    Args:
        seeds: How many; the first one is that of the settings.
        steps: Of each training.
        tokens: A step, at most; whole sequences, two at least.
    """
    numbers = range(settings.seed, settings.seed + seeds)
    size = {"steps": steps, "tokens": tokens}
    reference = {"reference": settings.baseline, "null": settings.baseline}
    runs = all_seeds(settings, numbers, {**reference, "candidate": norm}, size, progress, keep)

    def of_all(value: str) -> dict[str, dict]:
        return {
            str(seed): {name: run[value] for name, run in found.items()}
            for seed, found in runs.items()
        }

    return {
        "steps": steps,
        "seeds": list(numbers),
        "tokens": rows_a_batch(settings, tokens) * settings.data.context,
        "precision": settings.precision,
        **judge(of_all("losses"), of_all("final")),
    }


def all_seeds(
    settings: Settings,
    seeds: Sequence[int],
    runs: dict[str, str],
    size: dict[str, int],
    progress: Progress,
    keep: Kept,
) -> dict[int, dict]:
    """What `seed_runs` finds for each seed; on a GPU as many of them at a time as fit into it."""
    done = dict.fromkeys(seeds, 0)
    names = {seed: f"seed {seed}: {', '.join(runs.values())}" for seed in seeds}

    def start(seed: int) -> Child:
        def report(what: str, steps: int, total: int) -> None:
            done[seed] = steps
            progress(what, sum(done.values()), len(done) * total)

        target = "compare.training:seed_runs"
        return Child(target, settings.config, report, seed=seed, runs=runs, **size)

    def train_all(seeds: Sequence[int], at_once: int) -> None:
        starts = {seed: partial(start, seed) for seed in seeds if names[seed] not in keep}
        for seed, result in child.call_all(starts, at_once):
            keep(names[seed], lambda result=result: result)

    train_all(seeds[:1], at_once=1)
    train_all(seeds[1:], at_once=keep.found[names[seeds[0]]]["at_once"])
    return {seed: keep.found[names[seed]]["runs"] for seed in seeds}


def seed_runs(
    settings: Settings, progress: Progress, seed: int, runs: dict[str, str], steps: int, tokens: int
) -> dict:
    """The trainings of one seed, one after the other.

    Args:
        runs: Norms by run: "reference", "null", "candidate".
        steps, tokens: As in `training_tier`.

    Returns:
        runs: for each the losses of its steps, and the validation loss at its end, "final";
        at_once: how many processes like this one there is room for.
    """
    data = training_batches(settings, steps, tokens, seed)
    found = {}
    for number, (run, norm) in enumerate(runs.items()):
        lit = make_model(settings, norm, seed)
        if run == "null":
            reverse_features(lit)
        found[run] = train(
            settings,
            lit,
            permuted_rows(data, seed) if run == "null" else data,
            lambda step, number=number: progress(
                f"trainings from seed {seed}", number * steps + step, len(runs) * steps
            ),
        )
    return {"runs": found, "at_once": room(settings.device)}


def room(device: torch.device) -> int:
    """How many processes that take as much memory as this one a GPU can have, at most AT_ONCE."""
    if device.type != "cuda":
        return 1
    mine = torch.cuda.max_memory_reserved(device) + CONTEXT_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(AT_ONCE, 1 + free // mine, (os.cpu_count() or 1) // 2))


def train(
    settings: Settings, lit: LitGPT, data: list[Tensor], progress: Callable[[int], None]
) -> dict:
    """A training of one step a batch as train.py does it, its schedule included."""
    optimizer = lit.optimizer()
    warmup = min(lit.hparams.warmup_steps, len(data) // 4)
    schedule = LambdaLR(
        optimizer, lambda step: lr_factor(step, warmup, len(data), lit.hparams.min_lr_ratio)
    )
    step = Step(settings, lit, optimizer)
    losses = []
    for done, batch in enumerate(data):
        progress(done)
        losses.append(step(batch))
        schedule.step()
    with torch.no_grad():
        final = [step.forward(b.to(settings.device)) for b in settings.data.val_dataloader()]
    return {
        "losses": torch.stack(losses).tolist(),
        "final": torch.stack(final).double().mean().item(),
    }


def training_batches(settings: Settings, steps: int, tokens: int, seed: int) -> list[Tensor]:
    """A batch for each step, the same whenever it is asked for."""
    rows = rows_a_batch(settings, tokens)
    whole = batches(settings, math.ceil(steps * rows / settings.data.batch_size), seed)
    return list(torch.cat(whole).split(rows)[:steps])


def rows_a_batch(settings: Settings, tokens: int) -> int:
    """Sequences a batch: two at least, since a null run permutes them."""
    return max(2, min(settings.data.batch_size, tokens // settings.data.context))


def permuted_rows(data: list[Tensor], seed: int) -> list[Tensor]:
    """The batches with their rows in another order."""
    order = torch.Generator().manual_seed(seed)
    return [batch[torch.randperm(len(batch), generator=order)] for batch in data]


def reverse_features(lit: LitGPT) -> None:
    """Have every norm of the model see the features of a row from the last to the first."""
    for module in lit.modules():
        if isinstance(module, RMSNorm):
            module.norm = _reversed(module.norm)


def _reversed(norm: Norm) -> Norm:
    def rms_norm(x, weight, eps, *, out_dtype):
        return norm.rms_norm(x.flip(-1), weight.flip(-1), eps, out_dtype=out_dtype).flip(-1)

    def add_rms_norm(x, residual, weight, eps, *, out_dtype):
        operands = (tensor.flip(-1) for tensor in (x, residual, weight))
        y, h = norm.add_rms_norm(*operands, eps, out_dtype=out_dtype)
        return y.flip(-1), h.flip(-1)

    return Norm(norm.name, rms_norm, add_rms_norm)


def judge(losses: dict, finals: dict) -> dict:
    """Verdict on loss curves and final losses: pure arithmetic.

    Reference and null run are the same training twice, as far as mathematics goes: where the two
    end is known better from their mean, so a seed's final difference is taken to that.

    Args:
        losses: For each seed the losses of "reference", "candidate" and "null", of one length.
        finals: For each seed their validation losses at the end.

    Returns:
        The verdict and what it rests on. Of the curves: pass if their smoothed difference is at
        most NULL_FACTOR times the largest null run's, else fail. Of the end: pass if the final
        losses are equivalent, fail if they differ by more than the margin, else inconclusive. The
        verdict is the worse of the two.
    """

    # What was kept in a file has null for a loss that is not a number.
    losses = {seed: _numbers(curves) for seed, curves in losses.items()}
    finals = {seed: _numbers(found) for seed, found in finals.items()}

    def drift(run: str) -> list[float]:
        pairs = [curves[run] - curves["reference"] for curves in losses.values()]
        return [rms(smooth(pair, WINDOW)) for pair in pairs]

    null = drift("null")
    difference, largest_null = rms(drift("candidate")), float(np.max(null))
    resolution = LOSS_RESOLUTION * float(np.max([run["reference"] for run in losses.values()]))
    ratio = difference / float(np.maximum(largest_null, resolution))
    pairs = [f["candidate"] - (f["reference"] + f["null"]) / 2 for f in finals.values()]
    final = paired_interval(pairs, CONFIDENCE)
    margin = MARGIN_IN_SEED_SD * float(np.std([f["reference"] for f in finals.values()], ddof=1))
    curves = "pass" if ratio <= NULL_FACTOR else "fail"
    if -margin < final.low and final.high < margin:
        end = "pass"
    else:
        end = "fail" if final.low > margin or final.high < -margin else "inconclusive"
    return {
        "verdict": "fail" if curves == "fail" else end,
        "verdicts": {"curves": curves, "end": end},
        "rms_difference": difference,
        "rms_null": rms(null),
        "largest_null": largest_null,
        "resolution": resolution,
        "ratio": ratio,
        "limit": NULL_FACTOR,
        "window": WINDOW,
        "final_difference": final._asdict(),
        "margin": margin,
        "detail": (
            f"loss curves {ratio:.2g} times as far apart as the largest null run's, final "
            f"difference {final.low:.2g} to {final.high:.2g} at a margin of {margin:.2g}"
        ),
        "finals": {seed: _plain(found) for seed, found in finals.items()},
        "curves": {seed: _plain(curves) for seed, curves in losses.items()},
    }


def _numbers(runs: dict) -> dict[str, NDArray]:
    return {run: np.array(values, dtype=np.float64) for run, values in runs.items()}


def _plain(runs: dict[str, NDArray]) -> dict:
    return {run: values.tolist() for run, values in runs.items()}

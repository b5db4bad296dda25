"""Parity: does the model train under a norm as it does under the reference? One verdict.

op, float32   what the norm computes, alone and in the model: compare.exactness
training      loss curves in the config's precision: compare.training
controls      norms with a known fault, which the tiers above have to find
"""

from dataclasses import dataclass

from compare import child
from compare.child import Kept, Progress
from compare.controls import CONTROLS
from compare.setup import Settings
from compare.training import training_tier


@dataclass(frozen=True)
class Effort:
    """How much training the verdict rests on, and the rows of the operator's inputs."""

    steps: int
    seeds: int
    tokens: int  # a step, at most: whole sequences, two at least
    rows: int


# On a GPU, a seed's final difference scatters about 0.7 times as much as the losses of different
# seeds do (GPT-2 small). Twenty of them make its interval reach 0.39 * 0.7 = 0.27 of the latter to
# either side, where the margin is at 0.5; eight were tried, and came out inconclusive. On a CPU the
# Triton kernels are interpreted, half a second a step whatever the batch, and in float32 the runs
# of a seed differ so little that three seeds do.
ON_GPU = Effort(steps=500, seeds=20, tokens=4096, rows=8192)
ON_CPU = Effort(steps=50, seeds=3, tokens=512, rows=256)


def run(settings: Settings, progress: Progress, keep: Kept, effort: Effort | None = None) -> dict:
    """Every tier and control; the value of "parity" in results.json.

    The candidate, triton if it is among the norms and else the last one, goes through all tiers;
    the other norms through the cheap two. The model is always in the eager scope: in a compiled
    one, the same kernels run.

    Args:
        settings: The first norm is the reference of the model's tiers; that of the operator's tier
            is the definition.
        progress: Called with what runs, the steps done and the steps there are.
        keep: Holds what an earlier call found.
        effort: By default ON_GPU or ON_CPU, as the device is.
    """
    settings = settings.with_scope("eager")
    effort = effort or (ON_CPU if settings.device.type == "cpu" else ON_GPU)
    others = settings.norms[1:] or settings.norms
    candidate = "triton" if "triton" in others else others[-1]
    exact = keep(
        "op and float32",
        lambda: child.call(
            "compare.exactness:tiers",
            settings.config,
            progress,
            norms=[*others, *CONTROLS.values()],
            rows=effort.rows,
        ),
    )

    def training(norm: str) -> dict:
        amount = effort.seeds, effort.steps, effort.tokens
        return training_tier(settings, norm, *amount, progress, keep)

    tiers = exact[candidate] | {"training": training(candidate)}
    controls = {}
    for fault, norm in CONTROLS.items():
        found = exact[norm]
        if all(tier["verdict"] == "pass" for tier in found.values()):
            found = found | {"training": training(norm)}
        controls[fault] = control(found)
    return {
        "candidate": candidate,
        "reference": settings.baseline,
        "tiers": tiers,
        "norms": {norm: exact[norm] for norm in others},
        "controls": controls,
        "verdict": verdict(tiers, controls),
    }


def control(tiers: dict) -> dict:
    """The first tier that a faulty norm fails, and by how much."""
    failed = [name for name, tier in tiers.items() if tier["verdict"] == "fail"]
    return {
        "caught": bool(failed),
        "tier": failed[0] if failed else None,
        "tiers": {name: tier["verdict"] for name, tier in tiers.items()},
        "detail": "; ".join(f"{name}: {tier['detail']}" for name, tier in tiers.items()),
    }


def verdict(tiers: dict, controls: dict) -> str:
    """pass if all tiers pass and all controls were caught; fail if one did not; or inconclusive."""
    found = {tier["verdict"] for tier in tiers.values()}
    if "fail" in found or not all(control["caught"] for control in controls.values()):
        return "fail"
    return "inconclusive" if "inconclusive" in found else "pass"

"""Parity: does the model train under a norm as it does under the reference? One verdict.

op        the operator's results against float64
float32   the model's loss, gradients and first SGD steps, where nothing but rounding may differ
training  loss curves in the config's precision, against runs that differ by reduction order alone
controls  norms with a known fault, which the tiers above have to find
"""

import dataclasses
import math
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from compare.child import Progress
from compare.controls import CONTROLS
from compare.setup import Settings, Step, batches, make_model
from compare.statistics import paired_interval, rms, smooth
from kernels import Norm, RMSNorm, load_norm, reference
from model.gpt import STREAM_DTYPES
from model.lit import LitGPT, lr_factor

# --- tolerances -------------------------------------------------------------------------------

# op. The definition's own error on the same inputs says what rounding costs there. A norm may
# round in other places, so it gets twice that, and one unit in the last place of the result's
# dtype on top, for results that the definition happens to hit. dw is a sum over rows, in an order
# that is the norm's to choose: it gets a unit for each of M roundings that are independent of
# each other, which is sqrt(M) of them, as when one row is added after the other.
OP_FACTOR = 2


def op_units(result: str, rows: int) -> float:
    """Units in the last place that a result may be off by, besides OP_FACTOR."""
    return math.sqrt(rows) if result == "dw" else 1.0


# float32. A loss is right to a few epsilons of 1.2e-7, from its logits and from the mean over the
# tokens; 1e-6 is eight. A gradient comes through some ten operations a layer: over 12 layers their
# errors, independent of each other, add up to sqrt(120) or 11 epsilons, and differences of almost
# equal numbers (in dx, in the softmax) multiply them by a few; 1e-5 is 84.
LOSS_ERROR = 1e-6
GRADIENT_ERROR = 1e-5
# A gradient of nearly zero is what is left of larger ones, whose rounding it keeps: one with less
# than this share of the whole gradient, again eight epsilons, is measured against this share.
GRADIENT_SHARE = 1e-6
# Gradients off by GRADIENT_ERROR move the parameters off by that share of their path, which changes
# the loss by at most that share of what it fell on this path, so of itself.
SGD_LOSS_ERROR = LOSS_ERROR + GRADIENT_ERROR
SGD_STEPS = 20
SGD_LR = 0.1  # the loss falls fast, and no step overshoots, which would multiply errors

# training. 1.5 is room for chance between the norm's runs and as few null runs.
NULL_FACTOR = 1.5
WINDOW = 20  # steps of the moving mean: drift stays, the noise of single batches goes
# A loss is recorded in float32. Where reduction order changes nothing, as it may on a CPU, what
# differs by less than one unit in its last place is still the same.
LOSS_RESOLUTION = torch.finfo(torch.float32).eps
# The final losses are equivalent if two one-sided tests at 5% each say that they differ by less
# than half a standard deviation between seeds, which nobody could tell from another seed.
CONFIDENCE = 0.90
MARGIN_IN_SEED_SD = 0.5


@dataclass(frozen=True)
class Effort:
    """How much training the verdict rests on, and the rows of the operator's inputs."""

    steps: int
    seeds: int
    tokens: int  # a step, at most: whole sequences, two at least
    rows: int


# Eight seeds make the interval of the final difference reach 0.67 standard deviations of a pair to
# either side, five 0.95. On a CPU the Triton kernels are interpreted: half a second a step whatever
# the batch, and in float32 pairs differ so little that three seeds do.
ON_GPU = Effort(steps=500, seeds=8, tokens=8192, rows=8192)
ON_CPU = Effort(steps=50, seeds=3, tokens=512, rows=256)

# --- the whole --------------------------------------------------------------------------------


def run(settings: Settings, progress: Progress, effort: Effort | None = None) -> dict:
    """Every tier and control; the value of "parity" in results.json.

    The candidate, triton if it is among the norms and else the last one, goes through all tiers;
    the other norms through the cheap two. The model is always in the eager scope: in a compiled
    one, the same kernels run.

    Args:
        settings: The first norm is the reference of the model's tiers; that of the operator's tier
            is the definition.
        progress: Called with what runs, the steps done and the steps there are.
        effort: By default ON_GPU or ON_CPU, as the device is.
    """
    settings = settings.with_scope("eager")
    effort = effort or (ON_CPU if settings.device.type == "cpu" else ON_GPU)
    others = settings.norms[1:] or settings.norms
    candidate = "triton" if "triton" in others else others[-1]
    norms = {}
    for done, norm in enumerate(others):
        progress(f"{norm} against float64 and in float32", done, len(others))
        norms[norm] = {
            "op": op_tier(settings, norm, effort),
            "float32": float32_tier(settings, norm),
        }
    references = reference_runs(settings, effort, progress)
    tiers = norms[candidate] | {
        "training": training_tier(settings, candidate, effort, references, progress)
    }
    controls = {}
    for done, (fault, norm) in enumerate(CONTROLS.items()):
        progress(f"control: {fault}", done, len(CONTROLS))
        controls[fault] = control(settings, norm, effort, references, progress)
    return {
        "candidate": candidate,
        "reference": settings.baseline,
        "tiers": tiers,
        "norms": norms,
        "controls": controls,
        "verdict": verdict(tiers, controls),
    }


def control(
    settings: Settings, norm: str, effort: Effort, references: dict, progress: Progress
) -> dict:
    """The first tier that a faulty norm fails, and by how much; training only if no other did."""
    tiers = {"op": op_tier(settings, norm, effort), "float32": float32_tier(settings, norm)}
    if all(tier["pass"] for tier in tiers.values()):
        tiers["training"] = training_tier(settings, norm, effort, references, progress)
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


def _tier(cases: list[dict]) -> dict:
    """Verdict of cases that have an error and a limit each; an error that is NaN is a failure."""
    quotients = [case["error"] / case["limit"] for case in cases]
    worst = max(
        range(len(cases)), key=lambda i: math.inf if math.isnan(quotients[i]) else quotients[i]
    )
    passed = all(quotient <= 1 for quotient in quotients)
    case = cases[worst]
    return {
        "pass": passed,
        "verdict": "pass" if passed else "fail",
        "worst": quotients[worst],
        "limit": 1.0,
        "detail": f"{case['case']}: {case['error']:.2g}, where {case['limit']:.2g} is allowed",
        "cases": cases,
    }


# --- op ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """How the model calls a norm: shape and dtypes, and the scale of what it normalises."""

    name: str
    rows: int
    n: int
    x: torch.dtype
    stream: torch.dtype | None  # None where there is no residual add
    out: torch.dtype
    scale: float = 1.0


def calls(settings: Settings, rows: int) -> list[Call]:
    """The model's calls, then one of an odd shape, then some whose inputs are as small as eps."""
    width, eps = settings.model["n_embd"], settings.model.get("norm_eps", 1e-6)
    branch = settings.branch_dtype
    stream = STREAM_DTYPES[settings.model.get("stream_dtype", "float32")]
    add = Call("add and norm", rows, width, branch, stream, branch)
    found = [Call("norm", rows, width, stream, None, branch), add]
    if settings.model.get("qk_norm"):
        head_dim = width // settings.model["n_head"]
        found.append(Call("QK-norm", rows, head_dim, branch, None, branch))
    odd = dataclasses.replace(add, name="add and norm, odd shape", rows=37, n=width + 1)
    small = [
        dataclasses.replace(call, name=f"{call.name}, small inputs", scale=math.sqrt(eps or 1e-6))
        for call in found
    ]
    return [*found, odd, *small]


def op_tier(settings: Settings, norm: str, effort: Effort) -> dict:
    """Each result of each call, by its root mean square and by its largest error."""
    tested = load_norm(norm)
    eps = settings.model.get("norm_eps", 1e-6)
    generator = torch.Generator(settings.device).manual_seed(settings.seed)
    cases = []
    for call in calls(settings, effort.rows):
        operands = Operands.random(call, eps, generator)
        found, by_definition = (
            operands.results(norm, settings.autocast()) for norm in (tested, reference.norm)
        )
        for name, exact in operands.exact.items():
            ulp, units = torch.finfo(found[name].dtype).eps, op_units(name, call.rows)
            of_both = error(found[name], exact), error(by_definition[name], exact)
            cases += [
                {
                    "case": f"{name} of {call.name}, {measure} error",
                    "error": of_norm,
                    "limit": OP_FACTOR * of_definition + units * ulp,
                }
                for measure, of_norm, of_definition in zip(MEASURES, *of_both, strict=True)
            ]
    return _tier(cases)


MEASURES = "RMS", "largest"


def error(found: Tensor, exact: Tensor) -> tuple[float, float]:
    """Errors relative to the exact values: of the root mean squares, and of the largest ones."""
    difference = found.double() - exact
    return (
        (difference.norm() / exact.norm()).item(),
        (difference.abs().max() / exact.abs().max()).item(),
    )


@dataclass(frozen=True)
class Operands:
    """Inputs of a call and its exact results.

    Attributes:
        leaves: x (rows, n), the stream (rows, n) where the call adds, weight (n,) in float32.
        gradients: Upstream ones, of y and, where the call adds, of h.
        exact: Float64 results by name: y, dx, dw, and where the call adds h and dr.
    """

    call: Call
    eps: float
    leaves: list[Tensor]
    gradients: list[Tensor]
    exact: dict[str, Tensor]

    @classmethod
    def random(cls, call: Call, eps: float, generator: torch.Generator) -> "Operands":
        """Normal inputs; dy leans towards what is normalised, so that dx's projection matters."""

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=generator.device)

        shape = call.rows, call.n
        weight = 1 + normal(call.n) / 4
        h = x = (call.scale * normal(*shape)).to(call.x)
        leaves = [x, weight]
        if call.stream:
            stream = (call.scale * normal(*shape)).to(call.stream)
            h = (x.float() + stream.float()).to(call.stream)  # by definition: the rounded sum
            leaves.insert(1, stream)
        gradients = [(h / call.scale + normal(*shape)).to(call.out)]
        if call.stream:
            gradients.append(normal(*shape).to(call.stream))
        exact = _exact(h, leaves, eps, gradients)
        return cls(call, eps, [leaf.requires_grad_() for leaf in leaves], gradients, exact)

    def results(self, norm: Norm, autocast: AbstractContextManager) -> dict[str, Tensor]:
        """The norm's results by name, as `exact` has them; the forward pass under `autocast`."""
        if self.call.stream:
            with autocast:
                y, h = norm.add_rms_norm(*self.leaves, self.eps, out_dtype=self.call.out)
            dx, dr, dw = torch.autograd.grad((y, h), self.leaves, self.gradients)
            return {"y": y.detach(), "dx": dx, "dw": dw, "h": h.detach(), "dr": dr}
        with autocast:
            y = norm.rms_norm(*self.leaves, self.eps, out_dtype=self.call.out)
        dx, dw = torch.autograd.grad(y, self.leaves, self.gradients)
        return {"y": y.detach(), "dx": dx, "dw": dw}


def _exact(
    h: Tensor, operands: list[Tensor], eps: float, gradients: list[Tensor]
) -> dict[str, Tensor]:
    """Float64 results of a call on x, the stream if any, and weight, whose rounded sum is h."""
    *addends, weight = (operand.double() for operand in operands)
    leaves = [h.double().requires_grad_(), weight.requires_grad_()]
    y = reference.rms_norm(*leaves, eps)
    dx, dw = torch.autograd.grad(y, leaves, gradients[0].double())
    if len(addends) == 1:
        return {"y": y.detach(), "dx": dx, "dw": dw}
    dx = dx + gradients[1].double()
    return {"y": y.detach(), "dx": dx, "dw": dw, "h": sum(addends), "dr": dx}


# --- float32 ----------------------------------------------------------------------------------


def float32_tier(settings: Settings, norm: str) -> dict:
    """Loss and gradients of the first step, then SGD, on two short sequences in float32."""
    exact = dataclasses.replace(
        settings,
        precision="32-true",
        model={**settings.model, "stream_dtype": "float32"},
    )
    few = [
        batch[:2, : 1 + 256]
        for batch in torch.cat(batches(exact, SGD_STEPS, settings.seed)).split(2)[:SGD_STEPS]
    ]
    with reproducible_float32():
        losses, gradients = descend(exact, settings.baseline, few)
        found_losses, found_gradients = descend(exact, norm, few)
    whole = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    cases = [
        {
            "case": f"loss of step {step}",
            "error": abs(found / expected - 1),
            "limit": SGD_LOSS_ERROR if step else LOSS_ERROR,
        }
        for step, (found, expected) in enumerate(zip(found_losses, losses, strict=True))
    ]
    for name, expected in gradients.items():
        size = torch.maximum(expected.norm(), GRADIENT_SHARE * whole)
        off = ((found_gradients[name] - expected).norm() / size).item()
        cases.append({"case": f"gradient of {name}", "error": off, "limit": GRADIENT_ERROR})
    return _tier(cases)


def descend(
    settings: Settings, norm: str, batches: list[Tensor]
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of SGD, a step a batch, and the gradient before the first step by parameter."""
    lit = make_model(settings, norm, settings.seed)
    lit.loss(batches[0]).backward()
    gradients = {name: p.grad.double() for name, p in lit.gpt.named_parameters()}
    lit.zero_grad()
    step = Step(settings, lit, SGD(lit.gpt.parameters(), lr=SGD_LR))
    return torch.stack([step(batch) for batch in batches]).tolist(), gradients


@contextmanager
def reproducible_float32() -> Iterator[None]:
    """Float32 products in float32, not TF32, and deterministic algorithms where there are any."""
    precision = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
            warnings.filterwarnings("ignore", message=".*deterministic")
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


# --- training ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """What one training leaves: the loss of each step, and the validation loss at its end."""

    losses: list[float]
    final: float


def reference_runs(settings: Settings, effort: Effort, progress: Progress) -> dict:
    """For each seed a training under the reference norm, and a null run.

    The null run is the same mathematics added up in another order: the rows of every batch are
    permuted, and within the norm the features are reversed.
    """
    runs = {}
    for seed in range(settings.seed, settings.seed + effort.seeds):
        data = training_batches(settings, effort, seed)
        order = torch.Generator().manual_seed(seed)
        permuted = [batch[torch.randperm(len(batch), generator=order)] for batch in data]
        lit, null = (make_model(settings, settings.baseline, seed) for _ in range(2))
        for module in null.modules():
            if isinstance(module, RMSNorm):
                module.norm = reversed_features(module.norm)
        label = f"{settings.baseline}, seed {seed}"
        runs[seed] = {
            "reference": train(settings, lit, data, label, progress),
            "null": train(settings, null, permuted, f"{label}, null run", progress),
        }
    return runs


def reversed_features(norm: Norm) -> Norm:
    """The same norm, which sees the features of each row from the last to the first."""

    def rms_norm(x, weight, eps, *, out_dtype):
        return norm.rms_norm(x.flip(-1), weight.flip(-1), eps, out_dtype=out_dtype).flip(-1)

    def add_rms_norm(x, residual, weight, eps, *, out_dtype):
        operands = (tensor.flip(-1) for tensor in (x, residual, weight))
        y, h = norm.add_rms_norm(*operands, eps, out_dtype=out_dtype)
        return y.flip(-1), h.flip(-1)

    return Norm(norm.name, rms_norm, add_rms_norm)


def training_tier(
    settings: Settings, norm: str, effort: Effort, references: dict, progress: Progress
) -> dict:
    """A training under `norm` for each seed, judged against those under the reference."""
    runs = {}
    for seed, found in references.items():
        data = training_batches(settings, effort, seed)
        lit, label = make_model(settings, norm, seed), f"{norm}, seed {seed}"
        runs[seed] = found | {"candidate": train(settings, lit, data, label, progress)}
    return {
        "steps": effort.steps,
        "seeds": list(runs),
        "tokens": training_rows(settings, effort) * settings.data.context,
        "precision": settings.precision,
        **judge_training(
            {str(seed): {k: run.losses for k, run in r.items()} for seed, r in runs.items()},
            {str(seed): {k: run.final for k, run in r.items()} for seed, r in runs.items()},
        ),
    }


def judge_training(losses: dict, finals: dict) -> dict:
    """Verdict on loss curves and final losses: pure arithmetic.

    Args:
        losses: For each seed the losses of "reference", "candidate" and "null", of one length.
        finals: For each seed the validation losses of "reference" and "candidate" at the end.

    Returns:
        The verdict and what it rests on. pass: the smoothed difference of the curves is no more
        than a null run's and the final losses are equivalent. fail: the former is more, or the
        latter differ by more than the margin. inconclusive: neither is known.
    """

    def drift(run: str) -> list[float]:
        pairs = [np.subtract(curves[run], curves["reference"]) for curves in losses.values()]
        return [rms(smooth(pair, WINDOW)) for pair in pairs]

    difference, largest_null = rms(drift("candidate")), float(np.max(drift("null")))
    resolution = LOSS_RESOLUTION * float(np.max([run["reference"] for run in losses.values()]))
    ratio = difference / float(np.maximum(largest_null, resolution))
    pairs = [run["candidate"] - run["reference"] for run in finals.values()]
    final = paired_interval(pairs, CONFIDENCE)
    margin = MARGIN_IN_SEED_SD * float(np.std([f["reference"] for f in finals.values()], ddof=1))
    if not ratio <= NULL_FACTOR or final.low > margin or final.high < -margin:
        verdict = "fail"
    else:
        verdict = "pass" if -margin < final.low and final.high < margin else "inconclusive"
    return {
        "verdict": verdict,
        "rms_difference": difference,
        "largest_null": largest_null,
        "resolution": resolution,
        "ratio": ratio,
        "limit": NULL_FACTOR,
        "window": WINDOW,
        "final_difference": final._asdict(),
        "margin": margin,
        "detail": (
            f"loss curves {ratio:.2g} times as far apart as the null runs', final difference "
            f"{final.low:.2g} to {final.high:.2g} at a margin of {margin:.2g}"
        ),
        "finals": finals,
        "curves": losses,
    }


def train(
    settings: Settings, lit: LitGPT, data: list[Tensor], label: str, progress: Progress
) -> Training:
    """A training of one step a batch as train.py does it, its schedule included."""
    optimizer = lit.optimizer()
    warmup = min(lit.hparams.warmup_steps, len(data) // 4)
    schedule = LambdaLR(
        optimizer, lambda step: lr_factor(step, warmup, len(data), lit.hparams.min_lr_ratio)
    )
    step = Step(settings, lit, optimizer)
    losses = []
    for done, batch in enumerate(data):
        progress(label, done, len(data))
        losses.append(step(batch))
        schedule.step()
    with torch.no_grad():
        final = [step.forward(b.to(settings.device)) for b in settings.data.val_dataloader()]
    return Training(torch.stack(losses).tolist(), torch.stack(final).double().mean().item())


def training_rows(settings: Settings, effort: Effort) -> int:
    """Sequences a batch: two at least, since a null run permutes them."""
    return max(2, min(settings.data.batch_size, effort.tokens // settings.data.context))


def training_batches(settings: Settings, effort: Effort, seed: int) -> list[Tensor]:
    """A batch for each step, the same whenever it is asked for."""
    rows = training_rows(settings, effort)
    whole = batches(settings, math.ceil(effort.steps * rows / settings.data.batch_size), seed)
    return list(torch.cat(whole).split(rows)[: effort.steps])

"""What a norm computes, one call at a time and in a float32 model: two tiers of parity.

op        the operator's results against float64
float32   the model's loss, gradients and first SGD steps, where nothing but rounding may differ
"""

import dataclasses
import math
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import SGD

from compare.child import Progress
from compare.setup import Settings, Step, batches, make_model
from kernels import Norm, load_norm, reference
from model.gpt import STREAM_DTYPES


def tiers(
    settings: Settings, progress: Progress, norms: list[str], rows: int
) -> dict[str, dict[str, dict]]:
    """Both tiers of every norm. rows: of the operator's inputs."""
    found = {}
    for done, norm in enumerate(norms):
        progress(f"{norm} against float64 and in float32", done, len(norms))
        found[norm] = {
            "op": op_tier(settings, norm, rows),
            "float32": float32_tier(settings, norm),
        }
    return found


def _tier(cases: list[dict]) -> dict:
    """Verdict of cases that have an error and a limit each; an error that is NaN is a failure."""
    quotients = [case["error"] / case["limit"] for case in cases]
    worst = max(
        range(len(cases)), key=lambda i: math.inf if math.isnan(quotients[i]) else quotients[i]
    )
    case = cases[worst]
    return {
        "verdict": "pass" if all(quotient <= 1 for quotient in quotients) else "fail",
        "detail": f"{case['case']}: {case['error']:.2g}, where {case['limit']:.2g} is allowed",
        "cases": cases,
    }


# --- op ---------------------------------------------------------------------------------------

# The definition's own error on the same inputs says what rounding costs there. A norm may
# round in other places, so it gets twice that, and one unit in the last place of the result's
# dtype on top, for results that the definition happens to hit. dw is a sum over rows, in an order
# that is the norm's to choose: it gets a unit for each of M roundings that are independent of
# each other, which is sqrt(M) of them, as when one row is added after the other.
OP_FACTOR = 2


def op_units(result: str, rows: int) -> float:
    """Units in the last place that a result may be off by, besides OP_FACTOR."""
    return math.sqrt(rows) if result == "dw" else 1.0


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
    width, eps = settings.model["n_embd"], settings.model["norm_eps"]
    branch = settings.branch_dtype
    stream = STREAM_DTYPES[settings.model["stream_dtype"]]
    add = Call("add and norm", rows, width, branch, stream, branch)
    found = [Call("norm", rows, width, stream, None, branch), add]
    if settings.model["qk_norm"]:
        head_dim = width // settings.model["n_head"]
        found.append(Call("QK-norm", rows, head_dim, branch, None, branch))
    odd = dataclasses.replace(add, name="add and norm, odd shape", rows=37, n=width + 1)
    small = [
        dataclasses.replace(call, name=f"{call.name}, small inputs", scale=math.sqrt(eps or 1e-6))
        for call in found
    ]
    return [*found, odd, *small]


def op_tier(settings: Settings, norm: str, rows: int) -> dict:
    """Each result of each call, by its root mean square and by its largest error."""
    tested = load_norm(norm)
    eps = settings.model["norm_eps"]
    generator = torch.Generator(settings.device).manual_seed(settings.seed)
    cases = []
    for call in calls(settings, rows):
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

# A loss is right to a few epsilons of 1.2e-7, from its logits and from the mean over the
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

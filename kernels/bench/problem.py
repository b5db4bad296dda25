"""One case's random inputs, its results in float64, and how far from them one may be."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kernels import reference
from kernels.bench.cases import Case
from kernels.registry import Norm

EPS = 1e-6

# Relative L2 error allowed against float64. A result is rounded at most twice, to the stream's
# dtype and to its own, by half an epsilon each; a factor of two leaves room for the projection in
# dx, into which an error of x_hat enters a second time.
ROUNDINGS = 2
# Arithmetic in float32 costs tens of its epsilons whatever the dtypes are, and a sum over rows,
# added one by one in the worst case, about the square root of their number.
ARITHMETIC = 64


@dataclass
class Problem:
    """Inputs, upstream gradients and expected results of one case.

    Attributes:
        leaves: x (rows, n), with a residual stream residual (rows, n), and weight (n,).
        gradients: of y and, with a residual, of h.
        expected: float64 tensors by name: y, dx, dw, with a residual h and dr too.
    """

    case: Case
    leaves: list[Tensor]
    gradients: list[Tensor]
    expected: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def random(cls, case: Case, device: torch.device | str) -> "Problem":
        """Fresh normal inputs. dy leans towards x, so that the projection term of dx matters."""

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device)

        def cast(tensor: Tensor, dtype: str) -> Tensor:
            return tensor.to(getattr(torch, dtype))

        x, dy, weight = normal(case.rows, case.n), normal(case.rows, case.n), normal(case.n)
        leaves = [cast(x, case.x_dtype), cast(1 + weight / 4, case.weight_dtype)]
        gradients = [cast(x + dy, case.out_dtype)]
        if case.residual_dtype:
            leaves.insert(1, cast(normal(case.rows, case.n), case.residual_dtype))
            gradients.append(cast(normal(case.rows, case.n), case.residual_dtype))
        exact = cls(
            replace(case, out_dtype="float64"),
            [leaf.double().requires_grad_() for leaf in leaves],
            [gradient.double() for gradient in gradients],
        )
        leaves = [leaf.requires_grad_() for leaf in leaves]
        return cls(case, leaves, gradients, exact.results(reference.norm))

    def forward(self, norm: Norm) -> tuple[Tensor, ...]:
        """(y,), or (y, h) with a residual."""
        out_dtype = getattr(torch, self.case.out_dtype)
        if self.case.residual_dtype is None:
            return (norm.rms_norm(*self.leaves, EPS, out_dtype=out_dtype),)
        return norm.add_rms_norm(*self.leaves, EPS, out_dtype=out_dtype)

    def backward(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """(dx, dw), or (dx, dr, dw) with a residual."""
        return torch.autograd.grad(outputs, self.leaves, self.gradients)

    def results(self, norm: Norm) -> dict[str, Tensor]:
        """Outputs and gradients by name.

        The memory that they will be made of holds NaN before, where the allocator gives back what
        was freed last (it does on a GPU): an element that is not written shows as NaN.
        """
        poisoned = [
            torch.full_like(tensor, float("nan"), requires_grad=False)
            for tensor in (*self.leaves, *self.gradients)
            for _ in range(2)
        ]
        del poisoned
        outputs = self.forward(norm)
        gradients = self.backward(outputs)
        names = ["y", "h", "dx", "dr", "dw"] if self.case.residual_dtype else ["y", "dx", "dw"]
        detached = [output.detach() for output in outputs]
        return dict(zip(names, [*detached, *gradients], strict=True))

    def errors(self, results: dict[str, Tensor]) -> dict[str, float]:
        """Relative L2 error of each result: ||result - expected|| / ||expected||."""
        return {
            name: ((results[name].double() - expected).norm() / expected.norm()).item()
            for name, expected in self.expected.items()
        }

    def tolerance(self, name: str) -> float:
        """The relative L2 error that a correct result of this name may have."""
        case, stream = self.case, self.case.residual_dtype
        of_result = {"y": case.out_dtype, "dx": case.x_dtype, "dw": case.weight_dtype}
        dtypes = {of_result.get(name, stream), stream or of_result[name]}
        coarsest = max(torch.finfo(getattr(torch, dtype)).eps for dtype in dtypes)
        float32_epsilons = ARITHMETIC + (case.rows**0.5 if name == "dw" else 0)
        return ROUNDINGS * coarsest + float32_epsilons * torch.finfo(torch.float32).eps

"""However few the rows are, Triton lays each out over threads as it does many, and so adds it up in
the same order. Read in what is compiled for an H200, on any machine:

TRITON_INTERPRET=0 python -m tests.kernels.layouts
"""

import re
import sys
from contextlib import nullcontext

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import interpreter, launches, triton_rms_norm

H200 = launches.Gpu("NVIDIA H200", "sm_90", 132, 227 * 1024, dependent_launch=True)
BF16, FP32 = torch.bfloat16, torch.float32
NAMES = {BF16: "*bf16", FP32: "*fp32"}
FORMS = {  # x and y, residual, weight
    "bfloat16": (BF16, None, BF16),
    "float32": (FP32, None, FP32),
    "float32 weight": (BF16, None, FP32),
    "add": (BF16, BF16, BF16),
    "add, float32 weight": (BF16, BF16, FP32),
    "add to a float32 stream": (BF16, FP32, FP32),
}


def forward(rows: int, n: int, branch, stream, weight, launch) -> None:
    x, w = torch.empty(rows, n, dtype=branch), torch.empty(n, dtype=weight)
    residual = None if stream is None else torch.empty(rows, n, dtype=stream)
    rstd = torch.empty(rows)
    triton_rms_norm.forward(x, residual, w, 1e-6, x, residual, rstd, launch)


def backward(rows: int, n: int, branch, stream, weight, launch) -> None:
    dy, w = torch.empty(rows, n, dtype=branch), torch.empty(n, dtype=weight)
    dh = None if stream is None else torch.empty(rows, n, dtype=stream)
    h, dr = (dy if dh is None else dh), (None if stream in (None, branch) else dh)
    triton_rms_norm.backward(dy, dh, h, w, torch.empty(rows), dy, dr, w, launch)


def compiled(kernel, device, grid, tensors, integers, constants, options) -> str:
    """The kernel in Triton's intermediate form with layouts."""
    tensors = dict(zip(kernel.arg_names, tensors, strict=False))
    constants = constants | {name: None for name, tensor in tensors.items() if tensor is None}
    signature = {
        name: "constexpr" if name in constants else "i32" if name not in tensors else None
        for name in kernel.arg_names
    }
    signature |= {name: NAMES[t.dtype] for name, t in tensors.items() if t is not None}
    place = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    aligned = {place[n]: [["tt.divisibility", 16]] for n, t in tensors.items() if t is not None}
    source = ASTSource(kernel, signature, {place[n]: v for n, v in constants.items()}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ttgir"]


def row_layouts(text: str) -> list[tuple[str, ...]]:
    """Of every sum along rows: features a thread, lanes and warps along a row."""
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.blocked<(.*)>$", text, re.MULTILINE))
    sums = r'"tt\.reduce"\(.*?\) <\{axis = 1.*?\}\) : \(tensor<[^,]*, (#\w+)>\)'
    fields = "sizePerThread", "threadsPerWarp", "warpsPerCTA"
    return [
        tuple(re.search(rf"{field} = \[\d+, (\d+)\]", layouts[name])[1] for field in fields)
        for name in re.findall(sums, text, re.DOTALL)
    ]


def main() -> None:
    if interpreter.INTERPRETED:
        sys.exit("What is interpreted has no layout: set TRITON_INTERPRET=0.")
    launches.gpu = triton_rms_norm.gpu = lambda device: H200
    triton_rms_norm._on = lambda device: nullcontext()
    for (form, dtypes), n, run in (
        (form, n, run) for form in FORMS.items() for n in (768, 4096) for run in (forward, backward)
    ):
        found = []
        for rows in (1, 100_000):
            launched = []
            run(rows, n, *dtypes, lambda *arguments, into=launched: into.append(arguments))
            found.append(launched[0])
        few, many = found
        if few[5:] != many[5:]:
            layouts = [row_layouts(compiled(*arguments)) for arguments in found]
            print(run.__name__, n, form, *layouts)
            assert layouts[0] == layouts[1] != [], (run.__name__, n, form, layouts)


if __name__ == "__main__":
    main()

"""What torch.compile records for a GPU, tried without one:

TRITON_INTERPRET=0 python -m tests.kernels.recorded

Kernels are recorded as they would be for one multiprocessor of an H200, then run by Triton's
interpreter, and compared with the same kernels called one by one.
"""

import importlib.util
import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import torch
import triton
from torch._C import DispatchKey
from torch._higher_order_ops import triton_kernel_wrap as recorded
from torch.testing._internal.two_tensor import TwoTensor
from triton.backends.compiler import GPUTarget

from kernels import (
    add_rms_norm,
    functional,
    interpreter,
    launcher,
    launches,
    rms_norm,
    triton_rms_norm,
)

H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=1,  # so that few rows are more than one wave of programs
    shared_memory_per_block_optin=232448,
)
WRITTEN = {  # of each kernel's arguments; whatever else it were taken to write would be copied
    "_rms_norm_forward_kernel": {"y_ptr", "h_ptr", "rstd_ptr"},
    "_rms_norm_backward_kernel": {"dx_ptr", "dr_ptr", "partial_ptr"},
    "_rms_norm_projection_kernel": {"projection_ptr"},
    "_rms_norm_reduce_kernel": {"dw_ptr"},
}
BF16 = torch.bfloat16
launched, called = [], []  # names and warps of kernels, in compiled code and without


@contextmanager
def a_gpu_to_record_for():
    triton.runtime.driver.set_active(
        SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    )
    properties, torch.cuda.get_device_properties = torch.cuda.get_device_properties, lambda _: H200
    yield
    torch.cuda.get_device_properties = properties


def interpreted_kernels():
    """A second copy of the module triton_rms_norm, whose kernels are interpreted.

    The interpreter knows no dependent launch, and neither may what is recorded.
    """
    interpreter.INTERPRETED, os.environ["TRITON_INTERPRET"] = True, "1"
    launch = launcher.launch

    def noted(kernel, *arguments) -> None:
        called.append((kernel.fn.__name__, arguments[-1]["num_warps"]))
        launch(kernel, *arguments)

    launcher.launch = noted
    spec = importlib.util.spec_from_file_location("interpreted", triton_rms_norm.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.gpu = lambda device: replace(launches.gpu(device), dependent_launch=False)
    return module


def interpret_what_is_launched(kernels) -> None:
    """Have PyTorch run recorded kernels by their interpreted namesakes, and note them."""
    table = recorded.kernel_side_table

    def run(*, kernel_idx, constant_args_idx, grid, kwargs, **_):
        kernel, constants = table.get_kernel(kernel_idx), table.get_constant_args(constant_args_idx)
        launched.append((kernel.fn.__name__, kernel.configs[0].num_warps))
        getattr(kernels, kernel.fn.__name__)[grid[0]](**kwargs, **constants)

    functional_form = recorded.triton_kernel_wrapper_functional
    clone_and_run = functional_form.py_kernels[DispatchKey.CompositeExplicitAutograd]

    def checked(*, kernel_idx, kwargs, tensors_to_clone, **rest):
        name = table.get_kernel(kernel_idx).fn.__name__
        assert set(tensors_to_clone) == WRITTEN[name] & set(kwargs), (name, tensors_to_clone)
        return clone_and_run(
            kernel_idx=kernel_idx, kwargs=kwargs, tensors_to_clone=tensors_to_clone, **rest
        )

    functional_form.py_kernels[DispatchKey.CompositeExplicitAutograd] = checked
    recorded.triton_kernel_wrapper_mutation.py_kernels[DispatchKey.CompositeExplicitAutograd] = run


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def block(x, residual, weight):
    y, h = add_rms_norm(x, residual, weight, out_dtype=BF16)
    return rms_norm(torch.nn.functional.gelu(y)), h


def masked(x, weight):
    return rms_norm(x[x[:, 0] > 0], weight).sum(0)


def compare(name: str, call, compiled, inputs: list) -> None:
    """Outputs and gradients, bit for bit."""
    leaves = [tensor for tensor in inputs if tensor is not None]
    results = []
    for function in (call, compiled):
        outputs = function(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.manual_seed(1)
        gradients = torch.autograd.grad(outputs, leaves, [torch.randn_like(y) for y in outputs])
        results.append([*outputs, *gradients])
    for expected, got in zip(*results, strict=True):
        assert got.dtype == expected.dtype, name
        assert torch.equal(got, expected), name
    print(name, *launched)
    assert set(called) <= set(launched), called
    called.clear()
    launched.clear()


def main() -> None:
    if interpreter.INTERPRETED:
        sys.exit("Interpreted kernels cannot be recorded: set TRITON_INTERPRET=0.")
    interpreted = interpreted_kernels()
    interpret_what_is_launched(interpreted)
    functional.triton_rms_norm = interpreted  # for calls that are not compiled
    torch.manual_seed(0)
    qkv = torch.randn(4, 5, 3, 64).requires_grad_()
    cases = {
        "norm": (rms_norm, [random(6, 96, dtype=BF16), random(96)]),
        "one row": (rms_norm, [random(1, 96, dtype=BF16), random(96)]),
        "no weight": (rms_norm, [random(6, 96, dtype=torch.float16), None]),
        "strided": (lambda qkv, w: rms_norm(qkv[:, :, 1], w), [qkv, random(64)]),
        "add": (add_rms_norm, [random(6, 96, dtype=BF16), random(6, 96), random(96)]),
        "no row": (add_rms_norm, [random(0, 96, dtype=BF16), random(0, 96), random(96)]),
        "many rows": (rms_norm, [random(300, 96, dtype=BF16), random(96)]),
        "a number of rows that only data tell": (masked, [random(6, 96), random(96)]),
    }
    with a_gpu_to_record_for():
        for name, (call, inputs) in cases.items():
            torch.compiler.reset()
            compare(name, call, torch.compile(call, fullgraph=True, backend="aot_eager"), inputs)
        both = TwoTensor(torch.randn(6, 96), torch.randn(6, 96))
        got = torch.compile(rms_norm, fullgraph=True, backend="aot_eager")(both)
        assert torch.equal(got.a, rms_norm(both.a)), "a tensor of another class"
        for n in (96, 9000):
            torch.compiler.reset()
            compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
            for rows in (3, 300 if n == 96 else 5, 2):
                inputs = [random(rows, n, dtype=BF16), random(rows, n), random(n)]
                with torch._dynamo.config.patch(error_on_recompile=rows != 3):
                    compare(f"{rows} rows of {n}", block, compiled, inputs)


if __name__ == "__main__":
    main()

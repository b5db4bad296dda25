"""The operator inside torch.compile and, where there is a GPU, in CUDA graphs, on a second GPU
and beyond 32-bit offsets."""

import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor.utils import run_fw_bw_and_get_code
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from kernels import add_rms_norm, load_norm, rms_norm
from tests.running import ROOT, needs_interpreter, python

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
NORMS = ["eager", "compiled", "triton"]


def assert_same_but_for_order(a, b):
    """Equal up to the order of float32 sums: a few dozen epsilons of the whole."""
    assert torch.linalg.vector_norm(a - b) <= 64 * torch.finfo(a.dtype).eps * b.norm()


@pytest.mark.parametrize("name", NORMS)
def test_compiles_as_one_graph_and_once_for_all_batch_sizes(name, device):
    norm = load_norm(name)
    compiles = CompileCounterWithBackend("inductor")

    @torch.compile(backend=compiles, fullgraph=True)
    def block(x, residual, weight):
        y, h = norm.add_rms_norm(x, residual, weight)
        return norm.rms_norm(torch.nn.functional.gelu(y), weight) + h

    def leaves(rows):
        torch.manual_seed(rows)
        tensors = [torch.randn(*s, device=device) for s in [(rows, 4, 96)] * 2 + [(96,)]]
        return [t.requires_grad_() for t in tensors]

    for i, rows in enumerate([6, 10, 12, 130, 34]):
        inputs = leaves(rows)
        got = block(*inputs)
        y, h = norm.add_rms_norm(*inputs)
        expected = norm.rms_norm(torch.nn.functional.gelu(y), inputs[2]) + h
        assert_same_but_for_order(got, expected)
        gradient = torch.randn_like(got)
        for a, b in zip(
            torch.autograd.grad(got, inputs, gradient),
            torch.autograd.grad(expected, inputs, gradient),
            strict=True,
        ):
            assert_same_but_for_order(a, b)
        if i == 1:  # the second batch size makes the first dimension dynamic; after that, nothing
            compiled = compiles.frame_count
    assert compiles.frame_count == compiled


@needs_gpu
def test_compiled_code_launches_the_kernels_by_itself(device):
    x, residual = (torch.randn(6, 96, device=device, requires_grad=True) for _ in range(2))
    weight = torch.ones(96, device=device, requires_grad=True)
    torch.compiler.reset()
    call = torch.compile(lambda: sum(add_rms_norm(x, residual, weight)), fullgraph=True)
    _, codes = run_fw_bw_and_get_code(call)
    for kernel in ("forward", "backward", "reduce"):
        assert f"_rms_norm_{kernel}_kernel" in "".join(codes)
    assert "torch.ops.triton_rmsnorm_gpt" not in "".join(codes)


@needs_interpreter
def test_what_is_recorded_for_a_gpu_gives_the_same_bits():
    """On any machine: what is recorded is run by the interpreter."""
    done = python("-m", "tests.kernels.recorded", TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr


def test_few_rows_are_laid_out_as_many():
    """On any machine: the kernels are only compiled."""
    done = python("-m", "tests.kernels.layouts", TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert "backward 768" in done.stdout


def test_is_an_operator_where_operators_are_recorded(device):
    """A launch by itself would leave no trace: what was recorded would return unwritten memory."""
    x, other = torch.randn(2, 5, 96, device=device)
    recorded = [
        make_fx(lambda x: rms_norm(x) + 1)(x),
        torch.jit.trace(lambda x: rms_norm(x) + 1, x),
    ]
    for function in recorded:
        assert torch.equal(function(other), rms_norm(other) + 1)


def test_an_exported_program_loads_where_other_launches_are_known(device, tmp_path):
    class Norm(torch.nn.Module):
        def forward(self, x):
            return rms_norm(x) + 1

    x, file = torch.randn(5, 96, device=device), tmp_path / "norm.pt2"
    torch.export.save(torch.export.export(Norm(), (x,)), file)
    launches = tmp_path / "triton-rmsnorm-gpt" / "launches.json"
    launches.parent.mkdir()
    launches.write_text("{}")
    load = f"""
import torch, kernels
x = torch.ones(5, 96, device="{device}")
assert torch.equal(torch.export.load("{file}").module()(x), kernels.rms_norm(x) + 1)
"""
    done = python("-c", load, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_shapes_are_known_without_data(device):
    with FakeTensorMode():
        x = torch.empty(5, 96, device=device, dtype=torch.bfloat16, requires_grad=True)
        residual = torch.empty(5, 96, device=device, requires_grad=True)
        y, h = add_rms_norm(x, residual)
        dx, dr = torch.autograd.grad([y, h], [x, residual], [y, h])
        assert [t.dtype for t in (y, h, dx, dr)] == [x.dtype, residual.dtype] * 2
        assert {t.shape for t in (y, h, dx, dr)} == {x.shape}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_forward_mode_derivative_of_a_compiled_norm_is_refused(backend, device):
    x, tangent = torch.randn(2, 5, 96, device=device)
    torch.compiler.reset()
    jvp = torch.compile(lambda x, t: torch.func.jvp(rms_norm, (x,), (t,)), backend=backend)
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        jvp(x, tangent)


def test_a_compiled_graph_is_found_again_in_the_cache(device, tmp_path, monkeypatch):
    """PyTorch caches no graph with an autograd.Function: a new process would compile again."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x = torch.randn(6, 96, device=device, requires_grad=True)
    weight = torch.ones(96, device=device, requires_grad=True)
    for found in ("autograd_cache_saved", "autograd_cache_hit"):
        torch.compiler.reset()
        counters.clear()
        torch.compile(rms_norm, fullgraph=True)(x, weight).sum().backward()
        assert counters["aot_autograd"][found] == 1


def test_a_compiled_graph_is_not_found_once_its_norm_has_changed(device, tmp_path):
    """PyTorch's cache does not look into the operator that the norm is traced from."""
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels")
    script = tmp_path / "gradient.py"
    script.write_text(f"""
import torch
from kernels import rms_norm
x, weight = (torch.ones(*size, 96, device="{device}", requires_grad=True) for size in ([6], []))
torch.compile(rms_norm, fullgraph=True)(x, weight).sum().backward()
print(weight.grad[0].item())
""")

    def gradient() -> float:
        return float(python(str(script), TORCHINDUCTOR_CACHE_DIR=str(tmp_path)).stdout)

    before = gradient()
    with open(tmp_path / "kernels" / "functional.py", "a") as source:
        source.write("""
right = _gradients
def _gradients(*arguments):
    return tuple(found if found is None else 2 * found for found in right(*arguments))
""")
    assert gradient() == 2 * before


@needs_gpu
def test_cuda_graph_capture_and_replay(device):
    x, residual = (torch.randn(512, 768, device=device, requires_grad=True) for _ in range(2))
    weight = torch.ones(768, device=device, requires_grad=True)

    def step():
        y, h = add_rms_norm(x, residual, weight)
        return torch.autograd.grad([y, h], [x, residual, weight], [y.detach(), h.detach()])

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        weight.mul_(3)
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_runs_on_the_gpu_that_holds_x():
    x = torch.randn(64, 768, device="cuda:1", requires_grad=True)
    with torch.cuda.device(0):
        y = rms_norm(x)
        y.sum().backward()
    assert y.device == x.grad.device == x.device
    torch.testing.assert_close(y, load_norm("eager").rms_norm(x))


@needs_gpu
def test_more_than_two_to_the_31_elements(device):
    if torch.cuda.get_device_properties(device).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GiB of GPU memory")
    rows = 2**31 // 4096 + 3
    x = torch.randn(rows, 4096, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(4096, device=device).requires_grad_()
    y, h = add_rms_norm(x, x.detach(), weight)
    dx, dw = torch.autograd.grad([y, h], [x, weight], [y.detach(), h.detach()])
    tail = x[-5:].detach().requires_grad_()
    y_tail, h_tail = add_rms_norm(tail, tail.detach(), weight.detach())
    (dx_tail,) = torch.autograd.grad([y_tail, h_tail], tail, [y_tail.detach(), h_tail.detach()])
    for a, b in ((y, y_tail), (h, h_tail), (dx, dx_tail)):
        assert torch.equal(a[-5:], b)
    assert dw.isfinite().all()


def test_a_cpu_tensor_on_a_machine_with_a_gpu_is_refused():
    if not torch.cuda.is_available():
        pytest.skip("without a GPU the kernels are interpreted on the CPU")
    with pytest.raises(ValueError, match=r"x must be on a CUDA device .* but it is on cpu"):
        rms_norm(torch.ones(2, 8))

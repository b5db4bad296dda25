"""The operator's contract, case by case, for the norms of this project.

The same tests run on a GPU and, through Triton's interpreter, without one. What every norm must
compute is tested for all of them, what only the Triton kernels promise for `triton` alone.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad

from kernels import Norm, add_rms_norm, load_norm, rms_norm
from tests.kernels.oracle import assert_within, oracle

HALF, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = [HALF, BF16, FP32, FP64]
NORMS = ["eager", "compiled", "triton"]
EPS = 1e-5


@pytest.fixture(autouse=True)
def _poisoned_outputs():
    """Fill what torch.empty returns with NaN, so that an unwritten output cannot look right."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def random(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device, dtype=FP64).to(dtype)


def check_norm(norm, x, weight, *, residual=None, out_dtype=None, dy=None, dh=None) -> None:
    """Run forward and backward and compare every result with the float64 oracle."""
    inputs = {"x": x, "residual": residual, "weight": weight}
    leaves = {name: t.detach().requires_grad_() for name, t in inputs.items() if t is not None}
    if residual is None:
        y = norm.rms_norm(leaves["x"], leaves.get("weight"), EPS, out_dtype=out_dtype)
        outputs, h = [y], x
    else:
        y, h = norm.add_rms_norm(
            leaves["x"], leaves["residual"], leaves.get("weight"), EPS, out_dtype=out_dtype
        )
        outputs = [y, h]
    dy = random(*x.shape, dtype=y.dtype, device=x.device) if dy is None else dy
    grads = [dy]
    if residual is not None:
        dh = random(*x.shape, dtype=h.dtype, device=x.device) if dh is None else dh
        grads.append(dh)
    got = dict(zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), grads), strict=True))

    compute = FP64 if any(t.dtype == FP64 for t in leaves.values()) else FP32
    dtypes = {
        "compute": compute,
        "y": y.dtype,
        "dx": x.dtype,
        "dw": FP64 if weight is None else weight.dtype,
    }
    if residual is not None:
        exact = (x.to(compute) + residual.to(compute)).to(residual.dtype)
        assert torch.equal(h, exact)
        if norm.name in ("eager", "compiled"):
            dtypes["between"] = h.dtype
        if norm.name == "compiled":  # on a GPU, Inductor normalises h before it is rounded
            dtypes["unrounded"] = h.dtype
    expected = oracle(h.detach(), weight, EPS, dy, dh, dtypes)
    assert y.dtype == (out_dtype or x.dtype)
    assert_within(y.detach(), expected["y"], "y")
    assert_within(got["x"], expected["dx"], "dx")
    if residual is not None:
        assert got["residual"].dtype == residual.dtype
        of_residual = oracle(h.detach(), weight, EPS, dy, dh, dtypes | {"dx": residual.dtype})
        assert_within(got["residual"], of_residual["dx"], "dresidual")
    if weight is not None:
        assert got["weight"].dtype == weight.dtype
        assert_within(got["weight"], expected["dw"], "dw")


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_residual", [False, True], ids=["plain", "add"])
def test_every_dtype(name, dtype, with_residual, device):
    x = random(37, 96, dtype=dtype, device=device)
    residual = random(37, 96, dtype=dtype, device=device) if with_residual else None
    check_norm(load_norm(name), x, random(96, dtype=dtype, device=device), residual=residual)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 40),
    n=st.integers(1, 300),
    x=st.sampled_from(DTYPES),
    residual=st.sampled_from([None, *DTYPES]),
    weight=st.sampled_from([None, *DTYPES]),
    out=st.sampled_from([None, *DTYPES]),
)
def test_any_mix_of_dtypes_and_any_width(device, rows, n, x, residual, weight, out):
    check_norm(
        load_norm("triton"),
        random(rows, n, dtype=x, device=device),
        None if weight is None else random(n, dtype=weight, device=device),
        residual=None if residual is None else random(rows, n, dtype=residual, device=device),
        out_dtype=out,
    )


# Prime, odd, QK-norm, GPT and wide rows; 40000 and 131072 take the kernels' column-blocked path.
@pytest.mark.parametrize("n", [1, 64, 128, 769, 1536, 4093, 8192, 16384, 40000, 131072])
def test_widths(n, device):
    rows = max(3, min(1000, 200_000 // n))
    x, residual, weight = (random(*s, dtype=BF16, device=device) for s in [(rows, n)] * 2 + [(n,)])
    check_norm(load_norm("triton"), x, weight)
    check_norm(load_norm("triton"), x, weight.float(), residual=residual.float(), out_dtype=BF16)


def test_wide_rows_in_float64(device):
    x = random(3, 20_000, dtype=FP64, device=device)
    check_norm(load_norm("triton"), x, random(20_000, dtype=FP64, device=device), residual=x * 0.5)


@pytest.mark.parametrize("name", NORMS)
def test_zero_rows(name, device):
    x = torch.empty(0, 3, 64, device=device, requires_grad=True)
    weight = torch.ones(64, device=device, requires_grad=True)
    norm = load_norm(name)
    y, h = norm.add_rms_norm(x, x.detach(), weight)
    (y.sum() + h.sum() + norm.rms_norm(x, weight).sum()).backward()
    assert y.shape == h.shape == x.grad.shape == (0, 3, 64)
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("layout", ["qkv", "heads", "transposed", "expanded"])
def test_strided_rows_are_read_in_place(layout, device):
    qkv = random(2, 5, 3, 4, 64, dtype=BF16, device=device)
    x = {
        "qkv": qkv.view(2, 5, 3, 256)[:, :, 1],
        "heads": qkv[:, :, 1],
        "transposed": qkv[:, :, 1].transpose(1, 2),
        "expanded": qkv[:, :1, 1].expand(2, 5, 4, 64),
    }[layout]
    assert not x.is_contiguous()
    weight = random(x.shape[-1], dtype=FP32, device=device)
    check_norm(load_norm("triton"), x, weight)
    check_norm(load_norm("triton"), x, weight, residual=random(*x.shape, dtype=BF16, device=device))
    y = rms_norm(x.detach().requires_grad_(), weight)
    assert y.grad_fn.saved_tensors[0].data_ptr() == x.data_ptr()


@pytest.mark.parametrize("name", NORMS)
def test_layouts_that_cannot_be_read_in_place(name, device):
    x = random(6, 5, 4, 3, 64, dtype=FP32, device=device)
    weight = random(64, dtype=FP32, device=device)
    norm = load_norm(name)
    check_norm(norm, x.transpose(3, 4).contiguous().transpose(3, 4), weight)
    check_norm(norm, x.permute(3, 1, 0, 2, 4), weight)
    check_norm(norm, x, weight, residual=x.transpose(0, 0).flip(0).permute(0, 1, 2, 3, 4))


@pytest.mark.parametrize("name", NORMS)
def test_weights_that_are_not_contiguous(name, device):
    x, residual = (random(9, 64, dtype=FP32, device=device) for _ in range(2))
    for weight in (
        random(64, 3, dtype=FP32, device=device)[:, 1],
        random(1, dtype=FP32, device=device).expand(64),
    ):
        check_norm(load_norm(name), x, weight)
        check_norm(load_norm(name), x, weight, residual=residual)


@pytest.mark.parametrize("offset", [1, 3])
def test_misaligned_base_pointer(offset, device):
    def shifted(*shape):
        flat = random(offset + torch.Size(shape).numel(), dtype=BF16, device=device)
        return flat[offset:].view(shape)

    check_norm(load_norm("triton"), shifted(33, 64), shifted(64), dy=shifted(33, 64))
    check_norm(
        load_norm("triton"),
        shifted(33, 64),
        shifted(64),
        residual=shifted(33, 64),
        dh=shifted(33, 64),
    )


@pytest.mark.parametrize("name", NORMS)
def test_expanded_and_transposed_gradients(name, device):
    x, residual = (random(48, 48, dtype=FP32, device=device) for _ in range(2))
    weight = random(48, dtype=FP32, device=device)
    expanded = random(48, 1, dtype=FP32, device=device).expand(48, 48)
    transposed = random(48, 48, dtype=FP32, device=device).t()
    check_norm(load_norm(name), x, weight, residual=residual, dy=expanded, dh=transposed)
    check_norm(load_norm(name), x, weight, residual=residual, dy=transposed, dh=expanded)


def test_inputs_and_gradients_are_not_written_to(device):
    x, residual, dy, dh = (random(65, 96, dtype=BF16, device=device) for _ in range(4))
    weight = random(96, dtype=FP32, device=device).requires_grad_()
    tensors = (x, residual, weight, dy, dh)
    before = [t.detach().clone() for t in tensors]
    y, h = add_rms_norm(x.requires_grad_(), residual.requires_grad_(), weight)
    first = torch.autograd.grad([y, h], [x, residual, weight], [dy, dh], retain_graph=True)
    second = torch.autograd.grad([y, h], [x, residual, weight], [dy, dh])
    for was, now in zip(before, tensors, strict=True):
        assert torch.equal(was, now.detach())
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_frozen_weight_costs_no_gradient_of_it(device, monkeypatch):
    import kernels.triton_rms_norm as module

    monkeypatch.setattr(module, "_rms_norm_reduce_kernel", None)  # launching it would raise
    x = random(4000, 768, dtype=FP32, device=device).requires_grad_()
    weight = random(768, dtype=FP32, device=device)
    rms_norm(x, weight).sum().backward()
    assert x.grad is not None
    assert weight.grad is None


def test_frozen_input_leaves_only_the_gradient_of_the_weight(device):
    x, dy = (random(70, 96, dtype=FP32, device=device) for _ in range(2))
    weight = random(96, dtype=FP32, device=device).requires_grad_()
    rms_norm(x, weight, EPS).backward(dy)
    dtypes = {"compute": FP32, "y": FP32, "dx": FP32, "dw": FP32}
    assert_within(weight.grad, oracle(x, weight.detach(), EPS, dy, None, dtypes)["dw"], "dw")


@pytest.mark.parametrize("name", NORMS)
def test_only_one_output_used(name, device):
    x, residual, dy = (random(9, 96, dtype=FP32, device=device) for _ in range(3))
    weight = random(96, dtype=FP32, device=device)
    leaves = [t.requires_grad_() for t in (x, residual, weight)]
    dtypes = {"compute": FP32, "y": FP32, "dx": FP32, "dw": FP32}

    y, h = load_norm(name).add_rms_norm(*leaves, EPS)
    expected = oracle(h.detach(), weight.detach(), EPS, dy, None, dtypes)
    dx, dr, dw = torch.autograd.grad(y, leaves, dy)
    for got, key in ((dx, "dx"), (dr, "dx"), (dw, "dw")):
        assert_within(got, expected[key], key)

    _, h = load_norm(name).add_rms_norm(*leaves, EPS)
    dx, dr, dw = torch.autograd.grad(h, leaves, dy, allow_unused=True)
    assert torch.equal(dx, dy)
    assert torch.equal(dr, dy)
    assert dw is None or not dw.any()


@pytest.mark.parametrize("wanted", ["x", "residual"])
def test_only_one_summand_wants_a_gradient(wanted, device):
    x = random(9, 96, dtype=BF16, device=device)
    residual = random(9, 96, dtype=FP32, device=device)
    leaf = {"x": x, "residual": residual}[wanted].requires_grad_()
    dy, dh = random(9, 96, dtype=BF16, device=device), random(9, 96, dtype=FP32, device=device)
    y, h = add_rms_norm(x, residual, None, EPS)
    torch.autograd.backward([y, h], [dy, dh])
    dtypes = {"compute": FP32, "y": BF16, "dx": leaf.dtype, "dw": FP32}
    assert leaf.grad.dtype == leaf.dtype
    assert_within(leaf.grad, oracle(h.detach(), None, EPS, dy, dh, dtypes)["dx"], "dx")


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_same_input_gives_the_same_bits(dtype, device):
    x, residual, dy, dh = (random(5000, 128, dtype=dtype, device=device) for _ in range(4))
    weight = random(128, dtype=FP32, device=device)
    leaves = [t.requires_grad_() for t in (x, residual, weight)]

    def run():
        y, h = add_rms_norm(*leaves)
        return [y, h, *torch.autograd.grad([y, h], leaves, [dy, dh])]

    first = run()
    for _ in range(20 if device.type == "cuda" else 2):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


@pytest.mark.parametrize("n", [64, 768])
def test_a_row_does_not_depend_on_its_batch(n, device):
    x, dy = (random(3000, n, dtype=BF16, device=device) for _ in range(2))
    weight = random(n, dtype=FP32, device=device)

    def run(rows):
        leaf = x[rows].clone().requires_grad_()
        y = rms_norm(leaf, weight)
        return y.detach(), torch.autograd.grad(y, leaf, dy[rows])[0]

    whole = run(slice(0, 3000))
    for rows in (slice(0, 1), slice(7, 8), slice(2, 35), slice(2999, 3000), slice(100, 1700)):
        for part, of_whole in zip(run(rows), whole, strict=True):
            assert torch.equal(part, of_whole[rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [96, 4096, 40000])
@pytest.mark.parametrize("weight_dtype", [BF16, FP32], ids=str)
def test_add_equals_the_norm_of_the_sum(dtype, weight_dtype, n, device):
    x, residual = (random(5, n, dtype=dtype, device=device) for _ in range(2))
    weight = random(n, dtype=weight_dtype, device=device)
    y, h = add_rms_norm(x, residual, weight)
    assert torch.equal(h, x + residual)
    assert torch.equal(y, rms_norm(x + residual, weight))


@pytest.mark.parametrize("with_residual", [False, True], ids=["plain", "add"])
def test_gradcheck(with_residual, device):
    x = random(3, 2, 7, dtype=FP64, device=device).requires_grad_()
    residual = random(3, 2, 7, dtype=FP64, device=device).requires_grad_()
    weight = random(7, dtype=FP64, device=device).requires_grad_()
    if with_residual:
        assert torch.autograd.gradcheck(add_rms_norm, (x, residual, weight, EPS))
    else:
        assert torch.autograd.gradcheck(rms_norm, (x, weight, EPS))


def test_large_eps_and_zero_input(device):
    x = torch.zeros(4, 96, device=device, requires_grad=True)
    y = rms_norm(x, None, 0.25)
    y.backward(torch.ones_like(y))
    assert not y.any()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))  # 1 / sqrt(0.25)


def test_no_grad_mode_returns_plain_tensors(device):
    x = random(4, 96, dtype=FP32, device=device).requires_grad_()
    with torch.no_grad():
        y, h = add_rms_norm(x, x)
    assert not y.requires_grad
    assert not h.requires_grad


@pytest.mark.parametrize("power", [1, 2], ids=["constant dy", "dy of x"])
def test_second_derivative_is_refused(power, device):
    x = random(4, 8, dtype=FP64, device=device).requires_grad_()
    weight = random(8, dtype=FP64, device=device).requires_grad_()
    (dx,) = torch.autograd.grad(rms_norm(x, weight).pow(power).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        (rms_norm(x, weight).sum() + dx.square().sum()).backward()


def test_forward_mode_derivative_is_refused(device):
    x, tangent = (random(4, 8, dtype=FP32, device=device) for _ in range(2))
    with forward_ad.dual_level():
        assert torch.equal(
            rms_norm(x), rms_norm(x.clone())
        )  # without a tangent it is not asked for
        with pytest.raises(RuntimeError, match="no forward-mode derivative"):
            rms_norm(forward_ad.make_dual(x, tangent))
        with pytest.raises(RuntimeError, match="no forward-mode derivative"):
            add_rms_norm(x, forward_ad.make_dual(x, tangent))


@pytest.mark.parametrize("name", ["eager", "triton", "aten"])  # Inductor's code reads their memory
def test_gradients_that_are_zeros_without_memory(name, device):
    x = random(4, 8, dtype=FP32, device=device).requires_grad_()
    weight = random(8, dtype=FP32, device=device)
    y, h = load_norm(name).add_rms_norm(x, x.detach(), weight)
    torch.sgn(y).sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
    y, h = load_norm(name).add_rms_norm(x, x.detach(), weight)
    dy = torch.ones_like(y)
    expected = torch.autograd.grad(y, x, dy, retain_graph=True)
    assert torch.equal(torch.autograd.grad([y, torch.sgn(h).sum()], x, [dy, None])[0], expected[0])


@pytest.mark.parametrize("name", ["eager", "triton", "aten"])
def test_views_that_are_negated_when_read(name, device):
    tensors = [torch._neg_view(random(5, 8, dtype=FP32, device=device)) for _ in range(4)]
    x, residual, dy, dh = tensors
    weight = torch._neg_view(random(8, dtype=FP32, device=device))
    check_norm(load_norm(name), x, weight, dy=dy)
    check_norm(load_norm(name), x, weight, residual=residual, dy=dy, dh=dh)


@pytest.mark.parametrize("name", [*NORMS, "aten"])
def test_outputs_are_contiguous(name, device):
    x = random(4, 3, 8, dtype=FP32, device=device).transpose(0, 1)
    norm = load_norm(name)
    for output in (norm.rms_norm(x), *norm.add_rms_norm(x, x)):
        assert output.is_contiguous()


@pytest.mark.parametrize("name", [*NORMS, "aten"])
def test_the_stream_has_no_gradient_if_only_the_weight_wants_one(name, device):
    x = random(4, 8, dtype=FP32, device=device)
    weight = random(8, dtype=FP32, device=device).requires_grad_()
    y, h = load_norm(name).add_rms_norm(x, x, weight)
    assert y.requires_grad
    assert not h.requires_grad


def test_threads_may_call_it_at_the_same_time(device):
    together = threading.Barrier(8)

    def call(_) -> Tensor:
        x = torch.ones(64, 64, device=device, requires_grad=True)
        together.wait()
        for _ in range(6):
            rms_norm(x).sum().backward()
        return x.grad

    with ThreadPoolExecutor(8) as pool:
        first, *others = pool.map(call, range(8))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("name", [*NORMS, "aten"])
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"x": torch.ones(())}, r"x must have a last dimension .* shape is \(\)"),
        ({"x": torch.ones(4, 0)}, r"x must have a last dimension .* \(4, 0\)"),
        (
            {"x": torch.ones(4, 8, dtype=torch.int64)},
            "x must have one of the dtypes .* torch.int64",
        ),
        ({"weight": torch.ones(4)}, r"weight must have the shape \(8,\) .* \(4,\)"),
        ({"weight": torch.ones(8, 1)}, r"weight must have the shape \(8,\) .* \(8, 1\)"),
        ({"weight": torch.ones(8, dtype=torch.bool)}, "weight must have one of .* torch.bool"),
        ({"weight": torch.ones(8, device="meta")}, "weight must be on x's device .* meta"),
        ({"residual": torch.ones(2, 8)}, r"residual must have x's shape \(4, 8\).* \(2, 8\)"),
        ({"residual": torch.ones(4, 8, device="meta")}, "residual must be on x's device .* meta"),
        ({"eps": -1e-6}, r"eps must be a Python number from 0 to 3.4e\+38, but it is -1e-06"),
        ({"eps": float("nan")}, "eps must be .* but it is nan"),
        ({"eps": float("inf")}, "eps must be .* but it is inf"),
        ({"eps": 1e39}, r"eps must be .* but it is 1e\+39"),
        ({"eps": 10**400}, "eps must be a Python number"),
        ({"eps": "a"}, "eps must be .* but it is 'a'"),
        ({"x": [1.0, 2.0]}, "x must be a tensor, but it is a list"),
        (
            {"weight": torch.ones(8).to_sparse()},
            "weight must be a dense tensor, .* torch.sparse_coo",
        ),
        (
            {"x": torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(1, 8)])},
            "x must be a dense tensor, but its layout is nested",
        ),
        ({"weight": 2.0}, "weight must be a tensor, but it is a float"),
        ({"out_dtype": torch.int8}, "out_dtype must be one of .* torch.int8"),
    ],
)
def test_wrong_arguments(name, argument, message, device):
    arguments = {
        "x": torch.ones(4, 8),
        "residual": torch.ones(4, 8),
        "weight": torch.ones(8),
        "eps": 1e-6,
        "out_dtype": None,
    } | argument
    arguments = {
        key: value.to(device) if isinstance(value, Tensor) and not value.is_meta else value
        for key, value in arguments.items()
    }
    norm = load_norm(name)
    x, weight, eps = arguments["x"], arguments["weight"], arguments["eps"]
    if "x" not in argument:
        with pytest.raises(ValueError, match=message):
            norm.add_rms_norm(
                x, arguments["residual"], weight, eps, out_dtype=arguments["out_dtype"]
            )
    if "residual" not in argument:
        with pytest.raises(ValueError, match=message):
            norm.rms_norm(x, weight, eps, out_dtype=arguments["out_dtype"])


@pytest.mark.parametrize(
    "fault", ["wrong eps", "no projection", "dw of half the rows", "dh before the Jacobian"]
)
def test_the_oracle_catches_known_faults(fault, device):
    """The bounds are tight: each of these faults leaves them, in bfloat16."""

    def add_faulty_norm(x, residual, weight, eps, *, out_dtype):
        class Faulty(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, residual, weight):
                h = x + residual
                used = eps * 1.1 + 0.01 if fault == "wrong eps" else eps
                rstd = (h.float().square().mean(-1, keepdim=True) + used).rsqrt()
                ctx.save_for_backward(h.float() * rstd, rstd, weight)
                return (h.float() * rstd * weight.float()).to(x.dtype), h

            @staticmethod
            def backward(ctx, dy, dh):
                x_hat, rstd, weight = ctx.saved_tensors
                g = dy.float() * weight.float()
                late = dh.float()
                if fault == "dh before the Jacobian":
                    g, late = g + late, 0.0
                projection = (g * x_hat).mean(-1, keepdim=True) * (fault != "no projection")
                dx = (rstd * (g - x_hat * projection) + late).to(dy.dtype)
                rows = slice(0, len(dy) // 2) if "half" in fault else slice(None)
                dw = (dy.float() * x_hat)[rows].sum(0).to(weight.dtype)
                return dx, dx, dw

        return Faulty.apply(x, residual, weight)

    x, residual = (random(64, 96, dtype=BF16, device=device) for _ in range(2))
    with pytest.raises(AssertionError, match="elements off"):
        check_norm(
            Norm(fault, None, add_faulty_norm),
            x,
            random(96, dtype=FP32, device=device),
            residual=residual,
        )

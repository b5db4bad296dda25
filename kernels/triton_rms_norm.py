"""RMSNorm and add+RMSNorm in Triton: one forward kernel, a persistent backward, no atomics.

With x_hat = x * rstd, g = dy * w and rstd = 1 / sqrt(mean(x^2) + eps), differentiating
y = x_hat * w (Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467, section 4) gives

    dx = rstd * (g - x_hat * mean(g * x_hat))        dw = sum over rows of dy * x_hat

With a residual stream, h = x + residual is normalised and dh, the gradient that arrives through
the stream, is added to dx; the sum is the gradient of x and of residual.

Each kernel stands beside the function that launches it, by `launcher.launch` or, while
torch.compile traces, by `launcher.record`; `kernels.functional` makes them a differentiable PyTorch
operator.
"""

import contextlib
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.standard import _sum_combine

from kernels import interpreter
from kernels.arguments import compute_dtype
from kernels.launcher import launch, record
from kernels.launches import backward_launch, forward_launch, gpu, reduce_launch, thinned

INTERPRETED = tl.constexpr(interpreter.INTERPRETED)

# One compiled kernel serves most batch sizes and strides (Inductor compiles it as it likes).
_INTEGERS = ["n_rows", "size1", "size2", "stride0", "stride1", "stride2"]


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def _on(device: int):
    """Makes the tensors' GPU the current one, since Triton launches on that."""
    if interpreter.INTERPRETED or device == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


@dataclass(frozen=True)
class _Rows:
    """Where rows start: counted over up to three dimensions of two known inner sizes.

    Strides count in units of so many elements; unit 0 means that the rows are contiguous.
    """

    size1: int
    size2: int
    stride0: int
    stride1: int
    stride2: int
    unit: int

    @property
    def args(self) -> tuple[int, ...]:
        return self.size1, self.size2, self.stride0, self.stride1, self.stride2


_CONTIGUOUS = _Rows(1, 1, 0, 0, 0, unit=0)


def _rows_in_place(x: Tensor) -> tuple[Tensor, _Rows]:
    """x and where its rows start. Neighbouring dimensions merge where their strides allow.

    x is copied only if its features are not next to each other in memory, or if its rows need
    more dimensions than three.
    """
    x = _in_memory(x)
    if x.is_contiguous():
        return x, _CONTIGUOUS
    dims: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        elif size != 1:
            dims.append((size, stride))
    if len(dims) > 3 or (x.stride(-1) != 1 and x.shape[-1] > 1):
        return x.contiguous(), _CONTIGUOUS
    (_, stride0), (size1, stride1), (size2, stride2) = [(1, 0)] * (3 - len(dims)) + dims
    unit = 16 if all(stride % 16 == 0 for _, stride in dims) else 1
    return x, _Rows(size1, size2, stride0 // unit, stride1 // unit, stride2 // unit, unit)


def _in_memory(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of one whose memory does not hold its values: PyTorch's zeros without
    memory, which autograd makes, and views that are negated when they are read."""
    return tensor.clone() if tensor._is_zerotensor() or tensor.is_neg() else tensor


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else _in_memory(tensor).contiguous()


def forward(x, residual, weight, eps, y, h, rstd, launch=launch) -> None:
    """Write y and, where they are wanted, h = x + residual and rstd (rows,) in the compute dtype.

    y, h and rstd are contiguous; h is there if residual is, and has its dtype.
    """
    rows = x.numel() // x.shape[-1]
    if isinstance(rows, int) and rows == 0:  # while it is traced it may be a symbol
        return
    x, layout = _rows_in_place(x)
    residual, weight = _contiguous(residual), _contiguous(weight)
    compute = compute_dtype(x, residual, weight)
    n = int(x.shape[-1])  # a constant of the kernel, never a symbol
    h_dtype = x.dtype if h is None else h.dtype
    if weight is not None and weight.element_size() < h_dtype.itemsize:
        # Triton would lay x out as it loads a narrower weight, but only where no residual is
        # added: the two forms would sum in different orders. Widening is exact.
        weight = weight.to(h_dtype)
    tile = forward_launch(x.device, n, h_dtype, y.dtype, compute)
    if launch is not record:
        tile = thinned(tile, rows, n, gpu(x.device).multiprocessors)
    device = x.get_device()
    with _on(device):
        launch(
            _rms_norm_forward_kernel,
            device,
            (_blocks(rows, tile.rows), 1, 1),
            (x, residual, weight, y, h, rstd),
            (rows, *layout.args),
            {
                "N": n,
                "EPS": float(eps),
                "STRIDE_UNIT": layout.unit,
                "HAS_RESIDUAL": residual is not None,
                "HAS_WEIGHT": weight is not None,
                "SAVE_RSTD": rstd is not None,
                "FLOAT64": compute == torch.float64,
                "ROWS": tile.rows,
                "COLUMNS": tile.columns,
            },
            {"num_warps": tile.warps},
        )


@triton.jit(do_not_specialize=_INTEGERS)
def _rms_norm_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    h_ptr,
    rstd_ptr,
    n_rows,
    size1,
    size2,
    stride0,
    stride1,
    stride2,
    N: tl.constexpr,
    EPS: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    SAVE_RSTD: tl.constexpr,
    FLOAT64: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program normalises ROWS rows. A row longer than COLUMNS is read in blocks: short ones are
    held in registers, those of 1024 columns or more are read twice. Each is faster there.

    The last rows come first: of what the kernel before has written, they are in the L2.
    """
    COMPUTE: tl.constexpr = tl.float64 if FLOAT64 else tl.float32
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)[:, None]
    x_ptr += _row_offset(row, size1, size2, stride0, stride1, stride2, N, STRIDE_UNIT)
    column = tl.arange(0, COLUMNS)[None, :]

    TWICE: tl.constexpr = N > COLUMNS and COLUMNS >= 1024
    FIRST: tl.constexpr = "evict_last" if TWICE else ""
    SECOND: tl.constexpr = "evict_first"
    squares = tl.full([ROWS, COLUMNS], 0.0, COMPUTE)
    held = ()
    for start in tl.static_range(0, N, COLUMNS):
        inside = (row < n_rows) & (start + column < N)
        h = tl.load(x_ptr + start + column, inside, 0.0, eviction_policy=FIRST).to(COMPUTE)
        if HAS_RESIDUAL:
            at = row * N + start + column
            residual = tl.load(residual_ptr + at, inside, 0.0, eviction_policy=FIRST)
            h = _round(h + residual.to(COMPUTE), h_ptr.dtype.element_ty).to(COMPUTE)
        squares += h * h
        held += (h,)
    EARLY: tl.constexpr = N <= 4 * COLUMNS  # more would not fit the registers
    weights = ()
    if HAS_WEIGHT and EARLY:  # asked for now, they are there when the sum is
        for start in tl.static_range(0, N, COLUMNS):
            weights += (tl.load(weight_ptr + start + column, start + column < N, 0.0),)
    rstd = tl.rsqrt(_sum(squares, 1) / N + EPS)
    if SAVE_RSTD:
        tl.store(rstd_ptr + row, rstd, row < n_rows)

    for start in tl.static_range(0, N, COLUMNS):
        inside = (row < n_rows) & (start + column < N)
        at = row * N + start + column
        h = held[start // COLUMNS]
        if TWICE:
            h = tl.load(x_ptr + start + column, inside, 0.0, eviction_policy=SECOND).to(COMPUTE)
            if HAS_RESIDUAL:
                residual = tl.load(residual_ptr + at, inside, 0.0, eviction_policy=SECOND)
                h = _round(h + residual.to(COMPUTE), h_ptr.dtype.element_ty).to(COMPUTE)
        if HAS_RESIDUAL:
            tl.store(h_ptr + at, _round(h, h_ptr.dtype.element_ty), inside)
        y = h * rstd
        if HAS_WEIGHT and EARLY:
            y *= weights[start // COLUMNS].to(COMPUTE)
        elif HAS_WEIGHT:
            y *= tl.load(weight_ptr + start + column, start + column < N, 0.0).to(COMPUTE)
        tl.store(y_ptr + at, _round(y, y_ptr.dtype.element_ty), inside)


def backward(dy, dh, h, weight, rstd, dx, dr, dw, launch=launch) -> None:
    """Write of dx, dr (the same in another dtype) and dw those that are not None; all contiguous.

    dw is summed in two stages: every program of a persistent grid keeps its own sum in registers
    and writes it as one row of `partial`; then `_rms_norm_reduce_kernel` adds those rows.
    """
    rows = h.numel() // h.shape[-1]
    if isinstance(rows, int) and rows == 0:
        if dw is not None:
            dw.zero_()
        return
    h, layout = _rows_in_place(h)
    dy, dh, weight = _contiguous(dy), _contiguous(dh), _contiguous(weight)
    n = int(h.shape[-1])
    properties = gpu(h.device)
    tile = backward_launch(h.device, n, h.dtype, dy.dtype, dh is not None, rstd.dtype)
    # With a weight wider than the rest, Triton lays out a tile of one row unlike one of several.
    wider = weight is not None and weight.element_size() > min(h.element_size(), dy.element_size())
    if launch is not record and not wider:
        tile = thinned(tile, rows, n, properties.multiprocessors)
    blocks = _blocks(n, tile.columns)
    wave = max(1, tile.programs_per_sm * properties.multiprocessors // blocks)
    tiles = _blocks(rows, tile.rows)
    recorded = launch is record  # then rows may be a symbol, and no branch is taken on it
    programs = torch.sym_min(wave, tiles) if recorded else min(wave, tiles)
    two_stages = dw is not None and (recorded or programs > 1)
    partial = rstd.new_empty(wave, n) if two_stages else dw
    dependent = two_stages and properties.dependent_launch and not recorded
    constants = {
        "N": n,
        "STRIDE_UNIT": layout.unit,
        "HAS_WEIGHT": weight is not None,
        "FLOAT64": rstd.dtype == torch.float64,
        "COLUMNS": tile.columns,
    }
    options = {"num_warps": tile.warps}
    device = h.get_device()
    with _on(device):
        projection = None
        if blocks > 1 and dx is not None:
            projection = torch.empty_like(rstd)
            _project(dy, h, layout, weight, rstd, projection, constants, options, launch)
        launch(
            _rms_norm_backward_kernel,
            device,
            (programs, blocks, 1),
            (dy, dh, h, weight, rstd, projection, dx, dr, partial),
            (rows, *layout.args),
            constants
            | {
                "HAS_DH": dh is not None,
                "WRITE_DX": dx is not None,
                "WRITE_DR": dr is not None,
                "WRITE_DW": dw is not None,
                "ROWS": tile.rows,
                "STAGES": tile.stages,
                "DEPENDENT": dependent,
            },
            options,
        )
        if two_stages:
            _reduce(partial, programs, dw, dependent, launch)


@triton.jit(do_not_specialize=_INTEGERS)
def _rms_norm_backward_kernel(
    dy_ptr,
    dh_ptr,
    h_ptr,
    weight_ptr,
    rstd_ptr,
    projection_ptr,
    dx_ptr,
    dr_ptr,
    partial_ptr,
    n_rows,
    size1,
    size2,
    stride0,
    stride1,
    stride2,
    N: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    FLOAT64: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_DH: tl.constexpr,
    WRITE_DX: tl.constexpr,
    WRITE_DR: tl.constexpr,
    WRITE_DW: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A program walks over tiles of rows, tile by tile in steps of the grid, the last ones first:
    of what the kernel before has written, they are in the L2.

    The explicit number of stages makes Triton prefetch the next tiles while this one is worked on.
    """
    COMPUTE: tl.constexpr = tl.float64 if FLOAT64 else tl.float32
    program = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + column, mask=column < N, other=0.0).to(COMPUTE)
    dw = tl.full([ROWS, COLUMNS], 0.0, COMPUTE)

    tiles = (n_rows - 1) // ROWS + 1  # n_rows + ROWS could be too large for 32 bits
    for tile in tl.range(program, tiles, tl.num_programs(0), num_stages=STAGES):
        row = (tiles - 1 - tile) * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
        inside = (row < n_rows) & (column < N)
        h_row = _row_offset(row, size1, size2, stride0, stride1, stride2, N, STRIDE_UNIT)
        h = tl.load(h_ptr + h_row + column, mask=inside, other=0.0).to(COMPUTE)
        dy = tl.load(dy_ptr + row * N + column, mask=inside, other=0.0).to(COMPUTE)
        rstd = tl.load(rstd_ptr + row, mask=row < n_rows, other=0.0)
        x_hat = h * rstd
        if WRITE_DW:
            dw += dy * x_hat
        if WRITE_DX:
            g = dy * weight if HAS_WEIGHT else dy
            if N > COLUMNS:
                mean = tl.load(projection_ptr + row, mask=row < n_rows, other=0.0)
            else:
                mean = _sum(g * x_hat, 1) / N
            dx = (g - x_hat * mean) * rstd
            if HAS_DH:
                dx += tl.load(dh_ptr + row * N + column, mask=inside, other=0.0).to(COMPUTE)
            tl.store(dx_ptr + row * N + column, _round(dx, dx_ptr.dtype.element_ty), mask=inside)
            if WRITE_DR:
                tl.store(
                    dr_ptr + row * N + column, _round(dx, dr_ptr.dtype.element_ty), mask=inside
                )

    if DEPENDENT:  # the reducing kernel may take its place on multiprocessors that are done
        gdc_launch_dependents()
    if WRITE_DW:
        dw = _round(_sum(dw, 0), partial_ptr.dtype.element_ty)
        tl.store(partial_ptr + program.to(tl.int64) * N + column, dw, mask=column < N)


def _project(dy, h, layout, weight, rstd, projection, constants, options, launch) -> None:
    """Write the projection (rows,) with the constants and options of the backward kernel."""
    launch(
        _rms_norm_projection_kernel,
        rstd.get_device(),
        (rstd.shape[0], 1, 1),
        (dy, h, weight, rstd, projection),
        layout.args,
        constants,
        options,
    )


@triton.jit(do_not_specialize=_INTEGERS)
def _rms_norm_projection_kernel(
    dy_ptr,
    h_ptr,
    weight_ptr,
    rstd_ptr,
    projection_ptr,
    size1,
    size2,
    stride0,
    stride1,
    stride2,
    N: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    FLOAT64: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """mean(g * x_hat) of one row that is too long for one tile of the backward kernel."""
    COMPUTE: tl.constexpr = tl.float64 if FLOAT64 else tl.float32
    row = tl.program_id(0).to(tl.int64)
    h_ptr += _row_offset(row, size1, size2, stride0, stride1, stride2, N, STRIDE_UNIT)
    products = tl.full([1, COLUMNS], 0.0, COMPUTE)
    for start in tl.range(0, N, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        inside = column < N
        g = tl.load(dy_ptr + row * N + column, mask=inside, other=0.0).to(COMPUTE)
        if HAS_WEIGHT:
            g *= tl.load(weight_ptr + column, mask=inside, other=0.0).to(COMPUTE)
        products += g * tl.load(h_ptr + column, mask=inside, other=0.0).to(COMPUTE)
    first = tl.arange(0, 1)[:, None]
    mean = _sum(products, 1) * tl.load(rstd_ptr + row) / N
    tl.store(projection_ptr + row + first, mean)


def _reduce(partial, programs, dw, dependent, launch) -> None:
    """Write dw (N,), the sum of the first `programs` rows of partial (a full grid's, N)."""
    wave, n = partial.shape
    tile = reduce_launch(n, wave)
    launch(
        _rms_norm_reduce_kernel,
        dw.get_device(),
        (_blocks(n, tile.columns), 1, 1),
        (partial, dw),
        (programs,),
        {"N": n, "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPENDENT": dependent},
        {"num_warps": tile.warps} | ({"launch_pdl": True} if dependent else {}),
    )


@triton.jit(do_not_specialize=["n_partials"])
def _rms_norm_reduce_kernel(
    partial_ptr,
    dw_ptr,
    n_partials,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """dw of COLUMNS columns: the sum of the programs' partial sums, always in the same order."""
    if DEPENDENT:  # launched while the backward kernel still runs, to hide the launch
        gdc_wait()
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    dw = tl.full([ROWS, COLUMNS], 0.0, partial_ptr.dtype.element_ty)
    for start in tl.range(0, n_partials, ROWS):
        row = start + tl.arange(0, ROWS)[:, None].to(tl.int64)
        inside = (row < n_partials) & (column < N)
        dw += tl.load(partial_ptr + row * N + column, mask=inside, other=0.0)
    dw = _round(_sum(dw, 0), dw_ptr.dtype.element_ty)
    tl.store(dw_ptr + column, dw, mask=column < N)


@triton.jit
def _row_offset(
    row, size1, size2, stride0, stride1, stride2, N: tl.constexpr, STRIDE_UNIT: tl.constexpr
):
    """Where a row starts, in elements. A constant unit tells Triton how strides are aligned."""
    if STRIDE_UNIT == 0:
        return row * N
    else:
        outer = row // size2
        start = outer // size1 * stride0 + outer % size1 * stride1 + row % size2 * stride2
        return start * STRIDE_UNIT


@triton.jit
def _sum(values, AXIS: tl.constexpr):
    """tl.sum, written so that it is interpreted even where triton was imported before the
    interpreter was chosen (importing lightning imports triton)."""
    return tl.reduce(values, AXIS, _sum_combine, keep_dims=True)


@triton.jit
def _round(values, DTYPE: tl.constexpr):
    """Round to nearest even; from float64 to 16 bits by way of float32, as PyTorch does.

    Triton's interpreter truncates to bfloat16, so there the bits are rounded here before.
    """
    if DTYPE.primitive_bitwidth < 32:
        values = values.to(tl.float32)
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = values.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
        values = tl.where(values == values, rounded, float("nan"))
    return values.to(DTYPE)

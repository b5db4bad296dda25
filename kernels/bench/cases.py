"""What the benchmark measures: operator, shape and dtypes of a case, and its minimum traffic."""

from dataclasses import dataclass

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
TENSOR_BYTES = 64 * 2**20  # default size of one tensor: larger than the L2 of an H200 (60 MB)


@dataclass(frozen=True)
class Case:
    """One operator on one shape in one set of dtypes.

    Args:
        group: part of the preset it belongs to; the targets are stated group by group.
        op: "rms_norm" or "add_rms_norm".
        rows, n: shape of x, and of the residual.
        residual_dtype: the stream's dtype, None without a residual.
        max_autotune: also compile with Inductor's max-autotune, which takes many seconds.
        norms: implementations compared; None for every one there is.
    """

    group: str
    op: str
    rows: int
    n: int
    x_dtype: str
    residual_dtype: str | None
    weight_dtype: str
    out_dtype: str
    max_autotune: bool = False
    norms: tuple[str, ...] | None = None

    def traffic(self, direction: str) -> tuple[list[str], list[str]]:
        """Dtypes of the (rows, n) tensors that a pass must at least read, and of those it writes.

        The weight, rstd and dw are left out: they are a few rows or columns of such a tensor.
        The backward of the add reads h, dy and dh; it writes one gradient for both inputs where
        their dtypes agree, else one in each dtype.
        """
        x, residual, out = self.x_dtype, self.residual_dtype, self.out_dtype
        if direction == "forward":
            return ([x], [out]) if residual is None else ([x, residual], [out, residual])
        if residual is None:
            return [x, out], [x]
        return [residual, out, residual], [x] if x == residual else [x, residual]

    def bytes(self, direction: str) -> int:
        """Bytes of that traffic: the least a pass can move if nothing is in a cache."""
        reads, writes = self.traffic(direction)
        return self.rows * self.n * sum(ITEMSIZE[dtype] for dtype in reads + writes)

    @property
    def label(self) -> str:
        """Short text for a progress line: operator, shape and dtypes."""
        dtypes = self.x_dtype if self.residual_dtype in (None, self.x_dtype) else "mixed dtypes"
        return f"{self.op} {self.rows} x {self.n} {dtypes}"


def norm_case(group: str, rows: int, n: int, dtype: str = "bfloat16", **options) -> Case:
    """rms_norm with every tensor in one dtype."""
    return Case(group, "rms_norm", rows, n, dtype, None, dtype, dtype, **options)


def add_case(group: str, rows: int, n: int, dtype: str = "bfloat16", **options) -> Case:
    """add_rms_norm with every tensor in one dtype."""
    return Case(group, "add_rms_norm", rows, n, dtype, dtype, dtype, dtype, **options)


def default_rows(n: int, dtype: str) -> int:
    """Rows of n features that make one tensor about 64 MiB, rounded to a multiple of 64."""
    return max(64, TENSOR_BYTES // (n * ITEMSIZE[dtype]) // 64 * 64)


DESIGN_SHAPES = (
    (196608, 64),
    (131072, 128),
    (32768, 768),
    (16384, 1024),
    (16384, 2048),
    (16384, 4096),
    (8192, 8192),
)
BASELINES = ("compiled", "triton")  # what the "no cliff" groups compare


def design_preset() -> list[Case]:
    """The shapes that the project's targets are stated for, most important group first.

    design, add: the shapes of the kernels' tuning, bfloat16.
    mixed: bfloat16 branch and output, float32 stream and weight.
    dtypes, widths, few_rows, odd: no cliff beside them, against Inductor's default mode alone.
    """
    few = {"norms": BASELINES}
    widths = (1536, 3072, 5120, 12288, 16384, 32768)
    mixed = ("bfloat16", "float32", "float32", "bfloat16")
    return [
        *(norm_case("design", *shape, max_autotune=True) for shape in DESIGN_SHAPES),
        *(add_case("add", *shape) for shape in DESIGN_SHAPES),
        *(Case("mixed", "add_rms_norm", *s, *mixed) for s in ((32768, 768), (16384, 2048))),
        *(
            norm_case("dtypes", *shape, dtype, **few)
            for dtype in ("float16", "float32")
            for shape in ((32768, 768), (16384, 2048), (8192, 8192))
        ),
        *(norm_case("widths", default_rows(n, "bfloat16"), n, **few) for n in widths),
        *(norm_case("few_rows", rows, n, **few) for n in (768, 4096) for rows in (1, 64)),
        *(norm_case("odd", default_rows(n, "bfloat16"), n, **few) for n in (769, 4093)),
    ]


def sweep(widths: list[int], rows: int | None, dtypes: list[str]) -> list[Case]:
    """Both operators over row lengths, every implementation, one dtype a case."""
    return [
        make("sweep", rows or default_rows(n, dtype), n, dtype, max_autotune=True)
        for dtype in dtypes
        for n in widths
        for make in (norm_case, add_case)
    ]

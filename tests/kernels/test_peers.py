"""The peers behind this project's two calls: same results where they can, a sentence elsewhere."""

import sys
import types

import pytest
import torch

from kernels import load_norm
from kernels.bench.cases import Case, add_case, norm_case
from kernels.bench.problem import Problem
from kernels.registry import NORMS

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


@pytest.fixture
def stub_packages(monkeypatch):
    """Empty stand-ins for both packages: what is refused must be refused before they are called."""
    for name in ("liger_kernel", "liger_kernel.ops", "quack"):
        module = types.ModuleType(name)
        module.__spec__ = types.SimpleNamespace(name=name, origin=None)
        module.rmsnorm = None
        monkeypatch.setitem(sys.modules, name, module)


def ones(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


REFUSED = [
    ("liger", "rms_norm", [ones(2, 8, dtype=FP64)], {}, "no float64"),
    ("liger", "rms_norm", [ones(2, 8)], {"out_dtype": FP32}, "out_dtype cannot be float32"),
    ("liger", "rms_norm", [ones(1, 65537)], {}, "at most 65536 features a row, but x has 65537"),
    ("liger", "rms_norm", [ones(2, 8)], {}, "needs x on a GPU"),
    ("liger", "add_rms_norm", [ones(2, 8), ones(2, 8, dtype=FP32)], {}, "must be bfloat16 like x"),
    ("liger", "add_rms_norm", [ones(2, 8), ones(2, 8)], {}, "without a weight"),
    ("quack", "rms_norm", [ones(2, 8), ones(8, dtype=FP64)], {}, "no float64"),
    ("quack", "rms_norm", [ones(2, 8)], {"out_dtype": FP64}, "out_dtype cannot be float64"),
    ("quack", "rms_norm", [ones(2, 7)], {}, "even number of features, but x has 7"),
    ("quack", "rms_norm", [ones(1, 131074, dtype=FP32)], {}, "at most 131072 float32 features"),
    ("quack", "rms_norm", [ones(2, 8)], {}, "needs x on a GPU"),
    ("quack", "add_rms_norm", [ones(2, 7, dtype=FP32), ones(2, 7)], {}, "even number"),
]


@pytest.mark.usefixtures("stub_packages")
@pytest.mark.parametrize(("name", "call", "inputs", "options", "says"), REFUSED)
def test_what_a_peer_cannot_do_is_refused_in_a_sentence(name, call, inputs, options, says):
    with pytest.raises(ValueError, match=says):
        getattr(load_norm(name), call)(*inputs, **options)


def test_package_that_cannot_be_imported_is_a_value_error(monkeypatch):
    package = types.ModuleType("liger_kernel")  # a package without its module ops
    package.__spec__ = types.SimpleNamespace(name="liger_kernel", origin=None)
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", None)
    with pytest.raises(ValueError, match="norm 'liger' cannot be loaded: "):
        load_norm("liger")


CASES = [
    norm_case("", 200, 256, "bfloat16"),
    norm_case("", 33, 768, "float32"),
    add_case("", 200, 256, "float16"),
    Case("", "add_rms_norm", 64, 768, "bfloat16", "float32", "float32", "bfloat16"),
]
WIDER = Case("", "rms_norm", 64, 768, "bfloat16", None, "float32", "float32")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
@pytest.mark.parametrize("name", ["aten", "liger", "quack"])
def test_a_peer_computes_the_definition(name, case, device):
    if not NORMS[name].installed or (name != "aten" and device.type != "cuda"):
        pytest.skip(f"{name} needs its package and a GPU")
    if (name, case.residual_dtype) == ("liger", "float32"):
        pytest.skip("liger keeps the stream in x's dtype")
    problem = Problem.random(case, device)
    for result, error in problem.errors(problem.results(load_norm(name))).items():
        assert error <= problem.tolerance(result), result


def test_aten_rounds_to_no_coarser_dtype_than_the_outputs(device):
    problem = Problem.random(WIDER, device)
    error = problem.errors(problem.results(load_norm("aten")))["y"]
    assert error <= problem.tolerance("y") < torch.finfo(torch.bfloat16).eps / 4

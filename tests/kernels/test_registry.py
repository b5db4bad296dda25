"""Norms by name, and the module that holds a norm's weight."""

import sys

import pytest
import torch

from kernels import NORMS, RMSNorm, load_norm, rms_norm


def test_every_registered_norm_loads_or_says_how_to_install_it():
    for name, entry in NORMS.items():
        if entry.installed:
            assert load_norm(name).name == name
        else:
            with pytest.raises(ValueError, match=f"norm '{name}' needs .* pip install"):
                load_norm(name)


def test_unknown_norm_lists_the_known_ones():
    with pytest.raises(
        ValueError, match="unknown norm 'nosuch'; there are: eager, compiled, triton"
    ):
        load_norm("nosuch")


OWN_NORM = """
import torch.nn.functional as F
from kernels import Norm

def rms_norm(x, weight=None, eps=1e-6, *, out_dtype=None):
    return F.rms_norm(x, x.shape[-1:], weight, eps).to(out_dtype or x.dtype)

def add_rms_norm(x, residual, weight=None, eps=1e-6, *, out_dtype=None):
    h = x + residual
    return rms_norm(h, weight, eps, out_dtype=out_dtype), h

def make():
    return Norm("mine", rms_norm, add_rms_norm)

norm = make()
number = 3

def broken():
    raise RuntimeError("no luck today")
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_norm_module.py").write_text(OWN_NORM)
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_norm_module"
    sys.modules.pop("own_norm_module", None)


@pytest.mark.parametrize("attribute", ["make", "norm"])
def test_a_norm_of_ones_own(own_module, attribute, device):
    module = RMSNorm(64, norm=f"{own_module}:{attribute}").to(device)
    x = torch.randn(3, 64, device=device)
    y, h = module(x, x)
    torch.testing.assert_close(y, rms_norm(2 * x, eps=1e-6))
    assert torch.equal(h, 2 * x)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_module:norm", "'no_such_module:norm' cannot be loaded: .* No module named"),
        ("own_norm_module:nothing", "cannot be loaded: .* no attribute 'nothing'"),
        ("own_norm_module:broken", "cannot be loaded: RuntimeError: no luck today"),
        ("..own_norm_module:norm", "is not of the form package.module:name"),
        (":", "is not of the form package.module:name"),
        (None, "norm must be a name, but it is a NoneType"),
        ("own_norm_module:number", "must name a kernels.Norm .* but it names a int"),
    ],
)
def test_what_is_not_a_norm(own_module, target, message):
    with pytest.raises(ValueError, match=message):
        load_norm(target)


@pytest.mark.parametrize("name", ["eager", "compiled", "triton"])
def test_module_output_has_the_autocast_dtype_and_the_stream_keeps_its_own(name, device):
    module = RMSNorm(64, norm=name).to(device)
    assert module.weight.dtype == torch.float32
    branch = torch.randn(2, 3, 64, device=device, dtype=torch.bfloat16)
    stream = torch.randn(2, 3, 64, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y, h = module(branch, stream)
    assert (y.dtype, h.dtype) == (torch.bfloat16, torch.float32)
    y, h = module(branch, stream.bfloat16())
    assert (y.dtype, h.dtype) == (torch.float32, torch.bfloat16)
    assert module(branch).dtype == torch.float32


@pytest.mark.parametrize("dim", [0, 2.0, True])
def test_module_refuses_what_is_no_dimension(dim):
    with pytest.raises(ValueError, match=f"dim must be .* of at least 1, but it is {dim}"):
        RMSNorm(dim)


@pytest.mark.parametrize("eps", [-1.0, float("nan"), 1e39, None])
def test_module_refuses_what_is_no_eps(eps):
    with pytest.raises(ValueError, match="eps must be a Python number"):
        RMSNorm(8, eps)


def test_module_refuses_what_is_no_tensor_with_data():
    with pytest.raises(ValueError, match="x must be a tensor, but it is a NoneType"):
        RMSNorm(8)(None)
    with pytest.raises(ValueError, match="x must be a tensor with data"):
        RMSNorm(8).to("meta")(torch.ones(2, 8, device="meta"))

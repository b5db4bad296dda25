"""norm_recompute: the same gradients to the last bit, and no norm's output is kept for them."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from kernels import RMSNorm
from model import GPT, GPTConfig, LitGPT

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 32, "context": 16, "vocab_size": 64}
NORM_OUTPUTS = 2 * SHAPE["n_layer"] + 1  # all of which are read by a matrix


def gpt(device: torch.device, **changes) -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**SHAPE, **changes})).to(device)
    with torch.no_grad():
        for parameter in model.parameters():  # norm weights of 1 would hide a missing one
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def batch(device: torch.device) -> torch.Tensor:
    random = torch.Generator().manual_seed(1)
    return torch.randint(64, (3, 17), generator=random).to(device)


def loss(model: GPT, ids: torch.Tensor, bfloat16: bool) -> torch.Tensor:
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=bfloat16):
        return model(ids[:, :-1], ids[:, 1:])


@pytest.mark.parametrize(
    ("stream_dtype", "bfloat16"),
    [("float32", False), ("float32", True), ("bfloat16", True)],
    ids=["float32", "bf16-mixed", "bf16-mixed with a bfloat16 stream"],
)
@pytest.mark.parametrize("norm", ["eager", "triton", "aten"])
def test_gradients_are_the_same_to_the_last_bit(norm, stream_dtype, bfloat16, device):
    options = {"norm": norm, "stream_dtype": stream_dtype, "qk_norm": True}
    ids, found = batch(device), []
    for norm_recompute in (False, True):
        model = gpt(device, **options, norm_recompute=norm_recompute)
        value = loss(model, ids, bfloat16)
        value.backward()
        found.append([value, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def kept_outputs(model: GPT, ids: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """The loss, and the bytes of every output of a norm that its backward still needs."""
    outputs = []

    def watch(module, args, output) -> None:
        storage = (output[0] if isinstance(output, tuple) else output).untyped_storage()
        outputs.append((StorageWeakRef(storage), storage.nbytes()))

    handles = [m.register_forward_hook(watch) for m in model.modules() if isinstance(m, RMSNorm)]
    value = loss(model, ids, bfloat16=True)
    for handle in handles:
        handle.remove()
    gc.collect()  # Triton's interpreter leaves its last launch in a cycle
    return value, [size for reference, size in outputs if not reference.expired()]


@pytest.mark.parametrize("norm", ["eager", "triton"])
def test_one_activation_less_is_kept_for_each_norm(norm, device):
    ids = batch(device)
    activation = ids[:, 1:].numel() * SHAPE["n_embd"] * torch.bfloat16.itemsize
    value, kept = kept_outputs(gpt(device, norm=norm), ids)
    assert kept == [activation] * NORM_OUTPUTS
    value, kept = kept_outputs(gpt(device, norm=norm, norm_recompute=True), ids)
    assert kept == []
    value.backward()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU to count its memory")
def test_the_memory_of_a_gpu_is_less_by_that():
    device = torch.device("cuda")
    ids, allocated = batch(device).repeat(100, 1), []
    for norm_recompute in (False, True):
        model = gpt(device, norm="triton", n_embd=256, norm_recompute=norm_recompute)
        loss(model, ids, bfloat16=True).backward()  # what is allocated once, now is
        before = torch.cuda.memory_allocated()
        value = loss(model, ids, bfloat16=True)
        allocated.append(torch.cuda.memory_allocated() - before)
        del value
    activation = ids[:, 1:].numel() * 256 * torch.bfloat16.itemsize
    # An allocation is rounded up to 512 bytes.
    assert allocated[0] - allocated[1] == pytest.approx(NORM_OUTPUTS * activation, abs=512 * 40)


def test_a_graph_that_never_runs_backward_goes(device):
    """As after a forward pass for which there was too little memory."""
    model, ids = gpt(device, norm_recompute=True), batch(device)

    def tensors_after_a_forward_pass() -> int:
        loss(model, ids, True)
        gc.collect()
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    first = tensors_after_a_forward_pass()
    assert tensors_after_a_forward_pass() <= first  # other tests leave some that go late


def test_backward_twice_and_validation(device):
    """What was made again is made again once more; where there is no backward, nothing is kept."""
    model, ids = gpt(device, norm="triton", norm_recompute=True), batch(device)
    value = loss(model, ids, bfloat16=False)
    first = torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(value, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with torch.no_grad():
        assert torch.equal(loss(model, ids, bfloat16=False), value)


def test_a_norm_that_promises_no_exact_add_refuses_it():
    """Inductor's norm on a GPU is that of the sum before it is rounded to the stream's dtype."""
    with pytest.raises(ValueError, match="norm_recompute is not for norm 'compiled'"):
        GPT(GPTConfig(**SHAPE, norm="compiled", norm_recompute=True))


def test_a_compiled_model_refuses_it():
    with pytest.raises(ValueError, match="norm_recompute is for a model that is not compiled"):
        LitGPT(**SHAPE, norm_recompute=True, compile=True)

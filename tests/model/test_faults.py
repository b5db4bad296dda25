"""Values that are not finite are found where they first appear; what to do about memory."""

import pytest
import torch
from lightning import Callback
from torch.optim import AdamW
from torch.utils.data import DataLoader

from model import LitGPT
from model.faults import first_not_finite, memory_advice, out_of_memory
from tests.running import quiet_trainer

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 32, "context": 16, "vocab_size": 64}


def lit(**changes) -> LitGPT:
    torch.manual_seed(0)
    return LitGPT(**{**SHAPE, "norm": "eager", **changes})


def batches(number: int) -> torch.Tensor:
    return torch.randint(64, (number, 2, 17), generator=torch.Generator().manual_seed(1))


def _weight(model):
    with torch.no_grad():
        model.gpt.blocks[1].attn.out.weight[3, 4] = float("nan")


def _output(model):
    model.gpt.blocks[1].mlp.up.register_forward_hook(lambda m, i, output: output * float("inf"))


def _norm_with_two_outputs(model):
    model.gpt.blocks[0].norm2.register_forward_hook(lambda m, i, o: (o[0], o[1] + float("nan")))


def _gradient_of_a_weight(model):
    model.gpt.blocks[0].attn.qkv.weight.register_hook(lambda gradient: gradient * float("nan"))


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy / 0


def _backward_of_a_module(model):
    mlp = model.gpt.blocks[1].mlp
    up = mlp.up.forward
    mlp.up.forward = lambda x: _NoGradient.apply(up(x))


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (_weight, "the weight blocks.1.attn.out.weight"),
        (_output, "the output of blocks.1.mlp.up"),
        (_norm_with_two_outputs, "the output of blocks.0.norm2"),
        (_gradient_of_a_weight, "the gradient of blocks.0.attn.qkv.weight"),
        (_backward_of_a_module, "the gradient of blocks.1.mlp.up.weight"),
        (lambda model: None, None),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_the_first_tensor_that_is_not_finite(spoil, name, compiled):
    model = lit(compile=compiled)
    spoil(model)
    assert first_not_finite(model, batches(1)[0]) == name
    assert all(p.grad is None for p in model.parameters())


class _Spoil(Callback):
    """Makes one gradient infinite in the third step, and keeps the weights after every step."""

    def __init__(self) -> None:
        self.weights = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        if trainer.global_step == 2:
            pl_module.gpt.blocks[0].mlp.up.weight.grad[0, 0] = float("inf")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.weights.append([p.detach().clone() for p in pl_module.parameters()])


@pytest.mark.parametrize("fused", [False, True])
def test_no_weight_changes_from_a_gradient_on_that_is_not_finite(fused, tmp_path, monkeypatch):
    """With the fused optimizer too, which GPUs get and whose steps nobody waits for."""
    model, spoil = lit(), _Spoil()
    plain = LitGPT.optimizer
    monkeypatch.setattr(
        LitGPT, "optimizer", lambda self: AdamW(plain(self).param_groups, fused=fused)
    )
    trainer = quiet_trainer(
        max_steps=5,
        callbacks=[spoil],
        default_root_dir=tmp_path,
    )
    trainer.fit(model, DataLoader(batches(5), batch_size=None))
    before, good, *later = spoil.weights
    assert not all(torch.equal(a, b) for a, b in zip(before, good, strict=True))
    assert len(later) == 3
    for weights in later:
        assert all(torch.equal(a, b) for a, b in zip(good, weights, strict=True))


def test_out_of_memory_is_recognised():
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**60)
    assert out_of_memory(error.value)
    assert not out_of_memory(RuntimeError("something else"))


def test_memory_advice_keeps_the_step():
    happened, advice = memory_advice(3, 9, 2, 8, 2**30, 20 * 2**30).args
    assert "The GPU's memory ran out in step 3, with 20.00 GiB allocated at the peak" in happened
    assert "16.00 GiB for any batch" in happened
    assert advice.startswith(
        "--data.batch_size 3 --trainer.accumulate_grad_batches 6 --trainer.val_check_interval 24"
    )
    assert "val_check_interval" not in memory_advice(1, 4, 1, None, 10, None).args[1]
    assert "Not even one sequence fits" in memory_advice(1, 1, 1, 8, 10, None).args[1]

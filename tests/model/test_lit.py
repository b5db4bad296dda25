"""Training: the optimizer's groups, the schedule, clipping in every precision, equal losses."""

import itertools
import math

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.optim import AdamW
from torch.utils.data import DataLoader

from model import GPT, GPTConfig, LitGPT
from model.lit import clip_gradients, gathered_together, lr_factor
from tests.running import quiet_trainer

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 32, "context": 16, "vocab_size": 64}


def lit(**changes) -> LitGPT:
    torch.manual_seed(0)
    return LitGPT(**{**SHAPE, "norm": "eager", **changes})


def batches(number: int, size: int = 4) -> torch.Tensor:
    """Sequences that count up by 3 from a random start, which is something to learn."""
    start = torch.randint(64, (number, size, 1), generator=torch.Generator().manual_seed(1))
    return (start + 3 * torch.arange(17)) % 64


def test_weight_decay_is_for_matrices_only():
    model = lit(qk_norm=True, weight_decay=0.3)
    decayed, rest = model.optimizer().param_groups
    names = {id(p): name for name, p in model.gpt.named_parameters()}
    assert decayed["weight_decay"] == 0.3
    assert rest["weight_decay"] == 0.0
    assert all("norm" in names[id(p)] for p in rest["params"])
    assert not any("norm" in names[id(p)] for p in decayed["params"])
    assert len(decayed["params"]) + len(rest["params"]) == len(names)


def test_learning_rate_rises_linearly_then_falls_along_a_cosine():
    factors = [lr_factor(step, 4, 20, 0.1) for step in range(20)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[11] == pytest.approx(0.1 + 0.9 * 0.5)  # half of the 16 steps of the cosine
    assert factors[19] == pytest.approx(0.1)
    assert all(a > b for a, b in itertools.pairwise(factors[3:]))
    assert lr_factor(0, 0, 10, 0.1) <= 1.0  # no warm-up
    assert lr_factor(25, 4, 20, 0.1) == pytest.approx(0.1)  # beyond the end


@pytest.mark.parametrize("max_norm", [0.01, 1e6, 0.0])
def test_clipping_is_that_of_torch(max_norm):
    ours, theirs = lit(), lit()
    for model in (ours, theirs):
        model.loss(batches(1)[0]).backward()
    norm = clip_gradients(ours.gpt.parameters(), max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs.gpt.parameters(), max_norm or math.inf)
    assert norm == expected
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


class Fused(LitGPT):
    """With the fused optimizer also on a CPU, where it exists but is not what we would choose."""

    fused = True

    def optimizer(self) -> AdamW:
        keys = ("params", "weight_decay")
        groups = [{key: g[key] for key in keys} for g in super().optimizer().param_groups]
        return AdamW(groups, lr=self.hparams.lr, betas=self.hparams.betas, fused=self.fused)


@pytest.mark.parametrize(
    ("millions", "units"),
    [
        ([7] * 12, [3, 3, 3, 3]),  # GPT-2 small
        ([13] * 5, [2, 2, 1]),
        ([30] * 3, [1, 1, 1]),
        ([1] * 4, [2, 2]),
        ([1], [1]),
    ],
)
def test_small_blocks_are_gathered_together_in_order(millions, units):
    with torch.device("meta"):
        blocks = [torch.nn.Linear(1_000_000, size, bias=False) for size in millions]
    found = list(gathered_together(blocks))
    assert [len(unit) for unit in found] == units
    assert [block for unit in found for block in unit] == blocks


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_clipping_in_the_trainer_is_that_of_a_plain_loop(precision, fused, tmp_path):
    """Unscaled once, clipped, stepped; the clip of 0.05 is far below the gradient's norm."""
    data, clip, scale = batches(3), 0.05, 2.0**10
    torch.manual_seed(0)
    model = Fused(**SHAPE, norm="eager", grad_clip=clip, lr=1e-2, warmup_steps=0, min_lr_ratio=1.0)
    model.fused = fused
    reference = GPT(model.gpt.config)
    reference.load_state_dict(model.gpt.state_dict())

    scaler = torch.amp.GradScaler("cpu", init_scale=scale) if precision == "16-mixed" else None
    plugins = [MixedPrecision(precision, "cpu", scaler)] if precision != "32-true" else None
    trainer = quiet_trainer(
        max_steps=3,
        plugins=plugins,
        default_root_dir=tmp_path,
    )
    trainer.fit(model, DataLoader(data, batch_size=None))
    assert bool(trainer.optimizers[0].defaults["fused"]) == fused

    optimizer = AdamW(reference.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer.param_groups[0]["params"] = [p for p in reference.parameters() if p.dim() == 2]
    norms = [p for p in reference.parameters() if p.dim() == 1]
    optimizer.add_param_group({"params": norms, "weight_decay": 0.0})
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
    scale = scale if scaler else 1.0
    for batch in data:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None, cache_enabled=False):
            loss = reference(batch[:, :-1], batch[:, 1:])
        (scale * loss).backward()
        for p in reference.parameters():
            p.grad /= scale
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), clip)
        optimizer.step()

    assert norm > 2 * clip
    # The same sums in the same order; only AdamW's own arithmetic is fused, a few eps a step.
    torch.testing.assert_close(model.grad_norm, norm, rtol=1e-4, atol=0)
    for p, q in zip(model.gpt.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def first_losses(norm: str, device: torch.device, steps: int = 20, **changes) -> list[float]:
    model = lit(norm=norm, lr=1e-2, **changes).to(device)
    optimizer = model.optimizer()
    losses = []
    for batch in batches(steps).to(device):
        loss = model.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        clip_gradients(model.gpt.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


# In a step, some 10 sums of up to 128 float32 terms depend on each other, each off by a random walk
# of sqrt(128) roundings; what 20 steps leave in the weights adds up, at worst linearly.
LOSS_TOLERANCE = 20 * 10 * math.sqrt(128) * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("norm", ["compiled", "triton"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_first_20_losses_do_not_depend_on_the_norm(norm, qk_norm, device):
    expected = first_losses("eager", device, qk_norm=qk_norm)
    assert expected[-1] < expected[0] - 1
    got = first_losses(norm, device, qk_norm=qk_norm)
    assert got == pytest.approx(expected, rel=0, abs=LOSS_TOLERANCE)


def test_that_tolerance_sees_a_wrong_epsilon(device):
    right = first_losses("eager", device)
    wrong = first_losses("eager", device, norm_eps=1e-5)
    assert max(abs(a - b) for a, b in zip(right, wrong, strict=True)) > 10 * LOSS_TOLERANCE


def test_a_compiled_model_keeps_its_names_and_its_loss():
    plain, compiled = lit(), lit(compile=True)
    assert plain.state_dict().keys() == compiled.state_dict().keys()
    batch = batches(1)[0]
    expected = plain.loss(batch)
    assert compiled.loss(batch).item() == pytest.approx(expected.item(), abs=LOSS_TOLERANCE)


def test_a_checkpoint_alone_brings_the_model_back(tmp_path):
    model = lit(n_embd=16)
    trainer = quiet_trainer()
    trainer.strategy.connect(model)
    trainer.save_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    loaded = LitGPT.load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    assert loaded.gpt.config == GPTConfig(**{**SHAPE, "n_embd": 16}, norm="eager")
    batch = batches(1)[0]
    assert torch.equal(loaded.loss(batch), model.loss(batch))


def test_validation_does_not_leave_out_a_batch_whose_loss_is_not_finite(monkeypatch):
    model, (good, bad) = lit(), batches(2)
    plain = model.loss
    monkeypatch.setattr(
        model, "loss", lambda batch: plain(batch) * (math.nan if batch is bad else 1)
    )
    trainer = quiet_trainer()
    trainer.validate(model, DataLoader([good, bad], batch_size=None), verbose=False)
    assert not trainer.callback_metrics["val_loss"].isfinite()


def test_validation_weighs_batches_by_their_tokens(tmp_path):
    """A last batch that is smaller counts for less."""
    model = lit()
    small, large = batches(1, 1)[0], batches(1, 6)[0]
    trainer = quiet_trainer()
    trainer.validate(model, DataLoader([small, large], batch_size=None), verbose=False)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    both = torch.cat([small, large])
    expected = model.loss(both).item()
    assert metrics["val_loss"] == pytest.approx(expected, rel=1e-6)
    assert metrics["val_perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)

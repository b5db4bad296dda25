"""What the arms of a comparison share."""

import dataclasses
import sys

import pytest
import torch
from lightning import seed_everything

from compare.setup import Step, batches, from_config, make_model, norm_problems
from kernels import Norm, reference
from model.lit import LitGPT
from tests.model.test_lit import LOSS_TOLERANCE
from tests.running import quiet_trainer


def test_every_norm_gets_the_same_weights(settings):
    models = [make_model(settings, norm, seed=3).gpt.state_dict() for norm in ("eager", "aten")]
    torch.rand(1)  # the global generator has no say
    models.append(make_model(settings, "eager", seed=3).gpt.state_dict())
    other = make_model(settings, "eager", seed=4).gpt.state_dict()
    for name, weight in models[0].items():
        assert all(torch.equal(weight, model[name]) for model in models)
    assert not torch.equal(models[0]["embedding.weight"], other["embedding.weight"])


def test_making_a_model_leaves_the_global_generator_alone(settings):
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    make_model(settings, "eager", seed=3)
    assert torch.equal(torch.rand(1), expected)


def test_the_step_is_the_trainers(settings, tmp_path):
    """Five steps end in the weights that the Trainer comes to, bit for bit."""
    model = {**settings.model, "warmup_steps": 0, "min_lr_ratio": 1.0}  # a constant lr
    settings = dataclasses.replace(settings, model=model)
    seed_everything(5, verbose=False)
    trained = LitGPT(**model, norm="eager")
    trainer = quiet_trainer(
        max_steps=5,
        default_root_dir=tmp_path,
        limit_val_batches=0,
    )
    trainer.fit(trained, settings.data)

    lit = make_model(settings, "eager", seed=5)
    step = Step(settings, lit, lit.optimizer())
    for batch in batches(settings, 5, settings.data.seed):
        step(batch)
    for name, weight in lit.gpt.state_dict().items():
        assert torch.equal(weight, trained.gpt.state_dict()[name]), name


def test_batches_are_the_trainings_in_the_order_of_a_seed(settings):
    found = batches(settings, 3, settings.data.seed)
    assert torch.equal(found[2], settings.data.train_batch(2))
    other = batches(settings, 3, seed=7)
    assert not torch.equal(other[0], found[0])
    assert torch.equal(other[0], batches(settings, 1, seed=7)[0])


def test_precision_decides_what_the_norms_write(settings):
    mixed = dataclasses.replace(settings, precision="bf16-mixed")
    seen = {}
    for name, run in (("32-true", settings), ("bf16-mixed", mixed)):
        lit = make_model(run, "eager", seed=3)
        lit.gpt.final_norm.register_forward_hook(
            lambda module, inputs, output, name=name: seen.update({name: output[0].dtype})
        )
        Step(run, lit, lit.optimizer())(batches(run, 1, 0)[0])
    assert seen == {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}


def test_another_scope_is_compiled(settings):
    compiled = settings.with_scope("compiled")
    assert compiled.config["scope"] == from_config(compiled.config).scope == "compiled"
    assert make_model(compiled, "eager", 0).gpt._compiled_call_impl is not None
    assert make_model(settings, "eager", 0).gpt._compiled_call_impl is None
    assert make_model(settings.with_scope("graphs"), "eager", 0).cuda_graphs
    assert not make_model(compiled, "eager", 0).cuda_graphs


def losses_in_turn(settings, norms: list[str]) -> list[torch.Tensor]:
    """Four steps of a model of each norm, one after the other in every step: (4, norms)."""
    models = [make_model(settings, norm, seed=3) for norm in norms]
    steps = [Step(settings, lit, lit.optimizer()) for lit in models]
    return torch.tensor([[step(batch) for step in steps] for batch in batches(settings, 4, 0)])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA GPU")
def test_models_with_cuda_graphs_take_turns(settings):
    """They share a memory pool, and the first and the last one the compiled code."""
    norms = ["eager", "compiled", "triton", "eager"]
    on_gpu = dataclasses.replace(settings, device=torch.device("cuda"))
    expected = losses_in_turn(on_gpu.with_scope("compiled"), norms)
    difference = losses_in_turn(on_gpu.with_scope("graphs"), norms) - expected
    assert difference.abs().max() <= LOSS_TOLERANCE


def refuses(*arguments, **options):
    raise ValueError("norm 'refuses' wants a GPU")


def crashes(*arguments, **options):
    raise TypeError("no such argument")


def widens(x, residual, *arguments, **options):
    y, h = reference.add_rms_norm(x, residual, *arguments, **options)
    return y, h.double()


refusing = Norm("refuses", refuses, refuses)
widening = Norm("widens", reference.rms_norm, widens)
crashing = Norm("crashes", reference.rms_norm, crashes)


@pytest.fixture
def own_norms(monkeypatch):
    """This module under a name that a norm's target can have."""
    monkeypatch.setitem(sys.modules, "own_norms", sys.modules[__name__])


def test_norms_that_cannot_do_it_are_named(settings, own_norms):
    wanted = ("eager", "own_norms:refusing", "aten", "own_norms:crashing")
    first, second = norm_problems(dataclasses.replace(settings, norms=wanted), lambda *_: None)
    assert "own_norms:refusing' fails in a first call: ValueError: norm 'refuses' wants" in first
    assert "own_norms:crashing' fails in a first call: TypeError: no such argument" in second


def test_a_stream_of_another_dtype_is_refused(settings, own_norms):
    wanted = dataclasses.replace(settings, norms=("eager", "own_norms:widening"))
    [problem] = norm_problems(wanted, lambda *_: None)
    assert "own_norms:widening' has to return y in out_dtype and h in residual's dtype" in problem

"""The compiled model: one graph, compiled once for training and once for validation."""

from functools import partial

import pytest
import torch
from lightning import Callback
from torch import distributed
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from kernels import NORMS
from model import GPT, LitGPT
from tests.model.test_lit import LOSS_TOLERANCE, SHAPE, batches, lit
from tests.running import quiet_trainer

ON_GPU = torch.cuda.is_available()
# On a CPU Inductor's C++ takes half a minute; graphs and guards are there before it.
BACKEND = "inductor" if ON_GPU else "aot_eager"
PEERS = [name for name, entry in NORMS.items() if entry.package]


def train_and_validate(model: LitGPT, batch: torch.Tensor, dynamic: bool) -> None:
    """A forward and backward pass, and a validation, in bfloat16; `dynamic`: of any batch size."""
    tokens, targets = batch[:, :-1], batch[:, 1:]
    for tensor in (tokens, targets) if dynamic else ():
        torch._dynamo.mark_dynamic(tensor, 0)
    autocast = torch.autocast(batch.device.type, torch.bfloat16)
    with autocast:
        loss = model.gpt(tokens, targets)
    loss.backward()
    model.eval()
    with torch.no_grad(), autocast:
        model.gpt(tokens, targets)
    model.train()


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("norm", [name for name in NORMS if name not in PEERS])
def test_one_graph_for_all_batch_sizes_of_training_and_one_of_validation(norm, dynamic, device):
    """If torch.compile knows that sizes differ, else two: it takes the first for the only one."""
    torch.compiler.reset()
    counters.clear()
    model = LitGPT(
        **{**SHAPE, "n_layer": 1}, norm=norm, stream_dtype="bfloat16", qk_norm=norm == "triton"
    ).to(device)
    model.gpt.compile(fullgraph=True, backend=BACKEND)
    for size in (4, 6, 3, 12, 4):
        train_and_validate(model, batches(1, size)[0].to(device), dynamic)
    assert counters["stats"]["unique_graphs"] == (2 if dynamic else 4)
    assert not counters["graph_break"]


@pytest.mark.parametrize("norm", PEERS)
def test_one_graph_of_training_and_one_of_validation_with_a_peer(norm, device):
    """Of one batch size: how Liger launches its kernels depends on the number of rows."""
    if not (NORMS[norm].installed and ON_GPU):
        pytest.skip(f"{norm} needs its package and a GPU")
    torch.compiler.reset()
    counters.clear()
    model = LitGPT(**{**SHAPE, "n_layer": 1}, norm=norm, stream_dtype="bfloat16").to(device)
    model.gpt.compile(fullgraph=True, backend=BACKEND)
    for _ in range(3):
        train_and_validate(model, batches(1, 4)[0].to(device), dynamic=False)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


class Log(Callback):
    """The losses of all batches, and whether there were gradients to which theirs was added."""

    def __init__(self) -> None:
        self.losses, self.added = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.losses.append(outputs["loss"])

    def on_before_backward(self, trainer, pl_module, loss) -> None:
        self.added.append(all(p.grad is not None for p in pl_module.parameters()))


def train(compile: bool | str, micro_batches: int, norm: str = "eager") -> Log:
    """Four steps with a validation after each."""
    torch.manual_seed(0)
    model, log = LitGPT(**SHAPE, norm=norm, lr=1e-2, warmup_steps=0, compile=compile), Log()
    trainer = quiet_trainer(
        accelerator="gpu" if ON_GPU else "cpu",
        devices=1,
        max_steps=4,
        accumulate_grad_batches=micro_batches,
        val_check_interval=micro_batches,
        callbacks=[log],
    )
    data = DataLoader(batches(4 * micro_batches), batch_size=None)
    trainer.fit(model, data, DataLoader(batches(2), batch_size=None))
    return log


def test_micro_batches_add_to_gradients_that_no_graph_owns(monkeypatch):
    """Also without a compiler, which on a CPU records no graphs; the losses are the same."""
    monkeypatch.setattr(GPT, "compile", lambda *_, **__: None)
    expected, got = train(True, 2), train("reduce-overhead", 2)
    assert torch.equal(torch.stack(got.losses), torch.stack(expected.losses))
    assert got.added == [True] * 8
    assert train("reduce-overhead", 1).added == [False] * 4  # nothing to add to, no time for it


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs need a CUDA GPU")
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("norm", ["compiled", "triton"])
def test_cuda_graphs_train_as_the_model_without_them(norm, micro_batches):
    counters.clear()
    torch._dynamo.reset()  # other tests' models count towards the limit of recompilations
    expected, got = train(True, micro_batches, norm), train("reduce-overhead", micro_batches, norm)
    assert not counters["inductor"]["cudagraph_skips"]
    difference = torch.stack(got.losses) - torch.stack(expected.losses)
    assert difference.abs().max() <= LOSS_TOLERANCE


@pytest.fixture
def mesh():
    """One device that shares the parameters with nobody."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("data_parallel",))
    distributed.destroy_process_group()


def test_of_a_sharded_model_blocks_and_output_are_compiled(mesh, monkeypatch):
    """The graph of the whole would break where shards are gathered."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(LitGPT, "compile_options", {"fullgraph": True})
    torch.compiler.reset()
    counters.clear()
    plain, sharded = lit(), lit(compile=True)
    sharded.shard(mesh)
    batch = batches(1)[0]
    losses = [model.loss(batch) for model in (plain, sharded)]
    assert (losses[1] - losses[0]).abs() <= LOSS_TOLERANCE
    losses[1].backward()
    assert counters["stats"]["unique_graphs"] == 3  # the first block has no branch to add
    assert not counters["graph_break"]

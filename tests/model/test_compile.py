"""The compiled model: one graph, compiled once for training and once for validation."""

import pytest
import torch
from torch._dynamo.utils import counters

from kernels import NORMS
from model import LitGPT
from tests.model.test_lit import SHAPE, batches

ON_GPU = torch.cuda.is_available()
# On a CPU Inductor's C++ takes half a minute; graphs and guards are there before it.
BACKEND = "inductor" if ON_GPU else "aot_eager"
HERE = [
    name for name, entry in NORMS.items() if entry.installed and (entry.package is None or ON_GPU)
]


def train_and_validate(model: LitGPT, batch: torch.Tensor) -> None:
    """A forward and backward pass, and a validation, in bfloat16."""
    autocast = torch.autocast(batch.device.type, torch.bfloat16)
    with autocast:
        loss = model.loss(batch)
    loss.backward()
    model.eval()
    with torch.no_grad(), autocast:
        model.loss(batch)
    model.train()


@pytest.mark.parametrize("norm", HERE)
def test_one_graph_for_all_batch_sizes_of_training_and_one_of_validation(norm, device):
    """The second batch size makes that dimension a variable; after that nothing is compiled."""
    torch.compiler.reset()
    counters.clear()
    model = LitGPT(
        **{**SHAPE, "n_layer": 1}, norm=norm, stream_dtype="bfloat16", qk_norm=norm == "triton"
    ).to(device)
    model.gpt.compile(fullgraph=True, backend=BACKEND)
    for size in (4, 6):
        train_and_validate(model, batches(1, size)[0].to(device))
    assert counters["stats"]["unique_graphs"] == 4
    for size in (6, 3, 12, 4):
        train_and_validate(model, batches(1, size)[0].to(device))
    assert counters["stats"]["unique_graphs"] == 4
    assert not counters["graph_break"]

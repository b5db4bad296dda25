"""Blocks and batches: what an epoch covers, purity, ranks, and the fixed validation set."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import DataError, TextDataModule
from data.batches import OrderedBlocks, ShuffledBlocks, ValidationBatches


@pytest.fixture
def text(tmp_path):
    """A file of 4000 bytes in which every four neighbouring bytes are unlike any other four."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i:04d}" for i in range(1000)))
    return path


@given(context=st.integers(1, 9), extra=st.integers(1, 60), epoch=st.integers(0, 3))
def test_an_epoch_takes_each_target_at_most_once_and_nearly_all(context, extra, epoch):
    tokens = np.arange(context + extra)
    blocks = ShuffledBlocks(tokens, context, seed=1)
    taken = [blocks[epoch * blocks.per_epoch + i] for i in range(blocks.per_epoch)]
    for block in taken:
        assert block.tolist() == list(range(block[0], block[0] + context + 1))
    targets = np.concatenate([block[1:] for block in taken])
    assert len(set(targets.tolist())) == len(targets)
    # Left out: the first token, the offset (below one context), and less than a block at the end.
    assert len(tokens) - len(targets) <= 2 * context


def test_epochs_differ_in_order_and_offset_and_seeds_too():
    tokens = np.arange(10_000)
    starts = {}
    for seed in (1, 2):
        blocks = ShuffledBlocks(tokens, 10, seed)
        first = [[blocks[e * blocks.per_epoch + i][0] for i in range(20)] for e in range(8)]
        starts[seed] = first
        assert len({tuple(row) for row in first}) == 8
        assert len({row[0] % 10 for row in first}) > 1
        assert sorted(first[0]) != first[0]
    assert starts[1] != starts[2]


def test_a_block_does_not_depend_on_what_was_read_before():
    tokens = np.arange(100)
    forward = ShuffledBlocks(tokens, 7, 3)
    backward = ShuffledBlocks(tokens, 7, 3)
    indices = range(5 * forward.per_epoch)
    read = {i: backward[i].tolist() for i in reversed(indices)}
    assert [forward[i].tolist() for i in indices] == [read[i] for i in indices]


def test_the_shortest_split_is_one_block_for_ever():
    blocks = ShuffledBlocks(np.arange(6), context=5, seed=0)
    assert [blocks[i].tolist() for i in (0, 1, 99)] == [[0, 1, 2, 3, 4, 5]] * 3


def test_the_global_batch_is_the_same_for_any_number_of_ranks(text, prepare):
    def global_batch(step, world_size):
        module = prepare(text, batch_size=12 // world_size, context=8)
        return [
            row
            for rank in range(world_size)
            for row in module.train_batch(step, rank, world_size).tolist()
        ]

    for step in (0, 1, 50, 51):
        expected = global_batch(step, 1)
        assert len({tuple(row) for row in expected}) == 12
        assert all(global_batch(step, size) == expected for size in (2, 3, 4))


def test_batches_of_neighbouring_steps_share_no_block_within_an_epoch(text, prepare):
    module = prepare(text, context=8, batch_size=4)
    rows = [tuple(row) for step in range(50) for row in module.train_batch(step).tolist()]
    assert len(set(rows)) == 200


def test_validation_is_the_first_blocks_in_order_every_time(text, prepare):
    module = prepare(text, context=8, batch_size=3, val_batches=4)
    tokens = module.caches[0].validation.tolist()
    expected = [tokens[i * 8 : i * 8 + 9] for i in range(12)]
    for _ in range(2):
        loader = module.val_dataloader()
        assert len(loader) == 4
        assert [row for batch in loader for row in batch.tolist()] == expected


@given(
    blocks=st.integers(1, 40),
    batches=st.integers(1, 5),
    batch_size=st.integers(1, 7),
    world_size=st.integers(1, 4),
)
def test_ranks_share_out_the_first_validation_blocks_evenly(
    blocks, batches, batch_size, world_size
):
    tokens = OrderedBlocks(np.arange(blocks + 1), context=1)
    ranks = [
        [batch[:, 0].tolist() for batch in loader]
        for loader in (
            ValidationBatches(tokens, batches, batch_size, rank, world_size)
            for rank in range(world_size)
        )
    ]
    shapes = [[len(batch) for batch in rank] for rank in ranks]
    assert all(shape == shapes[0] for shape in shapes)
    assert len(set(shapes[0])) <= 1
    seen = sorted(i for rank in ranks for batch in rank for i in batch)
    assert seen == list(range(len(seen)))
    full = batches * batch_size * world_size
    if blocks >= full:
        assert len(seen) == full
    else:
        assert blocks - len(seen) < batch_size * world_size
        assert seen or blocks < world_size


def test_a_batch_is_int64_with_one_token_more_than_the_context(text, prepare):
    module = prepare(text, context=8, batch_size=3)
    for batch in (module.train_batch(0), next(iter(module.train_dataloader()))):
        assert (batch.shape, str(batch.dtype)) == ((3, 9), "torch.int64")


@pytest.mark.parametrize(("context", "split"), [(250, "validation"), (5000, "train")])
def test_a_context_longer_than_a_split_names_both(text, prepare, context, split):
    with pytest.raises(DataError, match=rf"{split} split has \d+ tokens; a context of {context} "):
        prepare(text, context=context)


def test_a_batch_larger_than_the_data_is_refused_with_both_numbers(text, prepare):
    blocks = prepare(text, context=8, batch_size=2)._train_blocks.per_epoch
    prepare(text, context=8, batch_size=blocks)
    message = rf"batch_size is {blocks + 1}, but the train split has {blocks} blocks of 8 tokens"
    with pytest.raises(DataError, match=message):
        prepare(text, context=8, batch_size=blocks + 1)


def test_a_context_that_just_fits_is_accepted(text, prepare):
    tokens = len(prepare(text).caches[0].validation)
    module = prepare(text, context=tokens - 1)
    assert [batch.shape for batch in module.val_dataloader()] == [(1, tokens)]


def test_all_wrong_arguments_are_reported_at_once():
    with pytest.raises(DataError) as error:
        TextDataModule("nowhere", "gpt9", 0, 0, 0, -1, num_proc=0)
    lines = str(error.value).splitlines()
    starts = ["context is 0", "batch_size is 0", "val_batches is 0", "seed is -1", "num_proc is 0"]
    starts += ["There is no source 'nowhere'", "There is no tokenizer 'gpt9'"]
    assert len(lines) == len(starts)
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True))


def test_the_vocabulary_is_known_before_any_data_is_read():
    assert TextDataModule().vocab_size == 50257
    assert TextDataModule(tokenizer="bytes").vocab_size == 257

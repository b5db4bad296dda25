"""Several sources with weights: exact shares, each source in its own order, and what is refused."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import DataError, TextDataModule
from data.batches import MixedBlocks, OrderedBlocks, ShuffledBlocks


def ordered(lengths):
    """Sources of so many blocks; block i of source s is [10^6 s + i, 10^6 s + i + 1]."""
    return [OrderedBlocks(np.arange(n + 1) + 10**6 * s, 1) for s, n in enumerate(lengths)]


@pytest.fixture
def texts(tmp_path):
    """Two files of 4000 bytes, the one of digits and the other of letters."""
    for name, characters in (("digits", "0123456789"), ("letters", "abcdefghij")):
        letters = dict(zip("0123456789", characters, strict=True))
        text = "".join(letters[c] for i in range(1000) for c in f"{i:04d}")
        (tmp_path / f"{name}.txt").write_text(text)
    return lambda digits, letters: (
        f"{tmp_path / 'digits.txt'}={digits}, {tmp_path / 'letters.txt'}={letters}"
    )


@given(
    weights=st.lists(st.floats(0.01, 1), min_size=1, max_size=5),
    seed=st.integers(0, 3),
)
def test_every_thousand_blocks_have_the_shares_and_each_source_comes_in_order(weights, seed):
    shares = np.array(weights) / sum(weights)
    mixed = MixedBlocks(ordered([3000] * len(shares)), shares, seed)
    assert sum(mixed.quotas) == 1000
    # Each end of a share is rounded to a block.
    assert np.abs(mixed.quotas - 1000 * shares).max() <= 1
    first = [mixed[i][0] for i in range(2000)]
    for source, quota in enumerate(mixed.quotas):
        for thousand in (first[:1000], first[1000:]):
            assert sum(block // 10**6 == source for block in thousand) == quota
        of_source = [block % 10**6 for block in first if block // 10**6 == source]
        assert of_source == list(range(2 * quota))


def test_the_order_is_random_and_another_in_each_thousand_and_for_each_seed():
    def order(seed, period):
        mixed = MixedBlocks(ordered([3000, 3000]), [0.5, 0.5], seed)
        return tuple(mixed[1000 * period + i][0] // 10**6 for i in range(1000))

    orders = {order(seed, period) for seed in (1, 2) for period in (0, 1)}
    assert len(orders) == 4
    # In a random order half of the neighbours differ, give or take sqrt(1000) / 2 = 16.
    changes = sum(a != b for a, b in pairwise(order(1, 0)))
    assert abs(changes - 500) < 5 * 16


def test_a_block_does_not_depend_on_what_was_read_before():
    def mixed():
        return MixedBlocks([ShuffledBlocks(np.arange(90), 7, 3)] * 2, [0.9, 0.1], 3)

    forward, backward = mixed(), mixed()
    read = {i: backward[i].tolist() for i in reversed(range(2500))}
    assert [forward[i].tolist() for i in range(2500)] == [read[i] for i in range(2500)]


@given(lengths=st.lists(st.integers(0, 1500), min_size=2, max_size=3))
def test_an_ordered_mixture_ends_where_one_of_its_sources_does(lengths):
    shares = np.arange(1, len(lengths) + 1) / sum(range(1, len(lengths) + 1))
    mixed = MixedBlocks(ordered(lengths), shares, 0)
    taken = [mixed[i][0] // 10**6 for i in range(len(mixed))]
    counts = [taken.count(source) for source in range(len(lengths))]
    assert all(count <= length for count, length in zip(counts, lengths, strict=True))
    longer = MixedBlocks(ordered([5000] * len(lengths)), shares, 0)
    following = longer[len(mixed)][0] // 10**6
    assert counts[following] == lengths[following]


def digits(batch):
    """For each row, whether it is of digits; each row must be of one source."""
    rows = [bytes(token for token in row if token < 256) for row in batch.tolist()]
    assert all(row.isdigit() or row.isalpha() for row in rows)
    return [row.isdigit() for row in rows]


def test_batches_of_training_and_validation_have_the_shares(texts, prepare):
    module = prepare(texts(1, 3), context=4, batch_size=100, val_batches=1)
    assert sum(sum(digits(module.train_batch(step))) for step in range(10)) == 250
    (batch,) = module.val_dataloader()
    # The letters' 49 blocks are used up first, at about 65 blocks of both.
    assert 0.1 < np.mean(digits(batch)) < 0.4
    assert batch.tolist() == next(iter(module.val_dataloader())).tolist()


def test_the_mixed_batch_is_the_same_for_any_number_of_ranks(texts, prepare):
    whole = prepare(texts(2, 1), context=4, batch_size=12)
    parts = prepare(texts(2, 1), context=4, batch_size=4)
    for step in (0, 200):
        rows = [row for rank in range(3) for row in parts.train_batch(step, rank, 3).tolist()]
        assert rows == whole.train_batch(step).tolist()


def test_the_order_of_the_training_data_does_not_change_the_validation(texts, prepare):
    one, two = (prepare(texts(2, 1), seed=seed) for seed in (1, 2))
    assert one.train_batch(0).tolist() != two.train_batch(0).tolist()
    for a, b in zip(one.val_dataloader(), two.val_dataloader(), strict=True):
        assert a.tolist() == b.tolist()


def test_a_file_whose_name_looks_like_a_mixture_is_that_file(tmp_path, documents):
    file = tmp_path / "kjv=1,a=2.jsonl"
    file.write_text('{"text": "a"}\n{"text": "b"}\n')
    assert documents(file) == {"train": ["a"], "validation": ["b"]}


def test_all_that_is_wrong_with_the_parts_is_said_at_once():
    with pytest.raises(DataError) as error:
        TextDataModule("kjv=0.5,kjv=1,nowhere.txt=1,tinystories=much,fineweb-edu=-1,wikitext-103")
    lines = str(error.value).splitlines()
    expected = [
        "The source 'kjv' is named twice",
        "There is no source 'nowhere.txt'",
        "The weight of 'tinystories' is 'much'",
        "The weight of 'fineweb-edu' is '-1'",
        "The source 'wikitext-103' has no weight",
    ]
    assert len(lines) == len(expected)
    assert all(line.startswith(start) for line, start in zip(lines, expected, strict=True))


def test_a_share_of_less_than_a_block_in_a_thousand_is_refused():
    with pytest.raises(DataError, match=r"share of tinystories is 0\.0001; .* one block in 1000"):
        TextDataModule("kjv=0.9999,tinystories=0.0001")


def test_a_source_too_short_for_its_share_is_named(texts, tmp_path, prepare):
    (tmp_path / "short.txt").write_text("short " * 20)
    mixture = f"{texts(1, 1)}, {tmp_path / 'short.txt'}=2"
    with pytest.raises(DataError, match=r"train split of .*short\.txt has 27 blocks .* at most 54"):
        prepare(mixture, context=4, batch_size=55)
    with pytest.raises(DataError, match=r"validation split of .*short\.txt has 6 tokens"):
        prepare(mixture, context=8)

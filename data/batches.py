"""Which tokens are in which batch: pure functions of the tokens, the seed and the step."""

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch


class ShuffledBlocks:
    """An endless sequence of blocks of `context` + 1 tokens, indexed by an integer >= 0.

    An epoch cuts the tokens into blocks that overlap in one token only, a block's last target
    being the next one's first input, and goes through them in a random order. The first cut is at
    a random offset, so that another epoch has other blocks. Block i depends on the tokens,
    `context`, `seed` and i alone, not on what was read before.
    """

    def __init__(self, tokens: np.ndarray, context: int, seed: int) -> None:
        self.tokens, self.context, self.seed = tokens, context, seed
        # One block fewer than would fit leaves room for any offset.
        self.per_epoch = max(1, len(tokens) // context - 1)
        self._epoch, self._starts = -1, np.empty(0, dtype=np.int64)

    def __getitem__(self, index: int) -> np.ndarray:
        """Block `index`: shape (context + 1,), dtype of the tokens."""
        epoch, place = divmod(index, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._starts = epoch, self._starts_of(epoch)
        start = self._starts[place]
        return self.tokens[start : start + self.context + 1]

    def _starts_of(self, epoch: int) -> np.ndarray:
        """Where the epoch's blocks start, in the order in which they come."""
        random = np.random.default_rng([self.seed, epoch])
        room = len(self.tokens) - 1 - self.per_epoch * self.context
        offset = random.integers(min(room, self.context - 1) + 1)
        return offset + self.context * random.permutation(self.per_epoch)


class OrderedBlocks:
    """The blocks of `context` + 1 tokens from the first token on, overlapping in one token."""

    def __init__(self, tokens: np.ndarray, context: int) -> None:
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> np.ndarray:
        """Block `index`: shape (context + 1,), dtype of the tokens."""
        start = index * self.context
        return self.tokens[start : start + self.context + 1]


class MixedBlocks:
    """Blocks of several sources, each in its own order, mixed in fixed shares.

    Of every `PERIOD` blocks, source s has `quotas[s]`, at random places that depend on `seed` and
    the number of the period alone. So block i depends on the sources, `quotas`, `seed` and i, not
    on what was read before. Ends, where the sources end, before the first block that is missing.
    """

    PERIOD = 1000

    def __init__(
        self, sources: Sequence[ShuffledBlocks | OrderedBlocks], shares: Sequence[float], seed: int
    ) -> None:
        self.sources, self.quotas, self.seed = sources, self.quotas_of(shares), seed
        self._period, self._order = -1, np.empty(0, dtype=np.int64)

    @classmethod
    def quotas_of(cls, shares: Sequence[float]) -> np.ndarray:
        """Shares that add up to 1, in blocks of a period: their sum is PERIOD, each at least 0."""
        ends = np.floor(np.cumsum(shares) * cls.PERIOD + 0.5).astype(np.int64)
        return np.diff(ends, prepend=0)

    def __len__(self) -> int:
        return min(self._place_of(s, len(blocks)) for s, blocks in enumerate(self.sources))

    def __getitem__(self, index: int) -> np.ndarray:
        """Block `index`: shape (context + 1,), dtype of its source's tokens."""
        period, place = divmod(index, self.PERIOD)
        order = self._order_of(period)
        source = order[place]
        before = np.count_nonzero(order[:place] == source)
        return self.sources[source][int(period * self.quotas[source] + before)]

    def _place_of(self, source: int, index: int) -> int:
        """Where block `index` of this source comes."""
        period, before = divmod(index, int(self.quotas[source]))
        places = np.flatnonzero(self._order_of(period) == source)
        return period * self.PERIOD + int(places[before])

    def _order_of(self, period: int) -> np.ndarray:
        """The source of each block of the period."""
        if period != self._period:
            random = np.random.default_rng([self.seed, period, 1])  # not that of an epoch
            of_each = np.repeat(np.arange(len(self.quotas)), self.quotas)
            self._period, self._order = period, random.permutation(of_each)
        return self._order


Blocks = ShuffledBlocks | OrderedBlocks | MixedBlocks


def stack(blocks: Blocks, indices: range) -> torch.Tensor:
    """The blocks of these indices as one int64 tensor, (len(indices), context + 1).

    In pinned memory where there is a GPU: copying from other memory makes the host wait for all
    that the GPU still has to do.
    """
    batch = torch.from_numpy(np.stack([blocks[i] for i in indices]).astype(np.int64))
    return batch.pin_memory() if torch.cuda.is_available() else batch


class TrainBatches:
    """Endless batches from micro-step `first_step()` on, which is asked when iteration begins."""

    def __init__(self, batch: Callable[[int], torch.Tensor], first_step: Callable[[], int]) -> None:
        self.batch, self.first_step = batch, first_step

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(self.batch, itertools.count(self.first_step()))


class ValidationBatches:
    """The same batches every time: a rank's share of the first blocks, in order.

    Of the first `batches` * `batch_size` * `world_size` blocks, or of all if there are fewer, rank
    r takes every `world_size`-th from block r on. Ranks have the same number of batches and these
    are full, but for a split of less than a batch a rank, which makes one smaller batch.
    """

    def __init__(
        self,
        blocks: OrderedBlocks | MixedBlocks,
        batches: int,
        batch_size: int,
        rank: int,
        world_size: int,
    ) -> None:
        self.blocks, self.rank, self.world_size = blocks, rank, world_size
        share = len(blocks) // world_size
        self.batch_size = min(batch_size, share)
        self.batches = min(batches, share // self.batch_size) if share else 0

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        stride = self.world_size
        for batch in range(self.batches):
            first, last = batch * self.batch_size, (batch + 1) * self.batch_size
            yield stack(self.blocks, range(first * stride + self.rank, last * stride, stride))

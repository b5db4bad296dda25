"""Which tokens are in which batch: pure functions of the tokens, the seed and the step."""

import itertools
from collections.abc import Callable, Iterator

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


def stack(blocks: ShuffledBlocks | OrderedBlocks, indices: range) -> torch.Tensor:
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
        self, blocks: OrderedBlocks, batches: int, batch_size: int, rank: int, world_size: int
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

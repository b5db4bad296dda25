"""A decoder-only GPT whose blocks are written around the pair (branch, stream).

Shapes in comments: B batch, T tokens, C width (n_embd), H heads, D head dimension, V padded
vocabulary.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import RMSNorm, load_norm
from kernels.arguments import LARGEST_EPS
from model.recompute import recompute_problems, recomputed

STREAM_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Keys (rotated) and values of the positions read so far, (B, H, T, D) each, by attention module.
Cache = dict[nn.Module, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT.

    Args:
        n_layer: Number of transformer blocks.
        n_head: Number of attention heads; has to divide `n_embd` into an even head dimension.
        n_embd: Width of the residual stream.
        context: Longest sequence that the model reads, in tokens.
        vocab_size: Number of token ids; the embedding is padded to a multiple of 64 rows.
        norm: Name of the RMSNorm implementation, as `kernels.load_norm` takes it.
        norm_eps: The norm's epsilon.
        qk_norm: Whether queries and keys are normalised per head before they are rotated.
        stream_dtype: Dtype of the residual stream, "float32" or "bfloat16".
        norm_recompute: Whether the backward pass makes the output of each norm that is followed
            by a matrix again instead of keeping it. Not for a model that is compiled, and only for
            norms with add_is_exact.

    Raises:
        ValueError: naming everything that is wrong, one sentence a line.
    """

    n_layer: int
    n_head: int
    n_embd: int
    context: int
    vocab_size: int
    norm: str = "triton"
    norm_eps: float = 1e-6
    qk_norm: bool = False
    stream_dtype: str = "float32"
    norm_recompute: bool = False

    def __post_init__(self) -> None:
        if problems := config_problems(**vars(self)):
            raise ValueError("\n".join(problems))

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def padded_vocab_size(self) -> int:
        """`vocab_size` rounded up to a multiple of 64, which matrix products like better."""
        return math.ceil(self.vocab_size / 64) * 64


def config_problems(
    *, n_layer, n_head, n_embd, context, vocab_size, norm_eps, stream_dtype, **_
) -> list[str]:
    """One sentence for everything that is wrong with these values of GPTConfig."""
    sizes = {
        "n_layer": n_layer,
        "n_head": n_head,
        "n_embd": n_embd,
        "context": context,
        "vocab_size": vocab_size,
    }
    problems = [
        f"{name} is {size}; it has to be at least 1." for name, size in sizes.items() if size < 1
    ]
    if n_head >= 1 and n_embd >= 1:
        if n_embd % n_head:
            problems.append(
                f"n_head is {n_head}, which does not divide n_embd, {n_embd}: "
                f"every head has to get the same share of the width."
            )
        elif (n_embd // n_head) % 2:
            problems.append(
                f"n_embd / n_head is {n_embd} / {n_head} = {n_embd // n_head}: rotary positions "
                f"turn pairs of features, so the head dimension has to be even."
            )
    if not 0 <= norm_eps <= LARGEST_EPS:
        problems.append(f"norm_eps is {norm_eps}; it has to be from 0 to {LARGEST_EPS:.3g}.")
    if stream_dtype not in STREAM_DTYPES:
        problems.append(
            f"stream_dtype is {stream_dtype!r}; it has to be {' or '.join(STREAM_DTYPES)}."
        )
    return problems


class GPT(nn.Module):
    """Decoder-only transformer: tied embeddings, rotary positions, pre-norm, no biases.

    The residual stream has a dtype of its own, `config.stream_dtype`. Each norm adds the branch
    before it to the stream and hands the normalised result to the next branch, so that add and
    norm can be one kernel.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        if config.norm_recompute and (problems := recompute_problems(load_norm(config.norm))):
            raise ValueError("\n".join(problems))
        self.stream_dtype = STREAM_DTYPES[config.stream_dtype]
        self.embedding = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.final_norm = RMSNorm(config.n_embd, config.norm_eps, norm=config.norm)
        self.head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.head.weight = self.embedding.weight
        cos, sin = rotary_tables(config.context, config.head_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._init_weights()

    def _init_weights(self) -> None:
        """N(0, 0.02) for every matrix; less for those that write to the stream.

        The stream sums 2 * n_layer branches, so that their scale of 1 / sqrt(2 * n_layer) keeps
        its variance independent of depth (GPT-2, section 2.3).
        """
        branch_std = 0.02 / math.sqrt(2 * self.config.n_layer)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                writes_to_stream = name.endswith(("attn.out.weight", "mlp.down.weight"))
                nn.init.normal_(parameter, std=branch_std if writes_to_stream else 0.02)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """Logits of the next token at every position, or their loss against `targets`.

        Args:
            tokens: int64 (B, T) with T <= context.
            targets: int64 (B, T), the ids that follow.
            cache: What has been read so far, an empty dict in the beginning; `tokens` come after
                it, are added to it, and are a single one a row if there is something before them.

        Returns:
            Logits (B, T, padded vocabulary), or with targets the mean cross-entropy in nats, a
            float32 scalar (float64 in a float64 model).
        """
        start = next(iter(cache.values()))[0].shape[2] if cache else 0
        end, context = start + tokens.shape[1], self.config.context
        if end > context:
            raise ValueError(f"tokens has {end} positions; the model's context is {context}")
        rotary = self.cos[start:end], self.sin[start:end]
        branch, stream = None, self.embedding(tokens).to(self.stream_dtype)
        for block in self.blocks:
            branch, stream = block(branch, stream, rotary, cache)
        return self.output(branch, stream, targets)

    def output(self, branch: Tensor, stream: Tensor, targets: Tensor | None) -> Tensor:
        """What `forward` returns, from what the last block does: (B, T, n_embd) each."""
        h, stream = self.final_norm(branch, stream)
        with recomputed(self.config.norm_recompute, self.final_norm, h, stream):
            logits = self.head(h)
        if targets is None:
            return logits
        if logits.dtype != torch.float64:
            logits = logits.float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")  # or it would be compiled again for each length
    def generate(
        self,
        tokens: Tensor,
        n_new: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        end: int | None = None,
    ) -> Tensor:
        """Sample `n_new` tokens after each row of `tokens`.

        Each token is predicted from all before it while they fit the context, of longer `tokens`
        from the last `context`. When the context is full, the window slides: the older half of it
        is dropped and the rest read anew, so that from then on a token is predicted from half a
        context to a whole one. Keys and values are kept meanwhile, a new token is read once.

        Args:
            tokens: int64 (B, T), T >= 1.
            n_new: How many tokens to append.
            temperature: Divides the logits; smaller is less random, 0 takes the most probable.
            top_k: Sample from the k most probable tokens only.
            generator: Source of randomness, on the device of `tokens`.
            end: An id after which a row has only this id; ends early when all rows have come to it.

        Returns:
            int64 (B, at most T + n_new), every new id below `vocab_size`.
        """
        if temperature < 0:
            raise ValueError(f"temperature is {temperature}; it has to be at least 0")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k is {top_k}; it has to be at least 1")
        ended = torch.zeros(len(tokens), 1, dtype=torch.bool, device=tokens.device)
        cache: Cache = {}
        unread, read = tokens[:, -self.config.context :], 0
        for _ in range(n_new):
            if read + unread.shape[1] > self.config.context:
                cache, read = {}, 0
                unread = tokens[:, -(self.config.context // 2 + 1) :]
            logits = self(unread, cache=cache)[:, -1, : self.config.vocab_size].float()
            read += unread.shape[1]
            unread = pick(logits, temperature, top_k, generator)
            if end is not None:
                unread = unread.masked_fill(ended, end)
                ended |= unread == end
            tokens = torch.cat([tokens, unread], dim=1)
            if ended.all():
                break
        return tokens


def pick(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """An id for each row of `logits` (B, vocabulary), int64 (B, 1), as `GPT.generate` says."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        kth = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)


class Block(nn.Module):
    """Attention and MLP, each behind a norm that first adds the pending branch to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_recompute = config.norm_recompute
        self.norm1 = RMSNorm(config.n_embd, config.norm_eps, norm=config.norm)
        self.attn = Attention(config)
        self.norm2 = RMSNorm(config.n_embd, config.norm_eps, norm=config.norm)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor | None,
        stream: Tensor,
        rotary: tuple[Tensor, Tensor],
        cache: Cache | None = None,
    ) -> tuple[Tensor, Tensor]:
        if x is None:  # the first norm of the model has no branch to add
            h = self.norm1(stream)
        else:
            h, stream = self.norm1(x, stream)
        with recomputed(self.norm_recompute, self.norm1, h, stream):
            x = self.attn(h, rotary, cache)
        h, stream = self.norm2(x, stream)
        with recomputed(self.norm_recompute, self.norm2, h, stream):
            x = self.mlp(h)
        return x, stream


class Attention(nn.Module):
    """Causal self-attention with rotary positions and, on request, QK-norm."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head, self.head_dim = config.n_head, config.head_dim
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.out = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps, norm=config.norm)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps, norm=config.norm)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], cache: Cache | None = None
    ) -> Tensor:
        B, T, C = x.shape
        # Views of one buffer, (B, T, H, D) each: the norm reads such strided rows in place.
        q, k, v = self.qkv(x).view(B, T, 3, self.n_head, self.head_dim).unbind(2)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, T, D)
        if cache is not None:
            if self in cache:
                assert T == 1, "several tokens after others would need a mask"
                k, v = (torch.cat(pair, dim=2) for pair in zip(cache[self], (k, v), strict=True))
            cache[self] = k, v
        # A single token may see all there is; several are the first ones.
        y = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1)
        return self.out(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    """Two matrices with a GELU between them, four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


def rotary_tables(context: int, head_dim: int, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine of every position's angles, float32 (context, 1, head_dim) each.

    Feature pair (i, i + head_dim / 2) turns by base^(-2i / head_dim) radians a position
    (Su et al. 2021, RoFormer). The sine is negative for the first feature of a pair.
    """
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.outer(torch.arange(context, dtype=torch.float64), frequency)[:, None]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], dim=-1).float(), torch.cat([-sin, sin], dim=-1).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the feature pairs (i, i + D/2) of x (B, T, H, D) by their position's angles.

    The angles are exact; their cosines are rounded to the dtype of x, which has been rounded
    likewise, so that a 16-bit x is not carried through memory as float32.
    """
    x1, x2 = x.chunk(2, dim=-1)
    swapped = torch.cat([x2, x1], dim=-1)
    return torch.addcmul(x * cos.to(x.dtype), swapped, sin.to(x.dtype))

"""The GPT against its definition, and the properties that its users rely on."""

import math

import pytest
import torch

from model.gpt import GPT, GPTConfig, rotary_tables, rotate

SHAPE = {"n_layer": 3, "n_head": 2, "n_embd": 32, "context": 24, "vocab_size": 100}


def gpt(norm: str = "eager", **changes) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**SHAPE, "norm": norm, **changes}))


def tokens(batch: int = 2, length: int = 24, vocab_size: int = 100) -> torch.Tensor:
    return torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))


# Reordered float64 sums: about 3 layers x 5 sums of 128 terms, each off by at most 128 eps.
FLOAT64 = {"rtol": 0, "atol": 2000 * torch.finfo(torch.float64).eps}


def textbook(model: GPT, ids: torch.Tensor) -> torch.Tensor:
    """Logits of a pre-norm GPT as textbooks write it: x = x + branch(norm(x)), op by op."""
    config, weights = model.config, dict(model.named_parameters())

    def norm(x, name, eps=config.norm_eps):
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weights[f"{name}.weight"]

    def turn(x):  # (T, H, D) as complex numbers, which rotate by a product
        half = config.head_dim // 2
        frequency = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(len(x), dtype=torch.float64)[:, None, None] * frequency
        z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
            torch.ones(()).double(), angle
        )
        return torch.cat([z.real, z.imag], -1)

    def attention(x, name):
        T, H, D = len(x), config.n_head, config.head_dim
        q, k, v = (
            part.view(T, H, D) for part in (x @ weights[f"{name}.qkv.weight"].T).chunk(3, -1)
        )
        if config.qk_norm:
            q, k = norm(q, f"{name}.q_norm"), norm(k, f"{name}.k_norm")
        scores = torch.einsum("ihd,jhd->hij", turn(q), turn(k)) / math.sqrt(D)
        future = torch.ones(T, T).triu(1).bool()
        probabilities = scores.masked_fill(future, -math.inf).softmax(-1)
        y = torch.einsum("hij,jhd->ihd", probabilities, v).reshape(T, H * D)
        return y @ weights[f"{name}.out.weight"].T

    def mlp(x, name):
        h = x @ weights[f"{name}.up.weight"].T
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        return h @ weights[f"{name}.down.weight"].T

    x = weights["embedding.weight"][ids]
    for i in range(config.n_layer):
        x = x + attention(norm(x, f"blocks.{i}.norm1"), f"blocks.{i}.attn")
        x = x + mlp(norm(x, f"blocks.{i}.norm2"), f"blocks.{i}.mlp")
    return norm(x, "final_norm") @ weights["embedding.weight"].T


@pytest.mark.parametrize("qk_norm", [False, True])
def test_branch_and_stream_are_the_textbook_model(qk_norm):
    model = gpt(qk_norm=qk_norm).double()
    model.stream_dtype = torch.float64
    model.cos, model.sin = (table.double() for table in _exact_tables(model.config))
    with torch.no_grad():
        for parameter in model.parameters():  # norm weights of 1 would hide a missing one
            parameter.add_(0.1 * torch.randn_like(parameter))
    ids = tokens()
    expected = torch.stack([textbook(model, row) for row in ids])
    torch.testing.assert_close(model(ids), expected, **FLOAT64)


def _exact_tables(config):
    frequency = 10_000.0 ** (-torch.arange(0, config.head_dim, 2).double() / config.head_dim)
    angle = torch.outer(torch.arange(config.context).double(), frequency)[:, None]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def test_a_later_token_never_changes_earlier_logits():
    model, ids = gpt(), tokens()
    changed = ids.clone()
    changed[:, 15] = (changed[:, 15] + 1) % 100
    a, b = model(ids), model(changed)
    assert torch.equal(a[:, :15], b[:, :15])
    assert not torch.equal(a[:, 15], b[:, 15])


def test_loss_is_the_mean_cross_entropy_of_the_logits():
    model, ids = gpt(), tokens()
    logits = model(ids[:, :-1]).log_softmax(-1)
    expected = -logits.gather(-1, ids[:, 1:, None]).mean()
    torch.testing.assert_close(model(ids[:, :-1], ids[:, 1:]), expected)


def test_attention_scores_depend_on_distance_only():
    """Rotary positions: <turn(q, i), turn(k, j)> is a function of i - j."""
    cos, sin = rotary_tables(64, 16)
    random = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 16, generator=random)
    turned_q, turned_k = (rotate(t.expand(1, 64, 1, 16), cos, sin)[0, :, 0] for t in (q, k))
    scores = turned_q @ turned_k.T  # by position of q, position of k
    for distance in (-20, -1, 0, 3, 40):
        diagonal = scores.diagonal(distance)
        # 16 products of numbers below 3 and cosines rounded to float32.
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-5)
    assert scores[20, 0] != pytest.approx(scores[0, 0].item(), abs=1e-3)


def test_embedding_and_head_are_one_matrix():
    model = gpt()
    assert model.head.weight is model.embedding.weight
    assert sum(name.endswith("head.weight") for name, _ in model.named_parameters()) == 0
    ids = tokens()
    model(ids[:, :-1], ids[:, 1:]).backward()
    assert model.embedding.weight.grad is model.head.weight.grad


def test_vocabulary_is_padded_and_padding_never_comes_out():
    model = gpt(vocab_size=65)
    assert model.embedding.weight.shape == (128, 32)
    with torch.no_grad():
        # The padded rows' logits become the largest by far.
        model.embedding.weight[65:] = 100 * model.embedding.weight[:63].sign()
    generated = model.generate(tokens(vocab_size=65)[:, :4], 60)
    assert generated.shape == (2, 64)
    assert generated.max() < 65


def test_no_biases_and_the_matrices_there_should_be():
    model = gpt(qk_norm=True)
    assert all(name.endswith("weight") for name, _ in model.named_parameters())
    width, layers, padded = 32, 3, 128
    matrices = padded * width + layers * 12 * width**2
    norms = (2 * layers + 1) * width + 2 * layers * (width // 2)
    assert sum(p.numel() for p in model.parameters()) == matrices + norms


def test_initial_scale():
    model = gpt(n_embd=128, n_layer=8)
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert torch.equal(p, torch.ones_like(p)), name
            continue
        writes_to_stream = "attn.out" in name or "mlp.down" in name
        std = 0.02 / math.sqrt(2 * 8) if writes_to_stream else 0.02
        # A sample's deviation is off by 1 / sqrt(2 n) of itself; 5 of those.
        assert p.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * p.numel())), name


def test_initial_loss_is_that_of_a_uniform_guess():
    """Logits h e have variance 0.02^2 C, C = 128, which adds half of it to log V: 0.03.

    What the input token's own embedding, still part of the stream, does to one logit in 1024
    stays below 0.05 as well.
    """
    model = gpt(n_embd=128, vocab_size=1000)
    ids = tokens(8, 25, 1000)
    loss = model(ids[:, :-1], ids[:, 1:]).item()
    assert loss == pytest.approx(math.log(1024), abs=0.15)


@pytest.mark.parametrize("stream_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("norm", ["eager", "triton"])
def test_dtypes_under_autocast(norm, stream_dtype, device):
    """Branches and norm outputs in bfloat16, the stream in its own dtype, the loss in float32."""
    model = gpt(norm, stream_dtype=stream_dtype, n_layer=1).to(device)
    seen = {}
    model.blocks[0].attn.register_forward_hook(lambda _, i, o: seen.update(h=i[0], branch=o))
    model.blocks[0].register_forward_hook(lambda _, i, o: seen.update(stream=o[1]))
    ids = tokens().to(device)
    with torch.autocast(device.type, torch.bfloat16):
        loss = model(ids[:, :-1], ids[:, 1:])
    loss.backward()
    assert seen["h"].dtype == seen["branch"].dtype == torch.bfloat16
    assert seen["stream"].dtype == getattr(torch, stream_dtype)
    assert loss.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_a_bfloat16_model_runs_without_autocast():
    model, ids = gpt().bfloat16(), tokens()
    assert model(ids).dtype == torch.bfloat16
    assert model(ids[:, :-1], ids[:, 1:]).dtype == torch.float32


def test_a_sequence_longer_than_the_context_is_refused_but_generate_crops():
    model = gpt()
    with pytest.raises(ValueError, match="tokens has 25 positions; the model's context is 24"):
        model(tokens(length=25))
    prompt = tokens(length=40)
    generated = model.generate(prompt, 2)
    assert torch.equal(generated[:, :40], prompt)


def test_generate_is_reproducible_and_obeys_top_k():
    model, prompt = gpt(), tokens(length=4)

    def sample(**options):
        return model.generate(prompt, 8, generator=torch.Generator().manual_seed(3), **options)

    assert torch.equal(sample(), sample())
    greedy = prompt
    for _ in range(8):
        best = model(greedy)[:, -1, :100].argmax(-1, keepdim=True)
        greedy = torch.cat([greedy, best], 1)
    assert torch.equal(sample(top_k=1), greedy)
    assert torch.equal(sample(temperature=1e-4), greedy)
    assert torch.equal(sample(temperature=0.0), greedy)
    assert not torch.equal(sample(), greedy)


@pytest.mark.parametrize(
    ("norm", "length", "context"),
    [("eager", 5, 24), ("eager", 40, 24), ("eager", 3, 1), ("eager", 2, 7), ("triton", 2, 7)],
)
def test_keys_and_values_that_are_kept_change_no_token(norm, length, context, device):
    """Against reading the whole window again for every token, far past the context."""
    model = gpt(norm, n_layer=1, context=context, qk_norm=True).to(device)
    with torch.no_grad():  # logits far enough apart that a last bit decides nothing
        model.embedding.weight.mul_(50)
    ids = tokens(length=length).to(device)
    generator = torch.Generator(device).manual_seed(3)
    n_new = 30 if norm == "eager" or device.type == "cuda" else 10  # the interpreter is slow
    expected, start = ids, max(0, length - context)
    for _ in range(n_new):
        if expected.shape[1] - start > context:
            start = expected.shape[1] - (context // 2 + 1)
        logits = model(expected[:, start:])[:, -1, :100].float()
        new = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        expected = torch.cat([expected, new], 1)
    got = model.generate(ids, n_new, generator=torch.Generator(device).manual_seed(3))
    assert torch.equal(got, expected)


def test_a_kept_token_is_not_read_again():
    model, read = gpt(), []
    model.blocks[0].attn.register_forward_hook(lambda _, i, o: read.append(o.shape[1]))
    model.generate(tokens(length=20), 8)
    assert read == [20, 1, 1, 1, 1, 13, 1, 1]  # 24 are full; half of them and the newest


def test_generate_stops_at_the_end_of_text():
    model, prompt = gpt(), tokens(batch=3, length=4)

    def written(rows, **options):
        generator = torch.Generator().manual_seed(3)
        return model.generate(prompt[:rows], 60, generator=generator, **options)[:, 4:].tolist()

    free = written(3)
    end = free[0][9]
    for row, whole in zip(written(3, end=end), free, strict=True):
        kept = whole.index(end) if end in whole else len(whole)
        assert row == (whole[:kept] + [end] * 60)[: len(row)]
    assert any(end not in whole for whole in free)  # a row that goes on while others have ended
    (alone,) = written(1)
    assert written(1, end=alone[9]) == [alone[: alone.index(alone[9]) + 1]]


@pytest.mark.parametrize(
    ("options", "match"),
    [({"temperature": -1.0}, "temperature is -1"), ({"top_k": 0}, "top_k is 0")],
)
def test_generate_refuses(options, match):
    with pytest.raises(ValueError, match=match):
        gpt().generate(tokens(), 1, **options)


def test_config_names_all_that_is_wrong_at_once():
    with pytest.raises(ValueError, match="n_layer is 0") as error:
        GPTConfig(0, 5, 128, 0, 100, norm_eps=-1.0, stream_dtype="float16")
    message = str(error.value)
    for text in ("n_head is 5", "context is 0", "norm_eps is -1", "'float16'"):
        assert text in message
    assert len(message.splitlines()) == 5
    with pytest.raises(ValueError, match="12 / 4 = 3"):
        GPTConfig(1, 4, 12, 8, 100)

"""Tokenizers: GPT-2's published ids, exact round trips, plain-text specials, and bad names."""

import os

import pytest
import regex
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from data import DataError, load_tokenizer


def test_gpt2_gives_the_published_ids():
    gpt2 = load_tokenizer("gpt2")
    assert gpt2.n_vocab == 50257
    assert gpt2.eot_token == 50256
    assert gpt2.encode_ordinary("Hello world") == [15496, 995]
    assert gpt2.encode_ordinary("Hello, my dog is cute") == [15496, 11, 616, 3290, 318, 13779]


# What a character is that Python's Unicode has not assigned yet, tiktoken and the package regex may
# know from later versions, and not from the same one.
ASSIGNED = st.characters(exclude_categories=["Cs", "Cn"])


@given(text=st.text(ASSIGNED) | st.from_regex(r"([a-zA-Z]+|'(s|ll|re)|[0-9]+|[ \n\t]+|[.,!]+)*"))
def test_gpt2_cuts_text_as_the_published_pattern_does(text):
    gpt2 = load_tokenizer("gpt2")
    pieces = regex.findall(
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", text
    )
    assert gpt2.encode_ordinary(text) == [
        token for piece in pieces for token in gpt2._encode_single_piece(piece)
    ]


def test_bytes_ids_are_the_utf8_bytes():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.n_vocab == 257
    assert tokenizer.eot_token == 256
    assert tokenizer.encode_ordinary("h\u00e9\n" * 100) == list("h\u00e9\n".encode() * 100)


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
@given(text=st.text())
def test_any_text_comes_back(name, text):
    tokenizer = load_tokenizer(name)
    assert tokenizer.decode(tokenizer.encode_ordinary(text)) == text


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_end_of_text_written_in_a_text_stays_text(name):
    tokenizer = load_tokenizer(name)
    ids = tokenizer.encode_ordinary("a<|endoftext|>b")
    assert tokenizer.eot_token not in ids
    assert tokenizer.decode(ids) == "a<|endoftext|>b"


def test_unknown_tokenizer_lists_the_known_ones():
    with pytest.raises(DataError, match=r"no tokenizer 'gpt9'; there are: gpt2, bytes, .*cl100k"):
        load_tokenizer("gpt9")


def test_tokenizer_that_cannot_be_fetched_names_those_that_need_no_network(monkeypatch):
    def unreachable(name):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    with pytest.raises(DataError, match=r"'o200k_base' has to be fetched.*gpt2 and bytes"):
        load_tokenizer("o200k_base")


def test_vocabulary_that_was_tampered_with_is_refused(tmp_path, monkeypatch):
    for name in ("vocab.bpe", "encoder.json"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(
        "data.tokenizer.package_file", lambda package, name: tmp_path / name.rpartition("/")[2]
    )
    load_tokenizer.cache_clear()
    with pytest.raises(DataError, match="not GPT-2's published vocabulary"):
        load_tokenizer("gpt2")


def test_a_vocabulary_that_is_fetched_is_kept_where_it_lasts(monkeypatch, tmp_path):
    def fetch(name):
        seen.append(os.environ["TIKTOKEN_CACHE_DIR"])
        return gpt2

    seen, gpt2 = [], load_tokenizer("gpt2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # restored afterwards
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR")
    monkeypatch.setattr(tiktoken, "get_encoding", fetch)
    load_tokenizer.cache_clear()
    load_tokenizer("o200k_base")
    load_tokenizer.cache_clear()
    assert seen == [str(tmp_path / "triton-rmsnorm-gpt" / "tiktoken")]

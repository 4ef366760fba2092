from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as TokenizerFile

from clover.errors import PromptError, TokenizerError
from clover.tokenizer import Tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
TAGS = ["<think>", "</think>"]
TEXT = "the cat, the hat and the café: naïve £5, 3 €, 日本語 ☘ 🍀\n"


def make_file() -> TokenizerFile:
    """A byte-level BPE with merges inside and across characters of several bytes."""
    file = TokenizerFile(models.BPE())
    file.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    file.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    file.train_from_iterator([TEXT] * 4, trainer)
    file.add_tokens([AddedToken(tag, special=False) for tag in TAGS])
    return file


FILE = make_file()
TOKENIZER = Tokenizer(FILE)
IDS = st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=40)


def test_load_reads_the_tokenizer_of_a_folder(tmp_path: Path) -> None:
    FILE.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.load(tmp_path)
    assert len(loaded) == len(TOKENIZER)
    assert loaded.encode(TEXT) == TOKENIZER.encode(TEXT)


def test_load_names_the_absent_file(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json, found no such file"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "{}", json.dumps({"model": {"type": "Other"}})])
def test_load_refuses_a_damaged_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"is not a readable tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_that_is_not_byte_level_is_refused(tmp_path: Path) -> None:
    file = TokenizerFile(models.BPE())
    file.decoder = decoders.WordPiece()
    file.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="found the decoder WordPiece"):
        Tokenizer.load(tmp_path)


def test_the_length_counts_added_tokens() -> None:
    assert len(TOKENIZER) == FILE.get_vocab_size(with_added_tokens=False) + len(TAGS)


def test_the_vocabulary_has_the_bytes_of_every_id_and_the_added_tokens_are_known() -> None:
    vocabulary = TOKENIZER.vocabulary()
    assert len(vocabulary) == len(TOKENIZER)
    assert b"".join(vocabulary[token_id] for token_id in TOKENIZER.encode(TEXT)) == TEXT.encode()
    added = {vocabulary[token_id].decode() for token_id in TOKENIZER.added_token_ids}
    assert added == {*SPECIAL, *TAGS}


def test_special_tokens_in_a_text_are_one_id_each() -> None:
    ids = TOKENIZER.encode("<|im_start|><think></think><|im_end|><|mask|>")
    assert ids == [
        TOKENIZER.token_id(token)
        for token in ["<|im_start|>", "<think>", "</think>", "<|im_end|>", "<|mask|>"]
    ]
    assert ids == [1, len(TOKENIZER) - 2, len(TOKENIZER) - 1, 2, 3]


def test_the_id_of_an_unknown_token_is_none() -> None:
    assert TOKENIZER.token_id("<|unknown|>") is None


def test_the_mask_token_is_found_or_none() -> None:
    assert TOKENIZER.mask_token_id == 3
    file = TokenizerFile(models.BPE())
    file.decoder = decoders.ByteLevel()
    assert Tokenizer(file).mask_token_id is None


def test_padding_and_truncation_of_the_file_are_not_applied(tmp_path: Path) -> None:
    file = make_file()
    file.enable_truncation(2)
    file.enable_padding(length=50)
    file.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode(TEXT) == TOKENIZER.encode(TEXT)


def test_encode_refuses_a_lone_surrogate() -> None:
    with pytest.raises(PromptError, match="not valid Unicode at character 3"):
        TOKENIZER.encode("abc\ud83c")


def test_skip_special_leaves_out_what_the_file_marks_special() -> None:
    ids = TOKENIZER.encode("<|im_start|><think>the hat<|im_end|>")
    assert TOKENIZER.decode(ids) == "<|im_start|><think>the hat<|im_end|>"
    assert TOKENIZER.decode(ids, skip_special=True) == "<think>the hat"
    stream = TOKENIZER.stream(skip_special=True)
    assert stream.push(ids) + stream.flush() == "<think>the hat"


def test_ids_past_the_end_say_nothing() -> None:
    ids = TOKENIZER.encode("cat")
    assert TOKENIZER.decode([*ids, len(TOKENIZER), 10**6]) == "cat"


def test_a_stream_gives_out_a_character_once_it_is_whole() -> None:
    ids = TOKENIZER.encode("ᚠ")  # its bytes are not in the training text: three tokens
    stream = TOKENIZER.stream()
    assert [stream.push([token_id]) for token_id in ids] == ["", "", "ᚠ"]
    assert stream.flush() == ""


def test_flush_gives_an_unfinished_character_as_a_replacement_and_starts_anew() -> None:
    ids = TOKENIZER.encode("ᚠ")
    stream = TOKENIZER.stream()
    assert stream.push(ids[:2]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.push(ids) == "ᚠ"


@given(st.text())
def test_decoding_what_was_encoded_gives_the_text_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(IDS)
def test_decode_agrees_with_the_tokenizers_package_on_any_ids(ids: list[int]) -> None:
    assert TOKENIZER.decode(ids) == FILE.decode(ids, skip_special_tokens=False)
    assert TOKENIZER.decode(ids, skip_special=True) == FILE.decode(ids, skip_special_tokens=True)


@given(IDS, st.lists(st.integers(0, 40)))
def test_a_stream_joined_equals_decode_at_every_split(ids: list[int], splits: list[int]) -> None:
    stream = TOKENIZER.stream()
    edges = [0, *sorted(splits), len(ids)]
    chunks = [ids[start:end] for start, end in pairwise(edges)]
    assert "".join(map(stream.push, chunks)) + stream.flush() == TOKENIZER.decode(ids)

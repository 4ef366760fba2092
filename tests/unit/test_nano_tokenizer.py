from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

import clover
from clover.chat import ChatTemplate, render_reply
from clover.tasks import sample_tasks
from recipes.nano_tokenizer import SPECIAL_TOKENS, VOCAB_SIZE, train_tokenizer

assert clover.__file__ is not None
TOKENIZER_PATH = Path(clover.__file__).parent / "assets" / "nano" / "tokenizer.json"

# Context is nano's scarcest good: a prompt with three tools has to stay below 200 tokens.
MIN_CHARS_PER_TOKEN = 3.5
MAX_MEAN_TOKENS = 140  # of a whole chat; tool use has several turns


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER_PATH))


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return train_tokenizer(vocab_size=400, num_tasks=50)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text).ids)


def contains(sequence: list[int], part: list[int]) -> bool:
    starts = range(len(sequence) - len(part) + 1)
    return any(sequence[start : start + len(part)] == part for start in starts)


def test_the_vocabulary_has_its_size_and_the_special_tokens_come_first(
    tokenizer: Tokenizer,
) -> None:
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert [tokenizer.id_to_token(i) for i in range(len(SPECIAL_TOKENS))] == list(SPECIAL_TOKENS)


def test_training_again_gives_the_same_bytes(small: Tokenizer) -> None:
    assert train_tokenizer(vocab_size=400, num_tasks=50).to_str() == small.to_str()


def test_the_asset_is_of_the_recipe_but_for_its_merges(
    tokenizer: Tokenizer, small: Tokenizer
) -> None:
    # It was trained before the tasks got all their wordings, so the merges are those of older text
    asset, anew = json.loads(tokenizer.to_str()), json.loads(small.to_str())
    for trained in (asset, anew):
        trained["model"].pop("vocab")
        trained["model"].pop("merges")
    assert asset == anew


@given(text=st.text())
def test_any_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(ids_of(tokenizer, text), skip_special_tokens=False) == text


@given(parts=st.lists(st.sampled_from([*SPECIAL_TOKENS, '{"type": "', "a", " ", "\n", "7", "é"])))
def test_special_tokens_and_schemas_survive_the_round_trip(
    tokenizer: Tokenizer, parts: list[str]
) -> None:
    text = "".join(parts)
    assert tokenizer.decode(ids_of(tokenizer, text), skip_special_tokens=False) == text


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_a_special_token_is_one_token_wherever_it_stands(tokenizer: Tokenizer, token: str) -> None:
    assert ids_of(tokenizer, f"a{token}b")[1] == tokenizer.token_to_id(token)


@given(
    word=st.from_regex(r"[a-zA-Z]{1,12}", fullmatch=True),
    before=st.sampled_from(["", " ", "\n", '"', "_", "=", ": ", ">\n", '["', "3", "("]),
    after=st.sampled_from(["", " ", "\n", "_", ", ", "?", "\n</", "7", ")", ". "]),
)
def test_a_word_is_the_same_tokens_wherever_it_stands(
    tokenizer: Tokenizer, word: str, before: str, after: str
) -> None:
    assert contains(ids_of(tokenizer, before + word + after), ids_of(tokenizer, word))


@given(number=st.integers(0, 10**12))
def test_every_digit_is_a_token(tokenizer: Tokenizer, number: int) -> None:
    assert len(ids_of(tokenizer, str(number))) == len(str(number))


def test_chats_are_short(tokenizer: Tokenizer) -> None:
    template = ChatTemplate()
    characters = tokens = 0
    for task in sample_tasks(300, 1, "heldout"):
        text = template.render(
            task.messages, tools=task.tools, enable_thinking=task.enable_thinking
        ) + render_reply(task.reply, enable_thinking=task.enable_thinking)
        characters += len(text)
        tokens += len(ids_of(tokenizer, text))
    assert characters / tokens > MIN_CHARS_PER_TOKEN
    assert tokens / 300 < MAX_MEAN_TOKENS

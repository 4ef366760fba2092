"""What an answer has to be, compiled: JSON Schema, a regular expression, tool calls.

`AnswerFormat` says it, `GrammarCompiler` gives it to llguidance, which says after every token what
may follow: a `Constraint` of `clover/diffusion/constraint.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from torch import Tensor

from clover.engine.lark import AnswerFormat, write_avoidance, write_lark
from clover.errors import ConstraintError, RequestError
from clover.tokenizer import Tokenizer

_SILENT: Final = 0
_NUM_KEPT: Final = 64  # grammars; one of two tools takes 0.2 MB
# llguidance appends the lines of the grammar that it complains of, which is not the user's text.
_GRAMMAR_EXCERPT: Final = re.compile(r"\n\s*\d+ \| .*", re.DOTALL)
_PLACE: Final = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")


class GrammarCompiler:
    """Compiles answer formats for one tokenizer and one model. Building it reads the vocabulary.

    The grammars of the last formats are kept: agents send the same tools with every turn. May be used
    from several threads.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Iterable[int]
    ) -> None:
        """Prepares the vocabulary.

        Args:
            tokenizer: The model's.
            vocab_size: The model's, padded rows included.
            eos_token_ids: What ends a text.

        Raises:
            RequestError: There is no EOS.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        if not self._eos_token_ids:
            raise RequestError(
                "a constrained text ends with EOS, and this model's config names none; give "
                "eos_token_ids"
            )
        self._vocabulary = LLTokenizer(
            TokenizerWrapper(_Vocabulary(tokenizer, min(self._eos_token_ids)))
        )
        self._compile_kept = lru_cache(maxsize=_NUM_KEPT)(self._compile)

    @property
    def num_compiled(self) -> int:
        """How often a format was compiled, because its grammar was not there yet, or no longer."""
        return self._compile_kept.cache_info().misses

    def compile(self, form: AnswerFormat, *, starts_in_thinking: bool = False) -> Grammar:
        """Returns the grammar of an answer.

        Args:
            form: What the answer has to be.
            starts_in_thinking: Whether the prompt ends inside `<think>`. The text is then free up
                to `</think>`, and the answer follows it.

        Raises:
            RequestError: The format uses what cannot be compiled, or no text satisfies it.
            PromptError: A tool has no name, or its parameters are not a JSON schema.
        """
        return self._compile_kept(_Keyed(_write_key(form), form), starts_in_thinking)

    def _compile(self, keyed: _Keyed, starts_in_thinking: bool) -> Grammar:
        form = keyed.form
        lark = write_lark(form, token=self._write_token, starts_in_thinking=starts_in_thinking)
        added = sorted(self._tokenizer.added_token_ids)
        avoidance = write_avoidance(form, token_ids=added)
        return Grammar(
            [self._build(lark), self._build(avoidance)],
            vocab_size=self._vocab_size,
            eos_token_ids=self._eos_token_ids,
        )

    def _build(self, lark: str) -> LLMatcher:
        matcher = LLMatcher(self._vocabulary, lark, log_level=_SILENT)
        if matcher.is_error():
            reason = _PLACE.sub("", _GRAMMAR_EXCERPT.sub("", matcher.get_error()).strip())
            raise RequestError(
                f"expected a format that a grammar can say, found: {reason}; write that part "
                "differently or leave it out"
            )
        return matcher

    def _write_token(self, text: str) -> str:
        """Returns how a grammar names the single token written `text`."""
        token_id = self._tokenizer.token_id(text)
        if token_id not in self._tokenizer.added_token_ids:
            raise RequestError(
                f"this format needs {text} as a token of its own, and the tokenizer has none; use "
                "a format without it"
            )
        return f"<[{token_id}]>"


@dataclass(frozen=True, slots=True)
class _Keyed:
    """A format, which holds mappings and cannot be hashed, known by a text that says all of it."""

    key: str
    form: AnswerFormat = field(compare=False)


def _write_key(form: AnswerFormat) -> str:
    """Returns the format as JSON, keys in their order: it decides the order of an answer's."""
    fields = {name: getattr(form, name) for name in type(form).__slots__}
    return json.dumps([type(form).__name__, fields], default=dict)


class _Vocabulary:
    """A tokenizer as llguidance wants to see it.

    All added tokens are special here, also those that `tokenizer.json` calls ordinary, as Qwen's
    does the tags: a grammar then says where a tag stands, and free text never holds one.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self.tokens = tokenizer.vocabulary()
        self.special_token_ids = sorted(tokenizer.added_token_ids)

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode())


class Grammar:
    """A compiled answer format: a `ConstraintFactory`. Holds no state of any text."""

    def __init__(
        self, matchers: Sequence[LLMatcher], *, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        """Keeps matchers in their first state; a text has to satisfy all of them."""
        self._matchers = matchers
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids

    @property
    def vocab_size(self) -> int:
        """The model's."""
        return self._vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """What ends a text."""
        return self._eos_token_ids

    def start(self) -> GrammarConstraint:
        """Returns the constraint of a new text."""
        return GrammarConstraint(
            [matcher.deep_copy() for matcher in self._matchers],
            vocab_size=self._vocab_size,
            eos_token_ids=self._eos_token_ids,
        )


class GrammarConstraint:
    """One text under a grammar: a `Constraint`.

    The first matcher is the format. Bytes that it forces are read as the tokens that the tokenizer
    would write them with, all at once and before anything else is asked: half way through, the rest
    alone could be tokenized differently. The other matchers take away texts that would be misread.
    """

    def __init__(
        self, matchers: Sequence[LLMatcher], *, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        """Starts behind no token; owns the matchers from here on."""
        self._matchers = matchers
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._has_ended = False
        self._history: list[list[int]] = []  # what was forced before each committed token
        self._forced = self._read_forced()

    def allowed(self) -> Tensor:
        """Returns the ids that may come next, bool [V].

        Raises:
            ConstraintError: The grammar has become too complex to go on.
        """
        if self._forced or self._has_ended:
            allowed = torch.zeros(self._vocab_size, dtype=torch.bool)
            allowed[self._forced[:1]] = True
            return allowed
        masks = [matcher.compute_bitmask() for matcher in self._matchers]
        self._check()
        allowed = _unpack(masks, self._vocab_size)
        allowed[list(self._eos_token_ids)] = self._may_end()
        return allowed

    def forced(self) -> list[int]:
        """Returns the tokens that come next whatever the model predicts."""
        return list(self._forced)

    def validate(self, tokens: Sequence[int]) -> int:
        """Returns how many of `tokens`, from the left, may come next."""
        tokens = list(tokens)
        num_forced = min(len(tokens), len(self._forced))
        for index in range(num_forced):
            if tokens[index] != self._forced[index]:
                return index
        if self._has_ended:
            return 0
        ends = [index for index, token_id in enumerate(tokens) if token_id in self._eos_token_ids]
        text = tokens[: ends[0]] if ends else tokens
        num_valid = min(matcher.validate_tokens(text) for matcher in self._matchers)
        if not ends or num_valid < len(text):
            return num_valid
        self.commit(text)
        may_end = self._may_end()
        self.rollback(len(text))
        return len(text) + may_end

    def commit(self, tokens: Sequence[int]) -> None:
        """Takes tokens as written.

        Raises:
            ConstraintError: One of them may not come where it stands.
        """
        for token_id in tokens:
            if self.validate([token_id]) == 0:
                raise ConstraintError(
                    f"expected a token that the grammar allows, found id {token_id}; a format that "
                    "demands a chat tag in its text cannot be written"
                )
            self._history.append(self._forced)
            self._has_ended = token_id in self._eos_token_ids
            if not self._has_ended:
                for matcher in self._matchers:
                    matcher.consume_token(token_id)
                self._check()
            self._forced = self._forced[1:] or self._read_forced()

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last `num_tokens` committed tokens."""
        if num_tokens == 0:
            return
        self._forced = self._history[-num_tokens]
        del self._history[-num_tokens:]
        for matcher in self._matchers:
            matcher.rollback(num_tokens - self._has_ended)  # matchers have not seen EOS
        self._has_ended = False

    def _may_end(self) -> bool:
        return all(matcher.is_accepting() for matcher in self._matchers)

    def _read_forced(self) -> list[int]:
        """Returns what the format forces; EOS once nothing else can follow, whichever it is."""
        if self._has_ended:
            return []
        form = self._matchers[0]
        return form.compute_ff_tokens() or [min(self._eos_token_ids)] * form.is_stopped()

    def _check(self) -> None:
        for matcher in self._matchers:
            if matcher.is_error():
                reason, _, _ = matcher.get_error().partition("\n")  # a dump of its state follows
                raise ConstraintError(f"the grammar of the answer cannot go on: {reason}")


def _unpack(bitmasks: Sequence[bytes], vocab_size: int) -> Tensor:
    """Returns where all bitmasks have a one, bool [V]; ids that the tokenizer lacks are False."""
    packed = np.stack([np.frombuffer(bitmask, dtype=np.uint8) for bitmask in bitmasks])
    bits = np.unpackbits(np.bitwise_and.reduce(packed), bitorder="little")[:vocab_size]
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[: len(bits)] = torch.from_numpy(bits).bool()
    return mask

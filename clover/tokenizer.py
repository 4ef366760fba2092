"""Text to token ids and back, for the byte-level `tokenizer.json` of a checkpoint folder.

Every byte-level token stands for fixed bytes, so decoding joins bytes; a character may be spread
over several tokens and is given out once it is whole.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final, Self

from tokenizers import Tokenizer as TokenizerFile
from tokenizers import decoders

from clover.errors import PromptError, TokenizerError

MASK_TOKEN: Final = "<|mask|>"


class Tokenizer:
    """Encodes and decodes with the tokenizer of a checkpoint folder.

    Special tokens written in a text are read as special tokens, wherever the text came from.
    """

    def __init__(self, file: TokenizerFile) -> None:
        """Wraps a tokenizer of the `tokenizers` package; see `load`.

        Raises:
            TokenizerError: The tokenizer is not byte-level.
        """
        if not isinstance(file.decoder, decoders.ByteLevel):
            found = type(file.decoder).__name__
            raise TokenizerError(f"expected a byte-level tokenizer, found the decoder {found}")
        file.no_padding()
        file.no_truncation()
        self._file = file
        added = file.get_added_tokens_decoder()
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self._special_ids = {token_id for token_id, token in added.items() if token.special}
        self._bytes_of: dict[int, bytes] = {}

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Returns the tokenizer of a checkpoint folder.

        Raises:
            TokenizerError: `tokenizer.json` is absent, cannot be read or is not byte-level.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"expected a tokenizer at {path}, found no such file")
        try:
            file = TokenizerFile.from_file(str(path))
        except Exception as error:  # the package raises nothing more precise
            raise TokenizerError(f"{path} is not a readable tokenizer.json: {error}") from error
        return cls(file)

    def __len__(self) -> int:
        """Returns the number of ids, added tokens included; a model may have more (padded) rows."""
        return self._file.get_vocab_size(with_added_tokens=True)

    @property
    def mask_token_id(self) -> int | None:
        """The id of `<|mask|>`. None in Qwen's tokenizers, where the model's config names a row."""
        return self.token_id(MASK_TOKEN)

    @property
    def added_token_ids(self) -> frozenset[int]:
        """The tokens beside the byte-level vocabulary: `<|im_end|>`, `<think>`, the tool tags."""
        return frozenset(self._added)

    def token_id(self, text: str) -> int | None:
        """Returns the id of the single token written `text`, None if there is none."""
        return self._file.token_to_id(text)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without adding any.

        Raises:
            PromptError: The text holds a lone surrogate, which no bytes can say.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"text is not valid Unicode at character {error.start}") from error
        return self._file.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Returns the text of the ids; bytes that are not UTF-8 become U+FFFD.

        Ids that the tokenizer does not know (padded rows) say nothing. `skip_special` leaves out
        the tokens that `tokenizer.json` marks special; in Qwen's, `<think>` and the tool tags are
        not.
        """
        return self.to_bytes(ids, skip_special=skip_special).decode("utf-8", errors="replace")

    def to_bytes(self, ids: Sequence[int], *, skip_special: bool = False) -> bytes:
        """Returns the bytes that the ids stand for."""
        hidden = self._special_ids if skip_special else frozenset[int]()
        return b"".join(self._token_bytes(token_id) for token_id in ids if token_id not in hidden)

    def vocabulary(self) -> list[bytes]:
        """Returns the bytes of every id, in the order of the ids."""
        return [self._token_bytes(token_id) for token_id in range(len(self))]

    def stream(self, *, skip_special: bool = False) -> IncrementalDecoder:
        """Returns a decoder for one text whose ids arrive in chunks."""
        return IncrementalDecoder(self, skip_special=skip_special)

    def _token_bytes(self, token_id: int) -> bytes:
        if token_id not in self._bytes_of:
            token = self._file.id_to_token(token_id) or ""
            alphabet = _byte_alphabet()
            self._bytes_of[token_id] = self._added.get(token_id) or bytes(
                alphabet[character] for character in token
            )
        return self._bytes_of[token_id]


class IncrementalDecoder:
    """Decodes one text whose ids arrive in chunks; no chunking changes the joined text."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool) -> None:
        """Starts a text; see `Tokenizer.stream`."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def is_inside_character(self) -> bool:
        """Whether the bytes so far end within a character."""
        pending, _ = self._decoder.getstate()
        return bool(pending)

    def push(self, ids: Sequence[int]) -> str:
        """Returns the whole characters that the ids complete."""
        return self._decoder.decode(self._tokenizer.to_bytes(ids, skip_special=self._skip_special))

    def flush(self) -> str:
        """Returns what an unfinished character becomes, and starts anew."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


@cache
def _byte_alphabet() -> dict[str, int]:
    """Returns the byte that each character of a byte-level token means.

    Printable Latin-1 characters mean themselves; the other 68 bytes, in order, are U+0100 onwards.
    Source: GPT-2, `bytes_to_unicode`.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}

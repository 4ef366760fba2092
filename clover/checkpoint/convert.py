"""A parent's folder to a Clover folder: the parent's bytes, four small tensors a layer, one row.

The commit path of the result is the parent's own arithmetic. Everything is copied as a stream.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F

from clover.checkpoint.files import CHUNK_BYTES, TensorSpec
from clover.checkpoint.names import (
    CONV_RIGHT_WEIGHT,
    EMBEDDING,
    HISTORY_BIAS,
    HISTORY_C,
    LOGIT_SCALE,
    Part,
    count_parameters,
    expected_tensors,
)
from clover.checkpoint.source import ModelTensors, dtype_name
from clover.checkpoint.writer import DEFAULT_SHARD_BYTES, FolderWriter, tensor_bytes
from clover.config import DiffusionConfig, ModelConfig, config_to_dict, read_config
from clover.errors import ConfigError
from clover.model.delta_net import HISTORY_BIAS_START, LOGIT_SCALE_START
from clover.tokenizer import Tokenizer

COPIED_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)

FORGETFUL_HISTORY_BIAS: Final = 0.5
FORGETFUL_TOKENS: Final = 3.0

Progress = Callable[[str, int, int], None]
"""Called after each tensor with its name, the bytes written so far and the bytes in all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertReport:
    """What a conversion did."""

    folder: Path
    config: ModelConfig
    num_parameters: int
    num_added_parameters: int
    num_dropped_tensors: int
    num_forgetful_heads: int
    num_bytes: int
    num_shards: int
    seconds: float


def convert(
    parent: Path,
    out: Path,
    *,
    block_size: int = 32,
    mask_token_id: int | None = None,
    expert_coreset_size: int | None = None,
    shift_logits: bool = True,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ConvertReport:
    """Writes a Clover folder made from a Qwen3.5/3.6 folder, and returns what was done.

    Every tensor of the parent keeps its bytes and its dtype, except the mask token's embedding row
    (see `mask_row`). The four added tensors take the dtype of their layer's convolution, so that a
    bf16 parent gives a bf16 model; their initial values are exact in every dtype.

    Args:
        parent: Experts fused or one by one, text part nested or flat; vision and MTP are left out.
        out: Appears whole at the end, or not at all.
        block_size: Tokens denoised together.
        mask_token_id: None: the tokenizer's `<|mask|>`, else the first row past its ids.
        expert_coreset_size: Experts that one block may use in a preview; None: all.
        shift_logits: Whether a position's prediction is read one position earlier.
        max_shard_bytes: Of tensor data in one file.
        overwrite: Replace a checkpoint that is already there.
        progress: Called after each tensor.

    Raises:
        ConfigError: The parent's configuration, or a choice made here, cannot be honoured.
        CheckpointError: The parent's files are damaged, or `out` is taken.
    """
    started = time.perf_counter()
    parent, out = Path(parent), Path(out)
    _check_folders(parent, out)
    writer = FolderWriter(out, overwrite=overwrite)
    parent_config = read_config(parent)
    if parent_config.diffusion is not None:
        raise ConfigError(f"{parent}: expected an autoregressive parent, found a Clover model.")
    tokenizer = Tokenizer.load(parent) if (parent / "tokenizer.json").is_file() else None
    diffusion = DiffusionConfig(
        block_size=block_size,
        mask_token_id=choose_mask_token_id(parent_config, tokenizer, mask_token_id),
        expert_coreset_size=expert_coreset_size,
        shift_logits=shift_logits,
    )
    config = dataclasses.replace(parent_config, diffusion=diffusion)
    conversion = _Conversion(ModelTensors(parent, parent_config), config, tokenizer)
    with writer:
        writer.write_tensors(
            conversion.specs, conversion.stream(progress), max_shard_bytes=max_shard_bytes
        )
        writer.copy_files(parent, COPIED_FILES)
        dtype = {"dtype": dtype_name(conversion.source.main_dtype)}
        writer.write_json("config.json", config_to_dict(config) | dtype)
    counts = count_parameters(config)
    return ConvertReport(
        folder=out,
        config=config,
        num_parameters=sum(counts.values()) - counts[Part.ADDED],
        num_added_parameters=counts[Part.ADDED],
        num_dropped_tensors=len(conversion.source.dropped),
        num_forgetful_heads=conversion.num_forgetful_heads,
        num_bytes=writer.num_bytes,
        num_shards=writer.num_shards,
        seconds=time.perf_counter() - started,
    )


def _check_folders(parent: Path, out: Path) -> None:
    source, target = parent.resolve(), out.resolve()
    if target == source or target in source.parents:
        raise ConfigError(f"{out}: expected a folder apart from the parent, {parent}.")


def choose_mask_token_id(
    config: ModelConfig, tokenizer: Tokenizer | None, asked: int | None
) -> int:
    """Returns the mask token's id: the one asked for, `<|mask|>`, or the first padded row.

    Raises:
        ConfigError: There is no such id, or the one asked for is a token of ordinary text.
    """
    num_ids = 0 if tokenizer is None else len(tokenizer)
    if num_ids > config.vocab_size:
        raise ConfigError(
            f"vocab_size: expected at least the tokenizer's {num_ids} ids, "
            f"found {config.vocab_size}."
        )
    if asked is not None:
        if tokenizer is not None and 0 <= asked < num_ids:
            _refuse_ordinary_token(tokenizer, asked)
        return asked
    if tokenizer is None:
        raise ConfigError(
            "mask_token_id: expected a tokenizer.json to choose it from, found none. "
            "Give the id (--mask-token-id)."
        )
    if tokenizer.mask_token_id is not None:
        return tokenizer.mask_token_id
    if num_ids == config.vocab_size:
        raise ConfigError(
            f"mask_token_id: expected a <|mask|> token or a padded row, found {num_ids} rows that "
            "are all in use. Name a special token that no text uses (--mask-token-id), or add "
            "<|mask|> to the tokenizer and a row to the parent's embeddings."
        )
    return num_ids


def _refuse_ordinary_token(tokenizer: Tokenizer, token_id: int) -> None:
    if tokenizer.to_bytes([token_id], skip_special=True):
        raise ConfigError(
            f"mask_token_id is {token_id}, the token {tokenizer.decode([token_id])!r} of ordinary "
            f"text; allowed: a special token, or a padded row from {len(tokenizer)} on."
        )


class _Conversion:
    """The tensors of the result, in order, made one at a time from those of the parent."""

    def __init__(
        self, source: ModelTensors, config: ModelConfig, tokenizer: Tokenizer | None
    ) -> None:
        assert config.diffusion is not None
        self.source = source
        self.num_forgetful_heads = 0
        self._mask_token_id = config.diffusion.mask_token_id
        self._num_real_rows = config.vocab_size if tokenizer is None else len(tokenizer)
        self.specs = [
            source.specs.get(name)
            or TensorSpec(name=name, dtype=self._added_dtype(name), shape=item.shape)
            for name, item in expected_tensors(config).items()
        ]

    def stream(self, progress: Progress | None) -> Iterator[Iterator[bytes | memoryview]]:
        """Yields the chunks of each tensor of `specs`."""
        total, done = sum(spec.num_bytes for spec in self.specs), 0
        for spec in self.specs:
            done += spec.num_bytes
            yield self._report(spec, done, total, progress)

    def _report(
        self, spec: TensorSpec, done: int, total: int, progress: Progress | None
    ) -> Iterator[bytes | memoryview]:
        yield from self._chunks(spec)
        if progress is not None:
            progress(spec.name, done, total)

    def _added_dtype(self, name: str) -> torch.dtype:
        return self.source.specs[name.rsplit(".", 1)[0] + ".conv1d.weight"].dtype

    def _chunks(self, spec: TensorSpec) -> Iterable[bytes | memoryview]:
        if spec.name == EMBEDDING:
            row = mask_row(self.source, self._mask_token_id, self._num_real_rows)
            replacement = tensor_bytes(row)
            offset = self._mask_token_id * len(replacement)
            return replace_bytes(self.source.chunks(spec.name), offset, replacement)
        if spec.name in self.source.specs:
            return self.source.chunks(spec.name)
        return [tensor_bytes(self._initial(spec).to(spec.dtype))]

    def _initial(self, spec: TensorSpec) -> torch.Tensor:
        layer, kind = spec.name.rsplit(".", 1)
        if kind == HISTORY_BIAS:
            a_log = self.source.read(f"{layer}.A_log")
            dt_bias = self.source.read(f"{layer}.dt_bias")
            forgetful = memory_in_tokens(a_log, dt_bias) <= FORGETFUL_TOKENS
            self.num_forgetful_heads += int(forgetful.sum())
            return torch.where(forgetful, FORGETFUL_HISTORY_BIAS, HISTORY_BIAS_START)
        value = {CONV_RIGHT_WEIGHT: 0.0, LOGIT_SCALE: LOGIT_SCALE_START, HISTORY_C: 0.0}[kind]
        return torch.full(spec.shape, value)


def memory_in_tokens(a_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """Returns after how many tokens each head's state has faded to 1/e of itself: [H].

    A head multiplies its state by exp(g) at each token, g = -exp(A_log) softplus(a + dt_bias); this
    is 1/|g| at a neutral input, a = 0. A head that forgets in a few tokens holds little history, so
    that its history slot starts with little weight.
    """
    return 1.0 / (a_log.float().exp() * F.softplus(dt_bias.float()))


def mask_row(source: ModelTensors, mask_token_id: int, num_real_rows: int) -> torch.Tensor:
    """Returns the embedding row that the mask token starts from: [D].

    It is the mean of the rows of the tokenizer's tokens, scaled to their median norm. A mask must
    say "a token stands here" and nothing of which one. The mean is what all rows have in common:
    among vectors of its length it is on average the nearest to every token, so that it favours
    none, and later layers know its direction. The length matters although each layer normalises
    its input, because the row is also the start of the residual stream: the plain mean is several
    times shorter than a token's row, and the layers' outputs would drown it in a ratio that they
    never met in training. A padded row as it stands is unsuitable: nothing has ever trained it.

    With tied embeddings the row is also the mask's output row. That does no harm, since sampling
    never lets the mask be drawn; an untied `lm_head` is left as it is.
    """
    count = num_real_rows - (mask_token_id < num_real_rows)
    if count < 1:
        raise ConfigError(f"vocab_size: expected tokens beside the mask, found {num_real_rows}.")
    spec = source.specs[EMBEDDING]
    hidden = spec.shape[1]
    # Made once: small tensors kept from each step would pin holes in the heap and let it grow.
    total, norms = torch.zeros(hidden, dtype=torch.float64), torch.empty(num_real_rows)
    step = max(1, CHUNK_BYTES // (4 * hidden))
    for start in range(0, num_real_rows, step):
        stop = min(start + step, num_real_rows)
        rows = source.read_rows(EMBEDDING, start, stop).float()
        if start <= mask_token_id < stop:
            rows[mask_token_id - start] = 0.0
        total += rows.sum(0, dtype=torch.float64)
        torch.linalg.vector_norm(rows, dim=1, out=norms[start:stop])
    mean = total / count
    is_real = torch.arange(num_real_rows) != mask_token_id
    scale = norms[is_real].median() / mean.norm().clamp_min(1e-30)  # rows of zeros stay zeros
    row: torch.Tensor = (mean * scale).to(spec.dtype)
    return row


def replace_bytes(
    chunks: Iterable[bytes], offset: int, replacement: memoryview
) -> Iterator[bytes | memoryview]:
    """Yields the chunks with the bytes from `offset` on replaced, whatever the chunking."""
    position, end = 0, offset + len(replacement)
    for chunk in chunks:
        stop = position + len(chunk)
        low, high = max(offset, position), min(end, stop)
        if low < high:
            yield chunk[: low - position]
            yield replacement[low - offset : high - offset]
            yield chunk[high - position :]
        else:
            yield chunk
        position = stop

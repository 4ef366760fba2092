"""Teacher-forced preview scores are those of one cached preview after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from clover.config import DiffusionConfig, ModelConfig
from clover.model.moe import record_router_logits, restrict_to_coreset
from clover.model.transformer import CloverForCausalLM
from clover.train.data import Document
from clover.train.packing import cut_blocks, pack_all
from clover.train.preview_quality import MASKED_SHARES, draw_mask, score_previews

ConfigFactory = Callable[..., ModelConfig]

BLOCK_SIZE = 4
LOSS_TOLERANCE = 1e-5  # fp32: one pass over the row against one for each block


@dataclass
class Tally:
    losses: list[float] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    is_first: list[bool] = field(default_factory=list)
    num_experts: list[int] = field(default_factory=list)


def _documents() -> list[Document]:
    generator = torch.Generator().manual_seed(0)
    return [
        Document(
            prompt_ids=tuple(torch.randint(2, 60, (3 + number,), generator=generator).tolist()),
            response_ids=tuple(torch.randint(2, 60, (7 + number,), generator=generator).tolist()),
        )
        for number in range(3)
    ]


def _model(config: ModelConfig) -> CloverForCausalLM:
    model = CloverForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    model.init_weights(generator)
    for weight in model.parameters():  # large enough for the greatest logits to be far apart
        if weight.dim() > 1:
            weight.data = weight.data.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
    return model


def _preview_one_by_one(model: CloverForCausalLM, masked: Tensor) -> Tally:
    """Commits each document token by token of history and previews its blocks from the cache."""
    assert model.config.diffusion is not None
    tally, mask_token_id = Tally(), model.config.diffusion.mask_token_id
    slot = 0
    for document in _documents():
        cache = model.new_cache(1)
        last = model.prefill(cache, torch.tensor([document.prompt_ids]))
        for start in range(0, len(document.response_ids), BLOCK_SIZE):
            tokens = document.response_ids[start : start + BLOCK_SIZE]
            mask = masked[slot].tolist()
            canvas = [
                mask_token_id if i >= len(tokens) or mask[i] else tokens[i]
                for i in range(BLOCK_SIZE)
            ]
            with record_router_logits(model) as router_logits:
                logits = model.preview(cache, torch.tensor([canvas]))[0]
            if model.config.diffusion.shift_logits:
                logits = torch.cat([last, logits[:-1]])
            positions = [i for i in range(len(tokens)) if mask[i]]
            for i in positions:
                tally.losses.append(-float(logits[i].log_softmax(-1)[tokens[i]]))
                tally.right.append(int(logits[i].argmax()) == tokens[i])
                tally.is_first.append(i == positions[0])
            for layer in router_logits:
                shares = layer.softmax(-1)  # of the one row
                shares = restrict_to_coreset(
                    shares, model.config.diffusion.expert_coreset_size or 4
                )
                tally.num_experts.append(len(set(shares.topk(2).indices.flatten().tolist())))
            last = model.commit(cache, torch.tensor([tokens]))[:, -1]
            slot += 1
    return tally


@pytest.mark.parametrize("shift_logits", [True, False])
@pytest.mark.parametrize("coreset_size", [None, 3])
def test_scores_are_the_means_over_previews_run_one_by_one(
    tiny_config: ConfigFactory, shift_logits: bool, coreset_size: int | None
) -> None:
    diffusion = DiffusionConfig(
        block_size=8,
        mask_token_id=63,
        shift_logits=shift_logits,
        expert_coreset_size=coreset_size,
    )
    model = _model(tiny_config(diffusion=diffusion))
    # One row, so that the blocks of the batch are those of the documents in order
    scores = score_previews(model, _documents(), block_size=BLOCK_SIZE, num_rows=1, row_length=64)
    [batch] = pack_all(_documents(), num_rows=1, row_length=64, pad_token_id=0)
    blocks = cut_blocks(batch, BLOCK_SIZE)
    assert [score.masked_share for score in scores] == list(MASKED_SHARES)
    for score in scores:
        masked = draw_mask(blocks, score.masked_share, 0)
        expected = _preview_one_by_one(model, masked[0])
        losses, right = torch.tensor(expected.losses), torch.tensor(expected.right).float()
        is_first = torch.tensor(expected.is_first)
        assert score.loss == pytest.approx(float(losses.mean()), abs=LOSS_TOLERANCE)
        assert score.first_loss == pytest.approx(float(losses[is_first].mean()), abs=LOSS_TOLERANCE)
        assert score.accuracy == pytest.approx(float(right.mean()))
        assert score.first_accuracy == pytest.approx(float(right[is_first].mean()))
        experts = torch.tensor(expected.num_experts).float()
        assert score.num_experts == pytest.approx(float(experts.mean()))


def test_every_token_is_masked_or_about_half_of_them() -> None:
    documents = [Document(prompt_ids=(5,), response_ids=tuple(range(2, 50)))] * 20
    [batch] = pack_all(documents, num_rows=20, row_length=64, pad_token_id=0)
    blocks = cut_blocks(batch, BLOCK_SIZE)
    assert torch.equal(draw_mask(blocks, 1.0, 0), blocks.is_token)
    half = draw_mask(blocks, 0.5, 0)
    # 960 fair coins: five standard deviations are 0.08
    assert float(half[blocks.is_token].float().mean()) == pytest.approx(0.5, abs=0.08)
    assert not bool((half & ~blocks.is_token).any())
    assert torch.equal(half, draw_mask(blocks, 0.5, 0))
    assert not torch.equal(half, draw_mask(blocks, 0.5, 1))


def test_a_dense_model_has_no_experts_to_count(tiny_config: ConfigFactory) -> None:
    model = _model(tiny_config("dense"))
    scores = score_previews(model, _documents(), block_size=BLOCK_SIZE, num_rows=1, row_length=64)
    assert [score.num_experts for score in scores] == [None, None]

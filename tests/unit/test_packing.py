"""Packing and blocks, and the sources that feed them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from clover.chat import ChatTemplate, parse_reply
from clover.errors import TrainingError
from clover.model.transformer import CloverForCausalLM
from clover.tasks import FAMILIES, check_reply
from clover.tokenizer import Tokenizer
from clover.train.data import ChatFileSource, Document, DocumentEncoder, TaskSource
from clover.train.packing import (
    MAX_WAITING,
    Batch,
    Packer,
    PackerState,
    best_fit,
    cut_blocks,
    fill_slots,
    pack_all,
    pack_rows,
)

NANO = Path(__file__).parents[2] / "clover" / "assets" / "nano"
PAD = 9
LEAK_TOLERANCE = 1e-5  # fp32: another row length sums in another order


class _Counting:
    """Documents whose tokens say which they are: lengths vary, prompts and replies too."""

    def document(self, index: int) -> Document:
        prompt, response = 2 + index % 5, 3 + (index * 7) % 11
        return Document(
            prompt_ids=(index,) * prompt,
            response_ids=(1000 + index,) * response,
            family="even" if index % 2 == 0 else "odd",
        )


def _document(prompt: int, response: int) -> Document:
    return Document(
        prompt_ids=tuple(range(10, 10 + prompt)), response_ids=tuple(range(30, 30 + response))
    )


def _packer(state: PackerState | None = None) -> Packer:
    return Packer(_Counting(), num_rows=3, row_length=40, pad_token_id=PAD, state=state)


@pytest.fixture(scope="module")
def encoder() -> DocumentEncoder:
    return DocumentEncoder(Tokenizer.load(NANO))


def test_rows_hold_documents_side_by_side_and_padding_belongs_to_none() -> None:
    batch = pack_rows([[_document(2, 1), _document(1, 2)]], row_length=8, pad_token_id=PAD)
    assert batch.input_ids.tolist() == [[10, 11, 30, 10, 30, 31, PAD, PAD]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1, 1, -1, -1]]
    assert batch.is_response.int().tolist() == [[0, 0, 1, 0, 1, 1, 0, 0]]
    assert [(s.start, s.response_start, s.end) for s in batch.spans] == [(0, 2, 3), (3, 4, 6)]
    assert batch.num_tokens == 6


def test_a_row_that_is_too_short_is_refused() -> None:
    with pytest.raises(TrainingError, match="row 0 needs 9 tokens, it has 8"):
        pack_rows([[_document(4, 5)]], row_length=8, pad_token_id=PAD)


def test_best_fit_is_the_fullest_row_with_room() -> None:
    assert best_fit([10, 4, 6], 5) == 2
    assert best_fit([10, 4, 6], 11) is None


def test_packer_uses_every_document_once() -> None:
    packer, seen = _packer(), []
    for _ in range(30):
        batch = packer.next_batch()
        seen += [int(batch.input_ids[span.row, span.start]) for span in batch.spans]
    assert len(seen) == len(set(seen))
    assert sorted([*seen, *packer.state.waiting]) == list(range(packer.state.next_index))
    assert len(packer.state.waiting) <= MAX_WAITING


def test_packer_fills_rows_well() -> None:
    packer = _packer()
    batches = [packer.next_batch() for _ in range(20)]
    filled = sum(batch.num_tokens for batch in batches) / (20 * 3 * 40)
    assert filled > 0.95


def test_packer_goes_on_from_its_state_as_if_never_stopped() -> None:
    whole, first = _packer(), _packer()
    for _ in range(5):
        whole.next_batch()
        first.next_batch()
    resumed = _packer(first.state)
    for _ in range(5):
        expected, found = whole.next_batch(), resumed.next_batch()
        assert torch.equal(expected.input_ids, found.input_ids)
        assert expected.spans == found.spans
    assert whole.state == resumed.state


def test_packer_skips_what_fits_no_row_and_counts_it() -> None:
    packer = Packer(_Counting(), num_rows=2, row_length=12, pad_token_id=PAD)
    batch = packer.next_batch()
    assert packer.state.skipped > 0
    assert all(span.end - span.start <= 12 for span in batch.spans)


def test_packer_stops_when_nothing_fits() -> None:
    packer = Packer(_Counting(), num_rows=2, row_length=4, pad_token_id=PAD)
    with pytest.raises(TrainingError, match="longer than row_length 4"):
        packer.next_batch()


def test_pack_all_keeps_every_document() -> None:
    documents = [_Counting().document(index) for index in range(20)]
    batches = pack_all(documents, num_rows=2, row_length=20, pad_token_id=PAD)
    firsts = [int(b.input_ids[s.row, s.start]) for b in batches for s in b.spans]
    assert sorted(firsts) == list(range(20))
    with pytest.raises(TrainingError, match="does not fit into a row of 5"):
        pack_all(documents, num_rows=2, row_length=5, pad_token_id=PAD)


def test_shares_of_a_batch_are_its_rows() -> None:
    batch = Packer(_Counting(), num_rows=4, row_length=40, pad_token_id=PAD).next_batch()
    shares = [batch.share(rank, 2) for rank in range(2)]
    assert sum(share.num_tokens for share in shares) == batch.num_tokens
    for rank, share in enumerate(shares):
        assert torch.equal(share.input_ids, batch.input_ids[rank::2])
        for span in share.spans:
            tokens = share.input_ids[span.row, span.response_start : span.end]
            assert (tokens >= 1000).all() and len(set(tokens.tolist())) == 1


def _spans_of_blocks(batch: Batch, block_size: int, skip: int = 0) -> list[list[list[int]]]:
    """The naive cut: for each row, the tokens of each block."""
    rows: list[list[list[int]]] = [[] for _ in batch.input_ids]
    for span in batch.spans:
        start = min(span.response_start + skip, span.end - 1)
        while start < span.end:
            stop = min(start + block_size, span.end)
            rows[span.row].append(batch.input_ids[span.row, start:stop].tolist())
            start += block_size
    return rows


@pytest.mark.parametrize("block_size", [1, 3, 8, 32])
@pytest.mark.parametrize("skip", [0, 2])
def test_blocks_cover_each_response_and_nothing_else(block_size: int, skip: int) -> None:
    batch = _packer().next_batch()
    blocks = cut_blocks(batch, block_size, skips=[skip] * len(batch.spans))
    for row, expected in enumerate(_spans_of_blocks(batch, block_size, skip)):
        used = int((blocks.starts[row] >= 0).sum())
        assert (blocks.starts[row, used:] == -1).all()
        assert not blocks.is_token[row, used:].any()
        found = [
            blocks.targets[row, number][blocks.is_token[row, number]].tolist()
            for number in range(used)
        ]
        assert found == expected


def test_first_block_starts_where_the_response_starts() -> None:
    batch = pack_rows([[_document(2, 5), _document(3, 4)]], row_length=20, pad_token_id=PAD)
    blocks = cut_blocks(batch, 4)
    assert blocks.starts.tolist() == [[2, 6, 10]]
    assert blocks.is_token.int().tolist() == [[[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1]]]
    assert blocks.targets.tolist() == [[[30, 31, 32, 33], [34, 34, 34, 34], [30, 31, 32, 33]]]


@pytest.mark.parametrize("num_slots", [1, 3, 8])
def test_slots_hold_the_blocks_of_their_row_as_evenly_as_they_can(num_slots: int) -> None:
    rows = [[_document(2, 9), _document(1, 3)], [_document(3, 2)], []]
    batch = pack_rows(rows, row_length=20, pad_token_id=PAD)
    blocks = cut_blocks(batch, 4)
    filled = fill_slots(blocks, num_slots, torch.Generator().manual_seed(0))
    for row, starts in enumerate(filled.starts.tolist()):
        own = [start for start in blocks.starts[row].tolist() if start >= 0]
        if not own:
            assert starts == [-1] * num_slots
            continue
        counts = [starts.count(start) for start in own]
        assert sum(counts) == num_slots and max(counts) - min(counts) <= 1
        for slot, start in enumerate(starts):
            where = blocks.starts[row].tolist().index(start)
            assert torch.equal(filled.targets[row, slot], blocks.targets[row, where])
            assert torch.equal(filled.is_token[row, slot], blocks.is_token[row, where])


def test_blocks_are_left_out_by_chance() -> None:
    batch = pack_rows([[_document(2, 12)]], row_length=20, pad_token_id=PAD)
    blocks, generator = cut_blocks(batch, 4), torch.Generator().manual_seed(0)
    kept = {int(fill_slots(blocks, 1, generator).starts) for _ in range(50)}
    assert kept == set(blocks.starts[0].tolist())


def test_packed_documents_never_see_each_other(tiny_config) -> None:  # type: ignore[no-untyped-def]
    model = CloverForCausalLM(tiny_config("moe"))
    model.init_weights(torch.Generator().manual_seed(0))
    documents = [_document(5, 9), _document(3, 6), _document(7, 4)]
    packed = pack_rows([documents], row_length=40, pad_token_id=0)
    with torch.no_grad():
        together = model(packed.input_ids, document_ids=packed.document_ids)
        for span, document in zip(packed.spans, documents, strict=True):
            alone = model(torch.tensor([document.prompt_ids + document.response_ids]))
            found = together[:, span.start : span.end]
            assert (found - alone).abs().max() < LEAK_TOLERANCE * alone.std() + 1e-6


def test_packed_documents_stay_finite_when_a_head_forgets_at_once(tiny_config) -> None:  # type: ignore[no-untyped-def]
    model = CloverForCausalLM(tiny_config("moe"))
    model.init_weights(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("dt_bias"):
                weight.fill_(30.0)  # decays by e^-100 and more per token, as trained heads do
    # Several borders inside a chunk, and chunks after it that would inherit a broken state
    documents = [_document(5, 4 + number % 3) for number in range(12)]
    packed = pack_rows([documents], row_length=140, pad_token_id=0)
    logits = model(packed.input_ids, document_ids=packed.document_ids)
    logits.sum().backward()
    assert bool(logits.isfinite().all())
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def test_documents_read_back_as_the_task_that_they_came_from(encoder: DocumentEncoder) -> None:
    tokenizer, source = Tokenizer.load(NANO), TaskSource(encoder)
    families = set()
    for index in range(40):
        task, document = source.task(index), source.document(index)
        families.add(document.family)
        prompt = tokenizer.decode(list(document.prompt_ids))
        expected = ChatTemplate().render(
            task.messages, tools=task.tools, enable_thinking=task.enable_thinking
        )
        assert prompt == expected
        assert document.response_ids[-1] == tokenizer.token_id("<|im_end|>")
        reply = tokenizer.decode(list(document.response_ids[:-1]))
        parsed = parse_reply(reply, starts_in_thinking=task.enable_thinking, tools=task.tools)
        assert check_reply(task, parsed)
    assert families == set(FAMILIES)


def test_task_source_is_a_function_of_seed_and_index(encoder: DocumentEncoder) -> None:
    source, again, other = (TaskSource(encoder, seed=seed) for seed in (0, 0, 1))
    assert source.document(3) == again.document(3)
    assert [source.document(i) for i in range(5)] != [other.document(i) for i in range(5)]


def test_family_weights_are_obeyed_and_checked(encoder: DocumentEncoder) -> None:
    source = TaskSource(encoder, weights={"sorting": 1.0, "lookup": 0.0})
    assert {source.document(index).family for index in range(10)} == {"sorting"}
    with pytest.raises(TrainingError, match=r"unknown task families \['poetry'\]"):
        TaskSource(encoder, weights={"poetry": 1.0})
    with pytest.raises(TrainingError, match="not all 0"):
        TaskSource(encoder, weights={"sorting": 0.0})


def _write(path: Path, *lines: object) -> Path:
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def test_each_assistant_turn_of_a_chat_is_a_document(
    tmp_path: Path, encoder: DocumentEncoder
) -> None:
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four", "reasoning_content": "so"},
    ]
    path = _write(tmp_path / "chats.jsonl", {"messages": messages}, "")
    source = ChatFileSource(path, encoder)
    assert len(source) == 2
    tokenizer = Tokenizer.load(NANO)
    replies = {tokenizer.decode(list(source.document(i).response_ids)) for i in range(2)}
    assert replies == {"\n</think>\n\ntwo<|im_end|>", "so\n</think>\n\nfour<|im_end|>"}


def test_chats_are_shuffled_anew_in_each_epoch_and_none_is_lost(
    tmp_path: Path, encoder: DocumentEncoder
) -> None:
    chats = [
        {
            "messages": [
                {"role": "user", "content": str(number)},
                {"role": "assistant", "content": str(number)},
            ],
            "enable_thinking": False,
        }
        for number in range(12)
    ]
    source = ChatFileSource(_write(tmp_path / "chats.jsonl", *chats), encoder, seed=3)
    epochs = [[source.document(12 * epoch + i) for i in range(12)] for epoch in range(2)]
    assert epochs[0] != epochs[1]
    assert set(epochs[0]) == set(epochs[1]) and len(set(epochs[0])) == 12


def test_a_run_over_chats_goes_on_at_the_exact_sample(
    tmp_path: Path, encoder: DocumentEncoder
) -> None:
    chats = [
        {"messages": [{"role": "user", "content": "x" * (i % 5)}, {**ASSISTANT, "content": str(i)}]}
        for i in range(20)
    ]
    path = _write(tmp_path / "chats.jsonl", *chats)

    def packer(state: PackerState | None = None) -> Packer:
        source = ChatFileSource(path, encoder, seed=1)
        return Packer(source, num_rows=2, row_length=64, pad_token_id=0, state=state)

    unbroken = packer()
    for _ in range(6):  # more than an epoch
        resumed = packer(unbroken.state)
        expected = unbroken.next_batch()
        assert torch.equal(resumed.next_batch().input_ids, expected.input_ids)
    assert unbroken.state.next_index > 20


def test_only_a_newline_ends_a_line_of_chats(tmp_path: Path, encoder: DocumentEncoder) -> None:
    path = tmp_path / "chats.jsonl"
    chat = {"messages": [USER, {**ASSISTANT, "content": "one\u2028two"}]}
    path.write_text("\n" + json.dumps(chat, ensure_ascii=False), encoding="utf-8")
    source = ChatFileSource(path, encoder)
    assert "one\u2028two" in Tokenizer.load(NANO).decode(list(source.document(0).response_ids))


def test_a_chat_is_rendered_when_it_is_asked_for(tmp_path: Path) -> None:
    template = ChatTemplate(
        "{{ messages[0].content if messages[0].content != 'a' else missing() }}"
    )
    encoder = DocumentEncoder(Tokenizer.load(NANO), template)
    source = ChatFileSource(
        _write(tmp_path / "chats.jsonl", "", {"messages": [USER, ASSISTANT]}), encoder
    )
    with pytest.raises(TrainingError, match=r"chats.jsonl, line 2: .*missing"):
        source.document(0)


USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "not JSON"),
        ([1], "expected an object, found list"),
        ({"messages": "hi"}, "expected a list of objects at 'messages'"),
        ({"messages": [USER, ASSISTANT], "tools": ["f"]}, "expected a list of objects at 'tools'"),
        ({"messages": [USER, ASSISTANT], "weight": 1}, r"unknown keys \['weight'\]"),
        ({"messages": [USER, ASSISTANT], "enable_thinking": 1}, "expected true or false"),
        ({"messages": [USER]}, "no assistant turn"),
        ({"messages": [ASSISTANT]}, "at least one message"),
        ({"messages": [{"role": "wizard", "content": "a"}, ASSISTANT]}, "role must be one of"),
    ],
)
def test_a_bad_line_is_named(
    tmp_path: Path, encoder: DocumentEncoder, line: object, message: str
) -> None:
    path = _write(tmp_path / "chats.jsonl", {"messages": [USER, ASSISTANT]}, line)
    with pytest.raises(TrainingError, match=f"chats.jsonl, line 2: .*{message}"):
        ChatFileSource(path, encoder)


def test_a_file_without_chats_or_without_a_file_is_refused(
    tmp_path: Path, encoder: DocumentEncoder
) -> None:
    with pytest.raises(TrainingError, match="holds no chat"):
        ChatFileSource(_write(tmp_path / "empty.jsonl", ""), encoder)
    with pytest.raises(TrainingError, match="cannot read training data"):
        ChatFileSource(tmp_path / "absent.jsonl", encoder)


def test_a_document_without_a_reply_is_refused() -> None:
    with pytest.raises(TrainingError, match="needs a prompt and a response, found 1 and 0"):
        Document(prompt_ids=(1,), response_ids=())

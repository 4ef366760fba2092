"""A checkpoint's answers to tasks: decoded, judged by the tasks' own checks, scored by family."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from clover.chat import parse_reply
from clover.checkpoint.load import LoadedCheckpoint
from clover.diffusion.generate import (
    GenerationRequest,
    GenerationResult,
    generate_all,
    reserved_token_ids,
)
from clover.diffusion.policies import Policy
from clover.tasks import FAMILIES, Task, check_reply, make_task

BATCH_SIZE = 32
MAX_TOKENS = 256  # the longest reference has 174
ITEM_SEED = 20_000_000  # far from the seeds of training and validation


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyScore:
    """How many of a family's items were answered rightly, and in how many passes."""

    family: str
    items: int
    correct: int
    tokens: int
    passes: int

    @property
    def accuracy(self) -> float:
        """Share of items answered rightly."""
        return self.correct / self.items

    @property
    def tpf(self) -> float:
        """Tokens per forward pass over all items."""
        return self.tokens / self.passes


def draw_items(split: str, families: Sequence[str] = FAMILIES) -> Iterator[Task]:
    """Yields tasks without end, the families in turn; always the same ones."""
    for index in itertools.count():
        yield make_task(families[index % len(families)], ITEM_SEED + index, split)


def answer(
    checkpoint: LoadedCheckpoint,
    policy: Policy,
    tasks: Sequence[Task],
    *,
    max_tokens: int = MAX_TOKENS,
) -> Iterator[tuple[Task, GenerationResult]]:
    """Yields the tasks with their answers, decoded greedily in one batch."""
    requests = [
        GenerationRequest(
            prompt_ids=checkpoint.tokenizer.encode(
                checkpoint.template.render(
                    task.messages, tools=task.tools, enable_thinking=task.enable_thinking
                )
            ),
            max_tokens=max_tokens,
            policy=policy,
        )
        for task in tasks
    ]
    results = generate_all(
        checkpoint.model,
        requests,
        decode=checkpoint.tokenizer.decode,
        eos_token_ids=checkpoint.eos_token_ids,
        forbidden_token_ids=reserved_token_ids(checkpoint.config, len(checkpoint.tokenizer)),
    )
    yield from zip(tasks, results, strict=True)


def is_correct(checkpoint: LoadedCheckpoint, task: Task, result: GenerationResult) -> bool:
    """Returns whether the answer, read as a chat reply, is the task's."""
    return result.finish_reason == "eos" and is_correct_text(checkpoint, task, result.token_ids)


def is_correct_text(checkpoint: LoadedCheckpoint, task: Task, token_ids: Sequence[int]) -> bool:
    """Returns whether tokens without EOS, read as a chat reply, are the task's answer."""
    text = checkpoint.tokenizer.decode(token_ids)
    reply = parse_reply(text, starts_in_thinking=task.enable_thinking, tools=task.tools)
    return check_reply(task, reply)


def score_answers(
    checkpoint: LoadedCheckpoint,
    policy: Policy,
    tasks: Sequence[Task],
    *,
    max_tokens: int = MAX_TOKENS,
) -> list[FamilyScore]:
    """Returns a score for each family, in the order of the tasks, and at last one for "all"."""
    answers = [
        (task, result, is_correct(checkpoint, task, result))
        for start in range(0, len(tasks), BATCH_SIZE)
        for task, result in answer(
            checkpoint, policy, tasks[start : start + BATCH_SIZE], max_tokens=max_tokens
        )
    ]
    scores = []
    for family in (*dict.fromkeys(task.family for task in tasks), "all"):
        part = [a for a in answers if family in (a[0].family, "all")]
        scores.append(
            FamilyScore(
                family=family,
                items=len(part),
                correct=sum(correct for _, _, correct in part),
                tokens=sum(result.stats.tokens for _, result, _ in part),
                passes=sum(result.stats.passes for _, result, _ in part),
            )
        )
    return scores

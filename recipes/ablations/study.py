"""One study: every variant is trained on the same tokens, seed by seed, and evaluated alike.

A study's folder has `study.json`, `results.jsonl` and, while a run is under way, its state. It may be
killed at any moment: finished runs are skipped, the one that was cut goes on where it was saved.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from clover.checkpoint.convert import choose_mask_token_id, convert
from clover.checkpoint.load import (
    LoadedCheckpoint,
    load_checkpoint,
    load_model,
    resolve_checkpoint,
)
from clover.config import read_config
from clover.diffusion.policies import Exact, Policy, Threshold
from clover.errors import TrainingInputError
from clover.model.delta_net import DeltaNet
from clover.model.transformer import CloverForCausalLM
from clover.tasks import FAMILIES, Task
from clover.tokenizer import Tokenizer
from clover.train.answers import draw_items, score_answers
from clover.train.calibrate import calibrate
from clover.train.data import Document, DocumentEncoder, DocumentSource, TaskSource
from clover.train.evaluation import evaluate
from clover.train.events import TrainEvent
from clover.train.packing import Packer
from clover.train.preview_quality import score_previews
from clover.train.run_files import git_commit
from clover.train.state import STATE_FILE, has_state
from clover.train.trainer import config_to_json, train
from recipes.ablations.results import (
    HistorySlot,
    Result,
    SplitResult,
    append_result,
    read_results,
)
from recipes.ablations.variants import (
    Setup,
    base_setup,
    choose_setups,
    freeze,
    preview_formula,
)
from recipes.nano import CLOVER_WEIGHTS, VALIDATION_SEED

SPLITS: Final = ("seen", "heldout")
BLOCK_SIZES: Final = (4, 8, 16, 32)
POLICIES: Final[Mapping[str, Policy]] = {
    "exact": Exact(),
    "threshold 0.9": Threshold(threshold=0.9),
}
STUDY_FILE: Final = "study.json"

OnEvent = Callable[[str, int, TrainEvent], None]
"""Is told the variant, the seed and what its training reports."""


def check_families(families: Sequence[str]) -> None:
    """Refuses names of families that there are not, and none at all.

    Raises:
        TrainingInputError: As it says.
    """
    unknown = sorted(set(families) - set(FAMILIES))
    if unknown or not families:
        raise TrainingInputError(
            f"expected some of the families {', '.join(FAMILIES)}, found {', '.join(unknown) or 'none'}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyConfig:
    """What all runs of a study have in common.

    Attributes:
        parent: A checkpoint that `resolve_checkpoint` finds, with a tokenizer.
        steps, num_rows, row_length: Tokens of a run: their product.
        families: Task families, in the shares of the recipe.
        num_documents: Documents of each split for teacher-forced scores.
        num_items: Items of each split to answer.
        max_tokens: Of an answer.
    """

    parent: str = "clover-nano-parent"
    steps: int = 600
    num_rows: int = 16
    row_length: int = 256
    families: tuple[str, ...] = FAMILIES
    num_documents: int = 128
    num_items: int = 128
    max_tokens: int = 256

    def __post_init__(self) -> None:
        """Checks ranges; those of training are checked by its own config."""
        check_families(self.families)
        for name in ("num_documents", "num_items", "max_tokens"):
            if getattr(self, name) < 1:
                raise TrainingInputError(f"{name} must be at least 1, found {getattr(self, name)}")


class Study:
    """A study in its folder."""

    def __init__(self, folder: Path, config: StudyConfig, on_event: OnEvent) -> None:
        """Opens or begins a study.

        Raises:
            TrainingInputError: The folder holds another study.
        """
        self._folder, self._config, self._on_event = folder, config, on_event
        self._parent = resolve_checkpoint(config.parent)
        tokenizer = Tokenizer.load(self._parent)
        self._encoder = DocumentEncoder(tokenizer)
        parent = read_config(self._parent)
        base = base_setup(
            parent,
            mask_token_id=choose_mask_token_id(parent, tokenizer, None),
            num_token_ids=len(tokenizer),
        )
        training = replace(
            base.training,
            steps=config.steps,
            num_rows=config.num_rows,
            row_length=config.row_length,
        )
        self.base = replace(base, training=training)
        # With the recipe, so that runs before and after a change of it are never compared
        _keep_config(
            folder,
            asdict(config)
            | {"families": list(config.families), "recipe": config_to_json(training)},
        )

    def run(self, variants: list[str] | None, seeds: Sequence[int]) -> bool:
        """Runs what is not finished, seed by seed; returns False where a signal cut it short."""
        setups = choose_setups(self.base, variants)
        for seed in seeds:
            for name, setup in setups.items():
                finished = {(result.variant, result.seed) for result in read_results(self._folder)}
                if (name, seed) in finished:
                    continue
                result = self._run_one(name, setup, seed)
                if result is None:
                    return False
                append_result(self._folder, result)
                (self._run_folder(name, seed) / STATE_FILE).unlink()
        return True

    @property
    def _weights(self) -> dict[str, float]:
        return {family: CLOVER_WEIGHTS[family] for family in self._config.families}

    def _run_folder(self, name: str, seed: int) -> Path:
        return self._folder / "runs" / f"{name}-{seed}"

    def _run_one(self, name: str, setup: Setup, seed: int) -> Result | None:
        """Converts, trains and evaluates; None where a signal cut the training short."""
        out = self._run_folder(name, seed)
        config = replace(setup.training, seed=seed, out=out)
        source = TaskSource(self._encoder, seed=seed, weights=self._weights)
        checkpoint = convert_parent(self._parent, setup)
        freeze(checkpoint.model, setup.frozen)
        with preview_formula(setup.formula):
            if setup.is_calibrated and not has_state(out):
                self._calibrate(checkpoint.model, source)
            summary = train(
                checkpoint.model,
                config,
                source,
                on_event=lambda event: self._on_event(name, seed, event),
                resume=has_state(out),
                parent=load_model(self._parent) if config.losses.needs_parent else None,
            )
            if not summary.is_finished:
                return None
            splits = {split: self._evaluate(checkpoint, split) for split in SPLITS}
        return Result(
            variant=name,
            seed=seed,
            tokens=config.steps * config.num_rows * config.row_length,
            git_commit=git_commit(),
            splits=splits,
            history_slots=history_slots(checkpoint.model),
        )

    def _calibrate(self, model: CloverForCausalLM, source: DocumentSource) -> None:
        packer = Packer(
            source,
            num_rows=self._config.num_rows,
            row_length=self._config.row_length,
            pad_token_id=model.config.pad_token_id or 0,
        )
        calibrate(model, packer.next_batch(), block_sizes=BLOCK_SIZES)

    def _evaluate(self, checkpoint: LoadedCheckpoint, split: str) -> SplitResult:
        config, model = self._config, checkpoint.model.eval()
        rows = {"num_rows": config.num_rows, "row_length": config.row_length}
        documents, tasks = self._documents(split), self._tasks(split)
        clean = evaluate(model, documents, block_size=None, **rows)
        return SplitResult(
            ar_loss=clean.loss,
            ar_exact=clean.exact,
            previews=[
                score
                for block_size in BLOCK_SIZES
                for score in score_previews(model, documents, block_size=block_size, **rows)
            ],
            answers={
                policy: score_answers(checkpoint, choice, tasks, max_tokens=config.max_tokens)
                for policy, choice in POLICIES.items()
            },
        )

    def _documents(self, split: str) -> list[Document]:
        """Returns the fixed documents of a split: the first that fit into a row."""
        source = TaskSource(self._encoder, seed=VALIDATION_SEED, split=split, weights=self._weights)
        documents = map(source.document, itertools.count())
        fitting = (document for document in documents if self._fits(document))
        return list(itertools.islice(fitting, self._config.num_documents))

    def _tasks(self, split: str) -> list[Task]:
        """Returns the fixed items of a split, families in turn: the first that fit into a row."""
        tasks = draw_items(split, self._config.families)
        fitting = (task for task in tasks if self._fits(self._encoder.encode_task(task)))
        return list(itertools.islice(fitting, self._config.num_items))

    def _fits(self, document: Document) -> bool:
        return len(document) <= self._config.row_length


def _keep_config(folder: Path, values: Mapping[str, Any]) -> None:
    """Writes study.json, or compares the study with the one that is there.

    A field that the older one did not know had its default.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / STUDY_FILE
    if not path.is_file():
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)
    saved = json.loads(path.read_text(encoding="utf-8"))
    changed = [
        f"{name} was {saved[name]!r}, is {value!r}"
        for name, value in values.items()
        if saved.get(name, value) != value
    ]
    if changed:
        raise TrainingInputError(
            f"{folder} holds another study: {'; '.join(changed)}; give the same options, or another "
            "folder"
        )


def convert_parent(parent: Path, setup: Setup) -> LoadedCheckpoint:
    """Returns the parent converted as the setup says, ready to train. Nothing stays on disk."""
    diffusion = setup.diffusion
    with TemporaryDirectory() as folder:
        converted = Path(folder) / "converted"
        convert(
            parent,
            converted,
            block_size=diffusion.block_size,
            mask_token_id=diffusion.mask_token_id,
            expert_coreset_size=diffusion.expert_coreset_size,
            shift_logits=diffusion.shift_logits,
        )
        return load_checkpoint(converted)


def history_slots(model: CloverForCausalLM) -> list[HistorySlot]:
    """Returns tau, b and c of every GDN layer."""
    return [
        HistorySlot(
            layer=number,
            tau=mixer.bd_softmax_logit_scale.tolist(),
            b=mixer.bd_softmax_history_bias.tolist(),
            c=mixer.bd_softmax_history_c.tolist(),
        )
        for number, layer in enumerate(model.model.layers)
        for mixer in layer.children()
        if isinstance(mixer, DeltaNet)
    ]

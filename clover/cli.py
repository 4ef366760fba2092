"""The command line: options in, exit codes out. Heavy modules are imported where they are used."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
import typer.core

from clover import __version__
from clover.errors import (
    BenchmarkError,
    CloverError,
    GenerationError,
    PromptError,
    RemoteError,
    RequestError,
    TrainingError,
    TrainingInputError,
)

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from clover.backends.base import Backend
    from clover.backends.local import LocalBackend
    from clover.checkpoint.load import LoadedCheckpoint
    from clover.cli_display import Pane
    from clover.cli_reply import Knobs, Question, Writer
    from clover.diffusion.policies import Policy
    from clover.engine.engine import EngineConfig
    from clover.engine.lark import AnswerFormat

DEFAULT_MODEL = "clover-nano"
DEFAULT_PARENT = "clover-nano-parent"
DEFAULT_MAX_TOKENS = 1024
FAILED, WRONG_INPUT = 1, 2
THOUGHT_ONLY = "no answer besides thinking: see --no-thinking, --json and --max-tokens"

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Block-diffusion language models: convert, train, generate.",
)

ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="A checkpoint folder; inside: clover-nano(-parent).",
    ),
]
PolicyOption = Annotated[
    str | None,
    typer.Option(
        help="exact[=0..1], relaxed[=nats], threshold[=0..1], entropy_bound[=nats], "
        "prompt_lookup[=tokens], autoregressive, balanced or fast; default: exact, of a parent "
        "autoregressive."
    ),
]
ThresholdOption = Annotated[float | None, typer.Option(help="Short for --policy threshold=X.")]
EntropyOption = Annotated[float | None, typer.Option(help="Short for --policy entropy_bound=X.")]
BlockSizeOption = Annotated[
    int | None, typer.Option(help="Tokens denoised together, in place of the model's own number.")
]
# Left out, these four are what the checkpoint's generation_config.json recommends, else greedy.
TemperatureOption = Annotated[
    float | None, typer.Option(help="0 takes the most likely token; default: the checkpoint's.")
]
TopKOption = Annotated[int | None, typer.Option(help="Draw from the k most likely tokens; 0: all.")]
TopPOption = Annotated[float | None, typer.Option(help="Draw from the likeliest of this mass.")]
MinPOption = Annotated[
    float | None, typer.Option(help="Drop tokens below this share of the likeliest.")
]
SeedOption = Annotated[int | None, typer.Option(help="Makes a drawn text reproducible.")]
MaxTokensOption = Annotated[int, typer.Option(help="Most tokens of one reply.")]
StopOption = Annotated[list[str] | None, typer.Option(help="Text that ends a reply; repeatable.")]
ThinkingOption = Annotated[
    bool | None, typer.Option("--thinking/--no-thinking", help="Whether a reply starts as thought.")
]
SystemOption = Annotated[str | None, typer.Option(help="System text before the first turn.")]
ToolsOption = Annotated[
    Path | None, typer.Option(help="JSON file: a list of tools as in the OpenAI API.")
]


DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")]


class _State:
    """What the options before the command have set."""

    debug = False


def main() -> NoReturn:
    """Runs the command line. A CloverError ends it with one sentence and no traceback."""
    try:
        app()
    except CloverError as error:
        if _State.debug:
            raise
        print(f"clover: {error}", file=sys.stderr)  # noqa: T201
        failed = isinstance(error, GenerationError | RemoteError | TrainingError | BenchmarkError)
        failed = failed and not isinstance(error, TrainingInputError)
        sys.exit(FAILED if failed else WRONG_INPUT)
    except BrokenPipeError:  # the reader of a pipe has left
        sys.stderr.close()
        sys.exit(FAILED)
    sys.exit(0)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"clover {__version__}")
        raise typer.Exit


@app.callback()
def _before(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version."),
    ] = False,
) -> None:
    _State.debug = debug


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="Or on standard input.")] = None,
    model: ModelOption = DEFAULT_MODEL,
    policy: PolicyOption = None,
    threshold: ThresholdOption = None,
    entropy_bound: EntropyOption = None,
    block_size: BlockSizeOption = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    seed: SeedOption = None,
    max_tokens: MaxTokensOption = DEFAULT_MAX_TOKENS,
    stop: StopOption = None,
    thinking: ThinkingOption = None,
    system: SystemOption = None,
    tools: ToolsOption = None,
    device: DeviceOption = "auto",
    json_schema: Annotated[
        Path | None, typer.Option(help="JSON file: a schema that the answer has to satisfy.")
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="A pattern that the whole answer has to match.")
    ] = None,
    tool_choice: Annotated[
        str | None,
        typer.Option(help="auto, required or a tool's name: calls that satisfy their schemas."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="The prompt as it is, no template.")] = False,
    examples: Annotated[
        int, typer.Option(min=0, help="Answer and check this many tasks that no training saw.")
    ] = 0,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run the autoregressive parent beside the model.")
    ] = False,
    parent: Annotated[
        str | None, typer.Option(help=f"The parent of --compare, {DEFAULT_PARENT} by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per answer.")] = False,
) -> None:
    """Answers a prompt, showing the denoising when a terminal watches."""
    if parent is not None and not compare:
        raise RequestError(f"--parent {parent} is for --compare, which is not given; leave it out")
    read_tools = _read_tools(tools)
    answer = _read_answer_format(json_schema, regex, tool_choice, read_tools)
    if answer is not None and examples:
        raise RequestError("--examples bring their own answers; leave out the form of the answer")
    if prompt is None and not examples and sys.stdin.isatty():
        raise PromptError("expected a prompt as argument or on standard input, found none")
    with _loading(model):
        knobs = _read_knobs(
            policy,
            threshold,
            entropy_bound,
            block_size,
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
            max_tokens,
            stop,
        )
        questions = _read_questions(
            prompt, system, read_tools, thinking, is_raw=raw, examples=examples
        )
        knobs = dataclasses.replace(knobs, answer=answer)
        writers = [_open_writer(model, knobs, device)]
        if compare:
            plain = dataclasses.replace(knobs, policy=None, block_size=None)
            writers.append(_open_writer(parent or DEFAULT_PARENT, plain, device))
    _answer_all(writers, questions, as_json=as_json)


@app.command()
def chat(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help=f"A checkpoint folder, {DEFAULT_MODEL} by default; with --url, the server's name "
            "of one.",
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="A server of the OpenAI API, in place of a model here.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="CLOVER_API_KEY", help="What that server wants to see.")
    ] = None,
    policy: PolicyOption = None,
    threshold: ThresholdOption = None,
    entropy_bound: EntropyOption = None,
    block_size: BlockSizeOption = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    seed: SeedOption = None,
    max_tokens: MaxTokensOption = DEFAULT_MAX_TOKENS,
    stop: StopOption = None,
    thinking: ThinkingOption = None,
    system: SystemOption = None,
    tools: ToolsOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Talks turn after turn: /thinking, /reset, /exit. Ctrl-C stops a reply, Ctrl-D leaves."""
    from clover.backends.base import Sampling
    from clover.cli_chat import Chat

    if url is not None and device != "auto":
        raise RequestError(f"--device {device} is for a model here, found --url too; leave one out")
    read_tools = _read_tools(tools)
    named_policy = _name_policy(policy, threshold, entropy_bound)
    decoding = {
        "policy": named_policy,
        "block_size": block_size,
        "sampling": Sampling(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
        ),
        "max_tokens": max_tokens,
        "stop": tuple(stop or ()),
    }
    backend = (
        _open_local(model or DEFAULT_MODEL, named_policy, device)
        if url is None
        else _open_remote(url, model, api_key)
    )
    out, notes = _consoles()
    Chat(
        backend,
        system=system,
        tools=read_tools,
        enable_thinking=thinking is not False,
        decoding=decoding,
        out=out,
        notes=notes,
    ).run()


def _open_local(model: str, policy: str | None, device: str) -> Backend:
    with _loading(model):
        from clover.backends.local import LocalBackend
        from clover.diffusion.policies import parse_policy
        from clover.engine.engine import EngineConfig

        chosen = parse_policy(policy) if policy else None  # a wrong one is refused before all else
        return LocalBackend(
            _load(model, device),
            model=Path(model).name,
            config=EngineConfig(num_slots=1),
            policy=chosen,
        )


def _open_remote(url: str, model: str | None, api_key: str | None) -> Backend:
    try:
        from clover.backends.remote import RemoteBackend
    except ModuleNotFoundError as error:
        raise RequestError(
            f"expected the client of the OpenAI API, found no {error.name}; "
            "pip install 'clover[remote]'"
        ) from error
    return RemoteBackend(url, model=model, api_key=api_key)


@app.command()
def convert(
    parent: Annotated[Path, typer.Argument(help="A Qwen3.5/3.6 checkpoint folder.")],
    out: Annotated[Path, typer.Argument(help="The Clover folder to write.")],
    block_size: Annotated[int, typer.Option(help="Tokens denoised together.")] = 32,
    mask_token_id: Annotated[
        int | None, typer.Option(help="Default: the tokenizer's <|mask|>, else its first free row.")
    ] = None,
    coreset: Annotated[
        int | None, typer.Option(help="Experts that one block may use in a preview; default all.")
    ] = None,
    no_shift: Annotated[
        bool, typer.Option("--no-shift", help="Read each prediction in place, not one to the left.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a checkpoint at OUT.")] = False,
) -> None:
    """Makes a Clover folder from an autoregressive parent."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from clover.checkpoint.convert import convert as convert_folder
    from clover.train.trainer import peak_memory_bytes

    _, notes = _consoles()
    columns = (TextColumn("converting"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=notes, disable=not notes.is_terminal, transient=True) as bar:
        task = bar.add_task("convert", total=None)
        report = convert_folder(
            parent,
            out,
            block_size=block_size,
            mask_token_id=mask_token_id,
            expert_coreset_size=coreset,
            shift_logits=not no_shift,
            overwrite=force,
            progress=lambda _, done, total: bar.update(task, completed=done, total=total),
        )
    typer.echo(
        f"{report.folder}: {report.num_parameters:,} parameters "
        f"({report.num_added_parameters:,} new), {report.num_dropped_tensors} tensors left out, "
        f"{report.num_shards} shards, {report.num_bytes / 1e9:.2f} GB in {report.seconds:.1f} s "
        f"({report.num_bytes / 1e6 / max(report.seconds, 1e-9):.0f} MB/s), "
        f"peak memory {peak_memory_bytes() / 2**20:.0f} MiB"
    )


@app.command()
def inspect(
    path: Annotated[
        str, typer.Argument(help="A checkpoint folder, config.json, or a model's name.")
    ],
    training: Annotated[
        bool, typer.Option("--training", help="Also the memory of training it, on each GPU.")
    ] = False,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs that --training shares it among.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Says what a checkpoint holds: parameters, bytes, cache."""
    from clover.checkpoint.inspect import inspect_checkpoint, render_report
    from clover.checkpoint.load import resolve_checkpoint
    from clover.train.memory import render_memory, training_memory

    report = inspect_checkpoint(resolve_checkpoint(path))
    if as_json:
        # Every field and every property: the counts are properties.
        values = {name: getattr(report, name) for name in dir(report) if not name.startswith("_")}
        values["config"] = dataclasses.asdict(report.config)
        if training:
            memory = training_memory(report.config, gpus)
            names = (name for name in dir(memory) if not name.startswith("_"))
            values["training"] = {name: getattr(memory, name) for name in names}
        typer.echo(json.dumps(values, default=str, ensure_ascii=False))
    else:
        lines = render_report(report)
        if training:
            lines += render_memory(training_memory(report.config, gpus))
        typer.echo("\n".join(lines))


@app.command()
def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            help="Bundled model or folder; repeatable; default: clover-nano and its parent.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    policy: PolicyOption = None,
    slots: Annotated[int, typer.Option(help="Most answers that share a pass.")] = 8,
    queue: Annotated[int, typer.Option(help="Most requests that wait; more get a 429.")] = 256,
    cache_mib: Annotated[
        int, typer.Option(min=0, help="Most MiB of states kept for later prompts; 0: none.")
    ] = 256,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="CLOVER_API_KEY", help="What clients have to show; default: nothing."),
    ] = None,
    max_request_bytes: Annotated[int, typer.Option(help="Largest body.")] = 4 * 2**20,
    request_timeout: Annotated[
        float, typer.Option(help="Seconds, waiting included, after which an answer is cut.")
    ] = 600.0,
    shutdown_seconds: Annotated[
        float, typer.Option(help="How long answers go on after Ctrl-C or SIGTERM.")
    ] = 30.0,
    device: DeviceOption = "auto",
) -> None:
    """Serves models over HTTP, to OpenAI's and Anthropic's clients and on a page."""
    try:
        from clover.serve.app import ServerConfig, run_server
    except ModuleNotFoundError as error:
        raise RequestError(
            f"expected the packages of the server, found no {error.name}; "
            "pip install 'clover[serve]'"
        ) from error
    config = ServerConfig(
        api_key=api_key,
        max_request_bytes=max_request_bytes,
        request_timeout=request_timeout,
        shutdown_seconds=shutdown_seconds,
    )
    names = model or [DEFAULT_MODEL, DEFAULT_PARENT]
    with _loading(", ".join(names)):
        from clover.engine.engine import EngineConfig

        limits = EngineConfig(
            num_slots=slots, max_waiting=queue, prefix_cache_bytes=cache_mib * 2**20
        )
        backends = [_serve_one(name, policy, limits, device) for name in names]
    run_server(backends, config, host=host, port=port)


@app.command()
def bench(
    out: Annotated[Path, typer.Argument(help="Folder for results.json, results.md, frontier.png.")],
    model: ModelOption = DEFAULT_MODEL,
    parent: Annotated[str, typer.Option(help="Its autoregressive parent.")] = DEFAULT_PARENT,
    items: Annotated[
        int, typer.Option(help="Held-out items with short, and with long answers.")
    ] = 32,
    family: Annotated[
        list[str] | None,
        typer.Option(help="Where items come from; repeatable; default: clover-nano's."),
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(help="Requests at a time; repeatable; default: 1 2 4 8 16 32."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Rounds of every measurement.")] = 3,
    turns: Annotated[int, typer.Option(help="Turns of the agent's trace.")] = 10,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of one answer.")] = 256,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Of Clover, beside exact; repeatable; default: balanced fast threshold=0.99."
        ),
    ] = None,
    transformers: Annotated[
        bool | None,
        typer.Option(
            "--transformers/--no-transformers",
            help="Its generate on the parent; default: where it is installed.",
        ),
    ] = None,
    drafter: Annotated[
        Path | None,
        typer.Option(help="The parent's DFlash drafter; default: PARENT/dflash where it is."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of a pass; default: torch's.")
    ] = None,
    device: DeviceOption = "auto",
) -> None:
    """Measures speed and accuracy side by side, once the texts are shown to be the right ones.

    Ctrl-C leaves what is finished.
    """
    import torch

    from clover.cli_bench import run_bench
    from clover.eval.bench import BenchConfig

    fields: dict[str, Any] = {"families": family, "concurrencies": concurrency}
    given: dict[str, Any] = {name: tuple(value) for name, value in fields.items() if value}
    config = BenchConfig(
        num_items=items, repeats=repeats, num_turns=turns, max_tokens=max_tokens, **given
    )
    if threads is not None:
        torch.set_num_threads(threads)
    _, notes = _consoles()
    for path in run_bench(
        out,
        config,
        model=model,
        parent=parent,
        policies=policy or ("balanced", "fast", "threshold=0.99"),
        with_transformers=transformers,
        drafter=drafter,
        device=_choose_device(device),
        notes=notes,
    ):
        typer.echo(path)


class _TrainGroup(typer.core.TyperGroup):
    """`train OUT` trains; `train plot RUN` draws what a training has reported."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts the name of the training command in front, unless another is named."""
        is_named = bool(args) and args[0] in self.commands
        return super().parse_args(ctx, args if is_named else ["run", *args])


train_app = typer.Typer(cls=_TrainGroup, add_completion=False, rich_markup_mode=None)
app.add_typer(train_app, name="train", help="Trains a model, or draws the curves of a training.")


@train_app.command("plot")
def plot(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    image: Annotated[
        Path | None, typer.Option(help="The image to write; default: curves.png in the folder.")
    ] = None,
) -> None:
    """Draws the curves of a run: losses, evaluations, gradient norm, speed."""
    from clover.train.plot import plot_run

    typer.echo(plot_run(run, image))


@train_app.command("run")
def train(
    context: typer.Context,
    out: Annotated[
        Path,
        typer.Argument(
            help="Folder of the run; a run that is there goes on. The model is in OUT/model at the end."
        ),
    ],
    recipe: Annotated[
        str | None,
        typer.Option(
            help="A named run: nano.parent, nano.convert, nano.calibrate (may be left out), nano.adapt, "
            "nano.distill, one after the other in one OUT; the models are in OUT/parent, "
            "OUT/converted, OUT/calibrated, OUT/adapted and OUT/clover."
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="JSONL file of chats: {messages, tools} a line.")
    ] = None,
    model: ModelOption = DEFAULT_MODEL,
    objective: Annotated[
        str | None,
        typer.Option(help="ar or two_stream; default: two_stream for a Clover model, ar else."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 1000,
    rows: Annotated[int, typer.Option(help="Packed rows of a step.")] = 8,
    row_length: Annotated[int, typer.Option(help="Tokens of a row.")] = 512,
    learning_rate: Annotated[float, typer.Option(help="Peak of the schedule.")] = 3e-4,
    seed: Annotated[int, typer.Option(help="Order of the data, and noise.")] = 0,
    save_every: Annotated[int, typer.Option(help="Steps between two saved states.")] = 500,
    parallelism: Annotated[
        str, typer.Option(help="Under torchrun: ddp (whole models) or fsdp (one, in slices).")
    ] = "ddp",
    activation_checkpointing: Annotated[
        bool, typer.Option("--activation-checkpointing", help="Less memory, a third more work.")
    ] = False,
    device: DeviceOption = "auto",
) -> None:
    """Trains a model on chats, or runs a recipe, to which the other options do not apply.

    Ctrl-C ends it after the current step, with the state saved. `clover train plot RUN` draws the
    curves of a run.
    """
    from clover.cli_train import run_recipe, train_on_chats

    _, notes = _consoles()
    if (recipe is None) == (data is None):
        raise RequestError("expected either --recipe or --data; give one of them")
    if recipe is not None:
        _refuse_options(context, allowed={"out", "recipe"})
        run_recipe(recipe, out, notes)
    elif data is not None:
        train_on_chats(
            model,
            data,
            out,
            objective=objective,
            parallelism=parallelism,
            activation_checkpointing=activation_checkpointing,
            learning_rate=learning_rate,
            device=_choose_device(device),
            notes=notes,
            steps=steps,
            num_rows=rows,
            row_length=row_length,
            seed=seed,
            save_every=save_every,
        )


def _refuse_options(context: typer.Context, *, allowed: set[str]) -> None:
    """Refuses what was given but would be ignored."""
    given = [
        name
        for name in context.params
        if name not in allowed and str(context.get_parameter_source(name)).endswith("COMMANDLINE")
    ]
    if given:
        found = ", ".join("--" + name.replace("_", "-") for name in given)
        raise RequestError(f"--recipe brings all of its own, found {found} too; leave it out")


def _read_knobs(
    policy: str | None,
    threshold: float | None,
    entropy_bound: float | None,
    block_size: int | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    seed: int | None,
    max_tokens: int,
    stop: Sequence[str] | None,
) -> Knobs:
    from clover.cli_reply import Knobs

    knobs = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    sampling = {
        name: value for name, value in (knobs | {"seed": seed}).items() if value is not None
    }
    return Knobs(
        policy=_choose_policy(policy, threshold, entropy_bound),
        block_size=block_size,
        sampling=sampling,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
    )


def _choose_policy(
    policy: str | None, threshold: float | None, entropy_bound: float | None
) -> Policy | None:
    from clover.diffusion.policies import parse_policy

    name = _name_policy(policy, threshold, entropy_bound)
    return parse_policy(name) if name else None


def _name_policy(
    policy: str | None, threshold: float | None, entropy_bound: float | None
) -> str | None:
    named = [policy] if policy else []
    named += [f"threshold={threshold}"] if threshold is not None else []
    named += [f"entropy_bound={entropy_bound}"] if entropy_bound is not None else []
    if len(named) > 1 and not (policy and named[1].startswith(f"{policy}=") and len(named) == 2):
        raise RequestError(
            f"expected one policy, found {' and '.join(named)}; leave all but one out"
        )
    return named[-1] if named else None


def _read_tools(path: Path | None) -> list[Mapping[str, Any]]:
    from clover.chat import ChatParser

    if path is None:
        return []
    tools = _read_json(path, "--tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise PromptError(
            f"--tools {path}: expected a list of tool objects, as in the OpenAI API (see "
            f"examples/tools.json), found {type(tools).__name__}"
        )
    ChatParser(starts_in_thinking=False, tools=tools)  # refuses a bad tool before the first pass
    return tools


def _read_answer_format(
    json_schema: Path | None,
    regex: str | None,
    tool_choice: str | None,
    tools: Sequence[Mapping[str, Any]],
) -> AnswerFormat | None:
    options = {"--json-schema": json_schema, "--regex": regex, "--tool-choice": tool_choice}
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise RequestError(f"expected one form of the answer, found {' and '.join(given)}")
    if not given:
        return None
    from clover.engine.lark import JsonSchema, Regex, ToolCalls

    if regex is not None:
        return Regex(pattern=regex)
    if tool_choice is not None:
        return ToolCalls(tools=tools, choice=tool_choice)
    assert json_schema is not None
    schema = _read_json(json_schema, "--json-schema")
    if not isinstance(schema, dict):
        raise RequestError(
            f"--json-schema {json_schema}: expected a JSON object, found {type(schema).__name__}"
        )
    return JsonSchema(schema=schema)


def _read_json(path: Path, option: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise PromptError(f"{option} {path}: expected a JSON file, found: {reason}") from error


def _read_questions(
    prompt: str | None,
    system: str | None,
    tools: Sequence[Mapping[str, Any]],
    thinking: bool | None,
    *,
    is_raw: bool,
    examples: int,
) -> list[Question]:
    from clover.chat import Message
    from clover.cli_reply import Question

    fixed = {"PROMPT": prompt, "--system": system, "--tools": tools or None, "--thinking": thinking}
    given = [name for name, value in fixed.items() if value is not None]
    if examples:
        if is_raw or given:
            found = ", ".join(given + ["--raw"] * is_raw)
            raise RequestError(
                f"--examples bring all of their own, found {found} too; leave it out"
            )
        return _example_questions(examples)
    if is_raw and (clash := [name for name in given if name != "PROMPT"]):
        raise RequestError(f"--raw uses no template, found {', '.join(clash)} too; leave it out")
    text = _read_prompt(prompt)
    if is_raw:
        return [Question(raw=text)]
    messages = [Message("system", content=system)] if system else []
    return [
        Question(
            messages=(*messages, Message("user", content=text)),
            tools=tools,
            enable_thinking=thinking is not False,
        )
    ]


def _read_prompt(prompt: str | None) -> str:
    try:
        text = sys.stdin.read().rstrip("\n") if prompt is None else prompt
    except UnicodeDecodeError as error:
        raise PromptError(f"expected text on standard input, found {error}") from error
    if not text.strip():
        raise PromptError("expected a prompt, found an empty one")
    return text


def _example_questions(count: int) -> list[Question]:
    from functools import partial

    from clover.cli_reply import Question
    from clover.tasks import FAMILIES, check_reply, make_task

    tasks = [make_task(FAMILIES[index % len(FAMILIES)], index, "seen") for index in range(count)]
    return [
        Question(
            messages=task.messages,
            tools=task.tools,
            enable_thinking=task.enable_thinking,
            is_right=partial(check_reply, task),
        )
        for task in tasks
    ]


@contextmanager
def _loading(model: str) -> Iterator[None]:
    """Says in a terminal what the first seconds are for: importing torch, reading weights."""
    _, notes = _consoles()
    if not notes.is_terminal:
        yield
        return
    with notes.status(f"loading {model}"):
        yield


def _open_writer(model: str, knobs: Knobs, device: str) -> Writer:
    from clover.cli_reply import Writer

    return Writer(_load(model, device), Path(model).name, knobs)


def _serve_one(model: str, policy: str | None, limits: EngineConfig, device: str) -> LocalBackend:
    """Returns a model in an engine of its own."""
    from clover.backends.local import LocalBackend
    from clover.diffusion.policies import CausalPolicy

    checkpoint = _load(model, device)
    chosen = _choose_policy(policy, None, None)
    if checkpoint.config.diffusion is None and not isinstance(chosen, CausalPolicy):
        chosen = None  # a parent beside the models that the policy is for
    return LocalBackend(
        checkpoint,
        model=Path(model).name,
        config=limits,
        policy=chosen,
    )


def _load(model: str, device: str) -> LoadedCheckpoint:
    import torch

    from clover.checkpoint.load import load_checkpoint, resolve_checkpoint

    place = _choose_device(device)
    # On a CPU fp32 is exact and no slower; on a GPU the weights keep the dtype they lie in.
    dtype: Any = torch.float32 if place.type == "cpu" else "auto"
    return load_checkpoint(resolve_checkpoint(model), dtype=dtype, device=place)


def _choose_device(name: str) -> torch.device:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise RequestError(f"device is {name!r}; allowed: auto, cpu, cuda") from error
    num_gpus = torch.cuda.device_count()
    if device.type not in ("cpu", "cuda") or (
        device.type == "cuda" and (device.index or 0) >= num_gpus
    ):
        raise RequestError(
            f"device is {name!r}; allowed: auto, cpu, cuda, found {num_gpus} GPUs that torch can use"
        )
    return device


def _consoles() -> tuple[Console, Console]:
    """Returns where answers go, and where everything else goes."""
    from rich.console import Console

    # emoji=False: what a model or a user wrote, ":smile:" for one, is shown as it is.
    return Console(emoji=False), Console(stderr=True, emoji=False)


def _answer_all(writers: Sequence[Writer], questions: Sequence[Question], *, as_json: bool) -> None:
    from clover.cli_display import Screen, comparison, totals
    from clover.cli_reply import Reply, describe, write

    out, notes = _consoles()
    is_live = out.is_terminal and not as_json
    panes: list[list[Pane]] = [[] for _ in writers]
    num_cut = 0
    for number, question in enumerate(questions, start=1):
        if is_live and len(questions) > 1:
            title = f"\n{number}/{len(questions)} {question.messages[-1].content}"
            out.print(title, style="bold", markup=False, highlight=False)
        replies = [Reply(writer, question) for writer in writers]
        write(replies, Screen(out) if is_live else None)
        for mine, reply in zip(panes, replies, strict=True):
            mine.append(reply.pane)
        num_cut += sum(reply.is_cut for reply in replies)
        if as_json:
            values = describe(replies[0])
            values |= {"parent": describe(replies[1])} if len(replies) > 1 else {}
            typer.echo(json.dumps(values, ensure_ascii=False))
        elif not is_live:
            typer.echo(replies[0].answer)
        if not as_json and not replies[0].answer:
            notes.print(THOUGHT_ONLY, style="dim", highlight=False, soft_wrap=True)
    closing = comparison(*panes) if len(writers) > 1 else totals(panes[0])
    closing += f", {num_cut} cut off by a limit" if num_cut else ""
    (out if is_live else notes).print(
        closing, style="bold", markup=False, highlight=False, soft_wrap=True
    )

"""The command line as a user meets it: output, errors, exit codes, the terminal."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pty
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main

from clover.cli import app, main
from clover.cli_display import MASK_GLYPH, Pane, comparison, render_reply
from clover.config import DiffusionConfig, ModelConfig

REPOSITORY = Path(__file__).parents[2]
TOKENIZER_FOLDER = REPOSITORY / "clover" / "assets" / "nano"
# CPU time, because wall time on a busy machine says nothing about us.
MAX_HELP_CPU_SECONDS = 0.5
# A random model writes nonsense; a short one is enough.
SHORT = ("--max-tokens", "12")


@dataclass(frozen=True)
class Outcome:
    """What one command left behind."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Folders:
    """Two random checkpoints: a Clover model and an autoregressive parent."""

    clover: str
    parent: str


Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    import torch

    from clover.checkpoint.load import save_model
    from clover.model.transformer import CloverForCausalLM
    from clover.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(TOKENIZER_FOLDER)
    mask_token_id, end = tokenizer.mask_token_id, tokenizer.token_id("<|im_end|>")
    assert mask_token_id is not None
    assert end is not None
    parent = _tiny_config(vocab_size=len(tokenizer), eos_token_ids=(end,))
    diffusion = DiffusionConfig(block_size=4, mask_token_id=mask_token_id)
    root = tmp_path_factory.mktemp("checkpoints")
    for name, config in {
        "parent": parent,
        "clover": dataclasses.replace(parent, diffusion=diffusion),
    }.items():
        model = CloverForCausalLM(config)
        model.init_weights(torch.Generator().manual_seed(0))
        save_model(model, root / name, files_from=TOKENIZER_FOLDER)
    return Folders(clover=str(root / "clover"), parent=str(root / "parent"))


def _tiny_config(**fields: Any) -> ModelConfig:
    from clover.config import AttentionConfig, DeltaNetConfig, DenseMlpConfig

    return ModelConfig(
        hidden_size=32,
        layer_types=("linear_attention", "full_attention"),
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        max_position_embeddings=1024,
        attention=AttentionConfig(
            num_heads=2, num_kv_heads=1, head_dim=16, rotary_dim=4, rope_theta=10_000.0
        ),
        delta_net=DeltaNetConfig(
            num_k_heads=2, num_v_heads=2, head_k_dim=8, head_v_dim=8, conv_kernel_size=4
        ),
        mlp=DenseMlpConfig(intermediate_size=32),
        **fields,
    )


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run_command(*arguments: str, stdin: str = "") -> Outcome:
        monkeypatch.setattr(sys, "argv", ["clover", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        return Outcome(code=int(stopped.value.code or 0), out=captured.out, err=captured.err)

    return run_command


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\nfrom clover.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    print('torch' in sys.modules)"
    )
    for arguments in (["--help"], ["generate", "--help"], ["--version"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True,
            text=True,
            check=True,
            cwd=REPOSITORY,
        )
        assert done.stdout.splitlines()[-1] == "False"


def test_help_takes_less_than_half_a_second() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "clover", "--help"], capture_output=True, check=True, cwd=REPOSITORY
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used < MAX_HELP_CPU_SECONDS


def test_the_surface_is_what_the_readme_says() -> None:
    knobs = {
        *("--model", "-m", "--policy", "--threshold", "--entropy-bound", "--block-size"),
        *("--temperature", "--top-k", "--top-p", "--min-p", "--seed", "--max-tokens", "--stop"),
        *("--thinking", "--no-thinking", "--system", "--tools", "--device"),
    }
    expected = {
        "generate": {
            *(knobs | {"--raw", "--examples", "--compare", "--parent", "--json"}),
            *("--json-schema", "--regex", "--tool-choice"),
        },
        "chat": knobs | {"--url", "--api-key"},
        "convert": {"--block-size", "--mask-token-id", "--coreset", "--no-shift", "--force"},
        "inspect": {"--json", "--training", "--gpus"},
        "train": {
            *(
                "--recipe",
                "--data",
                "--model",
                "-m",
                "--objective",
                "--steps",
                "--rows",
                "--row-length",
            ),
            *("--learning-rate", "--seed", "--device", "--save-every"),
            *("--parallelism", "--activation-checkpointing"),
        },
        "plot": {"--image"},
        "serve": {
            *("--model", "-m", "--host", "--port", "--policy", "--slots", "--queue", "--device"),
            *("--api-key", "--max-request-bytes", "--request-timeout", "--shutdown-seconds"),
            "--cache-mib",
        },
        "bench": {
            *("--model", "-m", "--parent", "--items", "--family", "--concurrency", "--repeats"),
            *("--turns", "--max-tokens", "--policy", "--threads", "--device", "--drafter"),
            *("--transformers", "--no-transformers"),
        },
    }
    group = typer.main.get_command(app)
    commands = dict(group.commands)  # type: ignore[attr-defined]
    training = commands.pop("train").commands
    commands |= {"train": training["run"], "plot": training["plot"]}
    found = {
        name: {
            option
            for parameter in command.params
            for option in (*parameter.opts, *parameter.secondary_opts)
            if option.startswith("-")
        }
        for name, command in commands.items()
    }
    assert found == expected


def test_a_pipe_gets_the_answer_and_nothing_else(run: Run, folders: Folders) -> None:
    arguments = ("generate", "hello", "--no-thinking", "-m", folders.clover, *SHORT)
    piped = run(*arguments)
    described = json.loads(run(*arguments, "--json").out)
    assert piped.code == 0
    assert described["tokens"] > 0
    assert piped.out == described["message"]["content"] + "\n"
    assert piped.err.startswith(f"{described['tokens']} tokens, ")
    assert f"TPF {described['tpf']:.2f}" in piped.err
    assert piped.err.count("\n") == 1


def test_a_prompt_may_come_from_standard_input(run: Run, folders: Folders) -> None:
    arguments = ("--raw", "-m", folders.clover, *SHORT)
    assert (
        run("generate", "hello", *arguments).out
        == run("generate", *arguments, stdin="hello\n").out
        != run("generate", "other", *arguments).out
    )


def test_a_seed_reproduces_a_drawn_text(run: Run, folders: Folders) -> None:
    def draw(*seed: str) -> dict[str, Any]:
        drawn = ("generate", "hello", "--temperature", "1", "--json", "-m", folders.clover, *SHORT)
        described: dict[str, Any] = json.loads(run(*drawn, *seed).out)
        return described

    first = draw()
    assert draw("--seed", str(first["seed"]))["text"] == first["text"]
    assert draw("--seed", str(first["seed"] // 2))["text"] != first["text"]


def test_exact_decoding_writes_the_autoregressive_text(run: Run, folders: Folders) -> None:
    texts = [
        json.loads(
            run("generate", "hello", "--json", "--policy", p, "-m", folders.clover, *SHORT).out
        )["text"]
        for p in ("autoregressive", "exact")
    ]
    assert texts[0] == texts[1]


def test_compare_runs_the_parent_at_one_token_a_pass(run: Run, folders: Folders) -> None:
    models = ("-m", folders.clover, "--parent", folders.parent)
    done = run("generate", "hello", "--compare", "--json", *models, *SHORT)
    described = json.loads(done.out)
    assert described["model"] == "clover"
    assert described["parent"]["model"] == "parent"
    assert described["parent"]["tpf"] == 1.0
    assert done.err.rstrip().endswith("x the parent's speed, 2 cut off by a limit")


def test_examples_are_checked(run: Run, folders: Folders) -> None:
    done = run("generate", "--examples", "2", "--json", "-m", folders.clover, *SHORT)
    assert [json.loads(line)["is_right"] for line in done.out.splitlines()] == [False, False]
    assert done.err.rstrip().endswith("0 of 2 right, 2 cut off by a limit")


def test_a_stop_string_ends_the_text_before_it(run: Run, folders: Folders) -> None:
    arguments = ("generate", "hello", "--raw", "--json", "-m", folders.clover, *SHORT)
    text = json.loads(run(*arguments).out)["text"]
    middle = text[len(text) // 2 :][:3]
    stopped = json.loads(run(*arguments, "--stop", middle).out)
    assert stopped["text"] == text[: text.index(middle)]
    assert stopped["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("generate", "x", "-m", "no-such-folder"), "no-such-folder"),
        (("generate", "x", "--threshold", "1.5"), "1.5"),
        (("generate", "x", "--policy", "luck"), "luck"),
        (("generate", "x", "--threshold", "0.5", "--entropy-bound", "1"), "one policy"),
        (("generate", "x", "--temperature", "-1"), "temperature"),
        (("generate", "  "), "prompt"),
        (("generate", "x", "--examples", "2"), "PROMPT"),
        (("generate", "x", "--raw", "--system", "y"), "--system"),
        (("generate", "x", "--tools", "no-such.json"), "no-such.json"),
        (("generate", "x", "--device", "abacus"), "abacus"),
        (("generate", "x", "--device", "meta"), "allowed: auto, cpu, cuda"),
        (("generate", "x", "--device", "cuda:99"), "allowed: auto, cpu, cuda"),
        (("generate", "x", "--parent", "elsewhere"), "--compare"),
        (("generate", "x", "--json-schema", "no-such.json"), "no-such.json"),
        (("generate", "x", "--regex", "a", "--tool-choice", "auto"), "--regex and --tool-choice"),
        (("generate", "--examples", "1", "--regex", "a"), "--examples"),
        (("inspect", "no-such-folder"), "no-such-folder"),
        (("convert", "no-such-folder", "out"), "no-such-folder"),
        (("train", "out"), "--recipe or --data"),
        (("train", "out", "--data", "x.jsonl", "--parallelism", "zero"), "'zero'"),
        (("train", "out", "--recipe", "nano.dream"), "nano.dream"),
        (("train", "out", "--recipe", "nano.parent", "--steps", "1000"), "--steps"),
        (("train", "out", "--data", "no-such.jsonl", "-m", "no-such-folder"), "no-such-folder"),
    ],
)
def test_a_wrong_input_ends_with_a_sentence(
    run: Run, arguments: tuple[str, ...], named: str
) -> None:
    done = run(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("clover: ")
    assert named in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        (("--block-size", "0"), "block_size"),
        (("--max-tokens", "0"), "max_tokens"),
        (("--stop", ""), "stop"),
    ],
)
def test_a_knob_that_the_model_cannot_honour_is_refused(
    run: Run, folders: Folders, knobs: tuple[str, ...], named: str
) -> None:
    done = run("generate", "x", "-m", folders.clover, *knobs)
    assert (done.code, done.out) == (2, "")
    assert named in done.err


def test_the_limits_of_a_server_are_those_of_each_engine(
    run: Run, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clover.engine.engine import EngineConfig

    served: list[Any] = []
    monkeypatch.setattr(
        "clover.serve.app.run_server", lambda backends, *_, **__: served.extend(backends)
    )
    limits = ("--slots", "3", "--queue", "4", "--cache-mib", "5")
    assert run("serve", "-m", folders.clover, "-m", folders.parent, *limits).code == 0
    expected = EngineConfig(num_slots=3, max_waiting=4, prefix_cache_bytes=5 * 2**20)
    assert [backend._engine.config for backend in served] == [expected] * 2


def test_a_reserved_id_and_an_endless_prompt_are_refused(run: Run, folders: Folders) -> None:
    for prompt, named in (("<|mask|>", "reserved"), ("word " * 2000, "context")):
        done = run("generate", prompt, "-m", folders.clover)
        assert (done.code, done.out) == (2, "")
        assert named in done.err


def test_a_parent_is_refused_diffusion_policies(run: Run, folders: Folders) -> None:
    done = run("generate", "x", "-m", folders.parent, "--policy", "threshold")
    assert done.code == 2
    assert "autoregressive" in done.err
    assert run("generate", "x", "-m", folders.parent, *SHORT).code == 0


def test_a_block_size_is_refused_where_there_are_no_blocks(run: Run, folders: Folders) -> None:
    for arguments in (("-m", folders.parent), ("-m", folders.clover, "--policy", "autoregressive")):
        done = run("generate", "x", "--block-size", "4", *arguments)
        assert (done.code, done.out) == (2, "")
        assert "block_size is 4" in done.err


def test_the_form_of_the_answer_can_be_demanded(run: Run, folders: Folders, tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 3}, "on": {"type": "boolean"}},
        "required": ["name", "on"],
        "additionalProperties": False,
    }
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    (tmp_path / "tools.json").write_text(json.dumps([{"name": "f", "parameters": schema}]))
    answer = ("generate", "x", "-m", folders.clover, "--no-thinking", "--temperature", "1")
    as_json = run(*answer, "--json-schema", str(tmp_path / "schema.json"))
    assert as_json.code == 0
    assert list(json.loads(as_json.out)) == ["name", "on"]
    matched = run(*answer, "--regex", "(ab|cd){2}", "--compare", "--parent", folders.parent)
    assert re.fullmatch("(ab|cd){2}\n", matched.out)
    choice = ("--tools", str(tmp_path / "tools.json"), "--tool-choice", "f")
    call = json.loads(run(*answer, *choice).out.splitlines()[0])
    assert call["name"] == "f"
    assert isinstance(call["arguments"]["on"], bool)


@pytest.mark.parametrize(
    ("schema", "named"), [("[]", "a JSON object, found list"), ('{"not": {}}', "not")]
)
def test_a_schema_that_cannot_be_used_is_refused_before_the_first_pass(
    run: Run, folders: Folders, tmp_path: Path, schema: str, named: str
) -> None:
    (tmp_path / "schema.json").write_text(schema)
    done = run(
        "generate", "x", "-m", folders.clover, "--json-schema", str(tmp_path / "schema.json")
    )
    assert (done.code, done.out) == (2, "")
    assert named in done.err


def test_a_bad_tool_is_refused_before_the_first_pass(
    run: Run, folders: Folders, tmp_path: Path
) -> None:
    (tmp_path / "tools.json").write_text('[{"function": "weather"}]')
    done = run("generate", "x", "-m", folders.clover, "--tools", str(tmp_path / "tools.json"))
    assert (done.code, done.out) == (2, "")
    assert "a function with a name" in done.err


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_bytes_that_are_no_text_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folders: Folders,
    command: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["clover", command, "-m", folders.clover])
    stdin = io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "expected text on standard input" in capsys.readouterr().err


def test_debug_shows_the_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "clover", "--debug", "generate", "x", "-m", "no-such-folder"],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
    )
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_a_chat_answers_each_line_and_remembers(run: Run, folders: Folders) -> None:
    # What random weights find likeliest is the same after any prompt; what they draw is not
    drawn = ("--temperature", "8", "--seed", "1")
    arguments = (
        "chat",
        "--no-thinking",
        "-m",
        folders.clover,
        "--threshold",
        "0.9",
        *drawn,
        *SHORT,
    )
    once = run(*arguments, stdin="hello\n")
    again = run(*arguments, stdin="hello\nhello\n/exit\nhello\n")
    reset = run(*arguments, stdin="hello\n/reset\nhello\n")
    assert once.code == again.code == reset.code == 0
    assert (once.err.count("TPF"), again.err.count("TPF")) == (1, 2)
    assert again.out.startswith(once.out)
    assert again.out != once.out * 2 == reset.out


def test_a_chat_survives_a_turn_that_is_refused(run: Run, folders: Folders) -> None:
    arguments = ("chat", "--no-thinking", "-m", folders.clover, *SHORT)
    done = run(*arguments, stdin="<|mask|>\nhello\n")
    assert done.out == run(*arguments, stdin="hello\n").out
    assert done.err.startswith("clover: ")


def test_converting_makes_a_folder_that_generates(
    run: Run, folders: Folders, tmp_path: Path
) -> None:
    out = str(tmp_path / "converted")
    convert = ("convert", folders.parent, out, "--block-size", "4")
    done = run(*convert)
    assert done.code == 0
    assert done.out.startswith(f"{out}: ")
    report = json.loads(run("inspect", out, "--json").out)
    assert report["config"]["diffusion"]["block_size"] == 4
    assert report["num_added_parameters"] > 0
    assert "parameters" in run("inspect", out).out
    parent = run("generate", "hello", "-m", folders.parent, *SHORT)
    assert run("generate", "hello", "-m", out, "--policy", "exact", *SHORT).out == parent.out
    assert run(*convert).code == 2
    assert run(*convert, "--force").code == 0


def test_training_stops_where_it_is_told_and_its_model_generates(
    run: Run, folders: Folders, tmp_path: Path
) -> None:
    data, out = tmp_path / "chats.jsonl", tmp_path / "run"
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    data.write_text(json.dumps({"messages": turns}) + "\n")
    size = ("--steps", "2", "--rows", "1", "--row-length", "64")
    train = ("train", str(out), "--data", str(data), "-m", folders.clover, *size)
    done = run(*train)
    assert (done.code, done.out) == (0, "")
    assert "finished at step 2" in done.err.splitlines()[-1]
    assert run("generate", "hi", "-m", str(out / "model"), *SHORT).code == 0
    again = run(*train)
    assert again.err.splitlines()[-1].startswith("finished at step 2: 0 tokens")
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 4  # step, save, two summaries
    plotted = run("train", "plot", str(out))
    assert (plotted.code, plotted.out.strip()) == (0, str(out / "curves.png"))
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert run("train", "plot", str(out / "model")).code == 2
    other = run(*train, "--seed", "1")
    assert other.code == 2
    assert "seed was 0, is 1; give the same options, or another folder" in other.err


def test_training_without_its_input_says_what_is_missing(run: Run, tmp_path: Path) -> None:
    absent = run("train", str(tmp_path), "--data", str(tmp_path / "absent.jsonl"))
    assert absent.code == 2
    assert "cannot read training data" in absent.err
    too_early = run("train", str(tmp_path), "--recipe", "nano.adapt")
    assert too_early.code == 2
    assert "run the stage `convert` with the same OUT first" in too_early.err


def test_an_answer_that_is_all_thinking_is_said_to_be_one(run: Run, folders: Folders) -> None:
    done = run("generate", "hello", "-m", folders.clover, *SHORT)
    assert done.out == "\n"
    assert "no answer besides thinking" in done.err


def test_a_terminal_sees_masks_fill_in(folders: Folders) -> None:
    options = ("-m", folders.clover, "--threshold", "0.9", *SHORT)
    command = [sys.executable, "-m", "clover", "generate", "hello", *options]
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=REPOSITORY,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
    ) as process:
        os.close(theirs)
        seen = _read_all(ours)
    os.close(ours)
    assert process.returncode == 0, seen
    assert MASK_GLYPH in seen
    assert "12 tokens, " in seen
    assert "Traceback" not in seen


def _read_all(descriptor: int) -> str:
    chunks = []
    while True:
        try:
            chunk = os.read(descriptor, 65536)
        except OSError:  # Linux says so when the other side of a terminal is gone
            break
        if not chunk:
            break
        chunks.append(chunk)
    return b"".join(chunks).decode()


def test_text_cannot_move_the_cursor() -> None:
    pane = Pane(title="x", committed="a\x1b[2Jb\rc\nd", cells=["\x07", None])
    assert render_reply(pane).plain == f"a\ufffd[2Jb\ufffdc\nd\ufffd{MASK_GLYPH}"


def test_a_comparison_adds_up_tokens_passes_and_seconds() -> None:
    def pane(title: str, tokens: int, passes: int, seconds: float, verdict: bool) -> Pane:
        return Pane(title=title, tokens=tokens, passes=passes, seconds=seconds, verdict=verdict)

    line = comparison(
        [pane("a", 10, 2, 1.0, True), pane("a", 20, 8, 2.0, False)],
        [pane("b", 10, 10, 2.0, True), pane("b", 10, 10, 2.0, True)],
    )
    assert line == (
        "a: 30 tokens, 3.00 s, 10.0 tokens/s, TPF 3.00, 1 of 2 right | "
        "b: 20 tokens, 4.00 s, 5.0 tokens/s, TPF 1.00, 2 of 2 right | 2.00x the parent's speed"
    )

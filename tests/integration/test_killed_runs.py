"""Runs that are killed outright, again and again, end like one that never was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

# Imports once; each life of the run is a fork, killed at a random moment or while it saves. Then one
# is let live, and what it leaves is compared with an unbroken run.
SCRIPT = """
import os, random, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from conftest import make_tiny_config
from test_parallel import Echo, new_model, run_config
from clover.train.parallel import whole_tensor
from clover.train.run_files import read_metrics
from clover.train.state import SHARDED_FOLDER, STATE_FILE, has_state
from clover.train.trainer import train

parallelism, out = sys.argv[1], Path(sys.argv[2])
STEPS, KILLS_WHILE_SAVING, MAX_LIVES = 30, 2, 20

def live(folder):
    if parallelism == "fsdp":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = run_config(parallelism, steps=STEPS, save_every=1, out=folder)
    model = new_model(make_tiny_config())
    train(model, config, Echo(), on_event=lambda event: None, resume=has_state(folder))
    torch.save([whole_tensor(p.detach()) for p in model.parameters()], folder / "weights.pt")

def fork(folder):
    pid = os.fork()
    if pid == 0:
        live(folder)
        os._exit(0)
    return pid

def unfinished():
    if parallelism == "ddp":
        return {path.name for path in out.glob(f".{STATE_FILE}.*")}
    folders = (out / SHARDED_FOLDER).glob("step-*")
    return {folder.name for folder in folders if not (folder / ".metadata").exists()}

draw, num_while_saving, lives = random.Random(0), 0, 0
while num_while_saving < KILLS_WHILE_SAVING and lives < MAX_LIVES:
    seen = unfinished()
    pid, lives = fork(out), lives + 1
    if lives % 2:
        time.sleep(draw.uniform(0.0, 0.2))
    else:
        deadline = time.monotonic() + 60
        while not unfinished() - seen and time.monotonic() < deadline:
            seen &= unfinished()  # what this life clears may come again
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"life {lives} ended by itself: give the run more steps"
    num_while_saving += bool(unfinished() - seen)
assert num_while_saving == KILLS_WHILE_SAVING, f"only {num_while_saving} kills hit a save"

for folder in (out, out.parent / "unbroken"):
    _, status = os.waitpid(fork(folder), 0)
    assert status == 0
found, expected = (torch.load(f / "weights.pt") for f in (out, out.parent / "unbroken"))
assert all(map(torch.equal, found, expected))
steps = [row["step"] for row in read_metrics(out) if row["event"] == "step"]
assert steps == list(range(1, STEPS + 1)), steps
assert not unfinished(), sorted(out.rglob("*"))
"""


@pytest.mark.parametrize("parallelism", ["ddp", "fsdp"])
def test_a_run_that_is_killed_at_any_moment_ends_bit_for_bit_like_one_never_killed(
    tmp_path: Path, parallelism: str
) -> None:
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), str(TESTS / "unit")])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, parallelism, str(tmp_path / "killed")],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr

"""Programs that nobody has read, run where they can do no harm: bubblewrap, with limits.

A program sees the system's `/usr`, the Python that runs us, an empty temporary directory in memory
and nothing else: no network, no other processes, no files of the user. There is no way around the
sandbox: without bubblewrap nothing runs.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clover.errors import TaskError

CPU_SECONDS = 2
WALL_SECONDS = 10
MEMORY_BYTES = 512 << 20  # address space of each process; Python itself takes about 30 MB
FILE_BYTES = 1 << 20  # of one file, standard output included
DISK_BYTES = 16 << 20
# Of the sandbox, from Linux 5.14 on. Not enforced when root runs us: the wall time still is.
NUM_PROCESSES = 64


def run_sandboxed(program: Path, request: object) -> Any:
    """Returns the JSON that a Python program prints, or None if it fails or breaks a limit.

    Args:
        program: A file that imports the standard library only. It reads `request` as JSON from its
            standard input; its working directory is empty and vanishes afterwards.

    Raises:
        TaskError: Bubblewrap is not installed, or may not be used here.
    """
    if reason := why_unavailable():
        raise TaskError(reason)
    source = program.read_text(encoding="utf-8")
    done = _run(["-c", source], json.dumps(request).encode())
    if done is None or done.returncode:
        return None
    try:
        return json.loads(done.stdout)
    except (ValueError, RecursionError):
        return None


@functools.cache
def why_unavailable() -> str | None:
    """Returns why nothing can be run here, or None if it can."""
    advice = "checking this task runs a program in bubblewrap (Debian: apt install bubblewrap)"
    missing = [name for name in ("bwrap", "prlimit") if shutil.which(name) is None]
    if missing:
        return f"{advice}; not found: {', '.join(missing)}"
    done = _run(["-c", ""], b"")
    if done is None or done.returncode:
        message = "timed out" if done is None else done.stderr.decode(errors="replace").strip()
        return f"{advice}; bwrap is installed but may not run here: {message}"
    return None


def _run(arguments: Sequence[str], stdin: bytes) -> subprocess.CompletedProcess[bytes] | None:
    """Returns the finished process of Python inside the sandbox, or None after WALL_SECONDS."""
    # -I and -S: neither the environment nor installed packages reach the program
    python = [os.path.realpath(sys.executable), "-I", "-S", *arguments]
    # Files, because their size is limited and a pipe would be read into our memory without end
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        try:
            done = subprocess.run(
                [*_bubblewrap(), "--", *_limits(), *python],
                input=stdin,
                stdout=stdout,
                stderr=stderr,
                timeout=WALL_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess(done.args, done.returncode, stdout.read(), stderr.read())


def _bubblewrap() -> list[str]:
    command = ["bwrap", "--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000"]
    command += ["--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
    command += ["--setenv", "PATH", "/usr/bin:/bin", "--setenv", "LC_ALL", "C.UTF-8"]
    for folder in ("/usr", "/bin", "/lib", "/lib64", sys.base_prefix):
        command += ["--ro-bind-try", folder, folder]
    command += ["--proc", "/proc", "--dev", "/dev"]
    return [*command, "--size", str(DISK_BYTES), "--tmpfs", "/tmp", "--chdir", "/tmp"]


def _limits() -> list[str]:
    return [
        "prlimit",
        f"--cpu={CPU_SECONDS}",
        f"--as={MEMORY_BYTES}",
        f"--fsize={FILE_BYTES}",
        f"--nproc={NUM_PROCESSES}",
        "--core=0",
        "--",
    ]

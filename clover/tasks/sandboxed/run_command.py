"""Writes a file tree, runs a shell command in it, and prints what became of it. In the sandbox.

Standard input: {"files": {path: text}, "folders": [path, ...], "command": ...}. Standard output:
{"files": ..., "folders": ..., "output": ...}, where `output` is what the command wrote.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

MAX_OUTPUT = 1 << 16  # bytes; no reference comes near it

request = json.load(sys.stdin)
root = Path("tree")
root.mkdir()
for folder in request["folders"]:
    (root / folder).mkdir(parents=True, exist_ok=True)
for path, text in request["files"].items():
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)

with Path("output").open("wb") as output:
    subprocess.run(
        ["/bin/sh", "-c", request["command"]],
        cwd=root,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.DEVNULL,
        check=False,
    )

files: dict[str, str] = {}
folders: list[str] = []
for parent, names, children in os.walk(root):
    folders += [os.path.relpath(os.path.join(parent, name), root) for name in names]
    for child in children:
        path = Path(parent, child)
        files[os.path.relpath(path, root)] = path.read_text(errors="replace")
written = Path("output").read_bytes()[:MAX_OUTPUT].decode(errors="replace")
json.dump({"files": files, "folders": sorted(folders), "output": written}, sys.stdout)

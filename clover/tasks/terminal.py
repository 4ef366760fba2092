"""Shell commands on a small file tree, judged by running them.

The prompt lists the files. A request changes the tree, or asks for something that a command prints. The
check compares what is there afterwards, and what was printed, with what a right command leaves.
"""

from __future__ import annotations

import posixpath
import random
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from clover.chat import Message
from clover.tasks.parted import Parted, ask, read_wordings
from clover.tasks.sandbox import run_sandboxed
from clover.tasks.splits import Split
from clover.tasks.task import Draft
from clover.tasks.words import OBJECTS

_PROGRAM = Path(__file__).with_name("sandboxed") / "run_command.py"
_LISTED = ("txt", "md", "csv", "log", "json", "cfg", "dat", "html", "xml", "ini")
_EXTENSIONS = Parted.of(*_LISTED)
_INVENTED = 0.4  # share of training's extensions that are any letters, so that they are copied


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """What a command has to do to a tree.

    Attributes:
        files: Text by path, before.
        folders: Folders before; those of files are implied.
        files_after: Text by path, afterwards.
        folders_after: All folders afterwards.
        output: Lines to be printed; None where the output does not matter.
        compare: Whether the order of lines counts, or only the first number is read.
    """

    files: Mapping[str, str]
    folders: Sequence[str]
    files_after: Mapping[str, str]
    folders_after: Sequence[str]
    output: Sequence[str] | None = None
    compare: Literal["in order", "any order", "number"] = "in order"

    def accepts(self, reply: Message) -> bool:
        """Returns whether the reply's text, run as a shell command, has the effect.

        Raises:
            TaskError: There is no sandbox to run it in.
        """
        command = reply.content.strip()
        if reply.tool_calls or not command:
            return False
        request = {"files": self.files, "folders": self.folders, "command": command}
        result = run_sandboxed(_PROGRAM, request)
        return (
            result is not None
            and result["files"] == self.files_after
            and sorted(result["folders"]) == sorted(self.folders_after)
            and (self.output is None or self._is_printed(result["output"]))
        )

    def _is_printed(self, output: str) -> bool:
        assert self.output is not None
        printed = [line.strip().removeprefix("./") for line in output.strip().splitlines()]
        if self.compare == "number":  # `wc -l FILE` prints the name too
            return [line.split()[0] for line in printed] == self.output
        if self.compare == "any order":
            return sorted(printed) == sorted(self.output)
        return printed == self.output


@dataclass(slots=True)
class _Tree:
    """Files and folders, changed by a request as its command will change them."""

    files: dict[str, str] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)

    def copy(self) -> _Tree:
        return _Tree(dict(self.files), set(self.folders))

    def inside(self, folder: str) -> list[str]:
        """Returns the paths of the files that lie in `folder`."""
        return [path for path in self.files if posixpath.dirname(path) == folder]


@dataclass(slots=True)
class _Job:
    """A request being drawn: the tree before, the tree after, and what is said and printed."""

    rng: random.Random
    split: Split
    before: _Tree
    after: _Tree
    slots: dict[str, Any] = field(default_factory=dict)
    output: list[str] | None = None
    compare: Literal["in order", "any order", "number"] = "in order"

    def file(self) -> str:
        """Returns the path of a file, which the request calls {f}."""
        self.slots["f"] = self.rng.choice(list(self.before.files))
        return str(self.slots["f"])

    def folder(self, *, other_than: str = "") -> str:
        """Returns a folder with files, which the request calls {d}."""
        folders = sorted({posixpath.dirname(path) for path in self.before.files} - {other_than, ""})
        self.slots["d"] = self.rng.choice(folders)
        return str(self.slots["d"])

    def fresh(self, extension: str = "") -> str:
        """Returns a name that no file or folder has."""
        taken = " ".join([*self.before.files, *self.before.folders])
        while True:
            name = OBJECTS.draw(self.rng, self.split)
            if name not in taken:
                return name + extension


def _move(job: _Job) -> str:
    path = job.file()
    folder = job.folder(other_than=posixpath.dirname(path))
    job.after.files[f"{folder}/{posixpath.basename(path)}"] = job.after.files.pop(path)
    return f"mv {path} {folder}/"


def _rename(job: _Job) -> str:
    path = job.file()
    job.slots["new"] = name = job.fresh(posixpath.splitext(path)[1])
    target = posixpath.join(posixpath.dirname(path), name)
    job.after.files[target] = job.after.files.pop(path)
    return f"mv {path} {target}"


def _copy(job: _Job) -> str:
    path = job.file()
    folder = job.folder(other_than=posixpath.dirname(path))
    job.after.files[f"{folder}/{posixpath.basename(path)}"] = job.after.files[path]
    return f"cp {path} {folder}/"


def _remove(job: _Job) -> str:
    path = job.file()
    del job.after.files[path]
    return f"rm {path}"


def _remove_folder(job: _Job) -> str:
    folder = job.folder()
    for path in job.before.inside(folder):
        del job.after.files[path]
    job.after.folders.remove(folder)
    return f"rm -r {folder}"


def _remove_kind(job: _Job) -> str:
    folder, extension = _folder_and_extension(job)
    for path in _of_kind(job.before, folder, extension):
        del job.after.files[path]
    return f"rm {folder}/*.{extension}"


def _make_folder(job: _Job) -> str:
    job.slots["new"] = name = job.fresh()
    job.after.folders.add(name)
    return f"mkdir {name}"


def _draw_extension(rng: random.Random, split: Split) -> str:
    if split == "heldout" or rng.random() >= _INVENTED:
        return _EXTENSIONS.draw(rng, split)
    while True:
        letters = "".join(rng.choices(string.ascii_lowercase, k=rng.choice((2, 3, 3, 4))))
        if letters not in _LISTED:
            return letters


def _make_file(job: _Job) -> str:
    extension = _draw_extension(job.rng, job.split)
    folder, name = job.folder(), job.fresh(f".{extension}")
    job.slots["new"] = name
    job.after.files[f"{folder}/{name}"] = ""
    return f"touch {folder}/{name}"


def _append(job: _Job) -> str:
    path = job.file()
    job.slots["text"] = text = job.fresh()
    job.after.files[path] += f"{text}\n"
    return f"echo {text} >> {path}"


def _overwrite(job: _Job) -> str:
    path = job.file()
    job.slots["text"] = text = job.fresh()
    job.after.files[path] = f"{text}\n"
    return f"echo {text} > {path}"


def _show(job: _Job) -> str:
    path = job.file()
    job.output = job.before.files[path].splitlines()
    return f"cat {path}"


def _first_lines(job: _Job) -> str:
    path = job.file()
    job.slots["n"] = n = job.rng.randrange(2, 5)
    job.output = job.before.files[path].splitlines()[:n]
    return f"head -n {n} {path}"


def _last_lines(job: _Job) -> str:
    path = job.file()
    job.slots["n"] = n = job.rng.randrange(2, 5)
    job.output = job.before.files[path].splitlines()[-n:]
    return f"tail -n {n} {path}"


def _sort_lines(job: _Job) -> str:
    path = job.file()
    job.output = sorted(job.before.files[path].splitlines())
    return f"sort {path}"


def _count_lines(job: _Job) -> str:
    path = job.file()
    job.output = [str(len(job.before.files[path].splitlines()))]
    job.compare = "number"
    return f"wc -l {path}"


def _search(job: _Job) -> str:
    path = job.file()
    job.slots["text"] = word = job.rng.choice(job.before.files[path].split())
    job.output = [line for line in job.before.files[path].splitlines() if word in line]
    return f"grep {word} {path}"


def _search_files(job: _Job) -> str:
    folder = job.folder()
    inside = job.before.inside(folder)
    job.slots["text"] = word = job.rng.choice(job.before.files[inside[0]].split())
    job.output = [path for path in inside if word in job.before.files[path]]
    job.compare = "any order"
    return f"grep -l {word} {folder}/*"


def _list_folder(job: _Job) -> str:
    folder = job.folder()
    job.output = [posixpath.basename(path) for path in job.before.inside(folder)]
    job.compare = "any order"
    return f"ls {folder}"


def _count_files(job: _Job) -> str:
    folder = job.folder()
    job.output = [str(len(job.before.inside(folder)))]
    job.compare = "number"
    return f"ls {folder} | wc -l"


def _find_kind(job: _Job) -> str:
    _, extension = _folder_and_extension(job)
    job.output = [path for path in job.before.files if path.endswith(f".{extension}")]
    job.compare = "any order"
    return f'find . -name "*.{extension}"'


def _folder_and_extension(job: _Job) -> tuple[str, str]:
    folder = job.folder()
    path = job.rng.choice(job.before.inside(folder))
    job.slots["e"] = extension = posixpath.splitext(path)[1][1:]
    return folder, extension


def _of_kind(tree: _Tree, folder: str, extension: str) -> list[str]:
    return [path for path in tree.inside(folder) if path.endswith(f".{extension}")]


_WORDINGS = read_wordings("terminal")
_REQUESTS: dict[Callable[[_Job], str], Parted[str]] = {
    _move: _WORDINGS["move"],
    _rename: _WORDINGS["rename"],
    _copy: _WORDINGS["copy"],
    _remove: _WORDINGS["remove"],
    _remove_folder: _WORDINGS["remove_folder"],
    _remove_kind: _WORDINGS["remove_kind"],
    _make_folder: _WORDINGS["make_folder"],
    _make_file: _WORDINGS["make_file"],
    _append: _WORDINGS["append"],
    _overwrite: _WORDINGS["overwrite"],
    _show: _WORDINGS["show"],
    _first_lines: _WORDINGS["first_lines"],
    _last_lines: _WORDINGS["last_lines"],
    _sort_lines: _WORDINGS["sort_lines"],
    _count_lines: _WORDINGS["count_lines"],
    _search: _WORDINGS["search"],
    _search_files: _WORDINGS["search_files"],
    _list_folder: _WORDINGS["list_folder"],
    _count_files: _WORDINGS["count_files"],
    _find_kind: _WORDINGS["find_kind"],
}


def draw(rng: random.Random, split: Split) -> Draft:
    """Returns a tree and a request. Held out are names, kinds of file and wordings."""
    tree = _draw_tree(rng, split)
    job = _Job(rng, split, before=tree, after=tree.copy())
    make = rng.choice(list(_REQUESTS))
    command = make(job)
    request = ask(rng, _REQUESTS[make].draw(rng, split), **job.slots)
    paths = list(tree.files)
    rng.shuffle(paths)
    layout = _WORDINGS["layout"].draw(rng, split)
    return Draft(
        key=f"{sorted(tree.files)} {command}",
        request=layout.replace("<>", "\n").format(files="\n".join(paths), ask=request),
        reply=Message("assistant", content=command),
        check=Effect(
            files=tree.files,
            folders=sorted(tree.folders),
            files_after=job.after.files,
            folders_after=sorted(job.after.folders),
            output=job.output,
            compare=job.compare,
        ),
    )


def _draw_tree(rng: random.Random, split: Split) -> _Tree:
    """Returns two or three folders of two files each or so, and perhaps a file beside them."""
    count = rng.choice((2, 2, 3))
    names = OBJECTS.sample(rng, split, count + 3 * count + 1)
    folders, names = names[:count], names[count:]
    tree = _Tree(folders=set(folders))
    extensions = [_draw_extension(rng, split) for _ in range(2)]
    for folder in folders:
        for _ in range(rng.choice((1, 2, 2, 3))):
            path = f"{folder}/{names.pop()}.{rng.choice(extensions)}"
            tree.files[path] = _draw_text(rng, split)
    if rng.random() < 0.5:
        tree.files[f"{names.pop()}.{rng.choice(extensions)}"] = _draw_text(rng, split)
    return tree


def _draw_text(rng: random.Random, split: Split) -> str:
    """Returns five to seven lines of two words, not in order."""
    return "".join(
        f"{' '.join(OBJECTS.sample(rng, split, 2))}\n" for _ in range(rng.randrange(5, 8))
    )

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
from clover.tasks.parted import Parted, lines, say
from clover.tasks.sandbox import run_sandboxed
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
    held_out: bool
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
            name = OBJECTS.draw(self.rng, self.held_out)
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


def _draw_extension(rng: random.Random, held_out: bool) -> str:
    if held_out or rng.random() >= _INVENTED:
        return _EXTENSIONS.draw(rng, held_out)
    while True:
        letters = "".join(rng.choices(string.ascii_lowercase, k=rng.choice((2, 3, 3, 4))))
        if letters not in _LISTED:
            return letters


def _make_file(job: _Job) -> str:
    extension = _draw_extension(job.rng, job.held_out)
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


_REQUESTS: dict[Callable[[_Job], str], Parted[str]] = {
    _move: lines("""\
[Please |]move {f} [in|]to {d}
Put {f} into {d}
{f} [belongs|should go] in {d}
[Can|Could] you move {f} to the directory {d}
I want {f} in {d} instead
"""),
    _rename: lines("""\
[Please |]rename {f} to {new}
{f} should be called {new}
Give {f} the name {new}
[Can|Could] you rename {f} as {new}
Change the name of {f} to {new}
"""),
    _copy: lines("""\
[Please |]copy {f} [in|]to {d}
Put a copy of {f} into {d}
{d} needs a copy of {f}
[Can|Could] you copy {f} to the directory {d}
I want {f} in {d} as well
"""),
    _remove: lines("""\
[Please |][remove|delete] {f}
Get rid of {f}
{f} is not needed any more
[Can|Could] you delete {f}
I no longer want {f}
"""),
    _remove_folder: lines("""\
[Please |][remove|delete] the directory {d}
Get rid of {d} and all in it
The directory {d} is not needed any more
[Can|Could] you delete all of {d}
I no longer want {d} and its files
"""),
    _remove_kind: lines("""\
[Please |][remove|delete] the {e} files in {d}
Get rid of all {e} files in {d}
The {e} files of {d} are not needed any more
[Can|Could] you delete every {e} file of {d}
{d} should have no {e} files
"""),
    _make_folder: lines("""\
[Please |][make|create] a directory {new}
I need a directory called {new}
There should be a directory {new}
[Can|Could] you add a directory named {new}
Set up the directory {new}
"""),
    _make_file: lines("""\
[Please |][make|create] an empty file {new} in {d}
I need an empty {new} in {d}
There should be an empty file {new} in {d}
[Can|Could] you add an empty file called {new} to {d}
{d} needs an empty file {new}
"""),
    _append: lines("""\
[Please |][append|add] the line {text} to {f}
Write {text} at the end of {f}
{f} needs {text} as its last line
[Can|Could] you append {text} to {f}
Put {text} below the text of {f}
"""),
    _overwrite: lines("""\
[Please |]replace the text of {f} by {text}
Write only {text} into {f}
{f} should contain {text} and nothing else
[Can|Could] you overwrite {f} with {text}
Make {text} the whole text of {f}
"""),
    _show: lines("""\
[Please |][show|print] {f}
What is in {f}?
What does {f} say?
[Can|Could] you print all of {f}
I want to read {f}
"""),
    _first_lines: lines("""\
[Please |][show|print] the first {n} lines of {f}
What are the first {n} lines of {f}?
How does {f} begin? Give {n} lines
[Can|Could] you print the top {n} lines of {f}
I want to read {n} lines from the start of {f}
"""),
    _last_lines: lines("""\
[Please |][show|print] the last {n} lines of {f}
What are the last {n} lines of {f}?
How does {f} end? Give {n} lines
[Can|Could] you print the bottom {n} lines of {f}
I want to read {n} lines at the end of {f}
"""),
    _sort_lines: lines("""\
[Please |][show|print] the lines of {f} sorted
What are the lines of {f} in order?
Sort {f} and print it
[Can|Could] you print {f} in sorted order
I want to read {f} sorted
"""),
    _count_lines: lines("""\
[Please |]count the lines of {f}
How many lines has {f}?
How long is {f} in lines?
[Can|Could] you count how many lines {f} has
I want the number of lines in {f}
"""),
    _search: lines("""\
[Please |][show|print] the lines of {f} with {text}
Where does {f} say {text}? Give the lines
Search {f} for {text}
[Can|Could] you find the lines with {text} in {f}
I want the lines of {f} that contain {text}
"""),
    _search_files: lines("""\
[Please |]list the files in {d} with {text}
Which files in {d} contain {text}?
Search {d} for files that say {text}
[Can|Could] you find the files of {d} with {text} in them
I want the names of files in {d} that contain {text}
"""),
    _list_folder: lines("""\
[Please |]list {d}
Which files are in {d}?
What does the directory {d} hold?
[Can|Could] you list the files in {d}
I want the names of the files in {d}
"""),
    _count_files: lines("""\
[Please |]count the files in {d}
How many files are in {d}?
How many files does {d} hold?
[Can|Could] you count how many files {d} has
I want the number of files in {d}
"""),
    _find_kind: lines("""\
[Please |]find all {e} files
Which {e} files are there?
Where are the {e} files?
[Can|Could] you list every {e} file in all directories
I want the paths of the {e} files
"""),
}
_LAYOUTS = lines("""\
Files:<>{files}<>{ask}
{files}<>{ask}
{ask}<>Files:<>{files}
{ask}<>{files}
Give a shell command.<>{files}<>{ask}
Tree:<>{files}<>{ask}
{ask} (shell)<>{files}
""")


def draw(rng: random.Random, held_out: bool) -> Draft:
    """Returns a tree and a request. Held out are names, kinds of file and wordings."""
    tree = _draw_tree(rng, held_out)
    job = _Job(rng, held_out, before=tree, after=tree.copy())
    make = rng.choice(list(_REQUESTS))
    command = make(job)
    ask = say(rng, _REQUESTS[make].draw(rng, held_out), **job.slots)
    paths = list(tree.files)
    rng.shuffle(paths)
    layout = _LAYOUTS.draw(rng, held_out)
    return Draft(
        key=f"{sorted(tree.files)} {command}",
        request=layout.replace("<>", "\n").format(files="\n".join(paths), ask=ask),
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


def _draw_tree(rng: random.Random, held_out: bool) -> _Tree:
    """Returns two or three folders of two files each or so, and perhaps a file beside them."""
    count = rng.choice((2, 2, 3))
    names = OBJECTS.sample(rng, held_out, count + 3 * count + 1)
    folders, names = names[:count], names[count:]
    tree = _Tree(folders=set(folders))
    extensions = [_draw_extension(rng, held_out) for _ in range(2)]
    for folder in folders:
        for _ in range(rng.choice((1, 2, 2, 3))):
            path = f"{folder}/{names.pop()}.{rng.choice(extensions)}"
            tree.files[path] = _draw_text(rng, held_out)
    if rng.random() < 0.5:
        tree.files[f"{names.pop()}.{rng.choice(extensions)}"] = _draw_text(rng, held_out)
    return tree


def _draw_text(rng: random.Random, held_out: bool) -> str:
    """Returns five to seven lines of two words, not in order."""
    return "".join(
        f"{' '.join(OBJECTS.sample(rng, held_out, 2))}\n" for _ in range(rng.randrange(5, 8))
    )

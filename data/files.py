"""Which files a path, a folder or a glob means: each of them once, whatever links lead to it."""

from __future__ import annotations

import glob
import os
import stat
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path

from conf.values import UserError

NO_FILES = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def find_text(given: str, pattern: str, whole_names: bool = False) -> dict[str, Path]:
    """Non-empty files by name: those of `given`, of a folder those that match `pattern`.

    A file is named from the folder on, or from the glob's first wildcard on; with whole_names, in a glob, by
    all of its path. UserError says what `given` is instead."""
    path = Path(given).expanduser()
    if path.is_file():
        found = {path.name: path}
    elif path.is_dir():
        found = {p.relative_to(path).as_posix(): p for p in path.glob(pattern) if p.is_file()}
        found = {name: p for name, p in found.items() if not _hidden(name)}
    elif wrong := _what_is_wrong(path):
        raise UserError(f"data.path={given} {wrong}: give a file with text in it, a folder or a glob")
    else:
        root = Path(*takewhile(lambda part: not glob.has_magic(part), path.parts))
        files = [p for p in map(Path, matches(str(path))) if p.is_file()]
        found = {str(p) if whole_names else p.relative_to(root).as_posix(): p for p in files}
        if not found:
            raise UserError(
                f"data.path={given}: no such file or folder, and as a glob it matches no file. Where its "
                "text has moved, a saved run goes on with data.path=<its new place>"
            )
    if not found:
        raise UserError(f"{path} holds no file that matches {pattern!r}{_what_there_is(path)}")
    full = {name: p for name, p in found.items() if p.stat().st_size}
    if not full:
        what = "is empty" if len(found) == 1 else f"all {len(found)} files are empty"
        raise UserError(f"data.path={given}: {what}; give a file with text in it")
    return full


def matches(pattern: str) -> list[str]:
    """What `glob.glob(pattern, recursive=True)` finds, but that ** enters each folder once: symbolic links
    can make loops, of which that reads every round."""
    parts = Path(pattern).parts
    if "**" not in parts:
        return sorted(glob.glob(pattern))
    at = parts.index("**")
    rest = parts[at + 1 :] or ("*",)
    found = []
    for start in matches(os.path.join(*parts[:at])) if at else [""]:
        found += [
            path for folder in _folders(start) for path in matches(os.path.join(glob.escape(folder), *rest))
        ]
    return found


def _folders(start: str) -> Iterator[str]:
    """`start` and the folders in it, hidden ones left out; by their own paths rather than by links."""
    seen, own, links = set(), deque([start]), deque()
    while own or links:
        folder = (own or links).popleft()
        try:
            at = os.stat(folder or ".")
            names = sorted(os.listdir(folder or "."))
        except OSError:  # no folder, or not ours to read: nothing matches there
            continue
        if (at.st_dev, at.st_ino) not in seen:
            seen.add((at.st_dev, at.st_ino))
            yield folder
            for path in (os.path.join(folder, name) for name in names if not name.startswith(".")):
                if os.path.isdir(path):
                    (links if os.path.islink(path) else own).append(path)


def each_once(found: Mapping[str, Path]) -> dict[str, Path]:
    """Each file under one of its names, sorted: its own rather than a link's, of hard links the first."""
    seen, kept = set(), {}
    for name, path in sorted(found.items(), key=lambda item: (item[1].is_symlink(), item[0])):
        facts = path.stat()
        if (facts.st_dev, facts.st_ino) not in seen:
            seen.add((facts.st_dev, facts.st_ino))
            kept[name] = path
    return dict(sorted(kept.items()))


def _what_is_wrong(path: Path) -> str | None:
    """Why this path, which is neither a file nor a folder, is none; None for a path that is not there."""
    if path.exists():
        return f"is {NO_FILES.get(stat.S_IFMT(path.stat().st_mode), 'no file')}"
    return "is a symbolic link that leads nowhere" if path.is_symlink() else None


def _hidden(name: str) -> bool:
    return any(part.startswith(".") and part not in (".", "..") for part in Path(name).parts)


def _what_there_is(folder: Path) -> str:
    kinds = Counter(p.suffix for p in folder.rglob("*") if p.is_file() and p.suffix).most_common(3)
    if not kinds:
        return ": give a folder with text files"
    listing = ", ".join(f"{n} {suffix}" for suffix, n in kinds)
    return f" (there are: {listing}): choose the files with data.pattern='**/*{kinds[0][0]}'"

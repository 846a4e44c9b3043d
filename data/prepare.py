"""Text to token files, once: `prepare` writes a folder that `data.tokens` maps into memory.

Long corpora are cut into chunks that a pool of processes tokenises into shards; the shards are then joined.
Every file gets its name only when it is whole, `meta.json` last of all, so that a kill at any moment leaves
either a prepared folder or one to be continued, and never one that merely looks prepared.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np

from conf.values import UserError
from data.corpora import Corpus, Encode, Piece, unit_hash
from data.storage import (
    SCHEMA,
    Progress,
    Unfinished,
    explained,
    join_shards,
    load_meta,
    locked,
    usable_cores,
    write_atomically,
)
from data.tokenizer_base import Tokenizer
from data.tokenizer_file import read_file
from data.tokenizers import (
    BPETokenizer,
    CharTokenizer,
    tokenizer_from_dict,
    tokenizer_spec,
)

SPLITS = ("train", "val")
CHUNK_CHARS = (1 << 20, 8 << 20)  # small at first, to spread a small corpus over the pool
SAMPLE_CHARS = 1 << 16  # what BPE learns from is drawn in blocks of about this: of a book, many
NAMES_LISTED = 2000  # documents: up to here the meta lists who is in validation, beyond it holds a hash
_CHANGED = "{} was written to while it was prepared: run again when it is whole"
BYTES_A_PROCESS = 4 << 20  # a process takes half a second to start, in which it could tokenise 2 MB


def folder_of(
    corpus: Corpus, tokenizer: dict[str, Any] | str, data_dir: str | Path
) -> tuple[Path, dict[str, Any]]:
    """Where this corpus and tokenizer are prepared, and the identity that the folder's name is a hash of."""
    spec = tokenizer_spec(tokenizer)
    identity = {"schema": SCHEMA, "source": corpus.describe(), "tokenizer": spec}
    same = identity | {"tokenizer": {key: value for key, value in spec.items() if key != "path"}}
    key = hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:12]
    return Path(data_dir) / f"{corpus.name}-{spec['kind']}-{key}", identity | {"key": key}


def prepare(
    corpus: Corpus,
    tokenizer: dict[str, Any] | str,
    data_dir: str | Path = "data/prepared",
    workers: int | None = None,
    quiet: bool = False,
    made: list[Path] | None = None,
) -> Path:
    """The folder with the token files and `meta.json`; made now unless it is there already.

    workers: processes that tokenise, by default up to one per core; 1: this one. made: gets the folder if it
    is this call that makes it. A second process that asks for the same waits for the first. UserError for bad
    input, a damaged folder, and a disk that is full or cannot be written; nothing is left of what would fail
    again.
    """
    try:
        folder, identity = folder_of(corpus, tokenizer, data_dir)
        if (folder / "meta.json").exists():
            load_meta(folder)
            if any(path.exists() for path in _parts(folder)):  # of one that was killed at the very end
                with suppress(OSError), locked(folder, quiet=True):
                    _remove_parts(folder)
            return folder
        with locked(folder, quiet):
            if not (folder / "meta.json").exists():
                _build_or_remove(corpus, identity, folder, workers, quiet)
                if made is not None:
                    made.append(folder)
    except OSError as error:
        raise explained(error, Path(data_dir)) from error
    load_meta(folder, verify=True)
    return folder


def _parts(folder: Path) -> tuple[Path, Path]:
    """What a preparation goes on from, and a prepared folder needs no more."""
    return folder / "shards", folder / "tokenizer.json"


def _remove_parts(folder: Path) -> None:
    shards, tokenizer = _parts(folder)
    if shards.exists():
        shutil.rmtree(shards)
    tokenizer.unlink(missing_ok=True)


def _build_or_remove(corpus: Corpus, identity: dict[str, Any], folder: Path, *how: Any) -> None:
    """Removes the folder where it holds no shard, or shards of no use: the same text would fail the same
    way, and another text has another folder."""
    try:
        _build(corpus, identity, folder, *how)
    except BaseException as error:
        mistake = isinstance(error, UserError) and not isinstance(error, Unfinished)
        changed = corpus.changed()
        if changed or mistake or not any(folder.glob("shards/*.json")):
            shutil.rmtree(folder, ignore_errors=True)
        if changed and isinstance(error, (UserError, OSError)):
            raise UserError(_CHANGED.format(changed[0])) from error
        raise


def _build(corpus: Corpus, identity: dict[str, Any], folder: Path, workers: int | None, quiet: bool) -> None:
    shards = folder / "shards"
    shards.mkdir(exist_ok=True)
    for leftover in (*folder.glob("*.tmp"), *shards.glob("*.tmp")):
        leftover.unlink()
    size = corpus.size()
    if workers is None:
        cores = usable_cores()
        workers = cores if size is None else min(cores, 1 + size // BYTES_A_PROCESS)
    with Progress(folder.name, size, quiet) as progress:
        tokenizer = _tokenizer(corpus, identity["tokenizer"], folder)
        dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 and corpus.targets == "all" else "<u4"
        done = _tokenise(corpus, tokenizer, dtype, shards, workers, progress)
        splits = {
            split: join_shards(split, done, shards, folder, np.dtype(dtype).itemsize) for split in SPLITS
        }
        for split, facts in splits.items():
            if facts["tokens"] < 2:
                raise UserError(
                    f"the {split} split of {corpus.name} has {facts['tokens']} tokens and needs 2 or more: "
                    f"give more text{_or_raise(corpus, split)}"
                )
        if changed := corpus.changed():
            raise UserError(_CHANGED.format(changed[0]))
        names = [name for shard in done for name in shard["val_documents"]]
        listed = sum(facts["documents"] for facts in splits.values()) <= NAMES_LISTED
        joined = "\n".join(names).encode(errors="surrogatepass")
        meta = identity | {
            "corpus": corpus.name,
            "vocab_size": tokenizer.vocab_size,
            "eot": tokenizer.eot,
            "dtype": dtype,
            "split_rule": corpus.split_rule,
            "splits": splits,
            "val_documents": names if listed else hashlib.sha256(joined).hexdigest(),
            "skipped": {"count": len(corpus.skipped), "first": corpus.skipped[:20]},
            "tokenizer_state": tokenizer.to_dict(),
        }
        write_atomically(folder / "meta.json", [json.dumps(meta, indent=1).encode()])
        progress.finish(
            f"{splits['train']['tokens']:,} training and {splits['val']['tokens']:,} validation tokens"
        )
    _remove_parts(folder)


def _or_raise(corpus: Corpus, split: str) -> str:
    """What else gives a split more tokens, where this corpus has it."""
    divides = split == "val" and hasattr(corpus, "val_fraction") and not getattr(corpus, "val", None)
    keys = {"max_documents": getattr(corpus, "max_documents", None) is not None, "val_fraction": divides}
    named = " or ".join(f"{corpus.KEYS}.{key}" for key, there in keys.items() if there)
    return named and f", or raise {named}"


def _tokenizer(corpus: Corpus, spec: dict[str, Any], folder: Path) -> Tokenizer:
    """Made once and kept beside the shards: all shards have to come from the same one."""
    saved = folder / "tokenizer.json"
    if saved.exists():
        return tokenizer_from_dict(json.loads(saved.read_bytes()))
    kind = spec["kind"]
    if kind == "char":  # of both splits, as nanoGPT does: validation may hold a character that training lacks
        chars: set[str] = set()
        for piece in corpus.pieces():
            chars.update(piece.text)
        tokenizer: Tokenizer = CharTokenizer("".join(chars))
    elif kind == "bpe":
        tokenizer = BPETokenizer.train(_sample(corpus, spec["sample_mb"]), spec["vocab_size"])
    else:
        tokenizer = tokenizer_from_dict(read_file(spec["path"]) if kind == "file" else spec)
    write_atomically(saved, [json.dumps(tokenizer.to_dict()).encode()])
    return tokenizer


def _sample(corpus: Corpus, sample_mb: float) -> Iterator[str]:
    """At most about `sample_mb` of training text, spread over a corpus of known size, else its beginning;
    never nothing, where there is any."""
    wanted = left = int(sample_mb * 1e6)
    share = wanted / max(corpus.size() or 1, 1)
    first = None  # block, for when chance draws none
    for i, piece in enumerate(corpus.pieces()):
        if left <= 0:
            return
        if piece.split != "train" or not piece.text:
            continue
        if share >= 1:  # all of it, and no word cut in two
            left -= len(piece.text)
            yield piece.text
            continue
        step = -(-len(piece.text) // max(1, round(len(piece.text) / SAMPLE_CHARS)))  # alike: no tiny last one
        for at in range(0, len(piece.text), step):
            block = piece.text[at : at + step]
            first = first or block
            if left > 0 and unit_hash(f"{i} {piece.document} {at}") < share:
                left -= len(block)
                yield block
    if left == wanted and first:
        yield first


def _chunks(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Consecutive pieces, a million characters at first and 8 later: a function of the corpus alone."""
    chunk, chars, n = [], 0, 0
    for piece in pieces:
        chunk.append(piece)
        chars += len(piece.text)
        if chars >= min(CHUNK_CHARS[0] << (n // 16), CHUNK_CHARS[1]):
            yield chunk
            chunk, chars, n = [], 0, n + 1
    if chunk:
        yield chunk


def _tokenise(
    corpus: Corpus, tokenizer: Tokenizer, dtype: str, shards: Path, workers: int, progress: Progress
) -> list[dict[str, Any]]:
    """The facts of each chunk's shard, in order; a shard that a former run finished is reused."""
    done: list[dict[str, Any]] = []
    pending: deque[Future | dict[str, Any]] = deque()
    train_tokens = 0

    def collect() -> None:
        nonlocal train_tokens
        first = pending.popleft()
        facts = first.result() if isinstance(first, Future) else first
        done.append(facts)
        train_tokens += facts["tokens"]["train"]
        progress.advance(facts["bytes"]["train"] + facts["bytes"]["val"])

    with _pool(workers, tokenizer, corpus, dtype) as pool:
        try:
            for index, chunk in enumerate(_chunks(corpus.pieces())):
                marker = shards / f"{index:06d}.json"
                if marker.exists():
                    pending.append(json.loads(marker.read_bytes()))
                else:
                    pending.append(pool.submit(_make_shard, chunk, shards / f"{index:06d}"))
                while len(pending) > workers + 1:  # bounds the memory: chunks in flight
                    collect()
                if corpus.max_tokens is not None and train_tokens >= corpus.max_tokens:
                    break
            while pending and (corpus.max_tokens is None or train_tokens < corpus.max_tokens):
                collect()
        except BrokenProcessPool as error:
            raise Unfinished(
                "a process that tokenises was killed, most likely for want of memory: run again (finished "
                "shards are kept), with fewer of them by data.prepare_workers=1"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return done


class _Inline(Executor):
    """The pool of one: works at submission, in this process."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future:
        future: Future = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def _pool(workers: int, tokenizer: Tokenizer, corpus: Corpus, dtype: str) -> Executor:
    arguments = tokenizer.to_dict(), dtype, corpus.encode, corpus.targets == "all"
    if workers <= 1:
        _start_worker(*arguments)
        return _Inline()
    # spawned, not forked: this process has threads (torch's, the tokenizer's), which a fork does not survive
    return ProcessPoolExecutor(workers, get_context("spawn"), initializer=_start_worker, initargs=arguments)


_worker: dict[str, Any] = {}


def _start_worker(tokenizer: dict[str, Any], dtype: str, encode: Encode, ends: bool) -> None:
    """ends: an end-of-text token follows each document."""
    _worker.update(tokenizer=tokenizer_from_dict(tokenizer), dtype=dtype, encode=encode, ends=ends)
    if parent := parent_process():
        # a worker whose parent is killed would wait for work for ever
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _make_shard(chunk: list[Piece], stem: Path) -> dict[str, Any]:
    """Writes <stem>.<split>.bin and .docs.bin (ends within the shard) and last <stem>.json, the facts."""
    tokenizer, dtype, encode = (_worker[name] for name in ("tokenizer", "dtype", "encode"))
    facts: dict[str, Any] = {"tokens": {}, "bytes": {}, "val_documents": []}
    for split in SPLITS:
        arrays, ends, count, n_bytes = [], [], 0, 0
        for piece in (p for p in chunk if p.split == split):
            try:
                ids = encode(tokenizer, piece.text).astype(dtype)
            except UserError as error:
                raise UserError(f"{piece.document}: {error}") from None
            if piece.ends and tokenizer.eot is not None and _worker["ends"]:
                ids = np.append(ids, np.array([tokenizer.eot], dtype=dtype))
            arrays.append(ids)
            count += len(ids)
            n_bytes += len(piece.text.encode())
            if piece.ends:
                ends.append(count)
                facts["val_documents"] += [piece.document] if split == "val" else []
        write_atomically(stem.with_suffix(f".{split}.bin"), [array.tobytes() for array in arrays])
        write_atomically(stem.with_suffix(f".{split}.docs.bin"), [np.array(ends, dtype="<i8").tobytes()])
        facts["tokens"][split], facts["bytes"][split] = count, n_bytes
    write_atomically(stem.with_suffix(".json"), [json.dumps(facts).encode()])
    return facts

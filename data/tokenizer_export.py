"""Any of our tokenizers as the files that transformers' AutoTokenizer reads."""

from __future__ import annotations

import itertools
import json
from typing import Any

from data.tokenizer_base import EOT_TEXT, Tokenizer
from data.tokenizer_file import JSONTokenizer
from data.tokenizers import BPETokenizer, ByteTokenizer, CharTokenizer


def tokenizer_files(tokenizer: Tokenizer, context: int) -> dict[str, str]:
    """Name -> text: tokenizer.json and tokenizer_config.json, and a chat template where it has one. The same
    ids for the same text, but that text which spells a special token is that token there."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context}
    config |= {"clean_up_tokenization_spaces": False}
    if isinstance(tokenizer, JSONTokenizer):
        named = {"eos_token": tokenizer.eos, "bos_token": tokenizer.bos}
        config |= {key: token for key, token in named.items() if token is not None}
        text = tokenizer.text
        if tokenizer.adds_tokens:  # to each text, such as one that begins it: ours adds none, in training too
            text = json.dumps(json.loads(text) | {"post_processor": None}, ensure_ascii=False)
        files = {"tokenizer.json": text}
        if tokenizer.chat_template is not None:
            files["chat_template.jinja"] = tokenizer.chat_template
    else:
        if tokenizer.eot is not None:
            config |= {"eos_token": EOT_TEXT, "bos_token": EOT_TEXT}
        files = {"tokenizer.json": _library(tokenizer).to_str(pretty=True)}
    return {**files, "tokenizer_config.json": json.dumps(config, indent=2)}


def vocabulary(tokenizer: Tokenizer) -> dict[str, int]:
    """Token -> id, spelt as the tokenizers library does, whatever kind of ours it is."""
    if isinstance(tokenizer, JSONTokenizer):
        return tokenizer.vocabulary()
    return _library(tokenizer).get_vocab(with_added_tokens=True)


def special_ids(tokenizer: Tokenizer) -> tuple[int | None, int | None]:
    """(bos, eos)"""
    return (tokenizer.bos_id if isinstance(tokenizer, JSONTokenizer) else tokenizer.eot), tokenizer.eot


def _library(tokenizer: Tokenizer) -> Any:
    """The same tokenizer as one of the tokenizers library, its end-of-text a special token."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    if isinstance(tokenizer, CharTokenizer):
        vocabulary = {char: i for i, char in enumerate(tokenizer.chars)}
        library = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=""))
        library.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        library.decoder = decoders.Fuse()
        return library
    if isinstance(tokenizer, BPETokenizer):
        library = tokenizers.Tokenizer.from_str(json.dumps(tokenizer.to_dict()["tokenizer"]))
    elif isinstance(tokenizer, ByteTokenizer):
        letters = byte_letters()
        library = _byte_level({letters[byte]: byte for byte in range(256)}, [], words=False)
    else:
        library = _byte_level(*of_ranks(tokenizer.ranks), words=True)
    assert library.get_vocab_size() == tokenizer.eot, "the end of text follows the vocabulary"
    library.add_special_tokens([EOT_TEXT])
    return library


def _byte_level(vocabulary: dict[str, int], merges: list[tuple[str, str]], words: bool) -> Any:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    library = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    library.decoder = decoders.ByteLevel()
    return library


def byte_letters() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level BPE, as GPT-2 has it."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def of_ranks(ranks: dict[bytes, int]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary and merges of a BPE that is known by the ranks of its tokens alone: the two parts of a
    token are what its bytes merge to by all the ranks before its own."""
    letters = byte_letters()
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            pairs = [ranks.get(a + b, rank) for a, b in itertools.pairwise(parts)]
            at = min(range(len(pairs)), key=pairs.__getitem__)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append(tuple("".join(letters[byte] for byte in part) for part in parts))
    return {"".join(letters[byte] for byte in token): rank for token, rank in ranks.items()}, merges

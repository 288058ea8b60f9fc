"""How does text become ids: which tokenizer.json, which id ends a document, and how is one trained?"""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, PADDING = "<|endoftext|>", "<|pad|>"
EOS_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<｜end▁of▁sentence｜>", "[EOS]", "<|return|>")
PAD_NAMES = (PADDING, "<pad>", "[PAD]", "<|padding|>", "<｜▁pad▁｜>", "<|finetune_right_pad_id|>")
SMALLEST_VOCABULARY = 256 + 2
"""Every byte, and the two special tokens: any text can be written in them."""


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer and what a data set must remember of it. sha256 is of ``json``, the bytes of tokenizer.json; vocab_size is its
    highest id + 1."""

    json: bytes
    sha256: str
    vocab_size: int
    eos_id: int
    pad_id: int | None
    tokenizer: Tokenizer

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, closed by eos_id ([n] int64). A special token that a text spells out is plain text: none can forge one."""
        encoded = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array([*e.ids, self.eos_id], dtype=np.int64) for e in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids, without special tokens."""
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)


def load_tokenizer(path: str | Path, eos: str | None = None) -> TextTokenizer:
    """A tokenizer.json, or a folder that holds one; ``eos`` names its end-of-text token if that has an unusual name. Raises ValueError."""
    file = Path(path)
    file = file / "tokenizer.json" if file.is_dir() else file
    try:
        json = file.read_bytes()
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror or error}") from None
    try:
        return tokenizer_of(json, eos)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def tokenizer_of(json: bytes, eos: str | None = None) -> TextTokenizer:
    """The tokenizer that the bytes of a tokenizer.json describe. Raises ValueError."""
    try:
        tokenizer = Tokenizer.from_buffer(json)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"not a tokenizer.json ({' '.join(str(error).split())[:120]})") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    ids = tokenizer.get_vocab(with_added_tokens=True)
    if not ids:
        raise ValueError("its vocabulary is empty")
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    return TextTokenizer(
        json=json,
        sha256=hashlib.sha256(json).hexdigest(),
        vocab_size=max(ids.values()) + 1,
        eos_id=_eos_id(ids, special, eos),
        pad_id=next((ids[name] for name in PAD_NAMES if name in ids), None),
        tokenizer=tokenizer,
    )


def _eos_id(ids: dict[str, int], special: list[str], eos: str | None) -> int:
    names = EOS_NAMES if eos is None else (eos,)
    found = next((ids[name] for name in names if name in ids), None)
    if found is not None:
        return found
    near = difflib.get_close_matches(eos or END_OF_TEXT, special, n=1)
    listed = ", ".join(special[:12]) or "none"
    wanted = f"no token {eos!r}" if eos else "no end-of-text token by a known name; pass --eos TOKEN"
    raise ValueError(f"{wanted}{f'; did you mean {near[0]}?' if near else ''} Its special tokens: {listed}")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """A byte-level BPE (Sennrich et al. 2016, over bytes as GPT-2 has it) of at most ``vocab_size`` ids, fewer if the text holds no more
    pairs. Texts in the same order give the same bytes. Raises ValueError.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        least = f"at least {SMALLEST_VOCABULARY} ids (256 bytes, 2 special tokens)"
        raise ValueError(f"a byte-level vocabulary needs {least}; got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer_of(tokenizer.to_str(pretty=True).encode())


@contextmanager
def one_thread_a_call() -> Iterator[None]:
    """The library's own threads off, so that the caller's threads are all there are. It offers no switch but its environment variable."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before

"""Text for the SmolLM2 example: the tokenizer out of a GGUF file's metadata, and documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# The larger part of a file is of no use: texts are cut to the context. At 100 characters a token,
# far above any text, this still fills a context of 8,192 tokens.
READ_CHARS_MAX = 1 << 20

# tokenizer.ggml.token_type: tokens that stand for themselves and are never made by merging.
_CONTROL = 3


def build_tokenizer(meta: Mapping[str, Any]) -> Any:
    """A tokenizers.Tokenizer for SmolLM2 from GGUF metadata.

    Byte-level BPE: digits are split off one by one, then the text is cut by GPT-2's pattern. No
    token is put before the text.

    Args:
      meta: name → gguf.ReaderField.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (meta["tokenizer.ggml.model"].contents(), meta["tokenizer.ggml.pre"].contents())
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"tokenizer {kind}: expected ('gpt2', 'smollm')")
    pieces: list[str] = meta["tokenizer.ggml.tokens"].contents()
    types: list[int] = meta["tokenizer.ggml.token_type"].contents()
    merges = [tuple(line.split(" ", 1)) for line in meta["tokenizer.ggml.merges"].contents()]
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(piece, special=True, normalized=False)
            for piece, kind_of_token in zip(pieces, types, strict=True)
            if kind_of_token == _CONTROL
        ]
    )
    return tokenizer


@dataclasses.dataclass(frozen=True)
class Document:
    """A text as token ids, cut into the part to prefill and the part to score.

    Attributes:
      prefill: tokens at positions 0 .. len(prefill) - 1.
      inputs: the tokens that follow, fed one by one or as a block, teacher-forced.
      targets: for each input the token after it, which its logits should predict.
    """

    prefill: list[int]
    inputs: list[int]
    targets: list[int]


def read_document(
    path: Path, tokenizer: Any, n_prefill: int, n_scored: int, n_after: int, context_tokens: int
) -> Document:
    """Reads the beginning of a UTF-8 text file and cuts it.

    The text's first n_prefill tokens are for the prefill, the next n_scored are inputs to score;
    what is longer is left out. Raises ValueError if the text is too short, or if prefill, inputs
    and n_after tokens to be decoded after them do not fit context_tokens.
    """
    if min(n_prefill, n_scored) < 1 or n_after < 0:
        raise ValueError("at least one token must be prefilled and one scored")
    n_used = n_prefill + n_scored
    if n_used + n_after > context_tokens:
        raise ValueError(
            f"{n_prefill} + {n_scored} + {n_after} tokens do not fit the context of "
            f"{context_tokens}: lower the number of prefilled, scored or decoded tokens"
        )
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read(READ_CHARS_MAX)
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    if len(tokens) <= n_used:
        raise ValueError(
            f"{path} has {len(tokens)} tokens, {n_used + 1} are needed: choose a longer text, or "
            "lower the number of prefilled or scored tokens"
        )
    return Document(
        prefill=tokens[:n_prefill],
        inputs=tokens[n_prefill:n_used],
        targets=tokens[n_prefill + 1 : n_used + 1],
    )

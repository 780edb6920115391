#!/usr/bin/env python3
"""SmolLM2-135M-Instruct in transformers on a GPU over long real texts: WaveKV beside exact attention.

For each length: a text is prefilled to it, 512 tokens after it are scored one by one by both
attentions, 64 more are generated. Beyond the 8,192 tokens that the model was trained for, the base of
its rotary positions is raised so that the slowest pair turns no further than in training ("NTK-aware"
scaling). Starts its own daemons (WAVEKV_BIN_DIR), runs client/python/examples/transformers_generate.py
and writes its output for each length into a folder. The text is this tree's own: its documents first,
then its sources, in order of their paths.

    transformers_long.py --weights SmolLM2-135M-Instruct.Q4_1.gguf --out-folder results
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from own_daemons import ROOT, Need, check_host_memory, daemons, need_of

EXAMPLE = ROOT / "client" / "python" / "examples" / "transformers_generate.py"
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
    results, status = [], 0
    for length in args.lengths:
        need = _need(args, length)
        check_host_memory(need, f"--lengths {length}")
        with daemons(need, args.backend, args.out_folder) as address:
            result = run_length(args, length, document, address)
        if result is None:
            status = 1
            continue
        result |= {"commit": args.commit, "text": about}
        path = args.out_folder / f"smollm2-{args.dtype}-{length}.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        results.append(result)
    print(" ".join(f"{title:>10}" for _, title in SHOWN))
    for result in results:
        print(" ".join(f"{_shown(result.get(name)):>10}" for name, _ in SHOWN))
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
    """The base at which the slowest pair of `tokens` turns as far as in training; 0: as it is."""
    if tokens <= TRAINED_TOKENS:
        return 0.0
    return round(TRAINED_THETA * (tokens / TRAINED_TOKENS) ** (HEAD_DIM / (HEAD_DIM - 2)))


def run_length(
    args: argparse.Namespace, length: int, document: Path, address: str
) -> dict[str, Any] | None:
    """Runs the example with `length` tokens in all; None, with its words, if it failed."""
    command = [
        sys.executable, str(EXAMPLE), "--attention=compare", f"--address={address}",
        f"--document={document}", f"--weights={args.weights}", f"--device={args.device}",
        f"--dtype={args.dtype}", f"--rope-theta={rope_theta(length)}",
        f"--prefill-tokens={length - args.score_tokens - args.decode_tokens - 1}",
        f"--score-tokens={args.score_tokens}", f"--decode-tokens={args.decode_tokens}",
        f"--cache-ratio={args.cache_ratio}", "--score-by-steps", "--json",
    ]  # fmt: skip
    print(f"{time.strftime('%H:%M:%S')} {length} tokens", file=sys.stderr, flush=True)
    started = time.monotonic()
    log = args.out_folder / f"smollm2-{args.dtype}-{length}.log"
    with open(log, "w", encoding="utf-8") as sink:
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=sink, text=True, check=False,
                timeout=args.timeout, env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            print(f"{length} tokens: not done in {args.timeout} s, see {log}", file=sys.stderr)
            return None
    if done.returncode != 0:
        words = log.read_text(encoding="utf-8")[-3000:]
        print(f"{length} tokens: exit status {done.returncode}\n{words}", file=sys.stderr)
        return None
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    result["document"] = document.name
    result["kv_bytes_ratio"] = result["kv_bytes_device_wavekv"] / result["kv_bytes_device_exact"]
    result |= {
        "rope_theta": rope_theta(length) or TRAINED_THETA, "dtype": args.dtype,
        "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip
    if args.device == "cuda" and not result["kv_bytes_device_wavekv"]:
        print(f"{length} tokens: steps were not taken on the GPU, see {log}", file=sys.stderr)
        return None
    return result


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
    parser.add_argument("--timeout", type=float, default=400, help="seconds for a length")
    parser.add_argument("--commit", default="", help="is noted")
    args = parser.parse_args(argv)
    args.backend = "cuda" if args.device == "cuda" else "host"
    return args


if __name__ == "__main__":
    sys.exit(main())

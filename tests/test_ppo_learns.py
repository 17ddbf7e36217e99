"""The shipped PPO configurations learn the toy, with every critic and with one or four completions a prompt; the critic foresees."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from recipes import arguments, ppo, report, runner  # noqa: E402

CRITICS = {"ppo_lora": "adapter", "ppo_shared": "shared", "ppo_full": "model"}


@pytest.mark.slow
@pytest.mark.parametrize("num_generations", [1, 4])
@pytest.mark.parametrize("config", CRITICS)
def test_toy_is_learned(config, num_generations, tmp_path, monkeypatch):
    """Mean reward from under 0.3 to over 0.8, explained variance from under 0.1 (untrained critic) to over 0.3 (10 steps' mean)."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    words = ["--config", str(ROOT / "recipes" / "configs" / f"{config}.yaml"), "--output_dir", str(tmp_path)]
    words += ["--num_generations", str(num_generations), "--disable_tqdm", "true"]
    trainer = runner.build_trainer(ppo.RECIPE, *arguments.parse(ppo.RECIPE, words))
    assert trainer.critic.kind == CRITICS[config]
    trainer.train()
    history = trainer.state.log_history
    rewards = [entry["reward"] for entry in history if "reward" in entry]
    first, most = report.explained_variance(history)
    assert sum(rewards[:3]) / 3 < 0.3
    assert sum(rewards[-5:]) / 5 > 0.8
    assert first < 0.1
    assert most > 0.3

"""Wrong input is refused before any training starts, in one line that names what was given and what is allowed."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from toyrun import SeeLoss, fixed_rollout, letter_reward, logged, trainer
from trl import GRPOConfig, GRPOTrainer

from trl_lossplus import GRPOPlusTrainer, LossPlusError, PolicyTerm, register_policy_loss
from trl_lossplus.registry import POLICY_LOSSES
from trl_lossplus.trainers import trl_seam


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


def test_model_path(tmp_path):
    with pytest.raises(LossPlusError, match="no such local folder") as error:
        trainer(str(tmp_path / "nowhere"), tmp_path)
    assert "nowhere" in one_line(error)


def test_dataset(toy, tmp_path):
    for dataset, words in (
        (Dataset.from_dict({"question": ["a"]}), "has no 'prompt' column, but question"),
        (Dataset.from_dict({"prompt": []}), "is empty"),
        (None, "train_dataset is None"),
    ):
        with pytest.raises(LossPlusError, match=words) as error:
            GRPOPlusTrainer(model=toy, reward_funcs=letter_reward, args=trainer_args(tmp_path), train_dataset=dataset)
        one_line(error)


def trainer_args(tmp_path):
    from toyrun import SETTINGS

    from trl_lossplus import GRPOPlusConfig

    return GRPOPlusConfig(output_dir=str(tmp_path), **SETTINGS)


def test_configuration_of_the_wrong_class(toy, tmp_path):
    with pytest.raises(LossPlusError, match="args is a GRPOConfig; GRPOPlusTrainer needs a GRPOPlusConfig"):
        trainer(toy, tmp_path, config_class=GRPOConfig)


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (lambda completions, **kw: [1.0], "returned 1 rewards for 8 completions"),
        (lambda completions, **kw: 1.0, "returned float; it must return a list of 8 numbers"),
        (lambda completions, **kw: ["good"] * 8, "returned 'good' for completion 0"),
    ],
)
def test_reward_functions(toy, tmp_path, reward, words):
    run = trainer(toy, tmp_path, reward=reward, rollout=fixed_rollout)
    with pytest.raises(LossPlusError, match=words) as error:
        run.train()
    one_line(error)


def test_async_rewards_are_checked_too(toy, tmp_path):
    async def slow(completions, **kwargs):
        return [1.0]

    run = trainer(toy, tmp_path, reward=slow, rollout=fixed_rollout)
    with pytest.raises(LossPlusError, match="'slow' returned 1 rewards for 8 completions"):
        run.train()


def test_a_reward_that_is_no_function(toy, tmp_path):
    with pytest.raises(LossPlusError, match="reward_funcs holds a int"):
        trainer(toy, tmp_path, reward=3)


@register_policy_loss("test_pull_up", requires={"old_logps", "advantages"}, formula="-A min(r, 2)", source="these tests")
def pull_up(batch, spec):
    ratio = batch.ratio(spec.log_ratio_clamp)
    return PolicyTerm(-batch.advantages * ratio.clamp(max=2), {"capped_mean": ratio.detach() > 2})


def undecorated(batch, spec):
    return PolicyTerm(-batch.advantages * batch.ratio(spec.log_ratio_clamp).clamp(max=2))


@pytest.mark.parametrize("name", ["test_pull_up", "test_inputs:undecorated"])
def test_j1_a_user_s_own_loss_is_the_one_that_trains(toy, tmp_path, name):
    """J1: by decorator and by path. The logged policy term is -mean(A r) = that of the loss, not of the stock one."""
    run = trainer(
        toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, policy_loss=name, num_iterations=2, learning_rate=0.05,
        max_steps=2,
    )  # fmt: skip
    assert run.spec.policy_loss == name
    seen = SeeLoss(run)
    run.train()
    assert logged(run, "loss") == pytest.approx(seen.losses, rel=1e-4, abs=1e-6)
    assert ("capped_mean" in run.state.log_history[0]) == (name == "test_pull_up")
    assert not any("clip_ratio" in key for key in run.state.log_history[0])
    assert POLICY_LOSSES.get(name).func is {"test_pull_up": pull_up, "test_inputs:undecorated": undecorated}[name]


def test_h1_dropout_is_told(toy, tmp_path, caplog):
    """H1: LoRA dropout .5 and two passes: the first ratio is not 1, and a warning names the modules and the way out."""
    lora = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5)

    def first_pass(**fields):
        caplog.clear()
        run = trainer(
            toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, num_iterations=2, max_steps=1,
            extra={"peft_config": lora}, **fields,
        )  # fmt: skip
        for parameter_name, parameter in run.model.named_parameters():
            if "lora_B" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.1)
        ratios = []
        see = run.guard.see
        run.guard.see = lambda output, inputs: (ratios.append(output.per_token["ratio"]), see(output, inputs))
        run.train()
        told = [record.message for record in caplog.records if "Dropout acts in" in record.message]
        return told, (ratios[0] - 1).abs().max().item()

    told, off = first_pass()
    assert len(told) == 1
    assert "lora_dropout" in told[0]
    assert "disable_dropout=True" in told[0]
    assert off > 0.01
    silent, off = first_pass(disable_dropout=True)
    assert silent == []
    assert off < 1e-5


def test_b4_on_policy_the_clip_cannot_act(toy, tmp_path):
    """B4: one update a rollout: the ratio is exactly 1, every clip fraction 0."""
    run = trainer(toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, max_steps=3)
    run.train()
    assert run.args.is_on_policy
    for name in ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "clip_ratio/high_max"):
        assert logged(run, name) == [0.0, 0.0, 0.0]


def test_l1_loss_0_has_a_gradient(toy, tmp_path):
    """L1: A = +-.7071, on-policy: loss 0 and gradient -+.35355 for each of two one-token rows."""
    from harness import plus_loss, rollout

    logps, entropies, inputs = rollout(seed=0, rows=2, width=1, lengths=[1, 1], old=False)
    inputs["advantages"] = torch.tensor([0.5**0.5, -(0.5**0.5)])
    (loss,), _ = plus_loss({"num_generations": 2}, [(logps, entropies, inputs)])
    loss.backward()
    assert loss.item() == 0.0
    assert logps.grad.flatten().tolist() == pytest.approx([-0.35355, 0.35355], abs=1e-5)


def changed_class(name, method):
    return type("GRPOTrainer", (GRPOTrainer,), {name: method})


def test_j2_a_moved_trl_is_an_error_or_one_warning(caplog):
    """J2: missing method or argument: an error with method and version. Another body: one warning."""

    class Bare:
        pass

    with pytest.raises(trl_seam.TRLVersionError, match=r"TRL 9\.9 has no Bare\._prepare_inputs"):
        trl_seam.check_seam(Bare, "9.9")

    def without_inputs(self, model):
        return None

    with pytest.raises(trl_seam.TRLVersionError, match=r"TRL 9\.9: GRPOTrainer\._compute_loss does not take inputs"):
        trl_seam.check_seam(changed_class("_compute_loss", without_inputs), "9.9")

    def other_body(self, model, inputs):
        return None

    assert trl_seam.check_seam(changed_class("_compute_loss", other_body), "9.9") == ["_compute_loss"]
    assert sum("9.9 is not a tested version: _compute_loss differ" in record.message for record in caplog.records) == 1
    caplog.clear()
    assert trl_seam.check_seam(GRPOTrainer, "installed") == []
    assert caplog.records == []

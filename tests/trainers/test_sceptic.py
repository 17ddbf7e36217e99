"""What a sceptical reading found, each kept as a test."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig
from toyrun import SETTINGS, StopAt, apart, fixed_rollout, letter_reward, logged, trainer, weights
from transformers import AutoModelForCausalLM
from trl import TrlParser

from trl_lossplus import (
    GRPOPlusConfig,
    GRPOPlusTrainer,
    LossPlusError,
    PolicyTerm,
    PPOPlusConfig,
    PPOPlusTrainer,
    register_policy_loss,
)
from trl_lossplus.diagnostics.guards import NonFiniteError
from trl_lossplus.toy import toy_dataset
from trl_lossplus.trainers.minibatch import normalize, row_table, trim

CPU = {"use_cpu": True, "bf16": False}
READS = {"old_logps", "advantages"}


def test_critic_warmup_with_an_entropy_bonus(toy, tmp_path):
    """The policy's terms are not there during warm-up, and are after it."""
    run = trainer(
        toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, trainer_class=PPOPlusTrainer, config_class=PPOPlusConfig,
        critic="shared", critic_warmup_steps=1, entropy_coef=0.01, max_steps=2,
    )  # fmt: skip
    run.train()
    assert "policy_loss" not in run.state.log_history[0]
    assert "policy_loss" in run.state.log_history[1]


def test_a_synced_reference_with_the_model_as_a_path(toy, tmp_path):
    """sync_ref_model without LoRA stays TRL's, also where the model is a path: alpha 1 makes the reference the policy."""
    run = trainer(
        toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, beta=0.1, sync_ref_model=True, ref_model_sync_steps=1,
        ref_model_mixup_alpha=1.0, max_steps=2,
    )  # fmt: skip
    run.train()
    reference = dict(run.ref_model.named_parameters())
    assert all(torch.equal(reference[name], p) for name, p in run.model.named_parameters())


@register_policy_loss("test_entropy_inside", requires={*READS, "entropies"}, formula="-A r - 5 H", source="these tests")
def entropy_inside(batch, spec):
    return PolicyTerm(-batch.advantages * batch.ratio(spec.log_ratio_clamp) - 5 * batch.entropies)


def test_an_objective_that_declares_entropies_gets_their_gradient(toy, tmp_path):
    norms = []
    for coef in (0.0, 1e-12):
        run = trainer(
            toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, policy_loss="test_entropy_inside", entropy_coef=coef,
            max_steps=1,
        )  # fmt: skip
        run.train()
        norms.append(logged(run, "grad_norm")[0])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def bad_losses():
    def detached(batch, spec):
        return PolicyTerm((-batch.advantages * batch.ratio(spec.log_ratio_clamp)).detach())

    def scalar_stat(batch, spec):
        return PolicyTerm(-batch.advantages * batch.ratio(spec.log_ratio_clamp), {"mine": 1.0})

    def reserved(batch, spec):
        return PolicyTerm(-batch.advantages * batch.ratio(spec.log_ratio_clamp), {"reward": batch.logps})

    return {
        "detached": (detached, "returned per_token without a gradient"),
        "scalar_stat": (scalar_stat, "the statistic 'mine', a float"),
        "reserved": (reserved, "the statistic 'reward' has the name of a metric"),
    }


@pytest.mark.parametrize("name", bad_losses())
def test_own_losses_that_break_their_contract(toy, tmp_path, name):
    func, words = bad_losses()[name]
    register_policy_loss(f"test_{name}", requires=READS, formula="x", source="these tests", replace=True)(func)
    run = trainer(
        toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, policy_loss=f"test_{name}", entropy_coef=0.05, max_steps=1
    )
    with pytest.raises(LossPlusError, match=words):
        run.train()


@register_policy_loss("test_steep", requires=READS, formula="infinite slope", source="these tests")
def steep(batch, spec):
    slope = (batch.logps - batch.logps.detach()).abs().sqrt()  # 0, with an infinite slope
    return PolicyTerm(-batch.advantages * batch.ratio(spec.log_ratio_clamp) + slope)


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_gradient_that_is_not_finite_reaches_no_weight(toy, tmp_path, policy):
    """The loss is finite, its gradient is NaN: stopped, or dropped until there were too many; the weights are as they were."""
    run = trainer(
        toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, policy_loss="test_steep", nonfinite_policy=policy,
        nonfinite_max_skips=2, max_steps=5,
    )  # fmt: skip
    before = weights(run)
    with pytest.raises(NonFiniteError, match=f"step {1 if policy == 'raise' else 3}: the norm of the gradient is nan"):
        run.train()
    assert run.state.global_step == (0 if policy == "raise" else 2)
    assert apart(before, weights(run)) == 0.0


def test_equal_advantages_whiten_to_exactly_zero():
    """E2: one row of 11 tokens of 0.7, alone in its group and in the batch, whole or split: exactly 0, not dust over eps."""
    for scope in ("batch", "group", "sequence"):
        for parts in (1, 2):
            micro_batches = [
                {
                    "advantages": torch.full((2 // parts, 11), 0.7),
                    "completion_mask": torch.ones(2 // parts, 11, dtype=torch.bool),
                    "group_ids": ids,
                    "row": ids,
                    "flat": torch.zeros_like(ids, dtype=torch.bool),
                    "scored": torch.ones_like(ids, dtype=torch.bool),
                }
                for ids in torch.arange(2).chunk(parts)
            ]
            kind = {"normalization": "rollout"}
            table = row_table(
                micro_batches, per_window=1, process=0, gather=lambda x: x, empty_rows=True, drop_flat=False, **kind
            )
            normalize(micro_batches, table, scope=scope, **kind)
            white = [micro["advantages"] for micro in micro_batches]
            assert all((x == 0).all() for x in white), (scope, parts)


def test_the_resumed_coefficient_of_a_rollout_in_use(toy, tmp_path):
    """
    Stopped in the middle of a rollout's use: the coefficient that the rollout has moved comes back with the rollout. Where the rollout
    is made again (its file is lost), it is the one before it, so that the rollout moves it once, not twice.
    """
    fields = {
        "num_iterations": 2, "kl_placement": "reward", "kl_reward_coef": 0.1, "kl_controller": "adaptive", "kl_target": 0.01,
        "kl_horizon": 100.0, "save_strategy": "steps", "save_steps": 3, "max_steps": 6, "rollout": fixed_rollout,
    }  # fmt: skip
    first = trainer(toy, tmp_path, reward=letter_reward, callbacks=[StopAt(3)], **fields)
    first.train()
    in_use = logged(first, "kl_coef")[-1]
    again = trainer(toy, tmp_path, reward=letter_reward, **fields)
    again.load_plus_state(str(tmp_path / "checkpoint-3"))
    assert again.kl_controller.coef == first.kl_controller.coef != in_use
    assert again.kl_factor == pytest.approx(in_use / 0.1, rel=1e-12)
    (tmp_path / "checkpoint-3" / "lossplus_state_0.pt").unlink()
    again = trainer(toy, tmp_path, reward=letter_reward, **fields)
    again.load_plus_state(str(tmp_path / "checkpoint-3"))
    assert again.kl_controller.coef == pytest.approx(in_use, rel=1e-12)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"beta": None}, "beta=None: it must be a number."),
        ({"epsilon": True}, "epsilon=True: it must be a number."),
        ({"num_iterations": 1.5}, "num_iterations=1.5: it must be a whole number."),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0 is out of range: it must be >= 1."),
        ({"steps_per_generation": 0}, "steps_per_generation=0 is out of range"),
        ({"temperature": 0}, "temperature=0 is out of range: it must be > 0."),
        ({"max_completion_length": -1}, "max_completion_length=-1 is out of range"),
        ({"use_bias_correction_kl": "maybe", "beta": 0.1}, "use_bias_correction_kl='maybe': it must be true or false"),
        ({"policy_loss": "math:sqrt"}, "the function must take two arguments, batch and spec"),
        ({"policy_loss": {"a": 1}}, "is not known"),
    ],
)
def test_wrong_types_are_one_line(fields, words):
    with pytest.raises(LossPlusError) as error:
        GRPOPlusConfig(**CPU, **fields)
    assert words in str(error.value)


def test_words_and_texts_are_read():
    """ "false" is false, and a number in a text is a number; also once HfArgumentParser has rewritten the types of the fields."""
    TrlParser((GRPOPlusConfig,))
    config = GRPOPlusConfig(**CPU, beta="0.1", use_bias_correction_kl="false", num_iterations="2", nonfinite_max_skips="4")
    assert (config.beta, config.use_bias_correction_kl, config.num_iterations, config.nonfinite_max_skips) == (0.1, False, 2, 4)
    assert config.loss_spec().use_bias_correction_kl is False


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (lambda completions, needed, **kw: [0.0] * 8, "cannot be called with what it is given"),
        (lambda completions: [0.0] * 8, r"let it end in \*\*kwargs"),
        (lambda completions, **kw: np.ones((8, 1)), "completion 0: 1 rewards for a completion of 3 tokens"),
        (lambda completions, **kw: np.float32(1.0), "returned float; it must return a list"),
    ],
)
def test_reward_functions_that_cannot_be_called_or_read(toy, tmp_path, reward, words):
    run = trainer(toy, tmp_path, reward=reward, rollout=fixed_rollout)
    with pytest.raises(LossPlusError, match=words):
        run.train()


def test_an_eval_dataset_without_prompts_is_refused_before_training(toy, tmp_path):
    with pytest.raises(LossPlusError, match="eval_dataset has no 'prompt' column"):
        trainer(toy, tmp_path, extra={"eval_dataset": Dataset.from_dict({"text": ["a"]})})


def test_trl_s_positional_arguments(toy, tmp_path):
    """GRPOTrainer's order: model, rewards, args, train, eval, processing class."""
    args = GRPOPlusConfig(output_dir=str(tmp_path), **SETTINGS)
    first = trainer(toy, tmp_path)
    run = GRPOPlusTrainer(toy, letter_reward, args, toy_dataset(), toy_dataset(), first.processing_class)
    assert run.eval_dataset is not None
    assert run.processing_class is first.processing_class


def test_a_model_critic_from_an_instance_without_a_path(toy, tmp_path):
    model = AutoModelForCausalLM.from_config(AutoModelForCausalLM.from_pretrained(toy).config)
    model.config._name_or_path = ""
    from trl_lossplus.toy import toy_tokenizer

    with pytest.raises(LossPlusError, match="critic='model' starts from the policy's path"):
        trainer(
            model, tmp_path, trainer_class=PPOPlusTrainer, config_class=PPOPlusConfig, critic="model",
            extra={"processing_class": toy_tokenizer()},
        )  # fmt: skip


def test_trimming_keeps_pad_to_multiple_of():
    """Padded to multiples of 4: prompt 8 with 3 used stays 4 wide, completion 8 with 5 used stays 8."""
    micro = {
        "prompt_ids": torch.zeros(1, 8, dtype=torch.long), "prompt_mask": torch.tensor([[0] * 5 + [1] * 3]),
        "completion_ids": torch.zeros(1, 8, dtype=torch.long), "completion_mask": torch.tensor([[1] * 5 + [0] * 3]),
    }  # fmt: skip
    trim([micro], left=True, multiple=4)
    assert micro["prompt_ids"].shape == (1, 4)
    assert micro["completion_ids"].shape == (1, 8)


def test_sequence_clip_fractions_are_over_rows_in_the_loss(toy, tmp_path):
    """gspo with flat groups dropped: every row in the loss is clipped, so the fraction is 1, not diluted by the dropped rows."""

    def reward(prompts, completions, **kwargs):
        return [float(i % 2) if i < 4 else 0.5 for i in range(len(completions))]

    run = trainer(
        toy, tmp_path, reward=reward, rollout=fixed_rollout, policy_loss="gspo", epsilon=1e-9, zero_std_groups="drop",
        num_iterations=2, max_steps=2, learning_rate=0.05,
    )  # fmt: skip
    run.train()
    ((output, _),) = run.guard.last
    batch = output.inputs
    kept = batch.mask.any(1)
    assert kept.sum() == 4
    drift = torch.where(batch.mask, batch.logps - batch.old_logps, 0).sum(1) / batch.mask.sum(1).clamp(min=1)
    clipped = (drift.exp() - 1).mul(batch.advantages[:, 0].sign()) > 1e-9
    expected = clipped[kept].float().mean().item()
    assert expected > 0
    assert logged(run, "clip_ratio/region_mean")[1] == pytest.approx(expected)


VIRTUAL = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
INVOKED = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", alora_invocation_tokens=[20])


@pytest.mark.parametrize(
    ("adapter", "reason"), [(VIRTUAL, "tokens of its own before each row"), (INVOKED, "aLoRA")], ids=["virtual", "alora"]
)
@pytest.mark.parametrize("layout", ["packed", "shared_prefix"])
def test_no_packing_of_an_adapter_that_acts_on_a_row_as_a_whole(toy, tmp_path, adapter, reason, layout):
    """An adapter that starts at 0 is the same in every layout at the first rollout, so comparing there does not find it."""
    with pytest.raises(LossPlusError, match=f"microbatch_layout='{layout}' is not exact here: .*{reason}"):
        trainer(toy, tmp_path, extra={"peft_config": adapter}, microbatch_layout=layout)


@pytest.mark.parametrize("adapter", [VIRTUAL, INVOKED], ids=["virtual", "alora"])
def test_auto_pads_it(toy, tmp_path, adapter, caplog):
    run = trainer(toy, tmp_path, extra={"peft_config": adapter}, microbatch_layout="auto")
    assert run.packed is None
    assert "auto takes padded, since" in caplog.text
    run.train()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lora_bias": True}, "the base layer has no bias"),
        ({"alora_invocation_tokens": [20]}, "aLoRA does not support safe merging"),
    ],
    ids=["bias", "alora"],
)
def test_adapters_that_peft_does_not_merge_are_refused_at_the_start(toy, tmp_path, fields, words):
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", **fields)
    with pytest.raises(
        LossPlusError, match=f"merged_generation=True: PEFT does not merge these adapters .*{words}.*Set it to False"
    ):
        trainer(toy, tmp_path, extra={"peft_config": lora}, merged_generation=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_beams", 3), ("use_cache", False), ("cache_implementation", "static"), ("encoder_repetition_penalty", 0.5)],
)
def test_compact_generation_beside_what_the_model_itself_sets(toy, tmp_path, name, value):
    """transformers fills in from the model's generation_config what generation_kwargs leaves out."""
    model = AutoModelForCausalLM.from_pretrained(toy)
    setattr(model.generation_config, name, value)
    with pytest.raises(LossPlusError, match=f"compact_generation=True: the model's generation_config has {name}={value!r}"):
        trainer(model, tmp_path, compact_generation=True)


def test_compact_generation_keeps_no_row_of_the_beginning(toy, tmp_path):
    """Processors that hold the prompts of all rows do not know which rows are left."""
    for name, value in (("encoder_repetition_penalty", 0.5), ("encoder_no_repeat_ngram_size", 2)):
        with pytest.raises(LossPlusError, match=f"generation_kwargs has {name}"):
            trainer(toy, tmp_path, compact_generation=True, generation_kwargs={name: value})


def test_virtual_tokens_keep_their_distance_on_every_split(toy, tmp_path):
    """They stand before a row's padding, so taking it away from each micro-batch would move them: here by another width for each."""
    rows = [{"prompt": "say " * (i % 5) + row["prompt"], "keyword": row["keyword"]} for i, row in enumerate(toy_dataset())]
    found = []
    for split in (1, 4):
        run = trainer(
            toy, tmp_path / str(split), reward=letter_reward, rollout=fixed_rollout, dataset=Dataset.from_list(rows),
            extra={"peft_config": VIRTUAL}, optim="sgd", learning_rate=10.0, max_grad_norm=1e9, max_steps=2,
            per_device_train_batch_size=16 // split, gradient_accumulation_steps=split,
        )  # fmt: skip
        start = weights(run)
        run.train()
        found.append(weights(run))
    assert apart(*found) < 1e-5
    assert apart(start, found[1]) > 1e-3


@pytest.mark.parametrize(("adapter", "critic"), [(VIRTUAL, "shared"), (INVOKED, "shared"), (INVOKED, "adapter")])
def test_no_critic_on_a_model_whose_adapter_acts_on_a_row_as_a_whole(toy, tmp_path, adapter, critic):
    """The critic's own pass goes through the trunk, where there are neither virtual tokens nor the places of invocation tokens."""
    with pytest.raises(LossPlusError, match=f"critic='{critic}': .*Take critic='model'"):
        trainer(
            toy, tmp_path, trainer_class=PPOPlusTrainer, config_class=PPOPlusConfig, critic=critic, extra={"peft_config": adapter}
        )  # fmt: skip

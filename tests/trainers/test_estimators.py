"""Estimators that read more than rewards, through the trainer: lengths, greedy baselines, sums of squared probabilities."""

import asyncio
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from toyrun import (
    SeeLoss,
    fixed_rollout,
    letter_reward,
    logged,
    rollout_with_tools,
    trainer,
    vowel_rewards,
)  # fmt: skip

from trl_lossplus import LossPlusError
from trl_lossplus.check.plain_advantages import numbered_baseline, token_baseline
from trl_lossplus.toy import keyword_reward, toy_dataset

TWO = {"num_iterations": 2, "max_steps": 2}


def first_rollout(run):
    seen = SeeLoss(run)
    run.train()
    return seen.inputs[0]


def texts_of(run, micro):
    tokens = [row[: mask.sum()] for row, mask in zip(micro["completion_ids"], micro["completion_mask"], strict=True)]
    return run.processing_class.batch_decode(tokens, skip_special_tokens=True)


def test_opo_weighs_by_the_model_s_own_tokens(toy, tmp_path):
    """s - (sum of n s) / (sum of n) of the group, n the tokens of the row that the loss counts: without a tool's."""
    run = trainer(toy, tmp_path, reward=letter_reward, rollout=rollout_with_tools, advantage_estimator="opo", max_steps=1)
    micro = first_rollout(run)
    lengths, scores = micro["loss_mask"].sum(1).tolist(), letter_reward(texts_of(run, micro))
    assert lengths != micro["completion_mask"].sum(1).tolist()
    for i, group in enumerate(micro["group_ids"].tolist()):
        own = [j for j, other in enumerate(micro["group_ids"].tolist()) if other == group]
        base = sum(lengths[j] * scores[j] for j in own) / sum(lengths[j] for j in own)
        assert micro["advantages"][i].item() == pytest.approx(scores[i] - base, abs=1e-6)


# remax.


def greedy_text(run, prompt):
    """The greedy completion of a prompt under the fixed rollout, decoded."""
    stand_in = SimpleNamespace(
        processing_class=run.processing_class, num_generations=1, greedy=True, accelerator=SimpleNamespace(process_index=0)
    )
    return run.processing_class.decode(fixed_rollout([prompt], stand_in)["completion_ids"][0], skip_special_tokens=True)


@pytest.mark.parametrize("kl", [{}, {"kl_placement": "reward", "kl_reward_coef": 0.5, **TWO, "max_steps": 4}])
def test_remax_by_hand(toy, tmp_path, kl):
    """Reward to come, less the reward of the prompt's greedy completion; two functions with weights; no KL in the baseline."""
    run = trainer(
        toy, tmp_path, reward=[letter_reward, keyword_reward], rollout=rollout_with_tools, advantage_estimator="remax",
        reward_weights=[1.0, -2.0], gamma=0.9, **{"max_steps": 1, **kl},
    )  # fmt: skip
    seen = SeeLoss(run)
    run.train()
    micro = seen.inputs[-1]
    prompts = run.processing_class.batch_decode(micro["prompt_ids"], skip_special_tokens=True)
    words = [next(row["keyword"] for row in run.train_dataset if row["prompt"] == prompt) for prompt in prompts]
    texts, bases = texts_of(run, micro), [greedy_text(run, prompt) for prompt in prompts]

    def total(done):
        return [a - 2 * b for a, b in zip(letter_reward(done), keyword_reward(done, words), strict=True)]

    assert micro["reward_baselines"].tolist() == pytest.approx(total(bases), abs=1e-6)
    mask, spread = micro["loss_mask"], 0.0
    d = torch.zeros(mask.shape)
    if kl:
        d = torch.where(mask, micro["old_per_token_logps"] - micro["ref_per_token_logps"], d)
        assert d.abs().max() > 1e-4
    for i, (score, base) in enumerate(zip(total(texts), total(bases), strict=True)):
        own = mask[i].nonzero().flatten().tolist()
        rewards = [-0.5 * d[i, t].item() for t in own]
        rewards[-1] += score
        for k, t in enumerate(own):
            to_come = sum(0.9 ** (j - k) * rewards[j] for j in range(k, len(own)))
            assert micro["advantages"][i, t].item() == pytest.approx(to_come - base, abs=1e-5)
        spread = max(spread, abs(score - base))
    assert spread > 0.1
    by_prompt = dict(zip(prompts, total(bases), strict=True))
    assert logged(run, "reward_baseline")[-1] == pytest.approx(sum(by_prompt.values()) / len(by_prompt), abs=1e-6)


def test_remax_generates_and_scores_each_prompt_once_and_logs_nothing_of_it(toy, tmp_path):
    """
    One greedy completion a prompt, seen by every kind of reward function; the counts, lengths and columns are those of the samples.
    """
    calls, scored = [], defaultdict(list)

    def rollout(prompts, trainer):
        calls.append((trainer.greedy, trainer.num_generations, list(prompts)))
        return {**fixed_rollout(prompts, trainer), "seen": ["greedy" if trainer.greedy else "sample"] * len(prompts)}

    rollout.supports_greedy = True

    def plain(completions, prompts, seen, log_extra, log_metric, **kwargs):
        scored["plain"].append(seen)
        log_extra("seen", seen)
        log_metric("share", float(seen[0] == "greedy"))
        return letter_reward(completions)

    async def waiting(completions, seen, **kwargs):
        await asyncio.sleep(0)
        scored["waiting"].append(seen)
        return [None] * len(completions)

    run = trainer(
        toy, tmp_path, reward=[plain, waiting], rollout=rollout, advantage_estimator="remax", max_steps=1,
        per_device_train_batch_size=16, log_completions=True,
    )  # fmt: skip
    other = trainer(
        toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, advantage_estimator="reinforce_plus_plus", max_steps=1,
        per_device_train_batch_size=16,
    )  # fmt: skip
    run.train()
    other.train()
    (_, _, sampled), (greedy, size, prompts) = calls
    assert (greedy, size, run.greedy, run.num_generations) == (True, 1, False, 4)
    assert prompts == sampled[::4]
    for name in ("plain", "waiting"):
        assert scored[name] == [["sample"] * 16, ["greedy"] * 4]
    assert list(run._logs["extra"]["seen"]) == ["sample"] * 16
    assert logged(run, "share") == [0.0]
    for name in ("completions/mean_length", "completions/max_length", "num_tokens", "reward", "completions/clipped_ratio"):
        assert logged(run, name) == logged(other, name), name


def test_remax_takes_the_likeliest_tokens_and_leaves_the_random_stream_alone(toy, tmp_path):
    """The baseline is the reward of generation without sampling; the sampled completions are those of a run without remax."""
    seen = {"remax": [], "reinforce_plus_plus": []}

    def run_of(estimator):
        def reward(prompts, completions, completion_ids, **kwargs):
            seen[estimator].append((prompts, completion_ids))
            return letter_reward(completions)

        run = trainer(
            toy, tmp_path, reward=reward, advantage_estimator=estimator, max_steps=3, learning_rate=0.0, temperature=1.3,
            top_k=7, generation_kwargs={"renormalize_logits": True},
        )  # fmt: skip
        run.train()
        return run

    run, _ = run_of("remax"), run_of("reinforce_plus_plus")
    samples, greedy = seen["remax"][::2], seen["remax"][1::2]
    assert samples == seen["reinforce_plus_plus"]
    assert run.generation_config.do_sample
    assert run.generation_config.temperature == 1.3
    end = run.processing_class.eos_token_id
    for prompts, done in greedy:
        assert len(set(prompts)) == len(prompts) == 2
        for prompt, ids in zip(prompts, done, strict=True):
            batch = run.processing_class(prompt, return_tensors="pt")
            whole = run.model.generate(**batch, do_sample=False, max_new_tokens=6, top_k=None, temperature=None)[0]
            alone = whole[batch["input_ids"].shape[1] :].tolist()
            assert ids == (alone[: alone.index(end) + 1] if end in alone else alone)


def test_remax_where_a_greedy_completion_cannot_be_scored(toy, tmp_path):
    """Its rows get advantage 0; the logged baseline is the mean of the others."""

    def reward(completions, prompts, **kwargs):
        greedy = len(set(prompts)) == len(prompts)
        return [None if greedy and i == 0 else 1.0 + i for i in range(len(completions))]

    run = trainer(toy, tmp_path, reward=reward, rollout=fixed_rollout, advantage_estimator="remax", max_steps=1)
    micro = first_rollout(run)
    lost = micro["group_ids"] == 0
    assert logged(run, "reward_baseline") == [2.0]
    assert (micro["advantages"][lost] == 0).all()
    kept = micro["loss_mask"] & ~lost.unsqueeze(1)
    assert torch.equal(micro["advantages"][kept], (micro["row"].float() - 1.0).unsqueeze(1).expand(kept.shape)[kept])


def test_remax_in_evaluation(toy, tmp_path):
    """Groups of num_generations_eval."""
    run = trainer(
        toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, advantage_estimator="remax", num_generations_eval=2,
        per_device_eval_batch_size=8, extra={"eval_dataset": toy_dataset().select(range(8))},
    )  # fmt: skip
    metrics = run.evaluate()
    bases = [letter_reward([greedy_text(run, row["prompt"])])[0] for row in toy_dataset().select(range(8))]
    assert metrics["eval_reward_baseline"] == pytest.approx(sum(bases) / 8, abs=1e-6)


def test_remax_with_vllm_asks_it_for_temperature_0(toy, tmp_path):
    """A stand-in for TRL's vLLM client: the samples at the run's settings, then one completion a prompt at temperature 0."""

    class Client:
        temperature, top_p, top_k, min_p, generation_kwargs = 0.8, 0.9, 5, 0.1, {"temperature": 0.7, "stop": ["x"]}

        def __init__(self):
            self.asked = []

        def settings(self):
            return (self.temperature, self.top_p, self.top_k, self.min_p, self.generation_kwargs)

        def generate(self, prompts, images, num_generations, profiler):
            self.asked.append((len(prompts), num_generations, *self.settings()))
            return None, [[5, 6]] * len(prompts), [[[-1.0], [-1.0]]] * len(prompts), None

    run = trainer(toy, tmp_path, reward=letter_reward, advantage_estimator="remax", max_steps=1)
    run.use_vllm, run.vllm_generation, run._last_loaded_step = True, Client(), 0
    client, before = run.vllm_generation, run.vllm_generation.settings()
    run.train()
    assert client.asked == [(8, 4, *before), (2, 1, 0.0, 1.0, 0, None, {"stop": ["x"]})]
    assert client.settings() == before


def test_remax_refuses_what_cannot_be_greedy(toy, tmp_path):
    """Before training, with the way out: a rollout function that does not say that it can, an environment factory."""

    def sampled_only(prompts, trainer):
        return fixed_rollout(prompts, trainer)

    with pytest.raises(LossPlusError, match="where trainer.greedy is True .* supports_greedy = True"):
        trainer(toy, tmp_path, rollout=sampled_only, advantage_estimator="remax")
    with pytest.raises(LossPlusError, match="environment_factory plays only the sampled ones"):
        trainer(toy, tmp_path, extra={"environment_factory": object}, advantage_estimator="remax")
    trainer(toy, tmp_path, rollout=sampled_only, advantage_estimator="opo")


# The optimal token baseline.


@pytest.mark.parametrize("fields", [{}, TWO, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}])
def test_sum_of_squared_probabilities_is_the_dense_one(toy, tmp_path, fields):
    """From TRL's tiles, on-policy and off: softmax(logits / temperature) squared and summed; training is left as it was."""
    run = trainer(
        toy, tmp_path, reward=letter_reward, rollout=rollout_with_tools, advantage_estimator="optimal_token_baseline",
        temperature=0.7, learning_rate=0.0, **{"max_steps": 1, **fields},
    )  # fmt: skip
    patched = run.model.forward
    seen = SeeLoss(run)
    run.train()
    assert run.model.forward == patched
    for micro in seen.inputs:
        ids, mask = (torch.cat([micro[f"prompt_{x}"], micro[f"completion_{x}"]], 1) for x in ("ids", "mask"))
        with torch.no_grad():
            logits = run.model(input_ids=ids, attention_mask=mask).logits[:, micro["prompt_ids"].shape[1] - 1 : -1]
        dense = torch.softmax(logits.double() / 0.7, -1).square().sum(-1).float()
        own = micro["loss_mask"]
        assert (micro["sum_pi_squared"] - dense)[own].abs().max() < 1e-6
        assert dense[own].std() > 1e-4


@pytest.mark.parametrize("reward", [letter_reward, vowel_rewards])
@pytest.mark.parametrize(
    ("name", "plain"), [("optimal_token_baseline", token_baseline), ("tir_optimal_token_baseline", numbered_baseline)]
)
def test_optimal_token_baseline_by_hand(toy, tmp_path, name, plain, reward):
    """G_t less the group's W-weighted mean of it, at the same place or number; None is out of its group."""

    def scored(completions, completion_ids, **kwargs):
        given = reward(completions=completions, completion_ids=completion_ids)
        return [None if i == 2 else value for i, value in enumerate(given)]

    run = trainer(
        toy, tmp_path, reward=scored, rollout=rollout_with_tools, advantage_estimator=name, max_steps=1, learning_rate=0.0
    )
    passes, forward = [], run.policy_forward
    run.policy_forward = lambda model, inputs, **kw: (passes.append(kw), forward(model, inputs, **kw))[1]
    micro = first_rollout(run)
    assert len(passes) == 2  # one for the sums and the old log-probs, one for the loss
    assert "old_per_token_logps" not in micro
    with torch.no_grad():
        logps = forward(run.model, micro)[0]
    rows = []
    texts, lengths = texts_of(run, micro), micro["completion_mask"].sum(1).tolist()
    tokens = [row[:n].tolist() for row, n in zip(micro["completion_ids"], lengths, strict=True)]
    given = reward(completions=texts, completion_ids=tokens)
    for i, mask in enumerate(micro["loss_mask"]):
        own = mask.nonzero().flatten().tolist()
        rewards = dict.fromkeys(own, 0.0)
        if micro["row"][i] == 2:
            pass
        elif isinstance(given[i], list):
            for t, value in enumerate(given[i]):
                rewards[max(place for place in own if place <= t)] += value
        else:
            rewards[own[-1]] += given[i]
        row = {"rewards": list(rewards.values()), "places": own, "scored": micro["row"][i] != 2}
        rows.append({**row, "sum_pi_squared": micro["sum_pi_squared"][i, own].tolist(), "old_logps": logps[i, own].tolist()})
    expected = plain(rows, micro["group_ids"].tolist(), {})
    for i, (advantages, _) in enumerate(expected):
        assert micro["advantages"][i, rows[i]["places"]].tolist() == pytest.approx(advantages, abs=1e-5)
    assert micro["advantages"].abs().max() > 0.05

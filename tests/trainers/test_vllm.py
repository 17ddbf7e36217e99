"""
TRL's vLLM path with a stand-in engine: TRL's own VLLMGeneration runs, colocated and against a server, weights and log-probs and all.

Stood in for: vllm.LLM with its SamplingParams, and the client of a server. The engine is a copy of the model that changes only by what it
is sent, so its log-probs are the policy's where, and only where, the weights arrive.
"""

import hashlib
import math
import re
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from toyrun import RATIOS, SeeLoss, apart, letter_reward, logged, trainer, weights
from transformers import AutoModelForCausalLM
from trl.generation import vllm_generation

from trl_lossplus import PolicyTerm, PPOPlusConfig, PPOPlusTrainer, register_policy_loss
from trl_lossplus.diagnostics.guards import NonFiniteError
from trl_lossplus.registry import POLICY_LOSSES

NAN = float("nan")
LORA = {"extra": {"peft_config": LoraConfig(r=4, target_modules="all-linear")}}
TRUNCATED = torch.tensor([[1, 1, 1], [2, 1, 0.5], [2.5, 1, 1], [1, 1, 2.5]])
RUN = {
    "reward": letter_reward, "max_steps": 2, "optim": "sgd", "learning_rate": 0.3, "use_vllm": True, "loss_type": "dapo",
    "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.5,
}  # fmt: skip
PPO = {"trainer_class": PPOPlusTrainer, "config_class": PPOPlusConfig}
POLICIES = {
    "full": {},
    "LoRA": LORA,
    "PPO adapter critic": {**LORA, **PPO, "critic": "adapter", "advantage_estimator": "gae"},
    "PPO model critic": {**PPO, "critic": "model", "advantage_estimator": "gae"},
}


class Engine:
    """Three tokens a completion, told by the prompt and the row's place in its group, scored so that pi / pi_sampler are `ratios`."""

    ratios, last = RATIOS, None

    def __init__(self, path):
        self.model, self.loads, self.resets = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), [], 0

    def load(self, named):
        own = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, tensor in named:
                own[name].copy_(tensor)
                self.loads.append(name)

    def complete(self, prompt, place):
        """Token ids, and their log-probs, NaN where not scored; `last[place]` is the last token where there is one."""
        digest = hashlib.sha256(f"{prompt} {place}".encode()).digest()
        ids = [4 + byte % 20 for byte in digest[:3]]
        if self.last is not None:
            ids[2] = self.last[place]
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        logps = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
        return ids, [NAN if r is None else x - math.log(r) for x, r in zip(logps, self.ratios[place], strict=True)]


class Colocated(Engine):
    """vllm.LLM as TRL uses it."""

    def __init__(self, model, **settings):
        super().__init__(model)
        self.settings = settings
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(
                driver_worker=SimpleNamespace(model_runner=SimpleNamespace(model=SimpleNamespace(load_weights=self.load)))
            )
        )

    def reset_prefix_cache(self):
        self.resets += 1

    def generate(self, prompts, sampling_params, use_tqdm):
        assert (sampling_params.n, sampling_params.logprobs) == (1, 0)
        outputs = []
        for i, row in enumerate(prompts):
            ids, scores = self.complete(row["prompt_token_ids"], i % 4)
            logprobs = [{token: SimpleNamespace(logprob=x, rank=1)} for token, x in zip(ids, scores, strict=True)]
            one = SimpleNamespace(token_ids=ids, logprobs=logprobs)
            outputs.append(SimpleNamespace(prompt_token_ids=row["prompt_token_ids"], outputs=[one]))
        return outputs


class Served(Engine):
    """TRL's client of a vLLM server; what it cannot score it gives as None."""

    path = None

    def __init__(self, base_url, **settings):
        super().__init__(self.path)

    def init_communicator(self, device):
        self.device = device

    def get_server_info(self):
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata, named):
        def streamed():  # a merged adapter's weights are there only while they are walked through
            for told, (name, tensor) in zip(metadata, named, strict=True):
                assert told == (name, "float32", list(tensor.shape))
                yield name, tensor

        self.load(streamed())

    def reset_prefix_cache(self):
        self.resets += 1

    def generate(self, prompts, n, **settings):
        rows = [self.complete(prompt, place) for prompt in prompts for place in range(n)]
        scores = [[[None if math.isnan(x) else x] for x in row] for _, row in rows]
        return {"prompt_ids": prompts, "completion_ids": [ids for ids, _ in rows], "logprobs": scores}


@pytest.fixture(params=["colocate", "server"])
def mode(request, toy, monkeypatch):
    """The mode, with the stand-ins in place; what TRL puts into the environment is taken out again."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation, "LLM", Colocated, raising=False)
    monkeypatch.setattr(vllm_generation, "SamplingParams", SimpleNamespace, raising=False)
    monkeypatch.setattr(vllm_generation, "VLLMClient", Served)
    monkeypatch.setattr(Served, "path", toy)
    return request.param


def engine(run):
    generation = run.vllm_generation
    return generation.llm if generation.mode == "colocate" else generation.vllm_client


def in_order(micro, name):
    return micro[name][micro["row"].argsort()]


@pytest.mark.parametrize("policy", POLICIES)
def test_weights_and_log_probs_by_hand(toy, tmp_path, mode, policy):
    """In both steps the weights are the ratios, cut at 2.5, 1 where not scored; the engine got each parameter of the policy, no other."""
    run = trainer(toy, tmp_path, vllm_mode=mode, **{**RUN, **POLICIES[policy]})
    seen = SeeLoss(run)
    run.train()
    assert len(seen.inputs) == 2
    for micro in seen.inputs:
        assert torch.allclose(in_order(micro, "importance_sampling_ratio"), TRUNCATED.repeat(2, 1), rtol=1e-4)
        sampler = in_order(micro, "sampling_per_token_logps")
        assert sampler.isnan().nonzero().tolist() == [[3, 1], [7, 1]]
        shift = (in_order(micro, "old_per_token_logps") - sampler).exp()
        assert shift[1].tolist() == pytest.approx(RATIOS[1], rel=1e-4)
    names = {name for name, _ in engine(run).model.named_parameters()}
    assert engine(run).loads == [*engine(run).loads[: len(names)]] * 2
    assert set(engine(run).loads) == names
    assert engine(run).resets == 2


def test_the_loss_by_hand(toy, tmp_path, mode):
    """On-policy: minus the mean over tokens of advantage times weight, which would be 0 without weights; what is logged of them."""
    run = trainer(toy, tmp_path, vllm_mode=mode, **{**RUN, "max_steps": 1})
    seen = SeeLoss(run)
    run.train()
    advantages = in_order(seen.inputs[0], "advantages")
    assert advantages.sum().item() == pytest.approx(0.0, abs=1e-5)
    assert seen.losses[0] == pytest.approx(-(advantages.view(8, 1) * TRUNCATED.repeat(2, 1)).mean().item(), rel=1e-4)
    assert abs(seen.losses[0]) > 1e-3
    assert logged(run, "rollout_corr/is_mean") == pytest.approx([TRUNCATED.mean().item()], rel=1e-4)


def test_a_row_whose_tokens_were_not_scored_is_the_policy_s_own(toy, tmp_path, mode, monkeypatch):
    """NaN for each token of a row that counts: as ratios of 1, to the bit of rounding, and nothing that is not finite."""
    ends = []
    for missing in (None, 1.0):
        monkeypatch.setattr(Engine, "ratios", [*RATIOS[:3], [missing] * 3])
        run = trainer(toy, tmp_path, vllm_mode=mode, **RUN)
        run.train()
        assert all(value == 0.0 for entry in run.state.log_history for name, value in entry.items() if "nonfinite" in name)
        ends.append(weights(run))
    assert apart(*ends) < 1e-6


def test_a_row_that_is_masked_may_hold_anything(toy, tmp_path, mode, monkeypatch):
    """mask_truncated_completions: three rows of a group end, the fourth does not; NaN or numbers there, the weights are the same bits."""
    ends = []
    for there in (None, 5.0):
        monkeypatch.setattr(Engine, "ratios", [[2.0, 1.0, 0.5]] * 3 + [[there] * 3])
        run = trainer(toy, tmp_path, vllm_mode=mode, mask_truncated_completions=True, **RUN)
        monkeypatch.setattr(Engine, "last", [run.processing_class.eos_token_id] * 3 + [5])
        start, seen = weights(run), SeeLoss(run)
        run.train()
        assert in_order(seen.inputs[0], "loss_mask").sum(1).tolist() == [3, 3, 3, 0] * 2
        assert apart(start, weights(run)) > 1e-4
        ends.append(weights(run))
    assert apart(*ends) == 0.0


@pytest.mark.parametrize("fields", [{"policy_loss": "rollout_ppo"}, {"off_policy_mask_threshold": 0.1}], ids=str)
def test_what_reads_the_log_probs_itself(toy, tmp_path, mode, fields):
    """A token that was not scored leaves these finite too."""
    run = trainer(toy, tmp_path, vllm_mode=mode, **{**RUN, **fields})
    start = weights(run)
    run.train()
    end = weights(run)
    assert all(tensor.isfinite().all() for tensor in end.values())
    assert apart(start, end) > 1e-5


def test_an_objective_that_lets_it_through_is_stopped(toy, tmp_path, mode, monkeypatch):
    """A user's own, with the log-probs as they are: named before any weight moves, with row and token of the one that is missing."""
    monkeypatch.setattr(POLICY_LOSSES, "entries", dict(POLICY_LOSSES.entries))

    @register_policy_loss(
        "raw_sampler", requires={"advantages", "rollout_logps"}, formula="-A exp(logp - mu)", source="this test"
    )
    def raw_sampler(batch, spec):
        return PolicyTerm(-batch.advantages * torch.exp(batch.logps - batch.rollout_logps))

    run = trainer(toy, tmp_path, vllm_mode=mode, policy_loss="raw_sampler", **RUN)
    start = weights(run)
    with pytest.raises(NonFiniteError, match=r"step 1: loss is nan on rank 0, micro-batch 0, row \d, token 1 ") as stopped:
        run.train()
    row = int(re.search(r"row (\d)", str(stopped.value))[1])
    assert run.step_under_way[0][1]["sampling_per_token_logps"].isnan().nonzero()[0].tolist() == [row, 1]
    assert apart(start, weights(run)) == 0.0

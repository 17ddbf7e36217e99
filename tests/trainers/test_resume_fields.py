"""A field that was changed before a run is resumed: refused, not used, or it acts when the warning says that it acts."""

import json
import logging
import shutil
from dataclasses import fields

import pytest
import torch
from resume_run import KL, LORA, build, copied, entries, resumed
from safetensors.torch import load_file, save_file

from trl_lossplus import LossPlusError, PPOPlusConfig
from trl_lossplus.diagnostics.probes import StepStatistics
from trl_lossplus.spec import LossSpec
from trl_lossplus.trainers import resume_fields
from trl_lossplus.trainers.resume_fields import BOTH, ROLLOUT, STEP, acts, changes, refuse, told

# Runs of 5 steps: 4 of the first rollout, and the first of the second. They are resumed from step 3.
RUNS = {
    "GRPO": {"max_steps": 5, "epsilon": 0.1},
    "KL": {"max_steps": 5, "beta": 0.05},
    "PPO": {"max_steps": 5, "critic": "shared", "kl_placement": "both", "beta": 0.05, "kl_reward_coef": 0.05, "missing_eos_penalty": 0.1,
        "use_bias_correction_kl": False},
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(toy, tmp_path_factory):
    """By name, made once: the folder of an uninterrupted run, and that run."""
    made = {}

    def run(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("runs") / name
            made[name] = folder, build(toy, folder, **RUNS[name])
            made[name][1].train()
        return made[name]

    return run


def lines(caplog, word):
    return [record.message for record in caplog.records if word in record.message]


@pytest.mark.parametrize(
    ("name", "when", "changed"),
    [
        ("GRPO", STEP, {"epsilon": 1e-4}),
        ("GRPO", STEP, {"loss_aggregation": "seq_mean_token_sum"}),
        ("GRPO", STEP, {"entropy_coef": 0.1}),
        ("KL", STEP, {"beta": 0.5}),
        ("PPO", STEP, {"vf_coef": 0.5}),
        ("GRPO", ROLLOUT, {"advantage_estimator": "rloo"}),
        ("GRPO", ROLLOUT, {"advantage_normalization": "rollout"}),
        ("GRPO", ROLLOUT, {"zero_std_groups": "drop", "max_completion_length": 2}),
        ("GRPO", ROLLOUT, {"beta": 0.5}),
        ("PPO", ROLLOUT, {"gae_lambda": 0.2}),
        ("PPO", ROLLOUT, {"kl_reward_coef": 0.5}),
        ("PPO", ROLLOUT, {"missing_eos_penalty": 0.5}),
        ("PPO", BOTH, {"kl_estimator": "k2"}),
        ("PPO", BOTH, {"log_ratio_clamp": 1e-3}),
    ],
)
def test_a_field_acts_when_the_line_says(toy, runs, caplog, name, when, changed):
    """Step 4 is of the rollout that the checkpoint holds: there only what acts from the next step on shows. Step 5 is of another."""
    folder, whole = runs(name)
    with caplog.at_level(logging.WARNING):
        again = resumed(toy, folder, 3, **RUNS[name] | changed)
    (line,) = lines(caplog, "What was changed acts")
    groups = dict(
        part.split(": ", 1) for part in line.split("What was changed ")[1].rstrip(".").replace("; acts", "\nacts").split("\n")
    )
    assert set(groups) == {f"acts {when}"}
    for field in changed:
        assert f"{field} was " in groups[f"acts {when}"]
    ours, theirs = entries(again), entries(whole)
    assert (ours[4] == theirs[4]) == (when == ROLLOUT)
    assert when == STEP or ours[5] != theirs[5]


def test_the_tables_name_fields():
    """A name that is no field would never differ. And every field of the loss has a time."""
    config, loss = {item.name for item in fields(PPOPlusConfig)}, {item.name for item in fields(LossSpec)}
    for names in (
        resume_fields.SHAPE,
        resume_fields.FORM,
        resume_fields.ORDER,
        resume_fields.MAKES_ROLLOUT,
        resume_fields.OF_OPTIMIZER,
    ):
        assert set(names) <= config
    assert loss >= resume_fields.AT_ROLLOUT
    spec = json.loads(json.dumps(vars(LossSpec())))
    assert {acts(name, spec, spec) for name in loss} == {STEP, ROLLOUT, BOTH}


@pytest.mark.parametrize(
    ("name", "was", "now", "when"),
    [
        ("beta", {"beta": 0.1}, {"beta": 0.2}, STEP),
        ("beta", {"beta": 0.1, "kl_controller": "adaptive"}, {"beta": 0.2}, ROLLOUT),  # until then the coefficient in use
        ("beta", {"beta": 0.1, "kl_controller": "adaptive"}, {"beta": 0.0}, STEP),
        ("kl_estimator", {"beta": 0.1}, {"beta": 0.1}, STEP),
        ("kl_estimator", {"kl_reward_coef": 0.1}, {"kl_reward_coef": 0.1}, ROLLOUT),
        ("zero_std_groups", {"zero_std_groups": "keep"}, {"zero_std_groups": "no_kl"}, STEP),
        ("zero_std_groups", {"zero_std_groups": "drop"}, {"zero_std_groups": "no_kl"}, BOTH),
        ("rollout_rs", {}, {}, ROLLOUT),
    ],
)
def test_when_depends_on_the_other_fields(name, was, now, when):
    plain = vars(LossSpec()) | {"beta": 0.0}
    assert acts(name, plain | was, plain | now) == when


@pytest.mark.parametrize("step", [3, 4])
def test_the_rates_of_the_checkpoint_stay(toy, runs, caplog, step):
    folder, whole = runs("GRPO")
    again = resumed(toy, folder, step, **RUNS["GRPO"], learning_rate=1e-9, adam_beta1=0.5)
    (line,) = lines(caplog, "learning_rate was")
    assert line.startswith("learning_rate was 0.03 and is 1e-09; adam_beta1 was 0.9 and is 0.5: not used, since ")
    assert entries(again)[5] == entries(whole)[5]


def test_another_budget_acts_from_the_next_rollout_on(toy, runs, caplog):
    """The parts of the rollout in use stay; the numbers are the same but for rounding."""
    folder, whole = runs("GRPO")
    seen = []
    again = build(toy, folder.with_name("budget"), **RUNS["GRPO"], max_tokens_per_microbatch=12)
    inner = again.model.forward
    again.model.forward = lambda *args, **kw: seen.append((again.state.global_step, len(kw["input_ids"]))) or inner(*args, **kw)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    (line,) = lines(caplog, "max_tokens_per_microbatch")
    assert f"acts {ROLLOUT}: max_tokens_per_microbatch was None and is 12." in line
    assert [rows for step, rows in seen if step == 3] == [4]
    assert entries(again)[4] == entries(whole)[4]
    assert entries(again)[5]["grad_norm"] == pytest.approx(entries(whole)[5]["grad_norm"], rel=1e-4)


def test_another_lora_alpha_is_another_policy(toy, tmp_path, caplog):
    build(toy, tmp_path / "whole", lora=LORA, max_steps=5).train()
    with pytest.raises(LossPlusError, match="lora_alpha was 8 and is 16. Set that as it was"):
        resumed(toy, tmp_path / "whole", 3, lora=LORA | {"lora_alpha": 16}, max_steps=5)
    resumed(toy, tmp_path / "whole", 4, lora=LORA | {"lora_alpha": 16}, max_steps=5)
    assert lines(caplog, "The policy is another than that of")[0].endswith("lora_alpha was 8 and is 16.")


def test_other_arithmetic_is_said(toy, runs, caplog):
    folder, _ = runs("GRPO")
    resumed(toy, folder, 3, **RUNS["GRPO"], model_init_kwargs={"attn_implementation": "eager"})
    (line,) = lines(caplog, "were computed otherwise")
    assert "attn_implementation was 'sdpa' and is 'eager'" in line


def test_what_an_older_file_does_not_say_is_not_told():
    """A name that it lacks is no difference; the budget stood under another kind."""
    now = {
        "form": {"temperature": 0.5},
        "rollout": {"max_tokens_per_microbatch": 8, "top_p": 0.5},
        "optimizer": {"learning_rate": 1.0},
    }
    was = {"inside": True, "form": {"max_tokens_per_microbatch": None}}
    assert changes(was, now) == {
        "form": {}, "rollout": {"max_tokens_per_microbatch": "max_tokens_per_microbatch was None and is 8"}, "optimizer": {}
    }  # fmt: skip


def test_adaptive_entropy_goes_on(toy, tmp_path, caplog):
    settings = {"use_adaptive_entropy": True, "entropy_coef_delta": 0.001, "max_steps": 5}
    build(toy, tmp_path / "whole", entropy_coef=0.01, **settings).train()
    again = resumed(toy, tmp_path / "whole", 3, entropy_coef=0.5, **settings)
    (line,) = lines(caplog, "entropy_coef was")
    assert line.startswith("entropy_coef was 0.01 and is 0.5 is not used: adaptive entropy control")
    assert again.entropy_coef < 0.1


@pytest.fixture(scope="module")
def adaptive(toy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adaptive") / "whole"
    run = build(toy, folder, **KL, max_steps=5)
    run.train()
    return folder, run


def test_a_lost_controller_file_is_said_where_it_matters(toy, adaptive, tmp_path, caplog):
    """The coefficient is in the state file too. Without either it starts anew; with kl_controller.json alone another start is said."""
    folder, whole = adaptive
    checkpoint = copied(folder, tmp_path, 4)
    (checkpoint / "kl_controller.json").unlink()
    assert resumed(toy, checkpoint.parent, 4, **KL, max_steps=5).kl_controller.coef == whole.kl_controller.coef
    assert lines(caplog, "kl_controller.json") == []
    (checkpoint / "lossplus_state_0.pt").unlink()
    resumed(toy, checkpoint.parent, 4, **KL, max_steps=5)
    assert lines(caplog, "kl_controller.json")[0].endswith(
        "has no adaptive kl_controller.json: the KL coefficient starts at 0.1."
    )
    shutil.copy(folder / "checkpoint-4" / "kl_controller.json", checkpoint)
    again = resumed(toy, checkpoint.parent, 4, **KL | {"kl_reward_coef": 0.7}, max_steps=5)
    assert again.kl_controller.coef == pytest.approx(whole.kl_controller.coef, rel=1e-6)
    assert lines(caplog, "was 0.1 and is 0.7, which is not used")


@pytest.mark.parametrize("text", ["{", "[1]", '{"kind": "adaptive"}', '{"kind": "adaptive", "coef": "x"}', ""])
def test_a_broken_controller_file(toy, adaptive, tmp_path, text):
    checkpoint = copied(adaptive[0], tmp_path, 4)
    (checkpoint / "kl_controller.json").write_text(text)
    (checkpoint / "lossplus_state_0.pt").unlink()
    with pytest.raises(LossPlusError, match=r"kl_controller.json cannot be read \(.*\). Take another checkpoint.") as error:
        resumed(toy, checkpoint.parent, 4, **KL, max_steps=5)
    assert "\n" not in str(error.value)


def test_a_state_of_another_step(toy, runs, tmp_path):
    folder, _ = runs("GRPO")
    checkpoint = copied(folder, tmp_path, 3)
    shutil.copy(folder / "checkpoint-2" / "lossplus_state_0.pt", checkpoint)
    with pytest.raises(LossPlusError, match=r"lossplus_state_0.pt is of step 2, and the checkpoint of step 3. Take another"):
        resumed(toy, checkpoint.parent, 3, **RUNS["GRPO"])


@pytest.mark.parametrize(
    ("critic", "name"),
    [
        ("model", "critic/model.safetensors"),
        ("shared", "critic/value_head.safetensors"),
        ("adapter", "critic/adapter_model.safetensors"),
        (None, "model.safetensors"),
    ],
)
def test_weights_that_are_cut_off(toy, tmp_path, critic, name):
    fields = {} if critic is None else {"critic": critic}
    build(toy, tmp_path / "whole", **fields, max_steps=1).train()
    path = tmp_path / "whole" / "checkpoint-1" / name
    path.write_bytes(path.read_bytes()[:30])
    with pytest.raises(LossPlusError, match=rf"checkpoint-1/{name} cannot be read \(.*\). Take another checkpoint.") as error:
        resumed(toy, tmp_path / "whole", 1, **fields, max_steps=2)
    assert "\n" not in str(error.value)


def misfits(path, tmp_path):
    """What a file of weights may hold instead: (what, its bytes, a piece of the error)."""
    other = tmp_path / "other.safetensors"
    save_file({"other": torch.zeros(3)}, other)
    names = other.read_bytes()
    save_file({name: torch.zeros(3, 3) for name in load_file(path)}, other)
    return [
        ("text", b"no safetensors file at all", "header"),
        ("empty", b"", "header too small"),
        ("names", names, "holds no "),
        ("shapes", other.read_bytes(), "shape"),
    ]


@pytest.mark.parametrize(
    ("critic", "name"),
    [
        ("model", "model.safetensors"),
        ("shared", "value_head.safetensors"),
        ("adapter", "value_head.safetensors"),
        ("adapter", "adapter_model.safetensors"),
    ],
)
def test_a_critic_that_is_none(toy, tmp_path, critic, name):
    """One line that names the file (for an adapter's tensors, its folder), on resuming and as critic_model_name_or_path."""
    build(toy, tmp_path / "whole", critic=critic, max_steps=1).train()
    folder = tmp_path / "whole" / "checkpoint-1" / "critic"
    for what, content, piece in misfits(folder / name, tmp_path):
        (folder / name).write_bytes(content)
        with pytest.raises(LossPlusError, match="checkpoint-1.*") as error:
            resumed(toy, tmp_path / "whole", 1, critic=critic, max_steps=2)
        told = [str(error.value)]
        if (what, critic) != ("names", "model"):  # a model without a critic's weights may start one: transformers draws them
            with pytest.raises(LossPlusError, match=rf"^critic_model_name_or_path.*{folder}") as error:
                build(toy, tmp_path / "new", critic=critic, critic_model_name_or_path=str(folder))
            told.append(str(error.value))
        for line in told:
            assert piece in line
            assert "\n" not in line
            assert name in line or name.startswith("adapter") or what == "shapes"


def test_another_critic_than_the_checkpoints(toy, runs, tmp_path):
    folder, _ = runs("PPO")
    with pytest.raises(
        LossPlusError, match="holds a critic of kind 'shared', and GRPOPlusTrainer trains none: take PPOPlusTrainer"
    ):
        resumed(toy, folder, 3, max_steps=5)
    with pytest.raises(LossPlusError, match="holds a critic of kind 'shared', and critic is 'model'."):
        resumed(toy, folder, 3, **RUNS["PPO"] | {"critic": "model"})
    with pytest.raises(LossPlusError, match="holds no critic, and critic is 'shared'."):
        resumed(toy, runs("GRPO")[0], 3, **RUNS["PPO"])


def test_the_critics_weights_are_not_called_missing(toy, tmp_path, caplog):
    """transformers loads the policy alone; any other weight that is missing is still told."""
    build(toy, tmp_path / "whole", critic="model", max_steps=1).train()
    theirs = logging.getLogger("transformers.trainer")
    theirs.addHandler(caplog.handler)
    try:
        again = resumed(toy, tmp_path / "whole", 1, critic="model", max_steps=2)
        assert lines(caplog, "missing keys") == []
        found = again.model.load_state_dict({}, strict=False)
        again._issue_warnings_after_load(found)
        (line,) = set(lines(caplog, "missing keys"))
        assert "model.norm.weight" in line
        assert "critic_model" not in line
    finally:
        theirs.removeHandler(caplog.handler)


def test_norms_that_are_not_told_yet_are_kept():
    """On several processes the squares of a step are told with the next step: 3^2 + 4^2 of the policy's, 5^2 of the KL's."""
    first, second = StepStatistics("summary"), StepStatistics("summary")
    first._norms = [("policy", torch.tensor(3.0)), ("policy", torch.tensor(4.0)), ("kl", torch.tensor(5.0))]
    assert first.close(2) == {}
    second.load_state_dict(first.state_dict())
    assert second.take(2).squares == first.take(2).squares == {"policy": 25.0, "kl": 25.0}
    off = StepStatistics("off")
    off.load_state_dict({"done": [("policy", torch.tensor(3.0))]})
    assert off.take(2).squares == {}


def test_a_missing_file_is_named_after_what_differs():
    none = {kind: {} for kind in ("shape", "form", "policy")}
    refuse("here", none, None)
    with pytest.raises(LossPlusError, match="cannot be used: no file."):
        refuse("here", none, "no file")
    with pytest.raises(LossPlusError, match="cannot be used: x was 1 and is 2. Set"):
        refuse("here", none | {"form": {"x": "x was 1 and is 2"}}, "no file")


def test_between_two_rollouts_another_loss_is_not_told():
    spec = vars(LossSpec())
    now = {"loss": spec, "optimizer": {}}
    changed = {"loss": {"epsilon": "epsilon was 0.1 and is 0.2"}, "optimizer": {}, "policy": {}, "rollout": {}, "arithmetic": {}}
    was = {"inside": False, "loss": spec | {"epsilon": 0.1}}
    assert list(told("here", was, now, changed, goes_on=True, adapts_entropy=False)) == []
    assert len(list(told("here", was | {"inside": True}, now, changed, goes_on=True, adapts_entropy=False))) == 1

"""LossSpec: YAML there and back, names, ranges, and what it reads."""

import dataclasses
import re

import pytest
import yaml
from helpers import OBJECTIVES, full_spec

from trl_lossplus import LossPlusError, LossSpec
from trl_lossplus.functional.kl import kl_names
from trl_lossplus.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from trl_lossplus.spec import CHOICES

CHANGED = {
    "policy_loss": "sapo",
    "epsilon": 0.1,
    "epsilon_high": 0.28,
    "delta": 4.0,
    "clip_ratio_c": 3.0,
    "loss_aggregation": "prompt_mean",
    "norm_length": 512.0,
    "beta": 1e-3,
    "kl_estimator": "low_var_kl+",
    "kl_controller": "adaptive",
    "kl_target": 0.1,
    "top_entropy_quantile": 0.2,
    "off_policy_mask_threshold": 0.5,
    "advantage_estimator": "gae",
    "whiten_rewards": True,
    "gamma": 0.99,
    "gae_lambda": 0.9,
    "gae_lambda_critic": 1.0,
    "vf_coef": 0.5,
    "value_loss": "huber",
    "huber_delta": 0.5,
    "cliprange_value": None,
}


@pytest.mark.parametrize("spec", [LossSpec(), LossSpec(**CHANGED), *(full_spec(name) for name in OBJECTIVES)], ids=repr)
def test_yaml_round_trip(spec):
    """to_yaml holds every field, reads back to an equal spec, and its text is stable."""
    text = spec.to_yaml()
    assert list(yaml.safe_load(text)) == [field.name for field in dataclasses.fields(LossSpec)]
    assert LossSpec.from_yaml(text) == spec
    assert LossSpec.from_yaml(text).to_yaml() == text


def test_yaml_by_hand():
    """A few lines; the rest are defaults; an empty text is the default spec; a spec cannot be changed."""
    spec = LossSpec.from_yaml("policy_loss: gspo\nepsilon: 3.0e-4\nepsilon_high: null\n")
    assert spec == LossSpec(policy_loss="gspo", epsilon=3e-4)
    assert spec.clip_high == 3e-4
    assert LossSpec.from_yaml("") == LossSpec()
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.epsilon = 0.1


NAMES = {
    "policy_loss": ("ppo_clp", "ppo_clip", POLICY_LOSSES.names()),
    "advantage_estimator": ("rlo", "rloo", ADVANTAGE_ESTIMATORS.names()),
    "kl_estimator": ("low_var_k", "low_var_kl", kl_names()),
    **{field: (allowed[0] + "x", None, allowed) for field, allowed in CHOICES.items()},
}


@pytest.mark.parametrize("field", NAMES)
def test_bad_names_list_the_allowed_ones_and_the_nearest(field):
    """`field='wrong' is not known. Did you mean 'near'? Allowed: all of them.`; None and numbers are no names either."""
    wrong, near, allowed = NAMES[field]
    with pytest.raises(LossPlusError) as caught:
        LossSpec(**{field: wrong})
    message = str(caught.value)
    assert f"{field}={wrong!r} is not known. Did you mean {(near or allowed[0])!r}?" in message
    listed = message.split("Allowed: ")[1].rstrip(".").split(", ")
    assert set(allowed) <= set(listed)
    for value in (None, 3, ""):
        with pytest.raises(LossPlusError, match=re.escape(f"{field}={value!r} is not known")):
            LossSpec(**{field: value})


def test_unknown_fields():
    """A field that is not there: the nearest that is."""
    with pytest.raises(LossPlusError, match="'epsilon_hi' is not known. Did you mean 'epsilon_high'.*Allowed: .*beta"):
        LossSpec.from_yaml("epsilon_hi: 0.3")


RANGES = {
    "epsilon": [-0.1, float("nan")],
    "epsilon_high": [-1e-9],
    "beta": [-0.1, float("nan")],
    "kl_reward_coef": [-1.0],
    "top_entropy_quantile": [-0.01, 1.01],
    "log_ratio_clamp": [0.0, -20.0],
    "kl_horizon": [0.0, -1.0],
    "kl_target": [0.0, -0.1],
    "norm_length": [0, -5],
    "delta": [0.0, -2.0],
    "clip_ratio_c": [1.0, 0.5, -3.0],
    "sapo_temperature_pos": [0.0, -1.0, float("nan")],
    "sapo_temperature_neg": [0.0, -1.0],
    "gamma": [-0.1, 1.1, float("nan")],
    "gae_lambda": [-0.1, 1.1],
    "gae_lambda_critic": [-0.1, 1.1],
    "vf_coef": [-0.1, float("nan")],
    "huber_delta": [0.0, -1.0],
    "cliprange_value": [0.0, -0.2],
    "entropy_coef": [float("nan")],
    "off_policy_mask_threshold": [float("nan")],
    "vespo_k_pos": [float("nan")],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in RANGES.items() for value in values])
def test_numbers_out_of_range(field, value):
    """The field, the value and the range."""
    with pytest.raises(LossPlusError, match=rf"{field}={value} is out of range: .*must be"):
        LossSpec(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epsilon", 0.0),
        ("beta", 0.0),
        ("top_entropy_quantile", 0.0),
        ("top_entropy_quantile", 1.0),
        ("clip_ratio_c", 1.0001),
        ("norm_length", 1),
        ("gamma", 0.0),
        ("gamma", 1.0),
        ("gae_lambda", 0.0),
        ("gae_lambda_critic", 1.0),
        ("vf_coef", 0.0),
        ("entropy_coef", -0.01),
    ],
)
def test_edges_of_the_ranges_are_allowed(field, value):
    """The closed ends of the ranges."""
    assert getattr(LossSpec(**{field: value}), field) == value


@pytest.mark.parametrize(("high", "low"), [(1.2, 5.0), (None, 5.1)])
def test_cispo_bounds_the_wrong_way_round(high, low):
    """A lower bound above the upper one (5 if not set) -> an error at construction; other objectives do not read it."""
    with pytest.raises(LossPlusError, match=f"cispo_ratio_min={low} is out of range: it must be <= epsilon_high, {high or 5.0}"):
        LossSpec(policy_loss="cispo", epsilon_high=high, cispo_ratio_min=low)
    assert LossSpec(policy_loss="cispo", epsilon_high=low, cispo_ratio_min=low).cispo_ratio_min == low
    assert LossSpec(cispo_ratio_min=low).cispo_ratio_min == low


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.1, "kl_placement": "reward"}, "beta=0.1 with kl_placement='reward': nothing reads it"),
        ({"beta": 0.1, "kl_placement": "none"}, "beta=0.1 with kl_placement='none': nothing reads it"),
        ({"kl_reward_coef": 0.1}, "kl_reward_coef=0.1 with kl_placement='loss': nothing reads it"),
        ({"kl_reward_coef": 0.1, "kl_placement": "none"}, "kl_reward_coef=0.1 with kl_placement='none': nothing reads it"),
        ({"kl_controller": "adaptive", "kl_target": 0.1}, "'adaptive' needs a coefficient to start from"),
        ({"kl_controller": "adaptive", "kl_target": 0.1, "kl_placement": "reward"}, "'adaptive' needs a coefficient"),
        ({"kl_controller": "adaptive", "beta": 0.1}, "'adaptive' needs kl_target"),
    ],
    ids=str,
)
def test_coefficients_that_nothing_reads(options, message):
    """A KL coefficient without its place, adaptive control without a coefficient or a target."""
    with pytest.raises(LossPlusError, match=message):
        LossSpec(**options)


@pytest.mark.parametrize(
    ("text", "value"),
    [("beta: high", "'high'"), ("epsilon: [1]", r"\[1\]"), ("clip_ratio_c: '3x'", "'3x'"), ("vf_coef: {}", "{}")],
)
def test_text_where_a_number_belongs(text, value):
    """An error that names the field and the value."""
    with pytest.raises(LossPlusError, match=f"{text.split(':')[0]}={value} is not a number"):
        LossSpec.from_yaml(text)


@pytest.mark.parametrize(("text", "number"), [("1e-3", 1e-3), ("3e-4", 3e-4), ("'0.5'", 0.5), ("1", 1)])
def test_scientific_notation(text, number):
    """`beta: 1e-3`, text to YAML 1.1, is the number that its writer means."""
    spec = LossSpec.from_yaml(f"beta: {text}")
    assert spec.beta == number
    assert isinstance(spec.beta, int | float)
    assert LossSpec.from_yaml(spec.to_yaml()) == spec


def test_bias_correction():
    """k2 times the ratio has a wrong gradient: refused, unless no KL is in the loss; k1, k3, abs are allowed."""
    for estimator in ("k1", "k3", "abs", "kl", "low_var_kl"):
        assert LossSpec(beta=0.1, kl_estimator=estimator, use_bias_correction_kl=True).use_bias_correction_kl
    for estimator in ("k2", "mse", "k3+"):
        with pytest.raises(LossPlusError, match="use_bias_correction_kl=True with kl_estimator"):
            LossSpec(beta=0.1, kl_estimator=estimator, use_bias_correction_kl=True)
        assert LossSpec(beta=0.0, kl_estimator=estimator, use_bias_correction_kl=True).kl_in_loss is False


READS = [
    ({}, set()),
    ({"beta": 0.1}, {"ref_logps"}),
    ({"kl_reward_coef": 0.1, "kl_placement": "reward"}, set()),  # its tensors are the rollout's, not the loss's
    ({"kl_placement": "none"}, set()),
    ({"kl_placement": "reward"}, set()),
    ({"vf_coef": 0.1}, {"values", "returns", "old_values"}),
    ({"vf_coef": 0.1, "cliprange_value": None}, {"values", "returns"}),
    ({"beta": 0.1, "kl_placement": "both", "kl_reward_coef": 0.1}, {"ref_logps"}),
    ({"entropy_coef": 0.01}, {"entropies"}),
    ({"top_entropy_quantile": 0.2}, {"entropies"}),
    ({"loss_aggregation": "prompt_mean"}, {"group_ids"}),
    ({"policy_loss": "vespo"}, {"rollout_weights"}),
    ({"beta": 0.1, "entropy_coef": 0.1, "loss_aggregation": "prompt_mean"}, {"ref_logps", "entropies", "group_ids"}),
]


@pytest.mark.parametrize(("options", "more"), READS, ids=[str(options) for options, _ in READS])
def test_required_is_the_union_of_what_is_read(options, more):
    """logps, mask and the objective's tensors, and one more for each term that is on."""
    spec = LossSpec(**options)
    assert spec.required() == {"logps", "mask", "old_logps", "advantages"} | more
    assert set(spec.readers()) == spec.required()


def test_readers_say_who():
    """Two readers of the entropies, and the KL as reader of old_logps where it is bias-corrected."""
    spec = LossSpec(
        beta=0.1, use_bias_correction_kl=True, entropy_coef=0.1, top_entropy_quantile=0.5, off_policy_mask_threshold=1.0
    )
    readers = spec.readers()
    assert readers["entropies"] == {"entropy bonus", "high-entropy selection"}
    assert readers["old_logps"] == {"policy (ppo_clip)", "KL in the loss", "off-policy mask"}
    assert readers["ref_logps"] == {"KL in the loss"}


@pytest.mark.parametrize(
    ("options", "sequence"),
    [
        ({}, False),
        ({"importance_sampling_level": "sequence"}, True),
        ({"policy_loss": "gspo"}, True),
        ({"policy_loss": "gspo_token"}, False),
    ],
)
def test_sequence_level(options, sequence):
    """Asked for, or a trait of the objective."""
    assert LossSpec(**options).sequence_level is sequence

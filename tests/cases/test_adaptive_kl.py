"""Cases D: the adaptive KL coefficient moves as published, refuses what could never work, and survives a restart bit for bit."""

import json

import pytest

from trl_lossplus import AdaptiveKLController, FixedKLController, LossPlusError, LossSpec


def test_d1_resume_is_bit_equal():
    """5 updates, state through JSON, 5 more -> the coefficients of one run of 10, bit for bit."""
    kls = [0.31, 0.02, 0.107, 0.0931, 4.0, 0.11, 0.0, 0.099, 0.5, 0.1]
    whole, first = (AdaptiveKLController(0.1, 0.1, 1e4) for _ in range(2))
    for kl in kls:
        whole.update(kl, 96)
    for kl in kls[:5]:
        first.update(kl, 96)
    resumed = AdaptiveKLController(0.7, 0.1, 1e4)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert resumed.coef == first.coef
    for kl in kls[5:]:
        resumed.update(kl, 96)
    assert resumed.coef == whole.coef != 0.1


@pytest.mark.parametrize(
    ("field", "name"), [("init_coef", "initial KL coefficient"), ("target", "kl_target"), ("horizon", "kl_horizon")]
)
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_d2_impossible_values_are_errors(field, name, value):
    """Target or horizon <= 0, start 0 -> an error at construction that names the field."""
    with pytest.raises(LossPlusError, match=name):
        AdaptiveKLController(**({"init_coef": 0.1, "target": 0.1, "horizon": 1e4} | {field: value}))


@pytest.mark.parametrize("field", ["kl_target", "kl_horizon"])
@pytest.mark.parametrize("value", [0.0, -0.1])
def test_d2_in_the_spec(field, value):
    """The same where the numbers are configured; adaptive without a target is an error too."""
    with pytest.raises(LossPlusError, match=f"{field}={value}.*must be > 0"):
        LossSpec(beta=0.1, kl_controller="adaptive", **({"kl_target": 0.1} | {field: value}))
    with pytest.raises(LossPlusError, match="needs kl_target"):
        LossSpec(beta=0.1, kl_controller="adaptive")


def test_d3_published_update():
    """Start .1, target .1, n=100, horizon 1e4; KL 1.0, then 0, then .105 -> .1002, .0999996, .1000495998."""
    controller, right = AdaptiveKLController(0.1, 0.1, 1e4), [0.1002, 0.0999996, 0.0999996 * (1 + 0.05 * 0.01)]
    assert right[2] == pytest.approx(0.1000495998, abs=1e-10)
    for kl, value in zip([1.0, 0.0, 0.105], right, strict=True):
        controller.update(kl, 100)
        assert controller.coef == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("kl", [float("nan"), float("inf"), float("-inf")])
def test_d3_a_kl_that_is_not_finite_is_refused(kl):
    """NaN must not become the coefficient: an error, and the coefficient stays."""
    controller = AdaptiveKLController(0.1, 0.1, 1e4)
    with pytest.raises(LossPlusError, match="not finite"):
        controller.update(kl, 100)
    assert controller.coef == 0.1


@pytest.mark.parametrize("rows", [5000, 6000, 10**6])
def test_d3_coefficient_stays_positive(rows):
    """KL 0, n of 5 horizons or more: the factor 1 - .2 n / horizon is <= 0 -> an error with the least horizon, .1 stays."""
    controller = AdaptiveKLController(0.1, 0.1, 1000)
    with pytest.raises(LossPlusError, match=f"kl_horizon=1000.0 is too short for {rows} rows.*more than {rows * 0.2:g};"):
        controller.update(0.0, rows)
    assert controller.coef == 0.1
    controller.update(0.0, 4999)
    assert controller.coef == pytest.approx(0.1 * 0.0002, rel=1e-9)
    controller.update(1.0, rows)  # upwards nothing is too far
    assert controller.coef == pytest.approx(0.1 * 0.0002 * (1 + 0.2 * rows / 1000), rel=1e-9)


def test_fixed_coefficient_stays():
    """A fixed coefficient ignores updates, saves and loads, and may be 0 but not negative."""
    controller = FixedKLController(0.04)
    controller.update(9.0, 1000)
    assert controller.coef == 0.04
    controller.load_state_dict(json.loads(json.dumps(FixedKLController(0.0).state_dict())))
    assert controller.coef == 0.0
    with pytest.raises(LossPlusError, match="finite number >= 0"):
        FixedKLController(-0.1)

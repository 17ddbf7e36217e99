"""docs/kl.md: its tables are what docs/make_kl.py makes, and what that computes is right by the definitions."""

import importlib.util
import math
import re

import pytest
import torch
from docpages import DOCS

P, Q = torch.tensor([0.3, -0.2, 0.1]).double().softmax(-1), torch.tensor([-0.4, 0.5, 0.2]).double().softmax(-1)
D = (P / Q).log()
SCORE = torch.eye(3).double() - P  # the gradient of log p(x) by the logits, a row for each x
TRUE_KL, REVERSE, FORWARD = (P * D).sum(), P * (D - (P * D).sum()), P - Q
VALUES = {"k1": D, "k2": D**2 / 2, "k3": (-D).exp() + D - 1, "abs": D.abs()}


@pytest.fixture(scope="module")
def maker():
    """docs/make_kl.py as a module."""
    spec = importlib.util.spec_from_file_location("make_kl", DOCS / "make_kl.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def at(maker):
    return maker.logits(), torch.tensor(maker.REFERENCE, dtype=torch.float64)


def test_tables_are_up_to_date(maker):
    page = maker.PAGE.read_text()
    assert maker.filled(page) == page, "run docs/make_kl.py"
    assert len(re.findall(r"^\| (?:k\d|abs)", page, re.M)) == 13  # 9 forms in the loss, 4 in the reward
    assert {path.stem for path in (DOCS / "img" / "kl").glob("*.svg")} == {"values", "distance", "descent"}


@pytest.mark.parametrize("name", VALUES)
def test_values_and_gradients_by_the_definitions(maker, name):
    """Mean and variance are sums over the three tokens; in the reward the gradient is sum p value (e_x - p)."""
    z, reference = at(maker)
    in_loss, in_reward = maker.in_loss(name, False, z, reference), maker.in_reward(name, z, reference)
    mean = (P * VALUES[name]).sum().item()
    deviation = math.sqrt((P * (VALUES[name] - mean) ** 2).sum())
    for exact in (in_loss, in_reward):
        assert exact.value == pytest.approx(mean, abs=1e-6)
        assert exact.deviation == pytest.approx(deviation, abs=1e-6)
    expected = (P * VALUES[name]) @ SCORE
    assert in_reward.gradient.tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    noise = sum(P[x] * ((VALUES[name][x] * SCORE[x] - expected) ** 2).sum() for x in range(3)).sqrt()
    assert in_reward.noise == pytest.approx(noise.item(), abs=1e-6)


def test_whose_gradient_each_is(maker):
    """The reverse KL's: k2, every +, k1 and k3 times the ratio, and k1 in the reward; k3 in the reward: reverse minus forward."""
    z, reference = at(maker)
    true = maker.true_gradients(z, reference)
    assert true["reverse"].tolist() == pytest.approx(REVERSE.tolist(), abs=1e-7)
    assert true["forward"].tolist() == pytest.approx(FORWARD.tolist(), abs=1e-7)
    said = {(name, ratio): maker.whose(maker.in_loss(name, ratio, z, reference).gradient, true) for name, ratio in maker.IN_LOSS}
    reverse = {("k1", True), ("k2", False), ("k3", True), ("k1+", False), ("k3+", False), ("abs+", False)}
    assert {key for key, text in said.items() if text == "the reverse KL's"} == reverse
    assert said["k3", False] == "the forward KL's"
    assert said["k1", False].startswith("0:")
    assert said["abs", False].startswith("neither")
    assert maker.whose(maker.in_reward("k1", z, reference).gradient, true) == "the reverse KL's"
    k3 = maker.in_reward("k3", z, reference).gradient
    assert k3.tolist() == pytest.approx((REVERSE - FORWARD).tolist(), abs=1e-6)


def test_descent_as_the_page_tells_it(maker):
    """k1 in the loss stays, the reverse KL's gradient arrives; in the reward k1 arrives, k2 and abs are stuck, k3 goes away."""

    def end(place, name):
        step = maker.in_reward if place == "reward" else lambda name, z, q: maker.in_loss(name, False, z, q)
        seen = maker.walk(lambda z, q: step(name, z, q).gradient, steps=30)
        return seen[0], seen[-1]

    start, stays = end("loss", "k1")
    assert stays == pytest.approx(start, abs=1e-6)
    assert start == pytest.approx(1.574, abs=1e-3)
    assert end("loss", "k3+")[1] < 1e-4
    assert end("loss", "k3")[1] < 1e-3
    assert end("reward", "k1")[1] < 1e-4
    assert end("reward", "k2")[1] > 0.9
    assert end("reward", "abs")[1] > 0.9
    assert end("reward", "k3")[1] == pytest.approx(2.41, abs=0.01)

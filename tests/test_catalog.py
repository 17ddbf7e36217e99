"""The listings and the pages made from the registry: whole, and up to date."""

import importlib.util
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from helpers import EVERY_OBJECTIVE

from trl_lossplus import GRPOPlusConfig, LossPlusError, PPOPlusConfig
from trl_lossplus.catalog import KINDS, listing, markdown, rows
from trl_lossplus.elsewhere import ELSEWHERE, written
from trl_lossplus.functional.aggregation import AGGREGATIONS
from trl_lossplus.functional.correction import CORRECTION_MODES, REJECTIONS
from trl_lossplus.functional.kl import KL_ALIASES, KL_ESTIMATORS
from trl_lossplus.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES

DOCS = Path(__file__).parents[1] / "docs"
NAMES = {
    "policy": EVERY_OBJECTIVE,
    "advantages": ADVANTAGE_ESTIMATORS.names(),
    "kl": [*KL_ESTIMATORS, *KL_ALIASES, "k3+"],
    "aggregation": list(AGGREGATIONS),
    "correction": [*CORRECTION_MODES, *REJECTIONS],
    "elsewhere": ["verl: vanilla", "prime-rl: ipo", "not here"],
}


@pytest.fixture(scope="module")
def maker():
    """docs/make_catalog.py as a module."""
    spec = importlib.util.spec_from_file_location("make_catalog", DOCS / "make_catalog.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", KINDS)
def test_listing(kind):
    """Every name with its formula; no line is empty; the registry's rows have a source."""
    text = listing(kind)
    for name in NAMES[kind]:
        assert name in text
    assert all(line.strip() for line in text.splitlines())
    for row in rows(kind):
        assert row.formula or row.name.startswith("test_")
        assert row.source or kind in ("aggregation", "elsewhere") or row.name.startswith("test_")  # (another test's)


@pytest.mark.parametrize("there", ELSEWHERE, ids=lambda there: f"{there.framework}: {there.name}")
def test_settings_of_elsewhere(there):
    """They build a configuration that keeps them, and survive YAML; where there are none, the reason stands beside."""
    if there.settings is None:
        assert len(there.note) > 20
        return
    critic = there.settings.get("advantage_estimator") == "gae"
    config = (PPOPlusConfig if critic else GRPOPlusConfig)(use_cpu=True, bf16=False, **there.settings)
    assert {name: getattr(config, name) for name in there.settings} == there.settings
    assert yaml.safe_load(f"{{{written(there.settings)}}}") == there.settings


def test_every_name_of_ours_that_is_said_to_be_the_same():
    """Rows with the note "the same names" list names of ours (verl's rloo and grpo by the way, too)."""
    ours = {*POLICY_LOSSES.names(), *ADVANTAGE_ESTIMATORS.names()}
    for there in ELSEWHERE:
        if there.note == "the same names":
            assert set(there.name.split(", ")) - {"reinforceplusplus"} <= ours, there


def test_unknown_kinds():
    """A kind that is not there names those that are."""
    with pytest.raises(LossPlusError, match="list='advantage' is not known. Did you mean 'advantages'"):
        listing("advantage")
    with pytest.raises(LossPlusError, match="markdown='kl'"):
        markdown("kl")


@pytest.mark.parametrize(("page", "kind"), [("losses.md", "policy"), ("advantages.md", "advantages")])
def test_pages_are_up_to_date(page, kind):
    """`python docs/make_catalog.py` would write what is there; each objective has its picture, and no other is left over."""
    assert (DOCS / page).read_text() == markdown(kind), "run docs/make_catalog.py"
    if kind == "policy":
        pictures = {path.stem for path in (DOCS / "img").glob("*.svg")}
        assert set(NAMES["policy"]) <= pictures
        assert all(path.stat().st_size < 60_000 for path in (DOCS / "img").glob("*.svg"))


@pytest.mark.parametrize("name", EVERY_OBJECTIVE)
def test_curves(name, maker):
    """The curves of a picture are finite, and at ratio 1 the gradient is -A (where the objective's traits do not say otherwise)."""
    at_one = int((maker.RATIOS - 1).abs().argmin())
    for advantage in (1.0, -1.0):
        loss, gradient = maker.curve(name, advantage)
        assert torch.isfinite(loss).all()
        assert torch.isfinite(gradient).all()
        if "gradient_at_one" not in POLICY_LOSSES.get(name).traits:
            near = 0.15 if name == "kl_cov" else 0.1  # (the grid's nearest point is not exactly 1)
            assert math.isclose(gradient[at_one].item(), -advantage, abs_tol=near)


def test_a_reader_that_has_seen_enough_is_no_error():
    """`trl-lossplus list | head -1`: the pipe is closed before all is written."""
    child = subprocess.Popen(
        [sys.executable, "-m", "trl_lossplus.cli", "list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    )
    assert child.stdout.read(1)
    child.stdout.close()
    assert (child.stderr.read(), child.wait(60)) == (b"", 0)

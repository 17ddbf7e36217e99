"""benchmarks/study.py, the tables of docs/choosing.md: what it counts, and that it runs (one seed, a few steps)."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from trl_lossplus import aggregate
from trl_lossplus.toy import toy_model

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "choosing.md").read_text()


@pytest.fixture(scope="module")
def study():
    spec = importlib.util.spec_from_file_location("study", ROOT / "benchmarks" / "study.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_steps_to_goal(study):
    """Five rollouts with a mean of .8, at the step of the fifth; two optimizer steps a rollout; never: None."""
    run = study.Run([0.0, 0.7, 0.8, 0.8, 0.8, 0.9, 0.9], [0, 2, 4, 6, 8, 10, 12], torch.nn.Identity())
    assert study.steps_to_goal(run) == 10
    assert study.steps_to_goal(run, 0.85) is None
    assert study.row_of_losses([run, run._replace(rewards=[0.0] * 7)]) == ["10 (10 to 10), 1 of 2 never", "0.42 (0.00 to 0.84)"]
    assert study.row_of_losses([run._replace(rewards=[0.0] * 7)])[0] == "never"


def test_vocabulary_kl(study):
    """The case with a known value, logits [.3, -.2, .1] and [-.4, .5, .2]: .158121 nats; of equal ones 0."""
    z, ref = torch.tensor([[[0.3, -0.2, 0.1]]]), torch.tensor([[[-0.4, 0.5, 0.2]]])
    assert study.vocabulary_kl(z, ref).tolist() == [[pytest.approx(0.158121, abs=1e-6)]]
    assert study.vocabulary_kl(z, z).item() == pytest.approx(0.0, abs=1e-7)


def test_exact_kl(study):
    """Of the first weights 0; of others, with logits halved by their head, the same as by hand on the same completions: > 0."""
    assert study.exact_kl(toy_model(), 0, each=1) == pytest.approx(0.0, abs=1e-7)
    state = torch.random.get_rng_state()
    moved = toy_model()
    moved.lm_head.weight.data *= 3
    assert 0.1 < study.exact_kl(moved, 0, each=2) < 5
    assert torch.equal(state, torch.random.get_rng_state())


def test_it_runs(study, monkeypatch, capsys, tmp_path):
    """Both tables with a row for each setting: one seed, twelve optimizer steps."""
    monkeypatch.setattr("sys.argv", ["study.py", "--seeds", "1", "--steps", "12"])
    monkeypatch.setattr(study, "PLACES", {name: study.PLACES[name] for name in ("k1 in the reward", "k3+ in the loss")})
    study.main()
    printed = capsys.readouterr().out
    rows = dict(re.findall(r"^\| ([\w +]+) \| (.*) \|$", printed, re.M))
    assert rows.keys() == {"loss", "KL", *study.LOSSES, "k1 in the reward", "k3+ in the loss"}
    for name in study.LOSSES:
        assert re.fullmatch(r"never \| 0\.\d\d \(0\.\d\d to 0\.\d\d\)", rows[name]), rows[name]
    kl = [float(rows[name].split()[0]) for name in ("k1 in the reward", "k3+ in the loss")]
    assert all(0 < value < 1 for value in kl)


def test_the_page_shows_what_it_prints(study):
    """The same titles and rows; the numbers are those of the machine that printed them."""
    for name in (*study.LOSSES, *study.PLACES):
        assert re.search(rf"^\| {re.escape(name)} \| \d", PAGE, re.M), name
    assert f"KL with coefficient {study.COEF}: mean (least to largest) of seeds 1, 2, 3, 200 optimizer steps" in PAGE


def test_the_numbers_of_the_aggregations():
    """Two rows of 10 and 100 tokens, losses 1 and 3 a token, one prompt."""
    mask = torch.arange(100) < torch.tensor([[10], [100]])
    loss, ids = torch.tensor([[1.0], [3.0]]).expand(2, 100), torch.tensor([0, 0])
    table = PAGE.split("## The aggregation")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)`[^|]*\| ([\d.]+) \|", table, re.M)
    assert len(rows) == 5
    for mode, value in rows:
        got = aggregate(mode, loss, mask, norm_length=200.0, group_ids=ids).item()
        assert got == pytest.approx(float(value), rel=1e-6), mode

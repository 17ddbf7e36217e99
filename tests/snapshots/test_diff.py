"""What differs between two snapshots: named in the first line, placed and measured, as text, JSON and HTML."""

import json
import re
from dataclasses import fields, replace

import pytest
import torch
from helpers import EVERY_OBJECTIVE
from htmlpage import browser, check_page, chromium
from made import step

from trl_lossplus import LossBatch, LossSpec, PolicyTerm, Snapshot, diff, register_policy_loss
from trl_lossplus.cli import main
from trl_lossplus.functional import kl
from trl_lossplus.registry import POLICY_LOSSES
from trl_lossplus.snapshots.diff import INPUTS, row_cosines
from trl_lossplus.snapshots.relation import relation

ALL = {"beta": 0.1, "vf_coef": 0.3}


def of(**changes):
    """A change of one tensor of each micro-batch."""
    return lambda b: replace(b, **{name: f(getattr(b, name)) for name, f in changes.items()})


# What is changed: fields of the spec, the batch; the first line.
CHANGES = {
    "epsilon": ({"epsilon": 0.1}, None, "Only the policy term changed: epsilon 0.2 -> 0.1."),
    "KL estimator": ({"kl_estimator": "k2"}, None, "Only the kl term changed: kl_estimator 'k3' -> 'k2'."),
    "KL estimator, gradient alone": (
        {"kl_estimator": "k3+"},
        None,
        "Only the gradient changed: kl_estimator 'k3' -> 'k3+'.",
    ),
    "mask": (
        {},
        of(mask=lambda m: m & (torch.arange(6) < 4)),
        "mask changed (11 True became False, 0 False became True), and after it the window, the kl and policy and value terms.",
    ),
    "aggregation": (
        {"loss_aggregation": "token_sum"},
        None,
        "The per-token losses are equal; what they are added up to changed: loss_aggregation 'token_mean' -> 'token_sum'.",
    ),
    "normalization, code": ({}, of(advantages=lambda a: a / 2), "advantages changed (times 0.5), and after it policy"),
    "advantages shifted": ({}, of(advantages=lambda a: a + 2), "advantages changed (plus 2), and after it policy"),
    "token weights": (
        {},
        lambda b: replace(b, token_weights=torch.full((len(b.mask), 6), 2.0)),
        "token_weights: missing in A, and after it policy",
    ),
    "gamma": (
        {"gamma": 0.9},
        of(returns=lambda r: 0.9 * r),
        "returns changed (times 0.9), and after it value; settings: gamma 1.0 -> 0.9.",
    ),
    "dual clip": ({"clip_ratio_c": 1.01}, None, "Only the policy term changed: clip_ratio_c None -> 1.01."),
    "dtype, rounded": (
        {},
        of(old_logps=lambda x: x.bfloat16()),
        "old_logps changed (rounded to bfloat16), and after it log_ratio",
    ),
    "dtype, computed": (
        {},
        of(old_logps=lambda x: (x - 0.07).bfloat16()),
        "old_logps changed (now in bfloat16), and after it log_ratio",
    ),
    "dtype, kind": ({}, of(group_ids=lambda x: x.int()), "group_ids: dtype torch.int64 and torch.int32"),
}


def saved(tmp_path, spec, change=None, **more):
    step(LossSpec(**ALL))[0].save(tmp_path / "a")
    step(spec, change, **more)[0].save(tmp_path / "b")
    return Snapshot.load(tmp_path / "a"), Snapshot.load(tmp_path / "b")


@pytest.mark.parametrize("name", CHANGES)
def test_the_headline_names_what_was_changed(tmp_path, capsys, name):
    """Each is named in the first line; the update's numbers and the moved tokens follow."""
    changes, change, words = CHANGES[name]
    a, b = saved(tmp_path, LossSpec(**{**ALL, **changes}), change)
    found = diff(a, b)
    assert found.headline.startswith(words), found.headline
    assert main(["snapshot", "diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == found.headline
    assert "gradient cosine" in printed


def test_a_sign_in_the_code_is_seen(tmp_path, monkeypatch):
    """KL sign: the estimator's code is changed between the two, with equal settings. Both are read as they were when taken."""
    k1 = {"beta": 0.1, "kl_estimator": "k1"}
    step(LossSpec(**k1))[0].save(tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.setitem(kl.KL_ESTIMATORS, "k1", lambda d, clamp: -d)
        step(LossSpec(**k1))[0].save(tmp_path / "b")
    found = diff(Snapshot.load(tmp_path / "a"), Snapshot.load(tmp_path / "b"))
    assert found.headline == "Only the kl term changed (negated), with equal settings and inputs."
    assert found.update["term kl"][1] == pytest.approx(-found.update["term kl"][0])
    assert found.update["term kl"][0] != 0


def test_a_users_loss_that_changed_is_seen(tmp_path):
    """min and max swapped in one's own loss, under the same name: the first line says that the policy term alone changed."""

    def kept(join):
        @register_policy_loss("test_swapped", requires={"old_logps", "advantages"}, replace=True)
        def loss(batch, spec):
            ratio = batch.ratio(spec.log_ratio_clamp)
            return PolicyTerm(-join(ratio * batch.advantages, ratio.clamp(0.8, 1.2) * batch.advantages))

        step(LossSpec(policy_loss="test_swapped", beta=0.1))[0].save(tmp_path / join.__name__)

    kept(torch.minimum)
    kept(torch.maximum)
    a, b = Snapshot.load(tmp_path / "minimum"), Snapshot.load(tmp_path / "maximum")
    assert diff(a, b).headline == "Only the policy term changed, with equal settings and inputs."
    assert a.loss < b.loss or b.loss < a.loss
    POLICY_LOSSES.entries.pop("test_swapped")


def test_another_normalizer_is_named(tmp_path):
    """The window's counts of two processes on the same rows: named before what follows from them."""
    a, b = saved(tmp_path, LossSpec(**ALL))
    for part in b.micro:
        part.window = replace(part.window, num_tokens=part.window.num_tokens * 2)
    assert diff(a, b).headline.startswith("window num_tokens changed")


@pytest.mark.parametrize("objective", ["ppo_clip", "gspo"])
def test_every_tensor_is_compared_and_named(objective):
    """Whatever a loss reads or gives: moved by 1 at one place, it is the first thing named, with size and place."""
    spec = LossSpec(**ALL, policy_loss=objective, entropy_coef=0.1)
    every = of(mask=torch.ones_like)
    a = step(spec, every)[0]
    for name in (item.name for item in fields(LossBatch)):
        assert name in INPUTS, name
    for name in a.micro[1].per_token:
        b = step(spec, every)[0]
        tensor = b.micro[1].per_token[name] = b.micro[1].per_token[name].clone()
        tensor[1, 3] += 1
        (change,) = diff(a, b).outputs
        assert (change.name, change.positions, change.where) == (name, 1, (1, 1, 3))
        assert change.largest == pytest.approx(1.0, abs=1e-5)
    for name in ("advantages", "ref_logps", "returns", "old_logps", "values"):
        b = step(spec, every)[0]
        moved = getattr(b.micro[0].batch, name).detach().clone()
        moved[2, 4] -= 2
        b.micro[0].batch = replace(b.micro[0].batch, **{name: moved})
        (change,) = diff(a, b).inputs
        assert (change.name, change.where) == (name, (0, 2, 4))
    b = step(spec, every)[0]
    b.micro[0].gradient = -b.micro[0].gradient
    assert diff(a, b).headline == "Only the gradient changed (negated), with equal settings and inputs."


@pytest.mark.parametrize("name", EVERY_OBJECTIVE)
def test_every_objectives_outputs_are_known(name):
    """No tensor that an objective gives is left out of the comparison."""
    a, b = step(LossSpec(policy_loss=name, **ALL))[0], step(LossSpec(policy_loss=name, **ALL))[0]
    assert diff(a, b).same
    for part in b.micro:
        part.per_token = {}
    assert {change.name for change in diff(a, b).outputs} == set(a.micro[0].per_token)


def test_diff_of_the_same(tmp_path, capsys):
    step(LossSpec())[0].save(tmp_path)
    assert main(["snapshot", "diff", str(tmp_path), str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["headline"].startswith("Nothing differs")
    assert found["cosine"] == pytest.approx(1.0, abs=1e-6)
    assert found["row_cosines"] == pytest.approx([1.0] * 6, abs=1e-6)


def test_no_row_of_the_same_has_turned():
    """Rows without a gradient, and with one too small for a plain cosine, are equal to themselves; a row that lost its gradient is not."""
    a = torch.tensor([[0.0, 0.0], [1e-30, 2e-30], [1.0, -1.0], [3.0, 4.0], [1e-9, 0.0]])
    assert row_cosines(a, a).tolist() == [1.0] * 5
    b = torch.tensor([[0.0, 0.0], [-2e-30, 1e-30], [0.0, 0.0], [4.0, 3.0], [-2e-9, 0.0]])
    assert row_cosines(a, b).tolist() == pytest.approx([1.0, 0.0, 0.0, 24 / 25, -1.0], abs=1e-6)


def test_diff_places_and_sizes():
    """One advantage moved by 3 in the second micro-batch: tensor, size, place and the token whose loss moved."""

    def move(batch):
        if len(batch.mask) == 2:
            advantages = batch.advantages.clone()
            advantages[1, 2] += 3
            return replace(batch, advantages=advantages, mask=torch.ones(2, 6, dtype=torch.bool))
        return batch

    def widen(batch):
        return replace(batch, mask=torch.ones(2, 6, dtype=torch.bool)) if len(batch.mask) == 2 else batch

    a, b = step(LossSpec(), widen)[0], step(LossSpec(), move)[0]
    found = diff(a, b)
    (change,) = found.inputs
    assert (change.name, change.positions, change.where) == ("advantages", 1, (1, 1, 2))
    assert change.largest == pytest.approx(3.0)
    (entry,) = found.tokens
    assert (entry["row"], entry["token"], entry["id"], entry["text"], entry["completion"]) == (5, 2, 108, " t108", "row 5")
    assert entry["change"] == pytest.approx(entry["b"] - entry["a"])
    assert entry["a"] == float(a.micro[1].per_token["policy"][1, 2])
    assert len(found.row_cosines) == 6
    (row,) = found.rows
    assert (row["row"], row["prompt"], [t["text"] for t in row["tokens"]]) == (5, "prompt 5", [f" t{i}" for i in range(106, 112)])


def test_the_loss_of_a_token_has_all_terms():
    """A KL coefficient alone is changed: each token's loss moves by the change of the coefficient times its KL."""
    a, b = step(LossSpec(beta=0.1))[0], step(LossSpec(beta=0.3))[0]
    found = diff(a, b)
    assert found.headline == (
        "The per-token losses are equal; what they are added up to changed: beta 0.1 -> 0.3."
        if len(a.terms) == 1
        else "Only the kl term changed: beta 0.1 -> 0.3."
    )
    for entry in found.tokens:
        part, r = (a.micro[0], entry["row"]) if entry["row"] < 4 else (a.micro[1], entry["row"] - 4)
        assert entry["change"] == pytest.approx(0.2 * float(part.per_token["kl"][r, entry["token"]]), rel=1e-4)
    share = found.update["share kl"]
    assert share[0] == pytest.approx(abs(a.terms["kl"]) / (abs(a.terms["kl"]) + abs(a.terms["policy"])))
    assert share[1] > share[0]


def test_other_rows_are_said():
    found = diff(step(LossSpec())[0], step(LossSpec(), max_rows=5)[0])
    assert found.headline.startswith("The snapshots hold other rows")
    assert "loss" in found.update


def numbers(text):
    return torch.tensor([float(x) for x in text.split()])


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ("1 -2 0", "-1 2 0", "negated"),
        ("1 2 3", "2 4 6", "times 2"),
        ("1 0 3", "2 0 6", "times 2"),
        ("1 0 3", "2 1 6", ""),
        ("1 2 3", "1.5 2.5 3.5", "plus 0.5"),
        ("1.001 2.003", "1 2", "rounded to bfloat16"),
        ("1 2", "1.001 2.003", "no longer rounded to bfloat16"),
        ("3", "6", ""),
        ("1 2 nan", "2 4 nan", ""),
        ("0.1 0.7 0.3", "0 1 0.5", ""),
    ],
)
def test_relations_by_hand(a, b, words):
    assert relation(numbers(a), numbers(b)) == words


def test_relation_of_masks():
    a, b = torch.tensor([True, True, False, True]), torch.tensor([False, True, True, False])
    assert relation(a, b) == "2 True became False, 1 False became True"


EVIL = "<script>alert('x')</script> & \"quoted\""


def evil_page(tmp_path, capsys):
    """A page of two snapshots whose texts want to break it, written by the command."""
    a, b = step(LossSpec(**ALL))[0], step(LossSpec(**{**ALL, "epsilon": 0.05, "beta": 0.02}))[0]
    for snapshot, name in ((a, "a"), (b, EVIL.replace("/", "_"))):
        snapshot.texts = {"prompt": [EVIL] * 6, "completion": [EVIL] * 6}
        snapshot.tokens |= {0: EVIL, 1: "", 2: "line\nbreak"}
        snapshot.save(tmp_path / name)
    page = tmp_path / "page.html"
    folders = [str(tmp_path / "a"), str(tmp_path / EVIL.replace("/", "_"))]
    assert main(["snapshot", "diff", *folders, "--html", str(page)]) == 1
    return page, capsys.readouterr().out


def test_the_page(tmp_path, capsys):
    """One file, nothing from outside, all text escaped; the verdict first, the tables in the order of the data flow, tokens coloured."""
    page, printed = evil_page(tmp_path, capsys)
    text = page.read_text()
    parsed = check_page(text)
    assert "script" not in parsed.tags
    body = "".join(parsed.text)
    verdict = re.search(r'<h1 class="verdict differs">(.*?)</h1>', text)[1]
    assert verdict == printed.splitlines()[0].replace("->", "&rarr;")
    assert re.sub(r"\s", "", text.split("<body>")[1]).startswith('<h1class="verdict')
    titles = re.findall(r"<h2>(.*?)</h2>", text)
    assert titles == [
        "Settings", "Outputs", "Gradient with respect to the log-probs", "Update", "Rows whose gradient turned most",
        "Tokens whose loss changed most", "Loss of each token, A to B",
    ]  # fmt: skip
    assert EVIL in body
    tokens = re.findall(r'<span class="t (up|down)" style="--s:([\d.]+)" title="token \d+: (\S+) to (\S+)"', text)
    assert max(float(strength) for _, strength, _, _ in tokens) == 1.0
    assert {kind for kind, _, _, _ in tokens} == {"up", "down"}
    for kind, _, before, after in tokens:
        assert float(after) == float(before) or kind == ("up" if float(after) > float(before) else "down")
    assert 'class="t out"' in text


def test_the_page_of_equal_snapshots(tmp_path, capsys):
    step(LossSpec())[0].save(tmp_path / "a")
    page = tmp_path / "page.html"
    assert main(["snapshot", "diff", str(tmp_path / "a"), str(tmp_path / "a"), "--html", str(page)]) == 0
    check_page(page.read_text())
    assert '<h1 class="verdict">Nothing differs' in page.read_text()
    assert main(["snapshot", "show", str(tmp_path / "a"), "--html", str(page)]) == 2
    assert "only snapshot diff writes a page" in capsys.readouterr().err


MEASURE = """<script>addEventListener('load', () => {
  const wide = document.documentElement.scrollWidth - innerWidth;
  const inner = Math.max(...[...document.querySelectorAll('.wide')].map(x => x.scrollWidth - x.clientWidth));
  const font = Math.min(...[...document.querySelectorAll('td, .t')].map(x => parseFloat(getComputedStyle(x).fontSize)));
  const colours = new Set([...document.querySelectorAll('.t')].map(x => getComputedStyle(x).backgroundColor)).size;
  document.title = JSON.stringify({wide, inner, font, colours, outside: performance.getEntriesByType('resource').length});
})</script>"""


@browser
@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_in_a_browser(tmp_path, capsys, width):
    """At a phone's and a desk's width: nothing wider than the page or its tables, letters legible, tokens in several colours."""
    page, _ = evil_page(tmp_path, capsys)
    page.write_text(page.read_text().replace("</body>", MEASURE + "</body>"))
    dom = chromium(f"--window-size={width},1000", "--dump-dom", f"file://{page}")
    seen = json.loads(re.search(r"<title>(.*?)</title>", dom)[1])
    assert seen["wide"] <= 0
    assert seen["inner"] <= 0
    assert seen["font"] >= 12
    assert seen["colours"] > 5
    assert seen["outside"] == 0


@browser
@pytest.mark.slow
def test_the_page_in_print(tmp_path, capsys):
    page, _ = evil_page(tmp_path, capsys)
    chromium(f"--print-to-pdf={tmp_path}/page.pdf", f"file://{page}")
    data = (tmp_path / "page.pdf").read_bytes()
    assert data.startswith(b"%PDF")
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", data)) <= 4

"""The doctor on files: ours, plain TRL's, csv exports, and everything that is no log."""

import json

import numpy as np
import pytest
from synthetic import SETTINGS, STEPS, at, healthy, ramp

from trl_lossplus.diagnostics import runlog
from trl_lossplus.diagnostics.doctor import diagnose, main
from trl_lossplus.diagnostics.rules import READS
from trl_lossplus.diagnostics.runlog import RunLogError, read_run

STOCK = ("loss", "grad_norm", "reward", "reward_std", "frac_reward_zero_std", "kl", "entropy", "completions/mean_length",
         "completions/clipped_ratio", "clip_ratio/region_mean", "clip_ratio/low_mean", "clip_ratio/high_mean")  # fmt: skip


def entries(columns, steps=None):
    """log_history of columns; NaN is left out, so that a column may be one-sided."""
    n = len(next(iter(columns.values())))
    steps = range(1, n + 1) if steps is None else steps
    return [
        {"step": step, "epoch": step / 10} | {k: float(v[i]) for k, v in columns.items() if not np.isnan(v[i])}
        for i, step in enumerate(steps)
    ]


def state(path, history):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps(
            {"best_metric": None, "global_step": len(history), "log_history": history, "stateful_callbacks": {"a": [1]}},
            indent=2,
            sort_keys=True,
        )
    )
    return path


def ours(folder, changed=None, settings=None):
    """An output folder of ours."""
    columns = {**healthy(), **(changed or {})}
    closing = [
        {"step": STEPS, "train_runtime": 3.0, "train_loss": 0.1},
        {"step": STEPS, "eval_loss": 1.0, "eval_reward": float("nan")},
    ]
    state(folder / "trainer_state.json", entries(columns) + closing)
    spec = {**SETTINGS, **(settings or {})}
    top = {"is_on_policy": spec.pop("is_on_policy"), "optimizer_steps_per_rollout": 4.0}
    (folder / "lossplus.json").write_text(json.dumps({"spec": spec, "config": {"num_generations": 8}, "versions": {}, **top}))
    return folder


def run_main(capsys, *argv):
    code = main([str(word) for word in argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_healthy_run_of_ours(tmp_path, capsys):
    code, out, err = run_main(capsys, ours(tmp_path / "run"))
    assert (code, err) == (0, "")
    assert "0 errors, 0 warnings" in out
    assert "200 logged steps (1 to 200)" in out


@pytest.mark.parametrize(("changed", "code", "rule"), [
    ({"completions/clipped_ratio": np.full(STEPS, 0.99), "reward": ramp(0.3, 0.3)}, 1, "truncated"),
    ({"loss/kl": -0.04 * healthy()["kl"]}, 2, "kl_sign"),
])  # fmt: skip
def test_status_and_json(tmp_path, capsys, changed, code, rule):
    found, out, _ = run_main(capsys, ours(tmp_path / "run", changed), "--json")
    report = json.loads(out)
    first = report["findings"][0]
    assert found == report["status"] == code
    assert first["rule"] == rule
    assert first["steps"][0] >= 1
    assert first["fields"]
    assert first["docs"].startswith("docs/diagnosis.md#")


def test_plain_trl_run(tmp_path, capsys):
    """TRL's metrics alone, in a folder of checkpoints: the last one is read."""
    columns = {name: healthy()[name] for name in STOCK}
    for step in (50, 200, 100):
        state(tmp_path / f"checkpoint-{step}" / "trainer_state.json", entries({k: v[:step] for k, v in columns.items()}))
    code, out, _ = run_main(capsys, tmp_path)
    assert code == 0
    assert "a trl run, 200 logged steps" in out
    columns["kl"], columns["reward"] = ramp(0.05, 8.0), ramp(0.4, 0.1)
    code, out, _ = run_main(capsys, state(tmp_path / "broken.json", entries(columns)), "--json")
    assert code == 2
    assert [f["rule"] for f in json.loads(out)["findings"]][0] == "kl_explodes"


def test_nan_in_a_plain_run(tmp_path, capsys):
    """G2: TRL logs loss 0.0 and a NaN gradient; null and NaN are both read."""
    columns = {name: healthy()[name] for name in STOCK}
    history = entries(columns)
    for entry in history[120:]:
        entry |= {"loss": 0.0, "grad_norm": float("nan"), "kl": None}
    code, out, _ = run_main(capsys, state(tmp_path / "s.json", history), "--json")
    first = json.loads(out)["findings"][0]
    assert (code, first["rule"], first["steps"]) == (2, "nan_logged", [121, 200])
    assert "kl, grad_norm" in first["seen"]
    assert "logs a NaN as 0" in first["seen"]


def test_case_l1_loss_zero_is_expected(tmp_path, capsys):
    zero = {"loss": np.zeros(STEPS), "loss/policy": np.full(STEPS, 1e-9), "clip_ratio/region_mean": np.zeros(STEPS)}
    zero |= {f"probe/log_ratio/q{q}": np.zeros(STEPS) for q in ("00", "50", "100")}
    code, out, _ = run_main(capsys, ours(tmp_path / "run", zero, {"is_on_policy": True}))
    assert code == 0
    assert "Loss 0 is expected" in out
    assert "watch the gradient and the reward" in " ".join(out.split())
    flat = {**zero, "group_reward/frac_flat": np.ones(STEPS), "reward": np.zeros(STEPS), "grad_norm": np.zeros(STEPS)}
    code, out, _ = run_main(capsys, ours(tmp_path / "flat", flat, {"is_on_policy": True}))
    assert code == 2
    assert "No signal" in out
    assert "Loss 0 is expected" not in out


def test_case_l1_in_a_plain_run(tmp_path, capsys):
    """Without any setting: the clip fraction is exactly 0 in every step, so the run is on-policy."""
    columns = {name: healthy()[name] for name in STOCK if not name.startswith("clip")} | {
        "clip_ratio/region_mean": np.zeros(STEPS)
    }
    columns["loss"] = np.full(STEPS, 1e-8)
    _, out, _ = run_main(capsys, state(tmp_path / "s.json", entries(columns)))
    assert "Loss 0 is expected" in out
    assert "On-policy, clipping cannot act" in out


def test_case_b4_on_policy(tmp_path, capsys):
    still = {"clip_ratio/region_mean": np.zeros(STEPS)} | {f"probe/log_ratio/q{q}": np.zeros(STEPS) for q in ("00", "50", "100")}
    _, out, _ = run_main(capsys, ours(tmp_path / "run", still, {"is_on_policy": True}))
    assert "On-policy, clipping cannot act" in out
    assert "The clip hardly acts" not in out


def test_case_l2_share_of_the_kl(tmp_path):
    """beta KL / (|policy| + beta KL), also where only the terms are logged."""
    run = read_run(
        ours(
            tmp_path / "run",
            {"share/loss/kl": np.full(STEPS, np.nan), "loss/policy": np.full(STEPS, -0.03), "loss/kl": np.full(STEPS, 0.01)},
        )
    )
    seen = next(f.seen for f in diagnose(run) if f.rule.id == "kl_share")
    assert seen.numbers["share/loss/kl"] == pytest.approx(0.25)
    assert "25.0%" in seen.text


def test_case_l3_raw_ratios(tmp_path):
    run = read_run(ours(tmp_path / "run", {"probe/log_ratio/q100": at(100, 30.0, otherwise=0.5)}))
    seen = next(f.seen for f in diagnose(run) if f.rule.id == "ratio_extreme")
    assert seen.numbers["log_ratio"] == 30.0
    assert "1.1e+13" in seen.text


def test_case_j6_d5_one_sided(tmp_path, capsys):
    """Metrics that only some steps or ranks logged, windows of unequal size: judged by what is there."""
    sparse = {}
    for name, values in healthy().items():
        keep = (
            np.arange(STEPS) % 4 == 0 if name.startswith(("reward", "group", "completions", "kl")) else np.ones(STEPS, dtype=bool)
        )
        sparse[name] = np.where(keep, values, np.nan)
    del sparse["clip_ratio/region_mean"], sparse["probe/log_ratio/q100"], sparse["probe/advantage/q00"]
    code, out, err = run_main(capsys, state(tmp_path / "s.json", entries(sparse)))
    assert (code, err) == (0, "")
    for name in sparse:
        alone = {"reward": sparse["reward"], name: sparse[name]}
        assert run_main(capsys, state(tmp_path / "one.json", entries(alone)))[0] == 0, name


def test_logging_every_tenth_step(tmp_path, capsys):
    columns = {name: values[::10] for name, values in healthy().items()}
    code, out, _ = run_main(capsys, state(tmp_path / "s.json", entries(columns, range(10, 201, 10))))
    assert code == 0
    assert "(10 to 200)" in out


def test_a_run_that_the_guard_stopped(tmp_path, capsys):
    """The last checkpoint's log is clean; what the guard wrote when it stopped names the tensor. With no log at all it is enough."""
    folder = ours(tmp_path / "run")
    stopped = {
        "step": 200,
        "tensor": "ratio",
        "sentence": "step 200: ratio is inf on rank 0, row 3, token 7. Likely: other tokens.",
    }
    (folder / "stopped.json").write_text(json.dumps(stopped))
    code, out, _ = run_main(capsys, folder, "--json")
    first = json.loads(out)["findings"][0]
    assert (code, first["rule"], first["steps"]) == (2, "nonfinite_ratio", [200, 200])
    assert "row 3, token 7" in first["seen"]
    (folder / "trainer_state.json").unlink()
    code, out, _ = run_main(capsys, folder, "--json")
    assert (code, [f["rule"] for f in json.loads(out)["findings"]]) == (2, ["nonfinite_ratio"])
    (folder / "stopped.json").write_text("{}")
    assert run_main(capsys, folder)[0] == 3
    old = {**stopped, "step": 150}
    (ours(tmp_path / "went_on") / "stopped.json").write_text(json.dumps(old))
    assert run_main(capsys, tmp_path / "went_on")[0] == 0


# csv


def write_wide(path, columns, step="step", prefix=""):
    names = list(columns)
    lines = [",".join([step, *(f'"{prefix}{name}"' for name in names)])]
    lines += [
        ",".join([str(i + 1), *("" if np.isnan(columns[n][i]) else repr(float(columns[n][i])) for n in names)])
        for i in range(STEPS)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("step", "prefix"), [("step", ""), ("Step", "my-run - train/"), ("_step", "train/"), ("train/global_step", "train/")]
)
def test_csv_of_wandb(tmp_path, capsys, step, prefix):
    columns = {**healthy(), "loss/kl": -0.04 * healthy()["kl"]}
    path = write_wide(tmp_path / "export.csv", columns, step, prefix)
    code, out, _ = run_main(capsys, path, "--json")
    assert (code, json.loads(out)["kind"], json.loads(out)["findings"][0]["rule"]) == (2, "csv", "kl_sign")
    assert run_main(capsys, write_wide(path, healthy(), step, prefix))[0] == 0


def test_csv_of_tensorboard(tmp_path, capsys):
    """One file a tag, as its page exports them; and one file with a tag column."""
    folder = tmp_path / "tb"
    folder.mkdir()
    columns = {"loss": healthy()["loss"], "reward": ramp(0.7, 0.2), "loss/kl": healthy()["loss/kl"], "kl": healthy()["kl"]}
    for name, values in columns.items():
        rows = "".join(f"1700000000.0,{i + 1},{v}\n" for i, v in enumerate(values))
        (folder / f"run-x-tag-train_{name.replace('/', '_')}.csv").write_text(f"Wall time,Step,Value\n{rows}")
    assert set(read_run(folder).columns) == set(columns)
    assert run_main(capsys, folder)[0] == 1  # the reward falls
    long = "".join(f"{i + 1},train/{name},{v}\n" for name, values in columns.items() for i, v in enumerate(values))
    (tmp_path / "long.csv").write_text(f"step,tag,value\n{long}")
    assert run_main(capsys, tmp_path / "long.csv")[0] == 1


# What is no log.


@pytest.mark.parametrize(("name", "content", "says"), [
    ("trainer_state.json", "", "cut short"),
    ("trainer_state.json", '{"log_history": [', "cut short"),
    ("trainer_state.json", "[1, 2]", "no log_history"),
    ("trainer_state.json", '{"a": 1}', "no log_history"),
    ("trainer_state.json", '{"log_history": [{"loss": 1}]}', "has no step"),
    ("trainer_state.json", '{"log_history": []}', "no training step"),
    ("trainer_state.json", "not json at all", "not valid JSON"),
    ("config.json", '{"model_type": "llama"}', "no log_history"),
    ("x.csv", "a,b\n1,2\n", "no step column"),
    ("x.csv", "", "no step column"),
    ("x.csv", "step,height\n1,2\n", "no metric of a training run"),
    ("x.csv", "step,loss,kl\n1,0.1,0.2\n2,0.", "cut short"),
    ("x.csv", "Wall time,Step,Value\n1.0,1,abc\n", "not a number"),
    ("x.csv", "step,loss\nabc,1\n", "not a number"),
    ("notes.txt", "hello", "neither"),
])  # fmt: skip
def test_no_log(tmp_path, capsys, name, content, says):
    """One clear line on stderr that names the file, and exit status 3."""
    (tmp_path / name).write_text(content)
    code, out, err = run_main(capsys, tmp_path / name)
    assert (code, out) == (3, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert says in err
    assert name in err


def test_cut_anywhere(tmp_path, capsys):
    """A log cut at any place is an error, never half a diagnosis."""
    whole = (
        state(tmp_path / "s.json", entries({"loss": healthy()["loss"][:20], "reward": healthy()["reward"][:20]}))
        .read_text()
        .rstrip()
    )
    for cut in range(1, len(whole) - 1, 61):
        (tmp_path / "s.json").write_text(whole[:cut])
        assert run_main(capsys, tmp_path / "s.json")[0] == 3


def test_binary_missing_and_empty(tmp_path, capsys):
    (tmp_path / "trainer_state.json").write_bytes(b"\x80\x02\xff\xfe" * 10)
    assert run_main(capsys, tmp_path)[0] == 3
    assert run_main(capsys, tmp_path / "nowhere")[0] == 3
    (tmp_path / "empty").mkdir()
    code, _, err = run_main(capsys, tmp_path / "empty")
    assert code == 3
    assert "not a run's output folder" in err


def test_broken_settings_are_left_aside(tmp_path, capsys):
    folder = ours(tmp_path / "run")
    (folder / "lossplus.json").write_text("{")
    assert run_main(capsys, folder)[0] == 0


# Long logs.


def test_fast_and_plain_reading_agree(tmp_path, monkeypatch):
    """Arrow's columns are the plain reader's, null, NaN and one-sided values among them."""
    history = entries({**healthy(), "kl": np.where(np.arange(STEPS) % 3 == 0, healthy()["kl"], np.nan)})
    history[40] |= {"grad_norm": float("nan"), "loss": float("inf"), "kl": None}
    history[41]["note"] = "text"
    history += [{"step": STEPS, "epoch": 1.0, "eval_loss": 1.0}, {"step": STEPS, "train_runtime": 1.0}]
    path = state(tmp_path / "trainer_state.json", history)
    plain = read_run(path, READS)
    monkeypatch.setattr(runlog, "PIECE", 1 << 15)
    steps, columns, bad = runlog._fast(path, READS)
    assert (steps == plain.steps).all()
    assert set(columns) == set(plain.columns)
    for name, column in columns.items():
        np.testing.assert_array_equal(column, plain.columns[name])
    assert {name: mask.tolist() for name, mask in bad.items()} == {name: mask.tolist() for name, mask in plain.bad.items()}
    assert set(bad) == {"grad_norm", "loss", "kl"}
    monkeypatch.setattr(runlog, "BIG", 0)
    assert [f.seen.text for f in diagnose(read_run(path, READS))] == [f.seen.text for f in diagnose(plain)]


@pytest.mark.parametrize("cut", [0.3, 0.99, 0.9999])
def test_a_long_log_that_is_cut_short(tmp_path, monkeypatch, cut):
    monkeypatch.setattr(runlog, "BIG", 0)
    path = state(tmp_path / "trainer_state.json", entries(healthy()))
    text = path.read_text()
    path.write_text(text[: int(len(text) * cut)])
    with pytest.raises(RunLogError, match="cut short"):
        read_run(path, READS)


@pytest.mark.slow
def test_a_hundred_thousand_steps(tmp_path, capsys):
    """
    A log of 100,000 steps with a plain TRL run's metrics, and one fault in the middle, in less than 5 s.

    Of processor time: that does not depend on what else the machine does. benchmarks/doctor.py measures more metrics.
    """
    import time

    from benchmarks.doctor import write_log

    path = tmp_path / "trainer_state.json"
    write_log(path, 100_000, "trl")
    text = path.read_text()
    place = text.index('"grad_norm": ', len(text) // 2) + len('"grad_norm": ')
    path.write_text(text[:place] + "NaN" + text[text.index(",", place) :])
    start = time.process_time()
    code, out, _ = run_main(capsys, path, "--json")
    assert time.process_time() - start < 5
    first = json.loads(out)["findings"][0]
    assert (code, first["rule"]) == (2, "nan_logged")
    assert 45_000 < first["steps"][0] < 55_000

"""The report: one file, nothing from outside, everything escaped; looked at in a real browser where there is one."""

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from htmlpage import browser, check_page, chromium
from synthetic import STEPS, at, healthy, ramp, run

from trl_lossplus import LossPlusError
from trl_lossplus.diagnostics.report import main, report, sample_completions
from trl_lossplus.diagnostics.report_plots import density

pytest.importorskip("matplotlib", reason="the report needs matplotlib: pip install 'trl-lossplus[report]'")
EVIL = "$x^$ <script>alert('x')</script> & \"quoted\""


def full():
    """A run with every chart in it."""
    columns = healthy()
    for name, middle in (("log_ratio", 0.0), ("advantage", 0.0), ("policy", 0.0), ("kl", 0.5)):
        for level, z in (("00", -3), ("05", -1.6), ("25", -0.7), ("50", 0), ("75", 0.7), ("95", 1.6), ("100", 3)):
            columns[f"probe/{name}/q{level}"] = ramp(middle, middle) + z * ramp(0.2, 0.5, noise=0.0)
    columns |= {
        "completions/min_length": ramp(5, 5),
        "completions/max_length": ramp(90, 99),
        "group_reward/std_max": ramp(0.5, 0.5),
    }
    return run(columns, {"learning_rate": 1e-5, "beta": 0.04})


CHARTS = ("reward", "loss", "kl", "clip", "ratio", "advantage", "groups", "shares", "lengths", "entropy", "critic")


def test_every_chart_is_there():
    text = report(full())
    page = check_page(text)
    assert [f"chart-{name}" for name in CHARTS] == [i for i in page.ids if i.startswith("chart-")]
    assert page.tags.count("svg") == len(CHARTS)
    assert "svg-clip-healthy-band" in page.ids
    assert "No warning and no error." in text
    assert text.index('class="findings"') < text.index('class="charts"')


def test_findings_are_on_top():
    broken = run({"loss/kl": -0.04 * healthy()["kl"], "mask/outside_completion": at(3, 2.0)})
    text = report(broken)
    page = check_page(text)
    assert [i for i in page.ids if i.startswith("finding-")][:2] == ["finding-mask_outside", "finding-kl_sign"]
    assert text.index("finding-mask_outside") < text.index("chart-reward")


def test_two_runs_and_their_settings():
    other = replace(run({"reward": ramp(0.1, 0.9)}, {"learning_rate": 2e-5, "beta": 0.04}), name="second")
    text = report(full(), other)
    check_page(text)
    rows = re.findall(r"<tr><td>(\w+)</td>", text[text.index('id="differences"') :])
    assert rows == ["learning_rate"]
    assert "1e-05" in text
    assert "2e-05" in text
    assert text.count('class="findings"') == 2
    unknown = replace(other, settings={})
    assert "its settings are not known" in report(full(), unknown)


def test_settings_of_one_run_have_room_for_their_values():
    """On a phone a long name is broken, not the value beside it: the table has the class whose second column has a least width."""
    text = report(full())
    below = text[text.index('id="settings"') :]
    assert re.search(r"<table class=\"settings\">.*?<td>learning_rate</td><td class=\"text\">1e-05</td>", below, re.S)
    assert re.search(r"\.settings td \+ td \{ min-width: \d", text)


def test_everything_from_data_is_escaped(tmp_path):
    (tmp_path / "completions").mkdir()
    table = pd.DataFrame(
        {"step": [1], "prompt": [EVIL], "completion": [[{"role": "assistant", "content": EVIL}]], EVIL: [1.0], "advantage": [0.5]}
    )
    table.to_parquet(tmp_path / "completions" / "completions_00001.parquet")
    evil = run({**healthy(), f"rewards/{EVIL}/mean": ramp(0, 1), "rewards/b/mean": ramp(0, 1)}, {"dataset": EVIL})
    evil = replace(evil, name=EVIL, source=EVIL, folder=tmp_path)
    for text in (report(evil), report(evil, replace(evil, settings={"dataset": "other"}))):
        page = check_page(text)
        assert "script" not in page.tags
        assert "alert(" in "".join(page.text)


def test_completions_at_start_middle_end(tmp_path):
    folder = tmp_path / "completions"
    folder.mkdir()
    for step in (1, 2, 3, 4, 5):
        rows = {
            "step": [step] * 6,
            "prompt": [f"p{i}" for i in range(6)],
            "completion": [f"c{step}.{i}" for i in range(6)],
            "advantage": range(6),
        }
        pd.DataFrame(rows).to_parquet(folder / f"completions_{step:05d}.parquet")
    (folder / "completions_00002.parquet").write_bytes(b"broken")
    found = sample_completions(replace(run(), folder=tmp_path))
    assert [(step, [row["completion"] for row in rows]) for step, rows in found] == [
        (step, [f"c{step}.{i}" for i in (5, 4, 0)]) for step in (1, 3, 5)
    ]
    (folder / "completions_00003.parquet").write_bytes(b"broken")
    assert [step for step, _ in sample_completions(replace(run(), folder=tmp_path))] == [1, 5]
    assert "c5.0" in report(replace(run(), folder=tmp_path))


def test_heat_map_holds_all_tokens():
    """Each step's shares sum to 1, and half of them lie below the median."""
    steps, edges, share = density(full(), "log_ratio")
    assert share.shape == (40, len(steps))
    np.testing.assert_allclose(share.sum(0), 1.0)
    below = share[edges[1:] <= 0.0].sum(0)
    assert np.abs(below - 0.5).max() < 0.15
    assert density(run(), "nothing") is None


@pytest.mark.parametrize("kept", [("reward",), ("loss",), ("probe/advantage/q00", "probe/advantage/q100", "entropy")])
def test_little_was_logged(kept):
    text = report(run({name: None for name in healthy() if name not in kept}))
    check_page(text)
    assert "Not logged in this run" in text


def test_one_step_and_long_runs():
    check_page(report(run(base=healthy(1), n=1)))
    long = report(run(base=healthy(30_000), n=30_000))
    check_page(long)
    assert len(long) < 2_000_000


def test_command(tmp_path, capsys):
    from test_doctor import ours

    page = tmp_path / "page.html"
    assert main([str(ours(tmp_path / "run")), "-o", str(page)]) == 0
    assert "page.html" in capsys.readouterr().out
    check_page(page.read_text())
    assert main([str(tmp_path / "nowhere")]) == 3
    assert capsys.readouterr().err.count("error: ") == 1
    path = str(tmp_path / "no" / "such" / "folder.html")
    with pytest.raises(LossPlusError) as error:
        main([str(tmp_path / "run"), "-o", path])
    assert str(error.value) == f"--output={path}: cannot be written (No such file or directory)."


MEASURE = """<script>addEventListener('load', () => {
  const wide = document.documentElement.scrollWidth - innerWidth;
  const boxes = [...document.querySelectorAll('figure svg')].map(x => x.getBoundingClientRect());
  const empty = boxes.filter(b => b.width < 150 || b.height < 60).length;
  const font = Math.min(...[...document.querySelectorAll('figure svg text')].map(t => t.getBoundingClientRect().height));
  document.title = JSON.stringify({wide, charts: boxes.length, empty, letters: Math.round(font * 10) / 10,
    finding: document.querySelector('.finding.error h3')?.innerText, columns: new Set(boxes.map(b => Math.round(b.x))).size,
    outside: performance.getEntriesByType('resource').filter(r => !r.name.startsWith('data:')).length});
})</script>"""


@browser
@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser(tmp_path, width):
    """Loads it at a phone's and a desk's width: all charts drawn, nothing wider than the page, nothing fetched, letters legible."""
    import json

    broken = full()
    text = report(run({**broken.columns, "loss/kl": -0.04 * broken.columns["kl"]}))
    (tmp_path / "page.html").write_text(text.replace("</body>", MEASURE + "</body>"))
    dom = chromium(f"--window-size={width},1000", "--dump-dom", f"file://{tmp_path}/page.html")
    seen = json.loads(re.search(r"<title>(.*?)</title>", dom)[1])
    assert seen["charts"] == len(CHARTS)
    assert seen["empty"] == 0
    assert seen["wide"] <= 0
    assert seen["outside"] == 0
    assert seen["letters"] >= 8
    assert "THE KL TERM" in seen["finding"].upper()
    assert seen["columns"] == (1 if width < 800 else 3)


@browser
@pytest.mark.slow
def test_in_print(tmp_path):
    (tmp_path / "page.html").write_text(report(full()))
    chromium(f"--print-to-pdf={tmp_path}/page.pdf", f"file://{tmp_path}/page.html")
    data = (tmp_path / "page.pdf").read_bytes()
    assert data.startswith(b"%PDF")
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", data)) <= 6


def test_steps_are_named(tmp_path):
    assert f"{STEPS} logged steps, 1 to {STEPS}" in report(run())


def test_a_run_that_resamples_shows_all_of_its_draws_beside_what_was_kept():
    plain = report(full())
    columns = {**full().columns, "resample/reward_all": ramp(0.2, 0.9), "resample/frac_flat_all": ramp(0.5, 0.4)}
    text = report(run(columns, {"learning_rate": 1e-5}))
    check_page(text)
    assert plain.count("of all draws") == 0
    assert text.count("of all draws") == 2  # reward, flat groups

"""
The launches that the README names, on two real processes: the weights of one process, checkpoints, failures.

What runs is the shipped accelerate file through `accelerate launch`; launches.py says what is changed in it for a CPU. Marked
nightly: all cells of docs/launches.md. `make test` has the launches that split parameters, for the rest see test_two_processes.py.
"""

import json
import re
import shutil
import time

import pytest
import yaml
from cells import CASES, KL, LEARNER, PPO, SKIP, all_cells, case
from compare import TOLERANCE, faults, judge, relative, weights
from launches import ACCELERATE, CONFIGS, HERE, LAUNCHES, ROOT, command, cpu_form, free_port, last_lines, run_cells, start

DISTRIBUTED = [name for name in LAUNCHES if name != "single"]
CELLS = {cell["name"]: cell for cell in [*all_cells(), *(cell for cells in CASES.values() for cell in cells)]}
QUICK = ["GRPO_full_KL", "PPO_adapter_critic_LoRA_KL", "A9", "I6", "one_pass_adapter", "one_pass_shared"]


class Results:
    """Runs cells once a launch; the single process's are run when they are first compared with."""

    def __init__(self, toy, folder):
        self.toy, self.folder, self.done = toy, folder, set()

    def run(self, launch, cells, timeout=1500):
        if launch.startswith("ZeRO"):
            pytest.importorskip("deepspeed")
        left = [cell for cell in cells if (launch, cell["name"]) not in self.done]
        self.done |= {(launch, cell["name"]) for cell in left}
        for name, result in run_cells(launch, left, self.folder / launch, self.toy, timeout=timeout).items():
            if "error" in result:
                (self.folder / launch / f"{name}.error").write_text(result["error"])

    def judged(self, launch, cells):
        self.run("single", cells)
        self.run(launch, cells)
        return {cell["name"]: judge(launch, cell["name"], self.folder) for cell in cells}

    def facts(self, launch, name):
        return json.loads((self.folder / launch / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def results(toy, tmp_path_factory):
    return Results(toy, tmp_path_factory.mktemp("launches"))


def all_right(rows):
    wrong = {name: faults(row) for name, row in rows.items() if faults(row)}
    assert not wrong, wrong


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["ZeRO-3", "FSDP2"])
def test_split_parameters_give_one_process_s_weights(results, launch):
    """Full and LoRA, KL, critics, a reference that follows, resuming, saving: where each process holds a part of the parameters."""
    all_right(results.judged(launch, [CELLS[name] for name in QUICK]))


# A group's prompt once, in parts of at most 30 tokens, which are as many on both processes; every pass is one of them.
PACKED = {"microbatch_layout": "shared_prefix", "max_tokens_per_microbatch": 30, "beta": 0.05, "num_iterations": 2}
IN_PARTS = [
    case("packed_GRPO", **PACKED),
    case("packed_PPO_adapter", **{**PPO, **PACKED}),
    case("packed_PPO_model", **{**PPO, **PACKED, "critic": "model", "lora": False}),
    case("padded_parts", **{**PACKED, "microbatch_layout": "padded"}, policy_loss="gspo"),
]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("launch", ["DDP", "ZeRO-2", "ZeRO-3", "FSDP2"])
def test_packed_rows_and_a_budget(results, launch):
    """Packed rows and parts within a budget of tokens, where parameters or gradients are split: the weights of one process."""
    all_right(results.judged(launch, IN_PARTS))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("launch", DISTRIBUTED)
def test_every_cell_of_the_matrix(results, launch):
    """docs/launches.md: algorithm x method x KL and the cases A3, A7, A9, D1, D5, E7, F9, I6, for each launch."""
    all_right(results.judged(launch, list(CELLS.values())))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("launch", DISTRIBUTED)
def test_a7_e7_f9_say_more_than_equal_weights(results, launch):
    """A7, E7: one result whatever the micro-batches. F9: policy and critic both changed in one step. D5: the KL is pooled."""
    cells = [cell for name in ("A7", "E7", "F9", "D5") for cell in CASES[name]]
    all_right(results.judged(launch, cells))
    for name in ("A7", "E7"):
        found = [weights(results.folder / launch / cell["name"] / "weights.pt") for cell in CASES[name]]
        first = weights(results.folder / "single" / CASES[name][0]["name"] / "start.pt")
        assert all(relative(one, found[0], first) < 1e-4 for one in found[1:])
    before, after = (weights(results.folder / launch / "F9" / f"{name}.pt") for name in ("start", "weights"))
    for role in ("lora_B.default", "lora_B.critic", "lora_value_head"):
        assert max((before[name] - after[name]).abs().max().item() for name in after if role in name) > 1e-4
    pooled = [entry["kl_rollout"] for entry in results.facts("single", "D5")["log"]]
    assert [entry["kl_rollout"] for entry in results.facts(launch, "D5")["log"]] == pytest.approx(pooled, rel=1e-4, abs=1e-7)


@pytest.mark.slow
def test_processes_without_signal_finish_with_equal_weights(results):
    """A process with masked rows only, with flat groups only (kept, dropped, replaced), and a metric that one process alone logs."""
    names = ("A3", "D5", "masked", "flat", "flat_dropped", "resampled", "metric_on_one")
    cells = [cell for name in names for cell in CASES[name]]
    all_right(results.judged("DDP", cells))
    for cell in CASES["resampled"]:
        one, two = (results.facts(launch, cell["name"])["log"] for launch in ("single", "DDP"))
        for name in ("resample/draws", "resample/prompts", "resample/frac_flat_all"):
            assert [entry[name] for entry in one if name in entry] == [entry[name] for entry in two if name in entry]
        assert all(entry["resample/draws"] > 1 for entry in one if "reward" in entry)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("launch", ["DDP", "FSDP2"])
def test_g2_a_step_that_is_not_finite_is_dropped_on_every_process(results, launch):
    """G2 with nonfinite_policy=skip: NaN on one process; the step is dropped on both, as on one process."""
    assert results.judged(launch, [SKIP])["G2_skip"]["apart"] < TOLERANCE  # what is logged as the dropped step's loss differs
    assert [entry.get("skipped_steps") for entry in results.facts(launch, "G2_skip")["log"]] == [0.0, 1.0, 1.0]


@pytest.mark.slow
@pytest.mark.nightly
def test_deepspeed_takes_its_own_steps_so_skip_is_refused(results):
    """DeepSpeed steps inside the backward pass: a step cannot be dropped after it, so the configuration is refused."""
    results.run("ZeRO-2", [SKIP])
    assert "nonfinite_policy='skip'" in (results.folder / "ZeRO-2" / "G2_skip.error").read_text()


# docs/scaling.md's table: how many collectives of ours a step has that begins with a rollout, and with what settings.
REWARD_KL = {"kl_placement": "reward", "kl_reward_coef": 0.1, "kl_controller": "adaptive", "kl_target": 0.01, "kl_horizon": 200.0}
ALL_OF_IT = {**PPO, **REWARD_KL, "whiten_rewards": True, "missing_eos_penalty": 0.5, "log_completions": True}
COUNTED = {
    "GRPO": (2, {}),
    "KL in the loss": (2, {"beta": 0.05}),
    "KL in the loss, adaptive": (3, KL),
    "KL in the reward by sequence, adaptive": (3, {**REWARD_KL, "kl_reward_level": "sequence"}),
    "KL in the reward by token, adaptive": (3, {**REWARD_KL, "kl_reward_level": "token"}),
    "advantages whitened over the rollout": (2, {"advantage_normalization": "rollout"}),
    "advantages whitened over the rollout, by group": (
        2,
        {"advantage_normalization": "rollout", "advantage_norm_scope": "group"},
    ),
    "advantages whitened over the step": (2, LEARNER),
    "advantages whitened over the step, by group": (2, {**LEARNER, "advantage_norm_scope": "group"}),
    "PPO (advantages whitened)": (2, PPO),
    "PPO, advantages whitened over the step, by row": (2, {**PPO, **LEARNER, "advantage_norm_scope": "sequence"}),
    "PPO, rewards whitened too": (3, {**PPO, "whiten_rewards": True}),
    "PPO, rewards whitened, KL in the reward, adaptive, missing_eos_penalty, log_completions": (3, ALL_OF_IT),
}
SOME = ["GRPO", "KL in the reward by sequence, adaptive", list(COUNTED)[-1]]


@pytest.mark.slow
@pytest.mark.parametrize("names", [SOME, pytest.param(list(COUNTED), marks=pytest.mark.nightly)], ids=["some", "all"])
def test_collectives_that_we_add(results, names):
    """
    At most 3 a step, with 1 micro-batch or with 4. All together are no more than stock TRL's: it has some in every micro-batch.

    Two steps a rollout: the second has one alone, for finiteness and the statistics. A gather of objects would count as two.
    """
    numbered = [(name, n) for name in names for n in (1, 4)]
    cells = []
    for name, n in numbered:
        sizes = {"rows": 16 // n, "gradient_accumulation_steps": n, "steps_per_generation": 2 * n}
        settings = {"num_generations": 2, "steps": 2, **sizes, **COUNTED[name][1]}
        cells.append({**case(f"count {list(COUNTED).index(name)} {n}", **settings), "count": True})
    stock = case("count stock", rows=4, gradient_accumulation_steps=4, steps_per_generation=8, num_generations=2, steps=2)
    results.run("DDP", [*cells, {**stock, "count": True, "stock": True}])
    of_trl = results.facts("DDP", "count stock")["collectives"]["others"]
    for (name, n), cell in zip(numbered, cells, strict=True):
        found, most = results.facts("DDP", cell["name"])["collectives"], COUNTED[name][0]
        assert [len(found["ours"][step]) for step in ("0", "1")] == [most, 1], (name, n, found["ours"])
        for step in ("0", "1"):
            assert len(found["ours"][step]) + len(found["others"][step]) <= len(of_trl[step]), (name, n, found["others"][step])


def test_the_table_of_collectives():
    """docs/scaling.md shows what is counted."""
    text = (ROOT / "docs" / "scaling.md").read_text()
    assert [f"| {name} | {most} |" for name, (most, _) in COUNTED.items()] == re.findall(r"^\| [^|]* \| [0-9] \|$", text, re.M)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("launch", ["DDP", "ZeRO-2", "ZeRO-3", "FSDP2"])
def test_sigkill_in_the_middle_of_a_step_and_resume(results, launch):
    """
    One process killed between two micro-batches ends both; resumed from the last checkpoint, which is inside a rollout of the second
    pass over the dataset, the run ends as if uninterrupted. Completions are sampled.
    """
    one = {**CELLS["inside_a_rollout"], "resume": None, "data": "sampled"}
    cell = {**one, "name": "killed", "kill": 5}
    began = time.time()
    results.run(launch, [cell])
    assert (results.folder / launch / "killed.error").exists()
    assert time.time() - began < 120
    checkpoint = results.folder / launch / "killed" / "checkpoint-5"
    again = {**one, "name": "after_the_kill", "from": str(checkpoint)}
    whole = {**one, "name": "not_killed"}
    results.run(launch, [again, whole])
    resumed, uninterrupted = (weights(results.folder / launch / name / "weights.pt") for name in ("after_the_kill", "not_killed"))
    assert all(resumed[name].equal(value) for name, value in uninterrupted.items())


def test_what_is_changed_for_the_cpu(tmp_path):
    """The CPU form of a shipped file differs in the number of processes and the list of GPUs alone."""
    for name, _ in LAUNCHES.values():
        shipped = yaml.safe_load((CONFIGS / name).read_text())
        derived = yaml.safe_load(cpu_form(name, tmp_path).read_text())
        assert {key: value for key, value in shipped.items() if key not in ("gpu_ids", "num_processes")} == {
            key: value for key, value in derived.items() if key not in ("gpu_ids", "num_processes")
        }


def test_shipped_files():
    """Each is for GPUs (but cpu.yaml), leaves precision to the training arguments, and has a comment that says how to start it."""
    for path in sorted(CONFIGS.glob("*.yaml")):
        text, settings = path.read_text(), yaml.safe_load(path.read_text())
        assert f"accelerate_configs/{path.name}" in text, path.name
        assert settings["use_cpu"] is (path.name == "cpu.yaml")
        assert settings["mixed_precision"] == "no"
        assert "gradient_accumulation_steps" not in settings.get("deepspeed_config", {})


STEP_LINE = re.compile(r"^step \d.*$", re.M)


def recipe_lines(launch, folder, words):
    """What the recipe printed for each step, and the line that says how many processes trained together."""
    run = start(command(launch, folder, HERE / "recipe.py", launch, ROOT / "recipes" / "grpo.py", *words), folder / "recipe.txt")
    run.wait(240)
    text = run.text()
    assert "processes: 2 " in text, last_lines(text)
    return [re.sub(r"\d+\.\d s.*", "", line) for line in STEP_LINE.findall(text)]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", ["full", "LoRA"])
def test_the_recipe_prints_the_same_steps_under_every_launch(tmp_path, method):
    """The toy through recipes/grpo.py, with real generation: the first three steps as printed, under each shipped file."""
    lora = ["--use_peft", "true", "--lora_target_modules", "all-linear"] if method == "LoRA" else []
    words = ["--max_steps", "3", "--beta", "0.02", "--per_device_train_batch_size", "16", *lora]
    found = {}
    for launch in DISTRIBUTED:
        folder = tmp_path / launch
        folder.mkdir()
        found[launch] = recipe_lines(launch, folder, [*words, "--output_dir", str(folder / "out")])
    assert len(found["DDP"]) == 3
    assert all(lines == found["DDP"] for lines in found.values()), found


@pytest.mark.slow
@pytest.mark.nightly
def test_two_machines(tmp_path, toy):
    """multi_node.yaml: the same command with machine_rank 0 and 1, one process each, trains two processes together."""
    port = free_port()
    cell = case("multi_node")
    runs = []
    for machine in (0, 1):
        settings = {**yaml.safe_load((CONFIGS / "multi_node.yaml").read_text()), "num_processes": 2}
        settings.pop("gpu_ids")
        (tmp_path / "multi_node.yaml").write_text(yaml.safe_dump(settings))
        job = {"launch": "DDP", "folder": str(tmp_path), "toy": toy, "cells": [cell]}
        (tmp_path / "job.json").write_text(json.dumps(job))
        words = [*ACCELERATE, "--config_file", str(tmp_path / "multi_node.yaml"), "--machine_rank", str(machine)]
        words += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(port)]
        words += [str(HERE / "worker.py"), str(tmp_path / "job.json")]
        runs.append(start(words, tmp_path / f"machine{machine}.txt"))
    for run in runs:
        run.wait(200)
    facts = json.loads((tmp_path / "multi_node.json").read_text())
    assert facts["processes"] == 2
    assert facts["wrapped"] == "DistributedDataParallel"


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="DeepSpeed compiles its Adam")
@pytest.mark.timeout(900)
def test_offload_trains(tmp_path):
    """deepspeed_zero2_offload.yaml: DeepSpeed's Adam on the CPU gives the rewards and losses of torch's, as printed."""
    words = ["--max_steps", "3", "--per_device_train_batch_size", "16"]
    found = {}
    for launch, file in (("DDP", "multi_gpu.yaml"), ("ZeRO-2", "deepspeed_zero2_offload.yaml")):
        folder = tmp_path / launch
        folder.mkdir()
        words_here = [*ACCELERATE, "--config_file", str(cpu_form(file, folder)), "--main_process_port", str(free_port())]
        words_here += [
            str(HERE / "recipe.py"),
            launch,
            str(ROOT / "recipes" / "grpo.py"),
            *words,
            "--output_dir",
            str(folder / "out"),
        ]
        run = start(words_here, folder / "recipe.txt")
        run.wait(600)
        found[launch] = STEP_LINE.findall(run.text())
        assert len(found[launch]) == 3, last_lines(run.text())
    for one, two in zip(found["DDP"], found["ZeRO-2"], strict=True):
        assert one.split("grad")[0] == two.split("grad")[0]

"""How a run ends before its time on two processes: soon, on both, and with one message."""

import re
import time

import pytest
from cells import case
from launches import HERE, ROOT, command, run_cells, start

# What is chosen, and the line that says what ended the run.
FAULTS = {
    "infinite reward": (
        ["--reward_funcs", "faults:infinite"],
        r"^error: reward function 'infinite' returned inf for completion 17 of 32: a reward must be a finite number",
    ),
    "reward raises": (["--reward_funcs", "faults:raising"], r"^KeyError: 'the column is not there'"),
    "reward raises everywhere": (["--reward_funcs", "faults:raising_later"], r"^KeyError: 'the column is not there'"),
    "too few rewards": (["--reward_funcs", "faults:too_few"], r"^error: .*'too_few' returned 15 rewards for 16 completions"),
    "NaN": (
        ["--policy_loss", "faults:nan_there"],
        r"^error: step 2: loss is nan on rank 1, .* The optimizer step was not taken\.$",
    ),
    "gradient": (
        ["--policy_loss", "faults:steep"],
        r"^error: step 2: the norm of the gradient is (inf|nan), .* The optimizer step was not taken\.$",
    ),
    "bug": (["--policy_loss", "faults:buggy_there"], r"^KeyError: 'a bug in the objective'"),
    "wrong input": (["--epsilon_high", "-3"], r"^error: epsilon_high=-3\.0 is out of range"),
    "refused by TRL": (["--use_vllm", "true"], r"^error: vLLM .*\(ImportError in trl/generation/vllm_generation\.py:\d+\)$"),
    "no checkpoint": (["--resume_from_checkpoint", str(HERE)], r"^error: resume_from_checkpoint='.*' is no checkpoint"),
}


def ended(launch, folder, words):
    """(what it printed without the launcher's report, exit status, seconds since the message)."""
    words = ["--max_steps", "4", "--per_device_train_batch_size", "16", "--output_dir", str(folder / "out"), *words]
    run = start(command(launch, folder, HERE / "recipe.py", launch, ROOT / "recipes" / "grpo.py", *words), folder / "out.txt")
    told = None
    while run.process.poll() is None and time.time() - run.started < 240:
        if told is None and re.search(r"^(error|KeyError)", run.text(), re.M):
            told = time.time()
        time.sleep(0.1)
    late = time.time() - (told or run.started)
    run.kill()
    return run.text(), run.process.returncode, late


def check(launch, folder, fault):
    words, message = FAULTS[fault]
    text, code, late = ended(launch, folder, words)
    assert code not in (0, None), text
    assert late < 60
    found = [line.split("]: ", 1)[-1] for line in text.splitlines()]
    assert len([line for line in found if re.search(message, line)]) == 1, text
    own = text.split("Traceback (most recent call last):")
    bug = message.startswith("^KeyError")
    # One traceback for a bug, none for what the user can mend; the launcher adds one of its own.
    assert len([part for part in own[1:] if "accelerate_cli" not in part and "accelerate/commands" not in part]) <= bug, text


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["reward raises", "NaN"])
def test_one_message_on_two_processes(tmp_path, fault):
    check("DDP", tmp_path, fault)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("launch", ["DDP", "ZeRO-2", "ZeRO-3", "FSDP2"])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_under_every_launch(tmp_path, launch, fault):
    check(launch, tmp_path, fault)


# Launch, and what of DeepSpeed's bfloat16: its own check of the gradient, or none.
STEEP = [*((launch, "") for launch in ("DDP", "FSDP2", "ZeRO-1", "ZeRO-2", "ZeRO-3")),
         ("ZeRO-2", "bf16"), ("ZeRO-2", "bf16 unchecked"), ("ZeRO-3", "bf16 unchecked")]  # fmt: skip


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(("launch", "precision"), STEEP)
def test_what_is_said_of_a_gradient_that_is_not_finite_is_true(toy, tmp_path, launch, precision):
    """G2: "was not taken" where the weights are as they were; "has taken" where ZeRO-1 or 2 is told not to look, and they are lost."""
    cell = case("steep", policy_loss="faults:steep_at_once", bf16=precision != "", save_strategy="no")
    cell |= {"stops": True, "unchecked": "unchecked" in precision}
    (result,) = run_cells(launch, [cell], tmp_path / "run", toy).values()
    taken = (launch, precision) == ("ZeRO-2", "bf16 unchecked")
    assert ("The optimizer step was not taken." in result["stopped"]) == (not taken)
    assert ("DeepSpeed has taken the optimizer step" in result["stopped"]) == taken
    assert (result["moved"] == 0.0) == (not taken), result["moved"]
    assert result["steps"] == 0

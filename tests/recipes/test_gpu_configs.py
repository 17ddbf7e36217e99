"""recipes/configs/gpu: each builds into its configuration, and its header states the memory that the formula gives."""

import re

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from reciperun import ROOT

from recipes import arguments, grpo, rewards, runner
from trl_lossplus import LossPlusError
from trl_lossplus.memory import SHAPES, shape_of
from trl_lossplus.memory_config import in_a_line, main, need, read, setup_of

FOLDER = ROOT / "recipes" / "configs" / "gpu"
CONFIGS = sorted(FOLDER.glob("*.yaml"))
TASKS = {"openai/gsm8k": ["math_accuracy"], "zwhe99/DeepMath-103K": ["math_accuracy", "soft_overlong"]}
by_name = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)


def size_of(path):
    """(method, GPUs, GB of each) as the file's name says."""
    method, gpus, gpu = re.search(r"_(lora|qlora|full)_(?:(\d+)x)?(\d+)gb$", path.stem).groups()
    return method, int(gpus or 1), int(gpu)


def commands(path):
    """The `accelerate launch` commands of the header, as words."""
    return [line.split()[3:] for line in path.read_text().splitlines() if line.startswith("#   accelerate launch")]


def test_there_is_one_for_each_size():
    assert {size_of(path)[1:] for path in CONFIGS} >= {(1, 8), (1, 12), (1, 16), (1, 24), (8, 24), (8, 80)}
    families = {(path.stem.split("_")[0].rstrip("0123456789.b"), size_of(path)[0]) for path in CONFIGS}
    assert families == {("qwen", "lora"), ("qwen", "qlora"), ("qwen", "full"), ("llama", "qlora")}


@by_name
def test_it_is_what_its_name_says(path):
    script, training, model = arguments.parse(grpo.RECIPE, ["--config", str(path)], say=lambda line: None)
    method = size_of(path)[0]
    assert (model.use_peft, model.load_in_4bit) == (method != "full", method == "qlora")
    settings = runner.model_settings(training, model)
    assert (settings["peft_config"] is not None) == (method != "full")
    assert (settings.get("quantization_config") is not None) == (method == "qlora")
    spec = training.loss_spec()
    assert (spec.policy_loss, spec.clip_high, spec.loss_aggregation, spec.kl_in_loss) == ("ppo_clip", 0.28, "token_mean", False)
    assert training.is_on_policy
    assert script.reward_names() == TASKS[script.dataset_name]
    made = rewards.reward_functions(script.reward_names(), training.max_completion_length, script.reward_kwargs)
    assert len(made) == len(TASKS[script.dataset_name])
    assert training.vllm_mode == "colocate"
    assert training.bf16
    assert training.output_dir == f"runs/{path.stem}"


@by_name
def test_the_header_states_its_memory(path):
    """Each line under "Memory" is what the command above it prints, it fits, and vLLM has room for the longest row."""
    text, values = path.read_text(), read(path)
    gpu, prompt = (int(re.search(rf"--{name} (\d+)", text)[1]) for name in ("gpu", "prompt"))
    assert gpu == size_of(path)[2]
    assert values["vllm_max_model_length"] == prompt + values["max_completion_length"]
    stated = re.findall(r"^#   (?:(--zero_stage.*): )?(training .*)$", text, re.M)
    assert len(stated) == (1 if size_of(path)[1] == 1 else 3)
    for flags, line in stated:
        launch = {"zero_stage": 0, "processes": 1}
        launch |= {name: int(value) for name, value in re.findall(r"--(zero_stage|processes) (\d)", flags)}
        found = need(values, gpu, prompt, **launch, deepspeed="--deepspeed" in flags)
        assert in_a_line(found).split(" (with")[0] == line
        assert found.fits
        cache = 4 * bytes_a_token(values) * (prompt + values["max_completion_length"])  # four rows at once, at the least
        assert found.vllm > found.vllm_weights + cache


def bytes_a_token(values):
    """Bytes of one token's keys and values in bfloat16."""
    shape = shape_of(values["model_name_or_path"])
    return 2 * shape.num_layers * shape.kv_size * 2


@by_name
def test_its_commands_are_accelerates(path):
    found = commands(path)
    assert len(found) == (1 if size_of(path)[1] == 1 else 4)
    for words in found:
        parsed = launch_command_parser().parse_args([*words[1:]] if words[0] == "launch" else words)
        config = yaml.safe_load((ROOT / parsed.config_file).read_text())
        assert (ROOT / parsed.training_script).is_file()
        assert ROOT / parsed.training_script_args[1] == path
        machines = parsed.num_machines or config["num_machines"]
        processes = parsed.num_processes or config["num_processes"]
        assert processes == machines * size_of(path)[1]
        if machines > 1:
            values, given = (
                read(path),
                dict(zip(parsed.training_script_args[::2], parsed.training_script_args[1::2], strict=True)),
            )
            assert (parsed.machine_rank, parsed.main_process_ip) == (0, "10.0.0.1")
            assert int(given["--gradient_accumulation_steps"]) * machines == values["gradient_accumulation_steps"]


def test_the_page_lists_each_with_its_memory():
    rows = [line.split(" | ") for line in (ROOT / "docs" / "scaling.md").read_text().splitlines() if "gb` | " in line]
    listed = {cells[1].strip("`"): cells[-1].removesuffix(" |") for cells in rows}
    stated = {path.stem: re.findall(r"training ([\d.]+) GiB( \+ vLLM [\d.]+ = [\d.]+) of", path.read_text()) for path in CONFIGS}
    assert listed == {stem: "; ".join(map("".join, found)) for stem, found in stated.items()}


# The command behind the numbers.


def test_a_smaller_gpu_does_not_do():
    values = read(FOLDER / "qwen7b_qlora_24gb.yaml")
    assert not need(values, 12, 512).fits
    assert not need({**values, "load_in_4bit": False}, 24, 512).fits
    assert not need({**values, "vllm_gpu_memory_utilization": 0.2}, 24, 512).fits  # 4.8 GiB for weights of 5.2


def test_what_a_recipe_needs_by_hand():
    """1.5B with LoRA: vLLM's share and weights, and the room that must stay."""
    found = need(read(FOLDER / "qwen1.5b_lora_12gb.yaml"), 12, 256)
    assert found.vllm == pytest.approx(0.4 * 12 * 2**30)
    assert found.vllm_weights == SHAPES["1.5B"].parameters * 2
    assert found.together == found.training.peak + found.vllm
    assert need({**read(FOLDER / "qwen1.5b_lora_12gb.yaml"), "use_vllm": False}, 12, 256).vllm == 0
    tight = (found.together + 2**30 + 0.1 * found.training.peak) / 2**30
    share = found.vllm / 2**30
    for gpu, fits in ((tight + 0.01, True), (tight - 0.01, False)):
        values = {**read(FOLDER / "qwen1.5b_lora_12gb.yaml"), "vllm_gpu_memory_utilization": share / gpu}
        assert need(values, gpu, 256).fits == fits


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"beta": 0.1}, "reference", True),
        ({"kl_placement": "reward"}, "reference", True),
        ({"vf_coef": 0.1}, "critic", "adapter"),
        ({"vf_coef": 0.1, "use_peft": False}, "critic", "model"),
        ({"critic": "shared"}, "critic", "shared"),
        ({"gradient_accumulation_steps": 1}, "accumulates", False),
        ({"max_completion_length": 100}, "context", 356),
    ],
)
def test_fields_that_decide(changes, field, value):
    values = {**read(FOLDER / "qwen1.5b_lora_12gb.yaml"), **changes}
    assert getattr(setup_of(values, 256), field) == value


@pytest.mark.parametrize(
    ("name", "billions"), [("Llama-3.2-1B", 1.236), ("Llama-3.2-3B", 3.213), ("Llama-3.1-8B", 8.030), ("0.5B", 0.494)]
)
def test_shapes_have_the_published_number_of_parameters(name, billions):
    assert SHAPES[name].parameters / 1e9 == pytest.approx(billions, rel=0.002)


@pytest.mark.parametrize(
    ("hub", "size"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", "0.5B"),
        ("Qwen/Qwen2.5-7B", "7B"),
        ("meta-llama/Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
    ],
)
def test_hub_names_of_known_shapes_need_no_download(hub, size):
    assert shape_of(hub) is SHAPES[size]


@pytest.mark.parametrize("name", ["someone/7B", "Qwen/Qwen2.5-9B", "Llama-3.1-8B-Instruct"])
def test_other_names_are_not_taken_for_them(name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(LossPlusError, match="neither a size"):
        shape_of(name)


def test_the_command_prints_it(capsys):
    assert main(["--config", str(FOLDER / "qwen7b_qlora_24gb.yaml"), "--gpu", "24", "--prompt", "512"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("Qwen/Qwen2.5-7B-Instruct: 7.62B parameters, 0.040B trained (QLoRA)")
    assert re.fullmatch(r"  vLLM +9\.60 GiB, 5\.17 of them its weights, the rest its cache", printed[-2])
    assert printed[-1].startswith("training 9.8 GiB + vLLM 9.6 = 19.4 of 24 GiB: fits (with 1 GiB for CUDA's context")


@pytest.mark.parametrize(
    ("text", "message"), [("a: [", "cannot be read"), ("- a", "field: value"), ("seed: 1", "names no model")]
)
def test_a_config_that_says_nothing_is_refused(tmp_path, text, message):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(LossPlusError, match=message):
        main(["--config", str(tmp_path / "c.yaml"), "--gpu", "8"])

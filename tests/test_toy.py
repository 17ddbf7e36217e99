import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_lossplus.toy import (
    KEYWORDS,
    TOY_TRAINING,
    keyword_reward,
    save_toy,
    toy_dataset,
    toy_model,
    toy_tokenizer,
)


def same_weights(first, second):
    first, second = first.state_dict(), second.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_toy(tmp_path_factory.mktemp("toy") / "model")


@pytest.fixture(params=["built", "loaded"])
def tokenizer(request, folder):
    return toy_tokenizer() if request.param == "built" else AutoTokenizer.from_pretrained(folder)


def test_tokenizer_round_trip(tokenizer):
    for prompt in toy_dataset()["prompt"]:
        ids = tokenizer(prompt)["input_ids"]
        assert len(ids) == len(prompt.split())
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == prompt


def test_tokenizer_special_tokens(tokenizer):
    special = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    assert special == [0, 1, 2, 3]
    assert tokenizer("unheard")["input_ids"] == [tokenizer.unk_token_id]
    assert tokenizer.decode([2, 0, 0], skip_special_tokens=True) == ""


def test_tokenizer_pads_left(tokenizer):
    batch = tokenizer(["say apple again", "apple"], padding=True)
    assert batch["attention_mask"] == [[1, 1, 1], [0, 0, 1]]
    assert batch["input_ids"][1][:2] == [tokenizer.pad_token_id] * 2


def test_saved_tokenizer_equals_built(folder):
    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded.get_vocab() == toy_tokenizer().get_vocab()
    assert loaded.is_fast


def test_dataset():
    dataset = toy_dataset()
    assert dataset.num_rows == len(set(dataset["prompt"])) == 48
    assert set(dataset["keyword"]) == set(KEYWORDS)
    # With no more room than this, a policy cannot score by listing every keyword.
    assert TOY_TRAINING["max_completion_length"] <= len(KEYWORDS) / 2
    tokenizer = toy_tokenizer()
    for row in dataset:
        ids = tokenizer(row["keyword"])["input_ids"]
        assert len(ids) == 1
        assert ids[0] != tokenizer.unk_token_id
        assert row["keyword"] in row["prompt"].split()


@pytest.mark.parametrize(
    ("completion", "keyword", "reward"),
    [
        ("apple", "apple", 1.0),
        ("the river  is apple", "apple", 1.0),
        ("apple apple apple", "apple", 1.0),
        ("pineapple apples", "apple", 0.0),
        ("river stone", "apple", 0.0),
        ("", "apple", 0.0),
        ([{"role": "assistant", "content": "an apple"}], "apple", 1.0),
        ([{"role": "assistant", "content": "pineapple"}], "apple", 0.0),
        ([], "apple", 0.0),
    ],
)
def test_keyword_reward(completion, keyword, reward):
    assert keyword_reward([completion], [keyword]) == [reward]


def test_keyword_reward_pairs_each_completion_with_its_own_keyword():
    completions, keywords = ["apple", "apple", "river"], ["apple", "river", "river"]
    rewards = keyword_reward(completions=completions, keyword=keywords, prompts=["", "", ""])
    assert rewards == [1.0, 0.0, 1.0]
    with pytest.raises(ValueError):
        keyword_reward(["apple", "river"], ["apple"])


def test_model_depends_on_its_arguments_alone():
    torch.manual_seed(1)
    first = toy_model()
    torch.manual_seed(2)
    assert same_weights(first, toy_model())
    assert not same_weights(first, toy_model(seed=1))


def test_model_leaves_global_rng_untouched():
    before = torch.get_rng_state()
    toy_model(seed=5)
    assert torch.equal(before, torch.get_rng_state())


def test_model_size_and_dtype():
    model = toy_model(hidden_size=32, num_layers=3, dtype=torch.bfloat16)
    assert model.config.hidden_size == 32
    assert len(model.model.layers) == 3
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    ids = toy_tokenizer()(["please say apple"], return_tensors="pt")["input_ids"]
    assert model(ids).logits.shape == (1, 3, len(toy_tokenizer()))


@pytest.mark.parametrize("arguments", [{"hidden_size": 40}, {"hidden_size": 0}, {"num_layers": 0}])
def test_model_refuses_impossible_sizes(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        toy_model(**arguments)


def test_saved_model_loads_bit_identically(folder):
    assert same_weights(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), toy_model())


def test_save_toy_is_idempotent(tmp_path):
    path = tmp_path / "model"
    assert save_toy(path) == str(path)
    written = {file: file.stat().st_mtime_ns for file in path.iterdir()}
    assert save_toy(path) == str(path)
    assert {file: file.stat().st_mtime_ns for file in path.iterdir()} == written


def test_save_toy_rewrites_other_settings_and_unfinished_folders(tmp_path):
    save_toy(tmp_path)
    save_toy(tmp_path, seed=1)
    assert same_weights(AutoModelForCausalLM.from_pretrained(tmp_path), toy_model(seed=1))
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).unlink()
        save_toy(tmp_path, seed=1)
        assert (tmp_path / name).is_file()

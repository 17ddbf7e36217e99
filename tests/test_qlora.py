"""
recipes/configs/qlora.yaml as far as a CPU without bitsandbytes allows: what the trainer is given.

Not run anywhere here: loading weights in 4 bits, a forward and backward pass through them, saving and merging the adapter.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from recipes import arguments, grpo
from recipes.runner import model_settings

QLORA = Path(__file__).parents[1] / "recipes" / "configs" / "qlora.yaml"


def settings(*words):
    _, training, model = arguments.parse(grpo.RECIPE, ["--config", str(QLORA), *words])
    return training, model_settings(training, model)


def test_four_bits_double_quantization_and_the_dtype_it_computes_in():
    training, given = settings()
    quantization = given["quantization_config"]
    assert quantization.load_in_4bit
    assert quantization.bnb_4bit_quant_type == "nf4"
    assert quantization.bnb_4bit_use_double_quant
    assert quantization.bnb_4bit_compute_dtype == torch.bfloat16
    assert training.model_init_kwargs["dtype"] == "bfloat16"


def test_lora_on_every_linear_layer_without_dropout():
    _, given = settings()
    lora = given["peft_config"]
    assert (lora.r, lora.lora_alpha, lora.lora_dropout) == (16, 32, 0.0)
    assert lora.target_modules == "all-linear" or set(lora.target_modules) == {"all-linear"}


def test_dora_and_rank_stabilized_lora_are_words_on_the_command_line():
    _, given = settings("--use_dora", "true", "--use_rslora", "true")
    assert given["peft_config"].use_dora
    assert given["peft_config"].use_rslora


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is there")
def test_without_bitsandbytes_transformers_says_what_is_missing():
    """How far it goes here: transformers' own check of the environment, before any weight is read."""
    from transformers.quantizers import AutoHfQuantizer

    _, given = settings()
    with pytest.raises(ImportError, match="bitsandbytes"):
        AutoHfQuantizer.from_config(given["quantization_config"]).validate_environment(device_map=None)

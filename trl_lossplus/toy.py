"""The embedded default task: a tiny Llama, a word-level tokenizer, 48 prompts and a keyword reward.

Everything is built in-process from a fixed seed; nothing is downloaded. Each prompt names one of eight
keywords, and a completion scores 1 if it contains that keyword. A completion has room for four words only, so
a policy that ignores its prompt cannot do better than 4/8: a mean reward above 0.5 shows that it reads it.

    from trl import GRPOConfig, GRPOTrainer
    trainer = GRPOTrainer(
        model=save_toy("toy"),
        reward_funcs=keyword_reward,
        train_dataset=toy_dataset(),
        args=GRPOConfig(output_dir="out", **TOY_TRAINING),
    )

With LoRA: the same, and `peft_config=LoraConfig(**TOY_LORA)`.
"""

import json
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, BOS, EOS, UNK = SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
KEYWORDS = ("apple", "river", "stone", "cloud", "tiger", "piano", "lemon", "candle")
TEMPLATES = (
    "please say {}",
    "now write {}",
    "say {} again",
    "tell me {}",
    "use {} here",
    "give us {} now",
)
FILLERS = "a an are at but by can do for from go in is it of on so that the to you"

TOY_TRAINING: dict[str, Any] = {
    "learning_rate": 2e-3,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "max_steps": 150,
    "per_device_train_batch_size": 64,
    "gradient_accumulation_steps": 1,
    "num_generations": 8,
    "max_completion_length": 4,
    "temperature": 1.0,
    "beta": 0.0,
    "seed": 0,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}
"""Keyword arguments of `trl.GRPOConfig` (all but `output_dir`) with which full fine-tuning learns the task.

The mean reward goes from about 0.1 to above 0.95, and `TOY_LORA` learns with the same settings. A learning
rate of 5e-3 is already too high for LoRA: some seeds end near 0.6.
"""

TOY_LORA: dict[str, Any] = {
    "r": 32,
    "lora_alpha": 64,
    "lora_dropout": 0.0,
    "target_modules": "all-linear",
    "bias": "none",
    "task_type": "CAUSAL_LM",
}
"""Keyword arguments of `peft.LoraConfig` with which LoRA learns the task under `TOY_TRAINING`.

The base model is random and stays frozen, so the adapters are wide (every linear layer) and of high rank.
"""

_MARKER = "toy.json"
_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def _vocabulary() -> dict[str, int]:
    """Every word and special token -> its id; the special tokens come first."""
    template_words = [word for template in TEMPLATES for word in template.split() if word != "{}"]
    tokens = dict.fromkeys([*SPECIAL_TOKENS, *KEYWORDS, *template_words, *FILLERS.split()])
    return {token: index for index, token in enumerate(tokens)}


def toy_tokenizer() -> PreTrainedTokenizerFast:
    """The task's word-level tokenizer: text is split at white space and each known word is one token.

    Unknown words become `<unk>`. No token is added to a prompt; padding goes on the left. It survives
    `save_pretrained` and `AutoTokenizer.from_pretrained` next to the config of `toy_model`, but not next to
    one whose `model_type` forces a tokenizer class of its own, such as qwen2.
    """
    backend = Tokenizer(WordLevel(_vocabulary(), unk_token=UNK))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=128,
    )


def toy_model(
    hidden_size: int = 64,
    num_layers: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> LlamaForCausalLM:
    """A tiny Llama on the CPU with random weights that depend on the arguments alone.

    The weights are drawn in float32 and then rounded to `dtype`. The global random state is left as it was.
    It takes up to 128 positions and returns logits (B, T, V), where V is the size of `toy_tokenizer`.

    Raises:
        ValueError: if `hidden_size` is not a positive multiple of 16 (the size of an attention head), or
            `num_layers` is not positive.
    """
    if hidden_size < 1 or hidden_size % 16:
        raise ValueError(f"hidden_size must be a positive multiple of 16, got {hidden_size}")
    if num_layers < 1:
        raise ValueError(f"num_layers must be positive, got {num_layers}")
    vocabulary = _vocabulary()
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 16,
        num_key_value_heads=hidden_size // 16,
        max_position_embeddings=128,
        initializer_range=0.1,
        tie_word_embeddings=False,
        pad_token_id=vocabulary[PAD],
        bos_token_id=vocabulary[BOS],
        eos_token_id=vocabulary[EOS],
        dtype=torch.float32,
    )
    # The CPU generator alone is seeded: torch.manual_seed would also reseed accelerators, beyond the fork.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        model = LlamaForCausalLM(config)
    # Parameters only: rotary frequencies stay in float32, as from_pretrained would leave them.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model.eval()


def save_toy(path: str | Path, hidden_size: int = 64, num_layers: int = 2, seed: int = 0) -> str:
    """Write `toy_model` and `toy_tokenizer` to the folder `path`, for `GRPOTrainer(model=path)`.

    A folder that this function completed earlier with the same arguments is left alone; with others it is
    overwritten. The marker file is written last, so a run cut short leaves no folder that looks complete.

    Returns:
        `path` as a string.

    Raises:
        ValueError: as `toy_model` does.
        OSError: if the folder cannot be written.
    """
    folder = Path(path)
    marker = folder / _MARKER
    settings = {"hidden_size": hidden_size, "num_layers": num_layers, "seed": seed}
    complete = all((folder / name).is_file() for name in (_MARKER, *_FILES))
    if complete and json.loads(marker.read_text()) == settings:
        return str(path)
    model = toy_model(hidden_size, num_layers, seed)
    marker.unlink(missing_ok=True)
    model.save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    marker.write_text(json.dumps(settings))
    return str(path)


def toy_dataset() -> Dataset:
    """48 rows, every keyword in every template: `prompt` (a string of 3 or 4 words) and its `keyword`."""
    pairs = [(template, keyword) for template in TEMPLATES for keyword in KEYWORDS]
    return Dataset.from_list([{"prompt": template.format(word), "keyword": word} for template, word in pairs])


def keyword_reward(completions: list, keyword: list[str], **kwargs: Any) -> list[float]:
    """1.0 for each completion that has its keyword among its words, else 0.0; a reward function for TRL.

    Args:
        completions: B strings, or B conversations (each a list of messages, whose `content`s are joined).
        keyword: the B keywords, as TRL passes the dataset's column.
        kwargs: the other columns, ignored.

    Raises:
        ValueError: if there are not as many keywords as completions.
    """
    texts = [done if isinstance(done, str) else _conversation_text(done) for done in completions]
    return [float(word in text.split()) for text, word in zip(texts, keyword, strict=True)]


def _conversation_text(messages: list[dict]) -> str:
    return " ".join(message["content"] for message in messages)

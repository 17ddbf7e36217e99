"""A tiny reward model for the toy, so that a critic can start from one without a download."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification

from trl_lossplus.toy import FILLERS, KEYWORDS, keyword_reward, toy_dataset, toy_tokenizer

TOY_REWARD_MODEL = "toy_reward_model"
STEPS, ROWS, LEARNING_RATE, LONGEST = 200, 64, 2e-3, 4
_MARKER = "toy_reward_model.json"


def toy_reward_model(base: str, folder: str | Path, seed: int = 0) -> str:
    """
    A sequence-classification model that scores prompt and completion as the toy's keyword reward does; trains for some seconds.

    It sees completions of 1 to 4 random words, every second one with the keyword among them, and regresses the reward at the last
    token. A folder that it completed earlier with the same arguments is left alone.

    Args:
        base: folder of the toy policy, where its trunk starts. folder: where it is put.

    Returns:
        `folder` as a string, for `critic_model_name_or_path`.
    """
    target = Path(folder)
    settings = {"base": Path(base).name, "seed": seed, "steps": STEPS}
    marker = target / _MARKER
    if marker.is_file() and json.loads(marker.read_text()) == settings:
        return str(folder)
    tokenizer, data = toy_tokenizer(), toy_dataset()
    words = [*KEYWORDS, *FILLERS.split()]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        for _ in range(STEPS):
            rows = [data[i] for i in torch.randint(len(data), (ROWS,)).tolist()]
            texts = [_completion(words, row["keyword"] if i % 2 else None) for i, row in enumerate(rows)]
            scores = torch.tensor(keyword_reward(texts, [row["keyword"] for row in rows]))
            inputs = tokenizer(
                [f"{row['prompt']} {text}" for row, text in zip(rows, texts, strict=True)], return_tensors="pt", padding=True
            )
            loss = (model(**inputs).logits.squeeze(-1) - scores).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    marker.write_text(json.dumps(settings))
    return str(folder)


def _completion(words: list[str], keyword: str | None) -> str:
    """1 to 4 random words; `keyword` takes the place of one of them."""
    length = int(torch.randint(1, LONGEST + 1, ()))
    chosen = [words[i] for i in torch.randint(len(words), (length,)).tolist()]
    if keyword is not None:
        chosen[int(torch.randint(length, ()))] = keyword
    return " ".join(chosen)

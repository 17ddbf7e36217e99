"""
GRPO with a chosen loss, for `accelerate launch` or plain python.

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/grpo.py            # the toy: no arguments needed
    python recipes/grpo.py --config recipes/configs/dapo.yaml --max_steps 20 --beta 0.01   # YAML, and overrides
    python recipes/grpo.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name data.jsonl --reward_funcs my_rewards:good

Arguments: those of RecipeArguments (dataset and rewards), GRPOPlusConfig (training and loss) and trl.ModelConfig (model, LoRA,
quantization). Wrong input ends in one line and exit status 2.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # the repository's root, not this folder, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from recipes import runner
from recipes.arguments import Recipe
from trl_lossplus import GRPOPlusConfig, GRPOPlusTrainer

RECIPE = Recipe("grpo", GRPOPlusConfig, GRPOPlusTrainer)
main = partial(runner.main, RECIPE)

if __name__ == "__main__":
    sys.exit(main())

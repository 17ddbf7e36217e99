import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
for folder in ("mirror", "trainers"):
    sys.path.insert(0, str(Path(__file__).parent / folder))
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

"""`trl-lossplus check`: every number of a small training run, a second time, by hand (see `run.py`; the formulas are in `plain*.py`)."""

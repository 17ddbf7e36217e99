"""Pure tensor mathematics: no trainer, no configuration, no metric names."""

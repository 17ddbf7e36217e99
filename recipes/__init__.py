"""Scripts for `accelerate launch`."""

"""Subclasses of TRL's trainers that replace the loss and what feeds it."""

"""What the loss did: statistics of an optimizer step."""

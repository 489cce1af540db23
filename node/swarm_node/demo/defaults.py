"""What the demo does if nobody says otherwise. Apart from `plan`, so that `--help` need not load torch."""

from __future__ import annotations

NUM_NODES = 4

# about a minute on two cores: 0.8M tokens, after which the validation loss is near 2
OUTER_STEPS = 12
INTERVAL_STEPS = 32

PROMPT = "def fibonacci(n):\n    if n"
MIN_NEW_TOKENS = 160

# after a minute of training the likeliest next byte is a space, for ever: text needs some chance
TEMPERATURE = 0.7

"""What a test draws at random is the same each time, unless SEED in the environment names other
numbers.
"""

import os


def chosen_seed() -> int:
    """The seed of a test, which is shown with its failure."""
    seed = int(os.environ.get("SEED", 20261121))
    print(f"seed {seed} (set SEED to draw others)")
    return seed

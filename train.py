"""Train: `python train.py ...` is `transformer-jax train ...`."""

import sys

from transformer_jax.cli import main

# The guard keeps worker processes, which import this file again, from starting a second run.
if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))

"""Use a trained model: `python serve.py ...` is `transformer-jax ...`."""

import sys

from transformer_jax.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

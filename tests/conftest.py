"""What every test runs under: eight CPU devices, shapes and types checked on every call, repeatable runs."""

import os
import shutil
from pathlib import Path

import hypothesis
import jax
import jaxtyping
import pytest

# Set here and not in the environment, so that a program that a test starts sees the machine as its user would.
if "JAX_PLATFORMS" not in os.environ:
    jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# What programs that tests start keep for later is kept here, and no text is taken from an earlier run's tokens.
cache = Path(__file__).parent.parent / ".pytest_cache" / "user"
os.environ["XDG_CACHE_HOME"] = str(cache)
shutil.rmtree(cache / "transformer_jax" / "tokens", ignore_errors=True)

# Most of a test's time is compilation; what an earlier run compiled is read back, however small.
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".pytest_cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# Before the first import of the package: its annotations, jaxtyping's shapes among them, hold on every call.
# Settings check themselves, with messages for people, which the hook would forestall.
floors = ("analysis", "training", "decoding", "text", "model", "report", "machine", "sharding")
jaxtyping.install_import_hook([f"transformer_jax.{floor}" for floor in floors], "beartype.beartype")

# The same examples in every run, so that a red run can be repeated; no deadline, because a first call compiles.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The folder that holds pyproject.toml."""
    return Path(__file__).parent.parent

"""What must hold of the source as a whole: import cost, public names, the floors, and the ways in."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import transformer_jax

PACKAGE = Path(transformer_jax.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
MESH_NAMES = {
    "Mesh",
    "NamedSharding",
    "P",
    "PartitionSpec",
    "get_mesh",
    "make_mesh",
    "mesh_utils",
    "reshard",
    "set_mesh",
    "shard_map",
    "sharding",
    "with_sharding_constraint",
}


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)


def test_importing_the_package_loads_nothing_heavy(repository: Path):
    found = run(sys.executable, "-c", "import sys, transformer_jax; print(*sys.modules)", cwd=repository)
    assert "transformer_jax.config" in found.stdout.split()
    assert not {"flax", "jax", "matplotlib", "numpy", "optax", "orbax"} & set(found.stdout.split())


@pytest.mark.parametrize("name", transformer_jax.__all__)
def test_a_public_name_is_what_its_file_defines(name: str):
    value = getattr(transformer_jax, name)
    assert value.__name__ == name
    assert value.__module__.startswith("transformer_jax.")
    assert name in dir(transformer_jax)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = transformer_jax.no_such_name


def test_every_floor_is_a_package_with_its_order_in_a_contract(repository: Path):
    contracts = tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    ordered = {c for contract in contracts if contract.get("exhaustive") for c in contract["containers"]}
    for folder in {source.parent for source in SOURCES}:
        # A folder without it is invisible to import-linter.
        assert (folder / "__init__.py").exists(), f"{folder} has no __init__.py"
        assert ".".join(folder.relative_to(PACKAGE.parent).parts) in ordered, f"{folder} has no layers contract"


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("sharding.py", "import transformer_jax.model.transformer", "A file imports"),
        ("new_file.py", "import json", "A file imports"),
        ("model/masks.py", "from transformer_jax.model import attention", "Inside model"),
        ("text/tokenizer.py", "from transformer_jax.text.corpus import find_corpus", "Inside text"),
        ("decoding/sampling.py", "import transformer_jax.decoding.generate", "Inside decoding"),
        ("training/objectives.py", "import transformer_jax.training.step", "Inside training"),
        ("analysis/new_file.py", "import json", "Inside analysis"),
        ("model/layers.py", "import optax", "model knows no text"),
        ("errors.py", "import jax.numpy", "Settings and errors"),
        ("text/tokenizer.py", "from transformer_jax import build", "No file imports"),
    ],
)
def test_the_contracts_bind(file: str, line: str, contract: str, repository: Path, tmp_path: Path):
    shutil.copy(repository / "pyproject.toml", tmp_path)
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    lint = [Path(sys.executable).parent / "lint-imports", "--no-cache"]
    kept = run(*lint, cwd=tmp_path)
    assert kept.returncode == 0, kept.stdout
    with (tmp_path / PACKAGE.name / file).open("a") as source:
        source.write(f"\n{line}\n")
    broken = run(*lint, cwd=tmp_path)
    assert broken.returncode == 1
    verdicts = [found for found in broken.stdout.splitlines() if found.startswith(contract)]
    assert "BROKEN" in verdicts[0]


def dotted_names(tree: ast.AST) -> Iterator[str]:
    """Every `a.b.c` that a file imports or mentions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def names_a_mesh(source: str) -> bool:
    return any(
        name.split(".")[0] == "jax" and MESH_NAMES & set(name.split(".")) for name in dotted_names(ast.parse(source))
    )


@pytest.mark.parametrize(
    "source",
    [
        "import jax.sharding",
        "from jax import P",
        "from jax.sharding import Mesh",
        "f(jax.lax.with_sharding_constraint)",
    ],
)
def test_a_mesh_is_seen_however_it_is_named(source: str):
    assert names_a_mesh(source)
    assert not names_a_mesh("import jax.numpy as jnp\nx.sharding")


def test_only_sharding_names_a_mesh():
    assert [source.name for source in SOURCES if names_a_mesh(source.read_text())] == ["sharding.py"]


def test_no_checker_is_silenced_inline(repository: Path):
    silenced = re.compile(r"#\s*(?:type:\s*ignore|pyright:|noqa|ruff:\s*noqa|pragma:)")
    for source in [*SOURCES, *(repository / "tests").rglob("*.py"), *repository.glob("*.py")]:
        assert not silenced.findall(source.read_text()), source


def test_files_and_functions_stay_short():
    for source in SOURCES:
        text = source.read_text()
        assert text.count("\n") < 400, source
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 50, f"{source}: {node.name}"


@pytest.mark.parametrize(
    ("way_in", "words"),
    [
        (["train.py"], ["train"]),
        (["serve.py"], []),
        (["-c", "import sys, transformer_jax.cli as cli; sys.exit(cli.main())"], []),
    ],
    ids=["train.py", "serve.py", "main"],
)
def test_every_way_in_is_the_same_program(way_in: list[str], words: list[str], repository: Path):
    for argument, status in (("--help", 0), ("--preset=no-such-word", 2)):
        one = run(sys.executable, *way_in, argument, cwd=repository)
        other = run(sys.executable, "-m", "transformer_jax", *words, argument, cwd=repository)
        assert (one.returncode, one.stdout, one.stderr) == (other.returncode, other.stdout, other.stderr)
        assert one.returncode == status
        assert "usage: transformer-jax" in one.stdout or "no-such-word" in one.stderr


def test_the_installed_command_is_main(repository: Path):
    command = [Path(sys.executable).parent / "transformer-jax", "--help"]
    assert run(*command, cwd=repository).stdout == run(sys.executable, "serve.py", "--help", cwd=repository).stdout

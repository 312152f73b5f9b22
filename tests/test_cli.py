"""The command line as a user meets it: help, mistakes, and text that arrives whole."""

import json
import subprocess
import sys

import pytest

import transformer_jax
from transformer_jax.cli import main

MISTAKES = {
    "preset": (["train", "--preset", "huge"], "no preset is called 'huge'; expected one of tiny, small"),
    "value": (["train", "--model.num-heads", "3"], "ModelConfig.d_model is 256; expected a multiple of num_heads = 3"),
    "range": (["train", "--optimizer.clip-norm", "-1"], "OptimizerConfig.clip_norm is -1.0; expected more than 0"),
    "folder": (["generate", "--model", "nowhere", "--prompt", "a"], "there is no model at 'nowhere'"),
    "no paths": (["train", "--data.paths", "--training.steps", "3"], "--data.paths is empty"),
    "preset twice": (["train", "--preset", "tiny", "--preset", "huge"], "no preset is called 'huge'"),
    "mesh": (["train", "--mesh.data", "-1", "--mesh.fsdp", "-1"], "at most one size may be -1"),
}


def test_the_version_is_told(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{transformer_jax.__version__}\n"


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_message_and_exit_code_2(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.startswith("error: ")
    assert "Traceback" not in printed.err


def test_an_unknown_option_is_named_with_what_was_perhaps_meant(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["train", "--model.num-head", "4"])
    assert exit.value.code == 2
    printed = capsys.readouterr().err
    assert "--model.num-head" in printed
    assert "--model.num-heads" in printed


def test_every_field_is_an_option_with_help_and_the_presets_default(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["train", "--preset", "small", "--help"])
    assert exit.value.code == 0
    printed = capsys.readouterr().out
    assert "--model.rope-theta" in printed
    assert "Base of the rotary frequencies" in printed
    assert "(default: 384)" in printed


@pytest.mark.slow
def test_rates_are_printed_as_json(capsys):
    arguments = "bench train --preset tiny --batch-size 2 --seq-len 8 --steps 1 --dtypes float32 --json"
    assert main(arguments.split()) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["tokens_per_s"] == pytest.approx(16 / row["ms_per_step"] * 1e3)
    assert row["of_matmul_peak"] == pytest.approx(row["gflops_per_s"] / row["matmul_peak_gflops_per_s"])
    arguments = "bench decode --preset tiny --batch-sizes 2 --context 16 --steps 2 --dtypes bfloat16 --json"
    assert main(arguments.split()) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["tokens_per_s"] == pytest.approx(2 / row["ms_per_step"] * 1e3)
    assert 0 < row["of_read_bandwidth"] < 1


def test_importing_the_package_is_quick_and_loads_no_jax():
    program = "import sys, transformer_jax; assert 'jax' not in sys.modules, 'jax is loaded'"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)

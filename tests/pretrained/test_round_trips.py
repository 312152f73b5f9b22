"""What is written is what was read: by this project's own readers, by transformers and by llama.cpp.

The last two are no dependencies of this project: those tests run where TRANSFORMER_JAX_PEERS names a Python that has
them (CONTRIBUTING.md), each group of them in one process of ask_peers.py.
"""

import dataclasses
import functools
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.pretrained.test_families import FIXTURES, NAMES, expected, load
from tests.pretrained.test_real_weights import REAL, TOKENIZED, every_decoder, opened
from tests.pretrained.test_tokenizers_out import like_roberta, word_pieces
from transformer_jax.architecture import ModelConfig, RopeScaling
from transformer_jax.config import DecodingConfig
from transformer_jax.decoding.embedding import embed
from transformer_jax.decoding.generate import generate
from transformer_jax.model.transformer import build
from transformer_jax.pretrained.convert import Stored, convert
from transformer_jax.pretrained.gguf import load_gguf
from transformer_jax.pretrained.huggingface import config_of_folder, load_folder, save_folder
from transformer_jax.text.tokenizer import Tokenizer, byte_tokenizer, train_bpe

pytestmark = pytest.mark.slow
PEERS = os.environ.get("TRANSFORMER_JAX_PEERS") or None
needs_peers = pytest.mark.skipif(
    PEERS is None,
    reason="set TRANSFORMER_JAX_PEERS to a Python with torch, transformers and llama-cpp-python (CONTRIBUTING.md)",
)
LARGER = {"vocab_size": 257, "max_seq_len": 64, "d_model": 64, "d_ff": 96, "num_heads": 2, "head_dim": None}
"""Sizes that llama.cpp's blocks of 32 divide, and the vocabulary of bytes, because a file needs a tokenizer."""
GLOBAL = {"layer_pattern": ("global",), "window": None}
LLAMA_3 = RopeScaling("llama3", factor=8.0, original_max_len=8192)
PATTERN_OF_GEMMA_3 = ("local",) * 5 + ("global",)
WRITTEN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases, tied": ("llama-tied-biases", {"mlp_bias": False}),
    "llama, multi-query": ("llama", {"num_heads": 4, "num_kv_heads": 1, "head_dim": 32}),
    "llama, linear": ("llama-linear", {}),
    "llama, yarn": ("llama-yarn", {}),
    "llama 3": ("llama3", {"rope_scaling": LLAMA_3, "rope_theta": 500_000.0}),
    "mixtral": ("mixtral", {}),
    "qwen2": ("qwen2", GLOBAL),
    "qwen3": ("qwen3", {}),
    "qwen3 with experts": ("qwen3-moe", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_scale": None}),
    "gemma3": (
        "gemma3",
        {"num_layers": 6, "layer_pattern": PATTERN_OF_GEMMA_3, "local_rope_theta": 10_000.0, "query_scale": None},
    ),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", GLOBAL),
    "gpt2": ("gpt2", {}),
    "gpt-neox": ("gpt-neox", {}),
    "bert": ("bert-bare", {}),
    "bert with a pooler": ("bert-bare", {"pooler": True}),
}
"""A model for each of llama.cpp's architectures: a fixture's config, and what is changed in it besides the sizes."""
DECODERS = [name for name in WRITTEN if not name.startswith("bert")]
every_file = pytest.mark.parametrize("name", WRITTEN)
PROMPT = np.random.default_rng(3).integers(0, 256, 40).tolist()


def ask(questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put all questions to one process of the other programs."""
    assert PEERS is not None
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "questions.json", Path(folder) / "answers.json"
        asked.write_text(json.dumps(questions))
        run = subprocess.run(
            [PEERS, Path(__file__).parent / "ask_peers.py", asked, answered],
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr[-4000:]
        return json.loads(answered.read_text())


def random_params(c: ModelConfig):
    """Parameters none of which is 0 or 1, so that each of them counts."""
    leaves, tree = jax.tree.flatten(build(c).init(jax.random.key(0)))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    return tree.unflatten([x + 0.25 * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)])


@functools.cache
def made(name: str):
    fixture, changes = WRITTEN[name]
    c = config_of_folder(FIXTURES / fixture)
    kv_heads = None if c.K == c.N else 1
    c = dataclasses.replace(c, **{**LARGER, "num_kv_heads": kv_heads, "dtype": "float32", **changes})
    return c, random_params(c)


def logits_of(c: ModelConfig, params, ids: list[int]) -> np.ndarray:
    model = build(c)

    @jax.jit
    def run(params, tokens):
        return model.unembed(params, model.trunk(params, tokens, jnp.arange(len(ids))[None]).hidden)

    return np.asarray(run(params, jnp.asarray([ids]))[0])


@every_file
def test_a_gguf_file_written_and_read_is_the_model(name, tmp_path):
    c, params = made(name)
    convert(tmp_path / "model.gguf", c, params, byte_tokenizer(), "float32")
    again = load_gguf(tmp_path / "model.gguf")
    convert(tmp_path / "again.gguf", again.config, again.params, byte_tokenizer(), "float32")
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "model.gguf").read_bytes()
    if name == "llama 3" or c.norm != "rmsnorm_plus_one":
        jax.tree.map(np.testing.assert_array_equal, again.params, params)
    else:
        # The file has 1 added to the scales of norms, which rounds them.
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-7), again.params, params)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What llama.cpp computes with the file of each model, and with other types of numbers for one."""
    folder = tmp_path_factory.mktemp("files")
    questions = []
    for name in DECODERS:
        convert(folder / f"{name}.gguf", *made(name), byte_tokenizer(), "float32")
        questions.append({"path": str(folder / f"{name}.gguf"), "ids": [PROMPT], "greedy": 12})
    for dtype in COARSE:
        convert(folder / f"{dtype}.gguf", *made("llama"), byte_tokenizer(), dtype)
        questions.append({"path": str(folder / f"{dtype}.gguf"), "ids": [PROMPT]})
    answers = ask(questions)
    return folder, dict(zip([*DECODERS, *COARSE], answers, strict=True))


@needs_peers
@pytest.mark.parametrize("name", DECODERS)
def test_llama_cpp_computes_the_same(name, files):
    """llama.cpp looks GELU up in a table of float16: such models differ by up to 0.005, others by up to 0.0002."""
    c, params = made(name)
    answer = files[1][name]
    greedy = answer["greedy"][0]
    logits = logits_of(c, params, PROMPT + greedy)
    error = abs(np.array(answer["logits"][0]) - logits[: len(PROMPT)])
    largest, mean = (1e-2, 1e-3) if c.activation.startswith("gelu") else (1e-3, 2e-5)
    assert error.max() < largest
    assert error.mean() < mean
    assert greedy == logits[len(PROMPT) - 1 : -1].argmax(axis=-1).tolist()


COARSE: dict[Stored, float] = {"float16": 0.01, "bfloat16": 0.08, "q8_0": 0.2}
"""Types of numbers, to which llama.cpp rounds activations too, and by how much its logits may then differ on average.

Measured: 0.0024, 0.023 and 0.064, of logits of up to 10.
"""


@needs_peers
@pytest.mark.parametrize("dtype", COARSE)
def test_llama_cpp_reads_other_types_of_numbers(dtype, files):
    folder, answers = files
    again = load_gguf(folder / f"{dtype}.gguf")
    logits = logits_of(again.config, again.params, PROMPT)
    assert abs(np.array(answers[dtype]["logits"][0]) - logits).mean() < COARSE[dtype]


@needs_peers
@pytest.mark.parametrize("name", ["bert, mean", "bert with a pooler, first", "like roberta, first", "minilm"])
def test_other_programs_make_the_same_vectors(name, tmp_path):
    """Of texts, by the tokens, the model and the pooling that were written; GELU of float16 again, in llama.cpp."""
    if name == "minilm":
        found = opened(name)
        c, params, tokenizer, pooling = found.config, found.params, found.tokenizer, "mean"
    else:
        kind, pooling = name.split(", ")
        tokenizer = like_roberta() if kind == "like roberta" else word_pieces()
        c = dataclasses.replace(made("bert" if kind == "like roberta" else kind)[0], vocab_size=tokenizer.vocab_size)
        params = random_params(c)
    texts = ["unable Café,a ab 你你 zz", "a b\tthe  theory don't", "a"]
    ids = [[*tokenizer.begin(text), *tokenizer.suffix] for text in texts]
    vectors = embed(build(c), params, ids, pooling=pooling)
    places: dict[str, Stored] = {"out": "float32", "out.gguf": "float32", "half.gguf": "float16", "eight.gguf": "q8_0"}
    for place, dtype in places.items():
        convert(tmp_path / place, c, params, tokenizer, dtype, pooling=pooling)
    folder, file, *coarse = ask([{"path": str(tmp_path / place), "vectors": texts} for place in places])
    assert folder["problems"] == []
    assert (folder["text_ids"], file["text_ids"]) == (ids, ids)
    row = 0 if pooling == "first" else slice(None)
    for hidden, vector in zip(folder["logits"], vectors, strict=True):
        mean = np.atleast_2d(np.array(hidden)[row]).mean(axis=0)
        np.testing.assert_allclose(mean / np.linalg.norm(mean), vector, atol=1e-5)
    np.testing.assert_allclose(file["vectors"], vectors, atol=2e-3)
    for answer in coarse:
        assert (np.array(answer["vectors"]) * vectors).sum(axis=-1).min() > 0.98


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """What transformers computes with the folder of each fixture's model, and with two in bfloat16."""
    folder = tmp_path_factory.mktemp("folders")
    questions = []
    for name in NAMES:
        loaded = load(name)
        save_folder(folder / name, loaded.config, loaded.params, prefer=loaded.family)
        ids, types, _ = zip(*expected(name), strict=True)
        question = {"path": str(folder / name), "ids": [row.tolist() for row in ids]}
        questions.append(question if types[0] is None else question | {"types": [row.tolist() for row in types]})
    for name in ROUNDED:
        loaded = load(name)
        stored = jax.tree.map(lambda x: x.astype(jnp.bfloat16), loaded.params)
        path = folder / f"{name} rounded"
        save_folder(path, loaded.config, stored, prefer=loaded.family, dtype="bfloat16")
        questions.append({"path": str(path), "ids": [expected(name)[0][0].tolist()]})
    names = [*NAMES, *(f"{name} rounded" for name in ROUNDED)]
    return folder, dict(zip(names, ask(questions), strict=True))


ROUNDED = ("gemma3", "llama")
"""Without experts: rounding may lead a token to others."""


@needs_peers
@pytest.mark.parametrize("name", NAMES)
def test_transformers_computes_the_same_with_what_was_read_and_written(name, folders):
    answer = folders[1][name]
    assert (answer["problems"], answer["dtype"]) == ([], "torch.float32")
    assert answer["class"] == json.loads((FIXTURES / name / "config.json").read_text())["architectures"][0]
    for found, (_, _, logits) in zip(answer["logits"], expected(name), strict=True):
        np.testing.assert_allclose(found, logits, atol=1e-5)


@needs_peers
@pytest.mark.parametrize("name", ROUNDED)
def test_transformers_reads_bfloat16(name, folders):
    folder, answers = folders
    answer = answers[f"{name} rounded"]
    assert (answer["problems"], answer["dtype"]) == ([], "torch.bfloat16")
    again = load_folder(folder / f"{name} rounded")
    assert again.config.dtype == "bfloat16"
    logits = logits_of(again.config, again.params, expected(name)[0][0].tolist())
    np.testing.assert_allclose(answer["logits"][0], logits, atol=0.1)


TEXTS = ["the theory of the thing", " a space,  two and\n\n\ttabs", "é 你好 🙂 ½ ٣٤", "don't 12345", ""]


def trained() -> Tokenizer:
    return train_bpe([Path(__file__).read_text()], 400)


@needs_peers
@pytest.mark.parametrize("tokenizer", [byte_tokenizer, trained])
def test_a_model_of_ones_own_is_the_same_model_elsewhere(tokenizer, tmp_path):
    """Its tokens, logits and greedy text: in transformers from a folder, in llama.cpp from a file."""
    tokenizer = tokenizer()
    c = ModelConfig(**{**LARGER, "vocab_size": tokenizer.vocab_size, "num_layers": 2, "dtype": "float32"})
    params = random_params(c)
    questions = []
    for name in ("folder", "file.gguf"):
        convert(tmp_path / name, c, params, tokenizer, "float32")
        questions.append({"path": str(tmp_path / name), "ids": [PROMPT], "texts": TEXTS, "greedy": 12})
    ids = [tokenizer.begin(text) for text in TEXTS]
    greedy = DecodingConfig(max_tokens=12, temperature=0.0)
    written = generate(build(c), params, ids, greedy, stop_ids=tokenizer.stop_ids)
    logits = logits_of(c, params, PROMPT)
    for answer in ask(questions):
        assert answer.get("problems", []) == []
        assert answer["text_ids"] == ids
        np.testing.assert_allclose(answer["logits"][0], logits, atol=1e-4)
        kept = [[i for i in row if i not in tokenizer.stop_ids] for row in answer["greedy"]]
        assert kept == [completion.tokens for completion in written]


@needs_peers
@every_decoder
def test_text_is_split_alike_elsewhere(name, tmp_path):
    """The tokenizers of published models, which a small model carries to transformers and to llama.cpp."""
    tokenizer = opened(name).tokenizer
    small: dict[str, Any] = {
        "vocab_size": tokenizer.vocab_size,
        "num_layers": 1,
        "d_model": 32,
        "d_ff": 32,
        "num_heads": 1,
    }
    c = ModelConfig(**small)
    questions = []
    for file in ("folder", "file.gguf"):
        convert(tmp_path / file, c, build(c).init(jax.random.key(0)), tokenizer, "bfloat16")
        questions.append({"path": str(tmp_path / file), "texts": list(TOKENIZED[name])})
    for answer in ask(questions):
        assert dict(zip(TOKENIZED[name], answer["text_ids"], strict=True)) == TOKENIZED[name]


@needs_peers
@pytest.mark.parametrize(("name", "numbers"), [("smollm2", (1, 2)), ("gemma3-270m", (1,))], ids=list(TOKENIZED))
def test_real_weights_write_the_same_text_elsewhere(name, numbers):
    """On prompts after which llama.cpp agrees with transformers about the published file too."""
    found, arrays = opened(name), np.load(REAL / f"{name}.npz")
    texts = [("", "def fibonacci(n):\n", "Once upon a time")[number] for number in numbers]
    stored: list[tuple[str, Stored]] = [("folder", "float32"), ("float32.gguf", "float32"), ("q8_0.gguf", "q8_0")]
    # Gigabytes, which pytest's own folders would keep.
    with tempfile.TemporaryDirectory() as folder:
        for file, dtype in stored:
            convert(Path(folder) / file, found.config, found.params, found.tokenizer, dtype)
        questions = [{"path": str(Path(folder) / file), "texts": texts, "greedy": 32} for file, _ in stored]
        answers = ask(questions)
    for answer in answers:
        assert answer["text_ids"] == [arrays[f"ids{number}"].tolist() for number in numbers]
        assert answer["greedy"] == [arrays[f"greedy{number}"].tolist() for number in numbers]

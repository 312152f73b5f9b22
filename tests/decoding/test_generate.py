"""Prefill and decoding against a forward pass without a cache, alone and in company, whole and in pieces."""

import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.decoding.models import bigram, make_model, successor_logits, uncached_logprobs
from transformer_jax.config import DecodingConfig
from transformer_jax.decoding.generate import (
    SMALLEST_CACHE,
    Completion,
    DecodeState,
    decode,
    decode_step,
    generate,
    stream,
)
from transformer_jax.decoding.prefill import prefill
from transformer_jax.decoding.sampling import sample, sampling_params
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Model, Output, Params

PROMPTS = [[5], [9, 2, 60, 33, 1], list(range(20, 41)), [7, 7, 7]]


def greedy(max_tokens: int = 10) -> DecodingConfig:
    return DecodingConfig(max_tokens=max_tokens, temperature=0.0)


def random_prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 61, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


def pad(prompts: list[list[int]], width: int, side: str) -> tuple[np.ndarray, np.ndarray]:
    tokens, positions = np.zeros((len(prompts), width), np.int32), np.full((len(prompts), width), -1, np.int32)
    for row, prompt in enumerate(prompts):
        columns = slice(len(prompt)) if side == "right" else slice(width - len(prompt), width)
        tokens[row, columns], positions[row, columns] = prompt, np.arange(len(prompt))
    return tokens, positions


def start(model: Model, params: Params, prompts: list[list[int]], config: DecodingConfig) -> DecodeState:
    """Decode from the last token of each prompt, in a cache of 64 slots."""
    rows = len(prompts)
    tokens, positions = pad([prompt[:-1] for prompt in prompts], max(map(len, prompts)), "right")
    cache, _ = prefill(model, params, model.init_cache(rows, 64), tokens, positions)
    return DecodeState(
        cache=cache,
        tokens=jnp.asarray([prompt[-1] for prompt in prompts]),
        positions=jnp.asarray([len(prompt) - 1 for prompt in prompts]),
        last_positions=jnp.full(rows, 63),
        keys=jax.random.split(jax.random.key(1), rows),
        sampling=sampling_params([config] * rows),
    )


@pytest.fixture(scope="module")
def rope() -> tuple[Model, Params]:
    return make_model()


class TestCachedIsUncached:
    @pytest.mark.slow
    @pytest.mark.parametrize("variant", [{}, {"positions": "learned", "norm": "layernorm"}], ids=["rope", "learned"])
    def test_a_greedy_token_is_the_most_likely_after_all_before_it(self, variant: dict[str, Any]):
        model, params = make_model(**variant)
        for prompt, completion in zip(PROMPTS, generate(model, params, PROMPTS, greedy(12)), strict=True):
            logprobs = uncached_logprobs(model, params, prompt + completion.tokens)[len(prompt) - 1 : -1]
            assert completion.tokens == logprobs.argmax(axis=1).tolist()
            np.testing.assert_allclose(completion.logprobs, logprobs.max(axis=1), atol=1e-5)
            assert completion.finish_reason == "length"

    @pytest.mark.slow
    def test_a_cache_that_grows_on_the_way_changes_nothing(self):
        model, params = make_model(max_seq_len=700)
        prompts = [[3, 1], random_prompts(1, 1)[0] * (SMALLEST_CACHE - 20)]
        completions = generate(model, params, prompts, [greedy(40), greedy(300)])
        for prompt, completion in zip(prompts, completions, strict=True):
            logprobs = uncached_logprobs(model, params, prompt + completion.tokens)[len(prompt) - 1 : -1]
            assert completion.tokens == logprobs.argmax(axis=1).tolist()

    def test_a_drawn_token_depends_on_the_request_key_and_the_position_alone(self, rope: tuple[Model, Params]):
        model, params = rope
        config = DecodingConfig(max_tokens=6, temperature=1.5, top_k=20, top_p=0.9, seed=2**32 - 1)
        (completion,) = generate(model, params, [PROMPTS[1]], config)
        logprobs = uncached_logprobs(model, params, PROMPTS[1] + completion.tokens)
        for position, token in enumerate(completion.tokens, start=len(PROMPTS[1])):
            keys = jax.random.fold_in(jax.random.key(np.uint32(config.seed)), position)[None]
            expected, _ = sample(jnp.asarray(logprobs[position - 1 : position]), keys, sampling_params([config]))
            assert token == expected[0]


class TestPrefill:
    @pytest.mark.parametrize("widths", [(1,), (3, 8), (16,)])
    def test_chunked_is_whole(self, rope: tuple[Model, Params], widths: tuple[int, ...]):
        model, params = rope
        tokens, positions = pad(PROMPTS, 21, "right")
        whole_cache, whole = prefill(model, params, model.init_cache(4, 64), tokens, positions)
        cache, hidden = prefill(model, params, model.init_cache(4, 64), tokens, positions, widths=widths)
        np.testing.assert_allclose(hidden, whole, atol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), cache, whole_cache)

    @pytest.mark.parametrize("widths", [(5,), (4, 32)])
    def test_left_padded_is_right_padded_is_alone(self, rope: tuple[Model, Params], widths: tuple[int, ...]):
        model, params = rope
        for side in ("left", "right"):
            cache, hidden = prefill(model, params, model.init_cache(4, 64), *pad(PROMPTS, 23, side), widths=widths)
            for row, prompt in enumerate(PROMPTS):
                alone_cache, alone = prefill(
                    model, params, model.init_cache(1, 64), *pad([prompt], len(prompt), side), widths=widths
                )
                np.testing.assert_allclose(hidden[row], alone[0], atol=1e-5)
                jax.tree.map(lambda a, b, r=row: np.testing.assert_allclose(a[r], b[0], atol=1e-5), cache, alone_cache)


class TestDecode:
    def test_scan_is_loop(self, rope: tuple[Model, Params]):
        model, params = rope
        config = DecodingConfig(temperature=1.3)
        state = start(model, params, PROMPTS, config)
        step = jax.jit(decode_step, static_argnums=0)
        chosen = []
        for _ in range(7):
            state, sampled = step(model, params, state)
            chosen.append(sampled)
        scanned_state, scanned = decode(model, params, start(model, params, PROMPTS, config), steps=7)
        np.testing.assert_array_equal(scanned.tokens, [sampled.tokens for sampled in chosen])
        np.testing.assert_allclose(scanned.logprobs, [sampled.logprobs for sampled in chosen], atol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), scanned_state.cache, state.cache)
        np.testing.assert_array_equal(scanned_state.positions, state.positions)

    def test_a_finished_row_chooses_nothing_and_writes_nothing(self, rope: tuple[Model, Params]):
        model, params = rope
        state = start(model, params, PROMPTS, greedy())
        state = state._replace(positions=state.positions.at[1].set(-1))
        before = jax.tree.map(lambda leaf: np.array(leaf[1]), state.cache)
        state, sampled = decode(model, params, state, steps=3)
        assert sampled.tokens[:, 1].tolist() == [-1, -1, -1]
        assert (np.asarray(sampled.tokens)[:, [0, 2, 3]] >= 0).all()
        assert state.positions[1] == -1
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1], b), state.cache, before)


class TestCompany:
    MIX = (
        DecodingConfig(max_tokens=9, temperature=0.0),
        DecodingConfig(max_tokens=14, temperature=1.4, seed=3),
        DecodingConfig(max_tokens=5, temperature=0.9, top_p=0.8, seed=4),
        DecodingConfig(max_tokens=11, temperature=1.0, top_k=6, seed=4),
    )

    @pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
    def test_batched_is_alone(self, dtype: str):
        model, params = make_model(dtype=dtype)
        together = generate(model, params, PROMPTS, self.MIX, stop_ids=(11,))
        for prompt, config, completion in zip(PROMPTS, self.MIX, together, strict=True):
            (alone,) = generate(model, params, [prompt], config, stop_ids=(11,))
            assert alone.tokens == completion.tokens
            assert alone.finish_reason == completion.finish_reason
            np.testing.assert_allclose(alone.logprobs, completion.logprobs, atol=1e-5)

    @pytest.mark.parametrize(
        ("longest", "dtype"),
        [
            (16, "float32"),
            pytest.param(600, "float32", marks=pytest.mark.slow),
            pytest.param(16, "bfloat16", marks=pytest.mark.slow),
            pytest.param(600, "bfloat16", marks=pytest.mark.slow),
        ],
    )
    def test_at_one_batch_size_company_and_place_change_no_bit(self, dtype: str, longest: int):
        """Longer company is prefilled in wider chunks, and has a longer cache."""
        model, params = make_model(dtype=dtype, max_seq_len=1024)
        config = DecodingConfig(max_tokens=12, temperature=1.1, seed=42)
        prompt = [4, 8, 15, 16, 23, 42, 4, 8, 15, 16, 23, 42, 1, 2, 3, 4, 5, 6, 7, 8, 9]
        (alone,) = generate(model, params, [prompt], config, rows=8)
        for trial in range(6 if longest == 16 else 2):
            place = trial + 1
            prompts = [*random_prompts(place, longest, trial), prompt, *random_prompts(7 - place, longest, trial + 50)]
            others = DecodingConfig(max_tokens=20, temperature=0.7, top_p=0.9, seed=trial)
            settings = [config if row == place else others for row in range(8)]
            assert generate(model, params, prompts, settings)[place] == alone

    def test_equal_seeds_agree_and_others_do_not(self, rope: tuple[Model, Params]):
        seeds = [42, 1, 42, 2, 42, 3, 42, 4]
        settings = [DecodingConfig(max_tokens=16, temperature=1.5, seed=seed) for seed in seeds]
        texts = [tuple(completion.tokens) for completion in generate(*rope, [[5, 6]] * 8, settings)]
        assert len({text for text, seed in zip(texts, seeds, strict=True) if seed == 42}) == 1
        assert len(set(texts)) == 5

    def test_pieces_joined_are_the_whole(self, rope: tuple[Model, Params]):
        whole = generate(*rope, PROMPTS, self.MIX, stop_ids=(11,))
        joined = [Completion([], [], None)] * 4
        counts = []
        for pieces in stream(*rope, PROMPTS, self.MIX, stop_ids=(11,), block=4):
            counts.append(max(len(piece.tokens) for piece in pieces))
            joined = [done.extended(piece) for done, piece in zip(joined, pieces, strict=True)]
        assert joined == whole
        assert counts[0] == 1
        assert max(counts[1:]) == 4

    @pytest.mark.slow
    def test_parameters_on_many_devices_give_the_same(self, rope: tuple[Model, Params]):
        model, params = rope
        mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec
        spread = jax.tree.map(
            lambda leaf: jax.device_put(
                leaf, jax.sharding.NamedSharding(mesh, spec("data") if leaf.shape[0] % 8 == 0 else spec())
            ),
            params,
        )
        for ours, theirs in zip(
            generate(model, params, PROMPTS, self.MIX), generate(model, spread, PROMPTS, self.MIX), strict=True
        ):
            assert ours.tokens == theirs.tokens
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)


class TestEnd:
    MODEL, PARAMS = bigram(30, max_seq_len=40), successor_logits(30)

    def test_the_stop_token_ends_its_row_and_is_not_in_it(self):
        completions = generate(self.MODEL, self.PARAMS, [[5], [17], [10], [19]], greedy(8), stop_ids=(20,))
        assert [completion.tokens for completion in completions] == [
            [6, 7, 8, 9, 10, 11, 12, 13],
            [18, 19],
            [11, 12, 13, 14, 15, 16, 17, 18],
            [],
        ]
        assert [completion.finish_reason for completion in completions] == ["length", "stop", "length", "stop"]
        assert [len(completion.logprobs) for completion in completions] == [8, 2, 8, 0]

    def test_a_stop_token_chosen_last_of_all_is_a_stop(self):
        (completion,) = generate(self.MODEL, self.PARAMS, [[5]], greedy(4), stop_ids=(9,))
        assert completion == ([6, 7, 8], completion.logprobs, "stop")

    @pytest.mark.parametrize("max_tokens", [1, 2, 3, 16, 17])
    def test_max_tokens_is_the_number_of_tokens(self, max_tokens: int):
        (completion,) = generate(self.MODEL, self.PARAMS, [[0]], greedy(max_tokens))
        assert completion.tokens == list(range(1, max_tokens + 1))
        assert completion.finish_reason == "length"

    @pytest.mark.parametrize("length", [30, 38, 39])
    def test_the_context_ends_a_completion(self, length: int):
        (completion,) = generate(self.MODEL, self.PARAMS, [[1] * length], greedy(20))
        assert completion.tokens == list(range(2, 2 + min(20, 40 - length)))
        assert completion.finish_reason == "length"

    def test_ids_beyond_the_limit_are_never_chosen(self):
        hot = DecodingConfig(max_tokens=30, temperature=2.0)
        for one in (hot, greedy(30)):
            (completion,) = generate(self.MODEL, self.PARAMS, [[22]], one, vocab_limit=25)
            assert max(completion.tokens) == 24

    @pytest.mark.slow
    def test_the_last_token_of_the_context_is_the_models_too(self):
        model, params = make_model()
        prompt = random_prompts(1, 1)[0] * 60
        (completion,) = generate(model, params, [prompt], greedy(9))
        logprobs = uncached_logprobs(model, params, prompt + completion.tokens)[59:-1]
        assert completion.tokens == logprobs.argmax(axis=1).tolist()
        assert len(completion.tokens) == 4

    def test_nothing_to_do_is_nothing_done(self):
        assert generate(self.MODEL, self.PARAMS, [], greedy()) == []


class TestRefusals:
    @pytest.mark.parametrize(
        ("prompt", "vocab_limit", "message"),
        [
            ([], None, r"prompt 1: the prompt has no tokens"),
            ([1, 2, 61], None, r"prompt 1: token 2 of the prompt has the id 61; the vocabulary has 0 to 60"),
            ([-1], None, r"prompt 1: token 0 of the prompt has the id -1"),
            ([1, 50], 50, r"token 1 of the prompt has the id 50; the vocabulary has 0 to 49"),
            ([1] * 64, None, r"the prompt has 64 tokens; the model's context holds 64"),
            ([1] * 1000, None, r"the prompt has 1000 tokens"),
        ],
    )
    def test_a_prompt_that_cannot_be_continued(
        self, rope: tuple[Model, Params], prompt: list[int], vocab_limit: int | None, message: str
    ):
        with pytest.raises(UserError, match=message):
            generate(*rope, [[1], prompt], greedy(), vocab_limit=vocab_limit)

    def test_logits_that_are_not_numbers(self, rope: tuple[Model, Params]):
        model, params = rope
        broken = jax.tree.map(lambda leaf: leaf * jnp.nan, params)
        with pytest.raises(UserError, match="parameters are damaged or have diverged"):
            generate(model, broken, [[1]], greedy())


def copies_of(compiled: str, shapes: set[str]) -> list[str]:
    """Instructions of a compiled program that copy or convert an array of one of these shapes, wherever they stand."""
    pattern = re.compile(r"= (?:\()?\w+(\[[\d,]*\])\S* (?:copy|copy-start|convert)\(")
    sizes = {shape[shape.index("[") :] for shape in shapes}
    return [line.strip() for line in compiled.splitlines() if (found := pattern.search(line)) and found[1] in sizes]


COPIED_ELSEWHERE = ((1, "float32", 2), (2, "bfloat16", 4))
"""Cases that other forms have copied."""


class TestCost:
    def compile(self, model: Model, params: Params, rows: int, length: int) -> tuple[Any, set[str], int]:
        cache = model.init_cache(rows, length)
        state = DecodeState(
            cache=cache,
            tokens=jnp.zeros(rows, jnp.int32),
            positions=jnp.zeros(rows, jnp.int32),
            last_positions=jnp.full(rows, 9),
            keys=jax.random.split(jax.random.key(0), rows),
            sampling=sampling_params([DecodingConfig()] * rows),
        )
        compiled = decode.lower(model, params, state, steps=8, stop_ids=(3,), vocab_limit=50).compile()
        names = {"float32": "f32", "bfloat16": "bf16", "int32": "s32"}
        leaves = jax.tree.leaves(cache)
        shapes = {f"{names[leaf.dtype.name]}[{','.join(map(str, leaf.shape))}]" for leaf in leaves}
        return compiled, shapes, sum(leaf.nbytes for leaf in leaves)

    @pytest.mark.parametrize(
        ("rows", "dtype", "heads"),
        [
            pytest.param(*case, marks=[] if case in COPIED_ELSEWHERE else pytest.mark.slow)
            for case in itertools.product((1, 2, 4), ("float32", "bfloat16"), (1, 2, 4))
            if case[:2] != (1, "bfloat16")
        ],
    )
    def test_decode_never_copies_the_cache(self, rows: int, dtype: str, heads: int):
        model, params = make_model(head_dim=32, num_kv_heads=heads, dtype=dtype)
        compiled, shapes, cache_bytes = self.compile(model, params, rows, 208)
        assert len(shapes) == 2
        assert all(shape in compiled.as_text() for shape in shapes)
        assert copies_of(compiled.as_text(), shapes) == []
        # Every byte of the cache that comes in is a byte of the cache that goes out, and none has a second place.
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= cache_bytes
        assert memory.temp_size_in_bytes < rows * 2 * 208 * 32 * 4 * max(heads // 2, 1)

    def test_a_copy_would_be_seen(self):
        model, params = make_model(head_dim=32)

        def copying(*arguments: Any, cache: Any, **others: Any) -> Any:
            hidden, new, _ = model.trunk(*arguments, cache=cache, **others)
            # What the cache held before is needed after it was written.
            return Output(hidden + sum(leaf.sum() for leaf in jax.tree.leaves(cache.k)) * 1e-9, new)

        compiled, shapes, _ = self.compile(model._replace(trunk=copying), params, 4, 208)
        assert copies_of(compiled.as_text(), shapes) != []

    @pytest.mark.parametrize(
        ("prompt", "max_tokens", "stop_ids", "expected"),
        [
            ([1, 2], 5000, (20,), [SMALLEST_CACHE]),
            pytest.param([1] * 200, 900, (), [SMALLEST_CACHE, 512, 1024, 2048], marks=pytest.mark.slow),
            ([1] * 600, 9000, (3,), [1024]),
        ],
    )
    def test_the_cache_is_as_long_as_the_tokens_and_not_as_the_limits(
        self, prompt: list[int], max_tokens: int, stop_ids: tuple[int, ...], expected: list[int]
    ):
        lengths = []
        plain = bigram(30, max_seq_len=8000)

        def recorded(batch: int, length: int) -> Any:
            if length > 1:
                lengths.append(length)
            return plain.init_cache(batch, length)

        model = plain._replace(init_cache=recorded)
        generate(model, successor_logits(30), [prompt], greedy(max_tokens), stop_ids=stop_ids)
        assert lengths == expected

    def test_nothing_is_compiled_twice(self, rope: tuple[Model, Params], caplog: pytest.LogCaptureFixture):
        def run(seed: int, count: int, longest: int, max_tokens: int) -> None:
            prompts = random_prompts(count, longest, seed)
            config = DecodingConfig(max_tokens=max_tokens, temperature=seed % 2 * 0.9, top_p=0.9, seed=seed)
            generate(*rope, prompts, config, stop_ids=(11,), rows=4)

        run(0, 4, 16, 16)
        with jax.log_compiles():
            for seed in range(1, 9):
                run(seed, 1 + seed % 4, 16, 9 + seed)
        assert "Compiling" not in caplog.text

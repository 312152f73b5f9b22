"""Make the tiny models that importing is tested with, and what transformers computes with them.

Run it in an environment that has torch and transformers, which the project itself never needs:

    python tests/pretrained/make_fixtures.py [NAME ...]

Each folder of fixtures/ then holds a model as transformers saves it, and expected.npz: two sequences of ids and the
float32 logits (or hidden states, where a model has no output layer) of each alone.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent / "fixtures"
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
    for row, length in enumerate((12, 7)):
        ids = random.integers(3, V, length)
        with torch.no_grad():
            output = model(torch.tensor([ids]))
        logits = output.logits if hasattr(output, "logits") else output.last_hidden_state
        expected |= {f"ids{row}": ids, f"logits{row}": logits[0].numpy()}
    np.savez(HERE / name / "expected.npz", **expected)
    print(name, sum(p.numel() for p in model.parameters()), f"logits up to {abs(expected['logits0']).max():.2f}")


for chosen in sys.argv[1:] or MODELS:
    make(chosen)

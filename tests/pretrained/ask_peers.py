"""Ask transformers and llama.cpp what they compute with models that this project has written.

    python tests/pretrained/ask_peers.py QUESTIONS ANSWERS

runs in an environment of their own; both arguments are JSON files, a list of objects each. A question is the `path` of
a folder or of a GGUF file, sequences of `ids` that logits are wanted of, with `types` of tokens, a list of `texts`, and
a number of `greedy` tokens to go on with after each sequence, or after each text where there are texts; or texts that
`vectors` are wanted of. An answer has the `logits` of each sequence, or its hidden states where the model has no output
layer, the `text_ids`, and the `greedy` ids; of a folder also the model's `class` and `dtype`, and the `problems` that
loading it had; of a file also the `vectors`.
"""

import json
import sys
import warnings
from pathlib import Path

import numpy as np


def ask_transformers(question: dict) -> dict:
    import torch
    import transformers

    torch.set_grad_enabled(False)
    path = question["path"]
    architecture = json.loads((Path(path) / "config.json").read_text())["architectures"][0]
    causal = architecture.endswith(("ForCausalLM", "LMHeadModel"))
    loader = "AutoModelForCausalLM" if causal else "AutoModelForMaskedLM" if "MaskedLM" in architecture else "AutoModel"
    with warnings.catch_warnings(record=True) as warned:
        model, loading = getattr(transformers, loader).from_pretrained(
            path, attn_implementation="eager", output_loading_info=True
        )
    answer = {
        "class": type(model).__name__,
        "dtype": str(model.dtype),
        "problems": [f"{name}: {sorted(found)}" for name, found in loading.items() if found] + [str(w) for w in warned],
        "logits": [],
        "greedy": [],
        "text_ids": [],
    }
    texts = question.get("vectors", question.get("texts", []))
    if texts:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        answer["text_ids"] = [tokenizer(text)["input_ids"] for text in texts]
    for row, ids in enumerate(answer["text_ids"] if "vectors" in question else question.get("ids", [])):
        types = question.get("types")
        given = {} if types is None else {"token_type_ids": torch.tensor([types[row]])}
        output = model.eval()(torch.tensor([ids]), **given)
        logits = output.logits if hasattr(output, "logits") else output.last_hidden_state
        answer["logits"].append(logits[0].float().tolist())
    if question.get("greedy"):
        for ids in answer["text_ids"] or question["ids"]:
            written = model.generate(torch.tensor([ids]), max_new_tokens=question["greedy"], do_sample=False)
            answer["greedy"].append(written[0, len(ids) :].tolist())
    return answer


def ask_llama_cpp(question: dict) -> dict:
    from llama_cpp import GGML_TYPE_F32, Llama

    if "vectors" in question:
        model = Llama(question["path"], n_ctx=64, embedding=True, verbose=False)
        return {
            "text_ids": [model.tokenize(text.encode(), special=False) for text in question["vectors"]],
            "vectors": model.embed(question["vectors"], normalize=True),
        }
    # Keys and values are cached in half precision unless it is told otherwise.
    model = Llama(
        question["path"], n_ctx=64, logits_all=True, type_k=GGML_TYPE_F32, type_v=GGML_TYPE_F32, verbose=False
    )
    texts = question.get("texts", [])
    answer = {"logits": [], "greedy": [], "text_ids": [model.tokenize(text.encode(), special=False) for text in texts]}
    for ids in question.get("ids", []):
        model.reset()
        model.eval(ids)
        answer["logits"].append(np.array(model.scores[: len(ids)]).tolist())
    for ids in answer["text_ids"] or question.get("ids", []):
        written = []
        model.reset()
        model.eval(ids)
        while len(written) < question.get("greedy", 0):
            written.append(int(model.scores[model.n_tokens - 1].argmax()))
            if written[-1] == model.token_eos():
                break
            model.eval(written[-1:])
        answer["greedy"].append(written)
    return answer


questions, answers = Path(sys.argv[1]), Path(sys.argv[2])
answers.write_text(
    json.dumps(
        [
            ask_llama_cpp(question) if question["path"].endswith(".gguf") else ask_transformers(question)
            for question in json.loads(questions.read_text())
        ]
    )
)

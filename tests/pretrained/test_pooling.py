"""How a published encoder makes one vector of a text: by the files that sentence-transformers keeps beside it."""

import json
import shutil
from pathlib import Path

import pytest

from transformer_jax.errors import UserError
from transformer_jax.training.open_model import pooling_of_model

BERT = Path(__file__).parent / "fixtures" / "bert-bare"


def folder(tmp_path, modes=None, modules=()):
    made = tmp_path / "made"
    shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(BERT, made)
    if modes is not None:
        (made / "1_Pooling").mkdir()
        (made / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 16, **modes}))
    types = [{"idx": i, "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(modules)]
    (made / "modules.json").write_text(json.dumps(types))
    return made


def test_the_folder_says_how(tmp_path):
    assert pooling_of_model(folder(tmp_path)) == "mean"
    first = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    assert pooling_of_model(folder(tmp_path, first, ["Transformer", "Pooling", "Normalize"])) == "first"
    assert pooling_of_model(folder(tmp_path, {"pooling_mode_mean_tokens": True})) == "mean"


@pytest.mark.parametrize(
    ("modes", "modules", "match"),
    [
        ({"pooling_mode_max_tokens": True}, (), "it asks for pooling_mode_max_tokens"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, (), "expected one of"),
        ({"pooling_mode_mean_tokens": False}, (), "it asks for no pooling"),
        (None, ("Transformer", "Pooling", "Dense"), "pass through Dense"),
    ],
)
def test_another_way_is_refused(tmp_path, modes, modules, match):
    with pytest.raises(UserError, match=match):
        pooling_of_model(folder(tmp_path, modes, modules))

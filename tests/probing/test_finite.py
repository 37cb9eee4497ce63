"""Weights and activations that are not finite are found by every method, before anything is written, and named."""

import math
import shutil

import pytest
import torch
from hybrid_cases import source, tokens
from probing_case import SMALL
from safetensors.torch import load_file, save_file

from hybridize.errors import NonFiniteError
from hybridize.probing.finite import check_weights
from hybridize.probing.hankel import hankel_sweep
from hybridize.probing.swa_proxy import Sweep
from hybridize.tasks.scored import score_text


def sweep(model):
    return Sweep(model, score_text(tokens(2, 24), "prose", batch_tokens=48))


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("model.layers.2.mlp.up_proj.weight", r"Layer 2 .*\(mlp\.up_proj\.weight\)"),
        ("model.norm.weight", r"The model .*\(model\.norm\.weight\)"),
        ("lm_head.weight", r"The model .*\(lm_head\.weight\)"),
        ("model.embed_tokens.weight", r"The model .*\(model\.embed_tokens\.weight\)"),
    ],
)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_names_the_tensor(name, where, value):
    model = source("llama", tie_word_embeddings=False)
    check_weights(model)
    model.get_parameter(name).data.view(-1)[-1] = value
    with pytest.raises(NonFiniteError, match=where):
        check_weights(model)


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("run", [sweep, lambda model: hankel_sweep(model, tokens(2, 24))], ids=["sweep", "hankel"])
def test_names_the_layer_whose_activations_are_not_finite(run, layer):
    model = source("llama")
    model.model.layers[layer].mlp.down_proj.weight.data.fill_(3e38)
    with pytest.raises(NonFiniteError, match=f"Layer {layer} gives hidden states"):
        run(model)


def test_a_head_that_overflows_is_not_laid_on_a_layer():
    model = source("llama", tie_word_embeddings=False)
    model.lm_head.weight.data.fill_(3e38)
    with pytest.raises(NonFiniteError, match="The unchanged model's loss on prose is no finite number"):
        sweep(model)


@pytest.mark.parametrize("method", ["swa", "hankel", "mixer"])
def test_every_method_refuses_them_before_anything_is_written(command, place, tmp_path, method):
    shutil.copytree(place / "source", tmp_path / "broken")
    weights = load_file(tmp_path / "broken" / "model.safetensors")
    weights["model.layers.3.self_attn.o_proj.weight"][0, 0] = torch.nan
    save_file(weights, tmp_path / "broken" / "model.safetensors", {"format": "pt"})
    code, _, err = command("probe", tmp_path / "broken", *SMALL, "--data", place / "text", "--method", method)
    assert code == 1 and "Layer 3 has weights that are not finite numbers (self_attn.o_proj.weight)" in err
    assert not (tmp_path / "runs").exists()

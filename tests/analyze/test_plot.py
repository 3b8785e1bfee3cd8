"""Figures of one text, drawn from a model or its folder, for notebooks."""

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from transformers import LlamaConfig, LlamaForCausalLM

import affine_attn
from affine_attn.errors import UserError
from affine_attn.models import AffineAttnForCausalLM
from tests.support.analyzed import HOSTILE, models
from tests.support.hf import SIZES

plot = affine_attn.plot
TEXT = f"{HOSTILE} and one line of a text"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return models(tmp_path_factory.mktemp("models"), "affine", "softmax")


def pixels(figure: Figure) -> np.ndarray:
    assert isinstance(figure, Figure)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())


def image(figure: Figure) -> np.ndarray:
    return np.ma.filled(figure.axes[0].images[0].get_array(), np.nan)


def test_every_picture_is_drawn_from_a_folder_a_model_and_tokens(folders):
    affine, softmax = folders
    model = AffineAttnForCausalLM.from_pretrained(affine).train()
    for draw in (plot.attention_map, plot.alpha, plot.heads):
        from_folder, from_model = draw(affine, TEXT), draw(model, TEXT)
        assert pixels(from_folder).std() > 1
        np.testing.assert_array_equal(image(from_folder), image(from_model))
    assert model.training
    ids = torch.arange(9)
    assert image(plot.attention_map(softmax, ids, layer=0)).shape == (9, 9)
    assert image(plot.attention_map(softmax, ids.tolist(), tokens=4)).shape == (4, 4)
    assert image(plot.heads(softmax, ids, "first_token")).shape == (2, 4)


def test_the_numbers_are_those_of_the_model(folders):
    affine, softmax = folders
    model = AffineAttnForCausalLM.from_pretrained(affine)
    seen = []
    model.model.layers[1].self_attn.alpha.register_forward_hook(lambda *call: seen.append(call[-1]))
    shown = image(plot.alpha(model, torch.arange(9)))
    np.testing.assert_allclose(shown[4:], seen[-1][0].detach().numpy())
    rows = np.nansum(image(plot.attention_map(softmax, torch.arange(9))), 1)
    np.testing.assert_allclose(rows, 1, atol=1e-3)


def test_a_model_of_transformers_is_drawn_too():
    assert pixels(plot.attention_map(LlamaForCausalLM(LlamaConfig(**SIZES)), torch.arange(9))).std() > 1


def test_what_cannot_be_drawn_is_a_sentence(folders):
    affine, softmax = folders
    model = AffineAttnForCausalLM(AffineAttnForCausalLM.from_pretrained(softmax).config)
    model.config.name_or_path = ""
    for draw, message in (
        (lambda: plot.alpha(softmax, TEXT), "there is no alpha in this model"),
        (lambda: plot.heads(softmax, TEXT, "alpha"), "there is no alpha in this model"),
        (lambda: plot.heads(affine, TEXT, "row_sums"), "did you mean row_sum"),
        (lambda: plot.attention_map(affine, TEXT, layer=2), "layer must be between 0 and 1, got 2"),
        (lambda: plot.attention_map(affine, TEXT, tokens=0), "tokens must be an integer >= 1"),
        (lambda: plot.attention_map(affine, ""), "the text has no tokens"),
        (lambda: plot.attention_map(model, TEXT), "give tokenizer="),
    ):
        with pytest.raises(UserError, match=message):
            draw()

"""Analyses of whole models against the weights that ``output_attentions`` shows, their files, and the command."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from affine_attn import Affine, AttentionSpec
from affine_attn.analyze.measure import measure
from affine_attn.analyze.run import Request, Target, analyze, analyze_all, targets, variant_name
from affine_attn.cli import app
from affine_attn.core.spec import ACTIVATIONS
from affine_attn.core.variants import at_length
from affine_attn.data.texts import load_sequences
from affine_attn.distill.run import run
from affine_attn.models import convert, preset
from affine_attn.models.collect import collect_statistics
from affine_attn.models.configuration import as_spec
from affine_attn.nn.alpha import alpha_gates
from affine_attn.runs.analysis import FILE, MAPS, analyses_in, read_analysis
from tests.support.analyzed import HOSTILE, models, text_file
from tests.support.hf import SIZES, tiny_model
from tests.support.tiny_runs import VOCAB, counting_shards, tiny

LENGTH = 24
# Weights of both signs and sums away from one: alpha_ma below alpha, and N near the sequence's length.
NEGATIVE = AttentionSpec(affine=Affine(length=16, start=0.3))
CASES = {
    "softmax": "softmax",
    "sink": "sink",
    "negative": NEGATIVE,
    "visible": AttentionSpec(affine=Affine(length=0, phi="sigmoid"), sink="learned", gate="headwise"),
    "keys": AttentionSpec(affine=Affine(length="keys", alpha_range=2.0)),
    "no_beta": AttentionSpec(affine=Affine(beta=False)),
    "scale_invariant": "scale_invariant",
    "mixed": ["softmax", NEGATIVE],
}


def small(name):
    model = tiny_model(CASES[name], **({"qk_norm": True} if name == "scale_invariant" else {}))
    for gate in alpha_gates(model):
        gate.alpha_ma.uniform_(0.2, 0.6)
    return model


def packed(seed):
    """One sequence, of which the last tokens are a document of their own."""
    ids = torch.randint(1, SIZES["vocab_size"], (1, LENGTH), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "position_ids": torch.tensor([[*range(15), *range(LENGTH - 15)]])}


def mean_entropy(w):
    """Of rows of weights that are not negative, renormalised, 0 for rows of zeros; mean over queries, per head."""
    p = (w / w.sum(-1, keepdim=True)).nan_to_num()
    return -torch.xlogy(p, p).sum(-1).mean((0, 2))


@pytest.mark.parametrize("name", CASES)
def test_every_number_is_that_of_the_dense_weights(name):
    model, sequences = small(name), [packed(0), packed(1)]
    inputs = []

    def note(module, args, kwargs):
        inputs.append((module, kwargs["hidden_states"]))

    hooks = [layer.self_attn.register_forward_pre_hook(note, with_kwargs=True) for layer in model.model.layers]
    with torch.no_grad():
        dense = [model(**sequence, output_attentions=True).attentions for sequence in sequences]
    for hook in hooks:
        hook.remove()
    found, maps = measure(model, sequences, [1], slice(3, 19))
    visible = torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool))
    visible[15:, :15] = False
    count = visible.sum(-1)
    means = []
    for layer in range(2):
        w = torch.cat([part[layer] for part in dense]).double()
        heads = {metric: values[layer] for metric, values in found["heads"].items()}
        close = {"rel": 2e-4, "abs": 2e-5}
        assert heads["entropy_clipped"] == pytest.approx(mean_entropy(w.clamp(min=0)).tolist(), **close)
        assert heads["entropy_absolute"] == pytest.approx(mean_entropy(w.abs()).tolist(), **close)
        negative = ((w < 0) & visible).sum((0, 2, 3)) / (2 * visible.sum())
        assert heads["negative"] == pytest.approx(negative.tolist(), abs=1e-6)
        assert heads["row_sum"] == pytest.approx(w.sum(-1).mean((0, 2)).tolist(), **close)
        first = torch.cat((w[:, :, :15, 0], w[:, :, 15:, 15]), -1)
        assert heads["first_token"] == pytest.approx(first.mean((0, 2)).tolist(), **close)
        if name in ("softmax", "scale_invariant"):
            assert heads["entropy"] == pytest.approx(heads["entropy_clipped"], **close)
        if name == "sink":
            assert heads["sink_mass"] == pytest.approx((1 - w.sum(-1)).mean((0, 2)).tolist(), **close)
        means.append(w.sum(-1).mean(1).flatten().numpy())
        gate = model.model.layers[layer].self_attn.alpha
        if gate is None:
            assert heads.get("alpha") is heads.get("alpha_entropy") is None
            continue
        x = torch.cat([hidden for module, hidden in inputs if module.alpha is gate])
        alpha = gate(x).detach().double()
        a, b = alpha[..., None], 0.0
        if gate.affine.beta:
            n = LENGTH if gate.affine.length == "keys" else count.clamp(min=gate.affine.length)
            b = ((gate.alpha_ma[:, None] - alpha) / n)[..., None]
            for histogram, values in (("beta", b[..., 0]), ("beta_sum", b[..., 0] * count)):
                assert_histogram(found["histograms"][histogram], layer, values)
        else:
            assert found["histograms"].keys() == {"alpha"}
        assert_histogram(found["histograms"]["alpha"], layer, alpha)
        p = torch.where(visible, (w - b) / a.clamp(min=1e-12), 0.0)
        entropy = -torch.xlogy(p.clamp(min=0), p.clamp(min=0)).sum(-1)
        if float(alpha.min()) > 1e-3:
            assert heads["entropy"] == pytest.approx(entropy.mean((0, 2)).tolist(), rel=1e-3)
            for head, r in enumerate(heads["alpha_entropy"]):
                pair = torch.stack((alpha[:, head].flatten(), entropy[:, head].flatten()))
                assert r == pytest.approx(float(torch.corrcoef(pair)[0, 1]), abs=1e-3)
    if name in ("negative", "mixed"):
        assert found["scalars"]["negative"] > 0.05
    np.testing.assert_allclose(maps[0], dense[0][1][0, :, 3:19, 3:19], rtol=1e-4, atol=1e-6)
    sums = found["row_sums"]
    assert sums["mean"] == pytest.approx([float(values.mean()) for values in means], rel=1e-4)
    assert sums["median"] == pytest.approx([float(np.median(values)) for values in means], rel=1e-4)
    assert sums["all"]["median"] == pytest.approx(float(np.median(means)), rel=1e-4)
    for counts, values in zip(sums["counts"], means, strict=True):
        assert sum(counts) == values.size
        assert sums["edges"][0] - 1e-4 <= values.min() <= values.max() <= sums["edges"][-1] + 1e-4
        middles = (np.array(sums["edges"])[1:] + np.array(sums["edges"])[:-1]) / 2
        assert np.average(middles, weights=counts) == pytest.approx(values.mean(), abs=middles[1] - middles[0])


def assert_histogram(histogram, layer, values):
    """values [B, H, T]; a value at an edge may be in either bin, as rounding decides."""
    edges, counts = np.array(histogram["edges"]), np.array(histogram["counts"][layer])
    assert counts.sum(1).tolist() == [values[:, 0].numel()] * values.shape[1]
    for head, row in enumerate(counts):
        at = values[:, head].flatten().numpy()
        assert edges[0] <= at.min() + 1e-6
        assert at.max() - 1e-6 <= edges[-1]
        assert abs(np.cumsum(row) - np.cumsum(np.histogram(at.clip(edges[0], edges[-1]), edges)[0])).max() <= 1


@pytest.mark.parametrize(
    ("function", "ends"),
    [(lambda x: 0.5 + torch.tanh(x), (-1.0, 3.0)), (lambda x: 5 * F.softplus(x), None)],
    ids=["both_signs", "without_an_end"],
)
def test_histograms_and_saturation_know_where_an_activation_of_ones_own_ends(function, ends, monkeypatch):
    monkeypatch.setitem(ACTIVATIONS, "own", function)
    model = tiny_model(AttentionSpec(affine=Affine(phi="own", alpha_range=2.0)))
    model.model.layers[0].self_attn.alpha.w_a.data.mul_(1000)
    sequences = [packed(0), packed(1)]
    found, _ = measure(model, sequences, [0], slice(0, 2))
    truth = collect_statistics(model, sequences, queries=True)
    histogram, saturated = found["histograms"]["alpha"], found["heads"]["alpha_saturated"]
    for layer, means in enumerate(truth):
        assert_histogram(histogram, layer, torch.cat(means.query_alpha, -1))
    alpha = torch.stack([torch.cat(means.query_alpha, -1) for means in truth])
    if ends is None:
        assert (histogram["edges"][0], histogram["edges"][-1]) == pytest.approx(
            (alpha.min().item(), alpha.max().item())
        )
        assert alpha.max() > 2.0
        # It ends below alone.
        assert saturated[1] == [0.0] * 4
    else:
        assert (histogram["edges"][0], histogram["edges"][-1]) == pytest.approx(ends)
        assert saturated[0] == pytest.approx(((alpha[0] == -1) | (alpha[0] == 3)).float().mean((0, 2)).tolist())
        assert max(saturated[0]) > 0.5
    for name in ("beta", "beta_sum"):
        assert found["histograms"][name]["edges"][0] < found["histograms"][name]["edges"][-1]


def test_a_correlation_of_what_does_not_change_is_none():
    model = small("negative")
    with torch.no_grad():
        alpha_gates(model)[0].w_a.zero_()
    found, _ = measure(model, [packed(0), packed(1)], [0], slice(0, 2))
    assert found["heads"]["alpha_entropy"][0] == [None] * 4
    assert all(isinstance(r, float) for r in found["heads"]["alpha_entropy"][1])
    assert found["layers"]["alpha_entropy"][0] is None


def test_a_window_that_slides_hides_old_keys():
    model = tiny_model("affine", window=5)
    sequence = {"input_ids": packed(0)["input_ids"]}
    _, maps = measure(model, [sequence], [0, 1], slice(10, 20))
    dense = model(**sequence, output_attentions=True).attentions
    for layer in range(2):
        np.testing.assert_allclose(maps[layer], dense[layer][0, :, 10:20, 10:20].detach(), rtol=1e-4, atol=1e-6)
    assert not maps[:, :, 9, 3].any()


def test_a_place_that_cannot_be_written_is_named_before_anything_is_computed(tmp_path):
    (tmp_path / "file").write_text("")
    # No such model either: it is not even looked for.
    with pytest.raises(ValueError, match=r"results cannot be written to .*none: give a folder of your own"):
        analyze_all([str(tmp_path / "none")], Request(tmp_path / "none"), tmp_path / "file")


@pytest.mark.parametrize("attention", ["softmax", "affine"])
def test_numbers_that_are_none_are_an_error_and_no_analysis(tmp_path, attention):
    """As of a model that diverged, or of one too large for float16."""
    (place,) = models(tmp_path, attention)
    broken = AutoModelForCausalLM.from_pretrained(place)
    with torch.no_grad():
        broken.model.layers[0].self_attn.q_proj.weight.fill_(torch.nan)
        broken.model.layers[0].mlp.up_proj.weight.fill_(torch.nan)
    broken.save_pretrained(place)
    answer = CliRunner().invoke(
        app, ["analyze", str(place), "--data", str(text_file(tmp_path)), "--length", "16", "--no-figures"]
    )
    assert answer.exit_code == 2
    assert "is not finite on this text, from layer 0 on" in answer.output
    assert not (place / "analysis").exists()


def test_files_are_what_was_written(tmp_path):
    (place,) = models(tmp_path, "affine")
    request = Request(text_file(tmp_path), length=48, sequences=2, layers=[1], window="4:20")
    (analysis,), (folder,) = analyze_all([str(place)], request)
    assert folder.parent == place / "analysis"
    assert folder.name.startswith("text-48-")
    again = read_analysis(folder)
    assert again.content == json.loads(json.dumps(analysis.content, allow_nan=False))
    np.testing.assert_array_equal(again.weights, analysis.weights)
    assert again.map(1).shape == (4, 16, 16)
    with pytest.raises(ValueError, match="of layers 1, not of 0"):
        again.map(0)
    assert again.content["data"] | {"path": ""} == {
        "path": "", "length": 48, "sequences": 2, "tokens": 96, "training_length": 128,
        "boundaries": "documents do not see each other",
    }  # fmt: skip
    assert again.content["model"]["variant"] == "affine"
    assert "".join(again.content["map"]["tokens"])[:8] in "<|endoftext|>" + HOSTILE
    whole = (folder / MAPS).read_bytes()
    for broken in (b"PK broken", whole[: len(whole) // 2], whole[:200] + bytes(100) + whole[300:]):
        (folder / MAPS).write_bytes(broken)
        with pytest.raises(ValueError, match="damaged"):
            read_analysis(folder)
    with pytest.raises(ValueError, match="make it with affine-attn analyze"):
        read_analysis(tmp_path)


def test_maps_that_no_report_would_read_are_not_made(tmp_path, monkeypatch):
    (place,) = models(tmp_path, "softmax")
    monkeypatch.setattr("affine_attn.analyze.run.MOST_MAP_BYTES", 20_000)
    with pytest.raises(
        ValueError, match=r"maps of 2 layers and a --window of 48 tokens take .* GiB, more than 0: give"
    ):
        analyze_all([str(place)], Request(text_file(tmp_path), length=48, sequences=1))
    assert not (place / "analysis").exists()
    analyze_all([str(place)], Request(text_file(tmp_path), length=48, sequences=1, layers=[1], window="0:16"))


def test_a_plain_model_is_converted(tmp_path):
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**(SIZES | {"vocab_size": VOCAB}))).eval()
    plain.save_pretrained(tmp_path / "llama")
    shards = counting_shards(tmp_path)
    request = Request(shards, length=16, sequences=3, join=True)
    analysis = analyze(Target("llama", str(tmp_path / "llama"), None), request)
    assert analysis.content["model"]["model_type"] == "llama"
    assert analysis.content["model"]["variant"] == "softmax"
    sequence = load_sequences(shards, 16, 1, None, join=True)[0]
    plain.set_attn_implementation("eager")
    dense = plain(**sequence, output_attentions=True).attentions
    np.testing.assert_allclose(analysis.map(1), dense[1][0].detach(), rtol=1e-3, atol=1e-5)
    # Without a tokenizer a token is shown as its number.
    assert analysis.content["map"]["tokens"] == [str(token) for token in sequence["input_ids"][0].tolist()]
    converted = measure(convert(plain, "softmax"), load_sequences(shards, 16, 3, None, join=True), [0], slice(0, 4))[0]
    assert analysis.content["heads"]["entropy"][0] == pytest.approx(converted["heads"]["entropy"][0])


def test_documents_of_a_text_are_kept_apart_unless_joined(tmp_path):
    (place,) = models(tmp_path, "softmax")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(place)
    lines = tmp_path / "two.jsonl"
    lines.write_text(json.dumps({"text": "abc"}) + "\n" + json.dumps({"text": "x" * 20}) + "\n")
    apart = load_sequences(lines, 12, 9, tokenizer)
    whole = [tokenizer.bos_token_id or tokenizer.eos_token_id, *tokenizer("abc")["input_ids"]]
    first = apart[0]["position_ids"][0].tolist()
    assert first == [*range(len(whole)), *range(12 - len(whole))]
    assert apart[1]["position_ids"][0].tolist() == list(range(12))
    joined = load_sequences(lines, 12, 9, tokenizer, join=True)
    assert [sequence.keys() for sequence in joined] == [{"input_ids"}] * len(apart)
    assert torch.equal(joined[1]["input_ids"], apart[1]["input_ids"])


def test_names_and_runs_are_found(tmp_path):
    for place in ("a/model", "b/model", "c"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "a/model/config.json").touch()
    (tmp_path / "b/metrics.jsonl").touch()
    found = targets([str(tmp_path / "a"), str(tmp_path / "b/model"), str(tmp_path / "c"), "owner/c"])
    assert [target.name for target in found] == ["a", "b", "c", "c-2"]
    assert [target.run and target.run.name for target in found] == ["a", "b", None, None]
    assert found[0].path == str(tmp_path / "a/model")
    assert found[3].path == "owner/c"


def test_a_variant_is_known_by_any_training_length_only():
    assert variant_name([preset("nano", "affine").spec(0)]) == "affine"
    assert variant_name([at_length(as_spec("logn"), 300)] * 2) == "logn"
    assert variant_name([AttentionSpec(affine=Affine(length=0))]) is None
    assert variant_name([AttentionSpec(), as_spec("sink")]) is None


def test_the_command_says_where_everything_is(tmp_path):
    places = models(tmp_path, "softmax", "affine")
    options = ["--data", str(text_file(tmp_path)), "--length", "32", "--sequences", "2", "--no-figures"]
    command = ["analyze", *map(str, places), *options, "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["figures"] == []
    for model, name in zip(printed["models"], ("softmax", "affine"), strict=True):
        assert model["name"] == name
        (folder,) = analyses_in(tmp_path / "out" / name)
        assert model["folder"] == str(folder)
        assert model["scalars"] == read_analysis(folder).content["scalars"]
    table = CliRunner().invoke(app, command).stdout
    assert "alpha_saturated" in table
    assert f"{printed['models'][1]['scalars']['negative']:.4g}" in table


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "less than 128 tokens"),
        (["--length", "1024"], "less than 1024 tokens"),
        (["--length", "32", "--window", "0:99"], "--window must be START:STOP within the 32 tokens, got '0:99'"),
        (["--length", "32", "--layer", "2"], "--layer must be between 0 and 1"),
        (["--length", "32", "--device", "moon"], "--device moon"),
    ],
)
def test_mistakes_are_answered_with_one_line(tmp_path, options, said):
    (place,) = models(tmp_path, "affine")
    text = tmp_path / "short.txt"
    text.write_text("few words " * 10)
    result = CliRunner().invoke(app, ["analyze", str(place), "--data", str(text), *options])
    assert result.exit_code == 2
    assert said in result.output.replace("\n", " ")
    assert "Traceback" not in result.output


def test_data_of_another_vocabulary_is_refused(tmp_path):
    (place,) = models(tmp_path, "affine", hidden_act="silu")
    shards = counting_shards(tmp_path)
    model = tiny_model("affine", vocab_size=20)
    model.save_pretrained(tmp_path / "little")
    with pytest.raises(ValueError, match="knows 20: not its data"):
        analyze(Target("little", str(tmp_path / "little"), None), Request(shards, length=16, sequences=4))
    with pytest.raises(ValueError, match="there is no folder"):
        analyze(Target("x", "./nowhere", None), Request(shards, length=16))
    with pytest.raises(ValueError, match="without a tokenizer"):
        analyze(Target("little", str(tmp_path / "little"), None), Request(text_file(tmp_path), length=16))
    assert place.exists()


_LONG = """
import resource, sys, torch
from affine_attn.analyze.measure import measure
from affine_attn.models import AffineAttnForCausalLM, preset
torch.set_num_threads(1)
model = AffineAttnForCausalLM(preset("nano", "affine", num_hidden_layers=1, num_attention_heads=1,
                                     num_key_value_heads=1, max_position_embeddings=16384))
length = int(sys.argv[1])
found, maps = measure(model, [{"input_ids": torch.randint(256, (1, length))}], [0], slice(length - 64, length))
assert sum(found["row_sums"]["all"]["counts"]) == length and maps.shape == (1, 1, 64, 64)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_sixteen_thousand_tokens_take_little_memory():
    """The weights, their logarithms and signs would each take 1 GiB for the one head."""
    run = subprocess.run([sys.executable, "-c", _LONG, "16384"], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 2e9


def test_the_length_is_that_of_the_training_and_another_is_another_result(tmp_path, capsys):
    for place in ("shards", "other"):
        (tmp_path / place).mkdir()
    data, output = counting_shards(tmp_path / "shards"), tmp_path / "run"
    run(tiny(data, attention="softmax", sequence_length=24), output)
    (first,), (folder,) = analyze_all([str(output)], Request(data, sequences=3))
    assert first.content["data"]["length"] == first.content["data"]["training_length"] == 24
    assert first.content["data"]["boundaries"] == "packed as in training: documents do not see each other"
    written = (folder / FILE).read_bytes()
    assert "beyond" not in capsys.readouterr().err
    # Longer, other data, joined, other maps: each is a result of its own, and none is called packed as in training.
    other = counting_shards(tmp_path / "other", seed=3)
    requests = [
        Request(data, length=32, sequences=3),
        Request(data, length=16, sequences=3),
        Request(other, sequences=3),
        Request(data, sequences=3, join=True),
        Request(data, sequences=3, window="4:8"),
    ]
    folders = {folder}
    for request in requests:
        (found,), (another,) = analyze_all([str(output)], request)
        folders.add(another)
        as_trained = found.content["data"]["length"] == 24 and not request.join
        assert found.content["data"]["boundaries"].startswith("packed as in training") == as_trained
    assert len(folders) == 6
    assert set(analyses_in(output / "model" / "analysis")) == folders
    assert (folder / FILE).read_bytes() == written
    assert "run was trained on sequences of 24 tokens: at 32, queries from 25 on are beyond its training" in (
        capsys.readouterr().err
    )
    # The same again is read.
    (again,), (same,) = analyze_all([str(output)], Request(data, sequences=3))
    assert same == folder
    assert again.content == json.loads(json.dumps(first.content))
    assert f"run: analysed before, {folder}" in capsys.readouterr().err
    # Models side by side see the same text: as long as the shortest of their trainings.
    tiny_model("softmax", vocab_size=VOCAB).save_pretrained(tmp_path / "elsewhere")
    both, _ = analyze_all([str(output), str(tmp_path / "elsewhere")], Request(data, sequences=3))
    assert [analysis.content["data"]["length"] for analysis in both] == [24, 24]
    assert both[1].content["data"]["training_length"] is None

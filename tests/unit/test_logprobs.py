"""Log-probs of chosen tokens through whole models, against the models' logits, for padded and packed rows."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import transformers
from structlog.testing import capture_logs
from torch import nn

from stream.errors import SettingsError
from workers.settings import TrainSettings
from workers.train.model.attention import set_attention
from workers.train.model.lm_head import find_lm_head
from workers.train.model.logit_blocks import LogitTransform
from workers.train.model.logprobs import LogprobModel, token_logprobs
from workers.train.model.trainable_model import checkpoint_layers

pytestmark = pytest.mark.models

VOCABULARY = 24
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDE = {"head_dim": 8}


def config(name, **options):
    return getattr(transformers, f"{name}Config")(**SHAPE, **options)


FAMILIES = {
    "qwen2": (config("Qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1), LogitTransform()),
    "qwen3": (config("Qwen3", **WIDE, tie_word_embeddings=True), LogitTransform()),
    "llama": (config("Llama"), LogitTransform()),
    "mistral": (config("Mistral", sliding_window=4), LogitTransform()),
    "phi3": (config("Phi3"), LogitTransform()),
    "gemma2": (config("Gemma2", **WIDE, final_logit_softcapping=0.5), LogitTransform(softcap=0.5)),
    "gemma3": (
        config("Gemma3Text", **WIDE, sliding_window=4, final_logit_softcapping=30.0),
        LogitTransform(softcap=30.0),
    ),
    "cohere": (config("Cohere", logit_scale=0.25), LogitTransform(scale=0.25)),
    "granite": (config("Granite", logits_scaling=4.0), LogitTransform(scale=0.25)),
}
if hasattr(transformers, "HyperCLOVAXConfig"):  # not in the oldest transformers that is permitted
    FAMILIES["hyperclovax"] = (config("HyperCLOVAX", logits_scaling=4.0), LogitTransform(scale=4.0))
PACKING = [name for name in FAMILIES if name != "gemma2"]
"""Families that `varlen` attention supports: Gemma 2 caps scores."""


def model_of(name, dtype=torch.float64):
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(5)
        model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES[name][0]), dtype=dtype).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:  # larger than a new model's, so that tokens affect each other
                nn.init.normal_(parameter, std=0.3)
    return model


def readable(model, *, packing="off", attention="auto"):
    dtype = next(model.parameters()).dtype
    return set_attention(
        LogprobModel(model, find_lm_head(model)), TrainSettings(packing=packing, attention=attention), dtype
    )


@pytest.fixture
def rows():
    """Rows of different lengths, padded; about half of their tokens chosen."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([9, 4, 7])
    real = torch.arange(9) < lengths[:, None]
    tokens = torch.randint(1, VOCABULARY, (3, 9), generator=generator) * real
    chosen = (torch.rand(3, 9, generator=generator) < 0.6) & real
    chosen[:, 0] = False
    return tokens, chosen, lengths


def of_logits(model, tokens, chosen, temperature=1.0):
    """Return log-probs and entropies of the model's logits."""
    logprobs = (model(input_ids=tokens).logits[:, :-1] / temperature).log_softmax(-1)
    result = logprobs.gather(2, tokens[:, 1:, None]).squeeze(2)
    return result[chosen[:, 1:]], -(logprobs.exp() * logprobs).sum(-1)[chosen[:, 1:]]


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_and_gradients_equal_those_of_the_models_logits(name, rows, temperature):
    model, (tokens, chosen, lengths) = model_of(name), rows
    read = readable(model)
    assert read.head.transform == FAMILIES[name][1]
    result = token_logprobs(read, tokens, chosen, temperature=temperature, lengths_M=lengths, entropy="gradient")
    logprobs, entropy = of_logits(model, tokens, chosen, temperature)
    # In `eager` attention, which Gemma 2 uses, scores are float32 for any model dtype.
    assert torch.allclose(result.logprobs_N, logprobs, rtol=0, atol=1e-12)
    assert torch.allclose(result.entropy_N, entropy, rtol=0, atol=1e-12)
    ours = gradients(model, result.logprobs_N.sum() + result.entropy_N.square().sum())
    theirs = gradients(model, logprobs.sum() + entropy.square().sum())
    assert {n: float((ours[n] - theirs[n]).abs().max()) for n in ours} == pytest.approx(
        dict.fromkeys(ours, 0), abs=1e-10
    )


def test_temperature_0_is_treated_as_1(rows):
    read = readable(model_of("qwen3"))
    greedy = token_logprobs(read, *rows[:2], temperature=0.0).logprobs_N
    assert torch.equal(greedy, token_logprobs(read, *rows[:2], temperature=1.0).logprobs_N)


def test_a_logit_cap_above_all_logits_is_detected():
    """A new model's logits are so small that 30 * tanh(z / 30) equals z to the last digits."""
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES["gemma3"][0]).eval()
    assert find_lm_head(model).transform.softcap == 30.0


class Odd(transformers.Qwen3ForCausalLM):
    """Transforms its logits in a way that its configuration does not declare."""

    def forward(self, **inputs):
        result = super().forward(**inputs)
        result.logits = result.logits * 3.0 - 1.0
        return result


@pytest.mark.parametrize("entropy", ["value", "gradient"])
def test_an_unknown_logit_transformation_falls_back_to_full_logits_and_is_logged(rows, entropy):
    model, (tokens, chosen, lengths) = Odd(FAMILIES["qwen3"][0]).double().eval(), rows
    with capture_logs() as logs:
        read = readable(model)
    assert read.head is None
    assert [(line["event"], line["model"]) for line in logs] == [("lm_head.unknown", "Odd")]
    result = token_logprobs(
        read, tokens, chosen, temperature=0.7, lengths_M=lengths, entropy=entropy, sum_pi_squared=True
    )
    logprobs, entropies = of_logits(model, tokens, chosen, 0.7)
    assert torch.allclose(result.logprobs_N, logprobs, rtol=0, atol=1e-12)
    assert torch.allclose(result.entropy_N, entropies, rtol=0, atol=1e-12)
    assert result.entropy_N.requires_grad == (entropy == "gradient")
    assert ((result.sum_pi_squared_N > 1 / VOCABULARY) & (result.sum_pi_squared_N < 1)).all()
    assert result.hidden_NH.shape == (int(chosen.sum()), SHAPE["hidden_size"])


def test_a_model_without_a_separate_output_layer_works(rows):
    table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(2))

    class Bigrams:
        def get_output_embeddings(self):
            return None

        def __call__(self, input_ids, use_cache=False):
            return SimpleNamespace(logits=table[input_ids])

    result = token_logprobs(LogprobModel(Bigrams(), find_lm_head(Bigrams())), *rows[:2], temperature=1.0)
    assert torch.allclose(result.logprobs_N, of_logits(Bigrams(), *rows[:2])[0])
    assert result.hidden_NH is None


def test_the_forward_pass_makes_no_logits(rows):
    """The output layer receives no tokens."""
    model = model_of("qwen3")
    read, shapes = readable(model), []
    model.lm_head.register_forward_hook(lambda _, __, logits: shapes.append(tuple(logits.shape)))
    token_logprobs(read, *rows[:2], temperature=1.0)
    assert shapes == [(3, 0, VOCABULARY)]


def test_padding_and_batch_mates_do_not_change_a_rows_log_probs(rows):
    read, (tokens, chosen, _) = readable(model_of("qwen3")), rows
    alone = token_logprobs(read, tokens[:1], chosen[:1], temperature=1.0).logprobs_N
    together = token_logprobs(read, tokens, chosen, temperature=1.0).logprobs_N
    assert torch.allclose(together[: len(alone)], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
@pytest.mark.parametrize("name", PACKING)
def test_packing_does_not_change_log_probs(name, attention, rows):
    model, (tokens, chosen, lengths) = model_of(name), rows
    options = {
        "temperature": 0.7,
        "lengths_M": lengths,
        "entropy": "gradient",
        "sum_pi_squared": True,
        "end_states": True,
    }
    apart = token_logprobs(readable(model), tokens, chosen, **options)
    expected = gradients(model, apart.logprobs_N.sum() + apart.entropy_N.sum())
    read = readable(model, packing="on", attention=attention)
    assert (read.packed, model.config._attn_implementation) == (True, attention)
    packed = token_logprobs(read, tokens, chosen, **options)
    for name_of, one, other in zip(packed._fields, packed, apart, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12), name_of
    result = gradients(model, packed.logprobs_N.sum() + packed.entropy_N.sum())
    far = {n: float((result[n] - expected[n]).abs().max() / expected[n].abs().max()) for n in expected}
    # Some families' norms are float32 for any model dtype, and so are the sums of the gradients of their gains.
    assert max(error for n, error in far.items() if expected[n].ndim > 1) < 1e-10, far
    assert max(far.values()) < 1e-6, far


def test_packing_does_not_change_log_probs_in_float32(rows):
    model, (tokens, chosen, lengths) = model_of("qwen3", torch.float32), rows
    apart = token_logprobs(readable(model), tokens, chosen, temperature=1.0, lengths_M=lengths)
    read = readable(model, packing="on", attention="varlen")
    packed = token_logprobs(read, tokens, chosen, temperature=1.0, lengths_M=lengths)
    assert torch.allclose(packed.logprobs_N, apart.logprobs_N, rtol=0, atol=1e-5)


STATEFUL = {
    "Mamba2": {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "n_groups": 1, "num_hidden_layers": 2},
    "Lfm2": {**SHAPE, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
}


@pytest.mark.parametrize("name", STATEFUL)
def test_a_model_with_recurrent_state_is_not_packed(name):
    made = getattr(transformers, f"{name}Config")(**{"vocab_size": VOCABULARY} | STATEFUL[name])
    model = transformers.AutoModelForCausalLM.from_config(made).eval()
    own = model.config._attn_implementation
    with pytest.raises(
        SettingsError,
        match=r"train\.packing is 'on', but .* gives other results for packed rows than for the same rows apart",
    ):
        readable(model, packing="on")
    assert model.config._attn_implementation == own
    assert not readable(model).packed


def test_attention_across_packed_rows_is_detected(monkeypatch):
    """The leak is far smaller than rounding in bfloat16."""
    model = model_of("qwen3", torch.float32)
    layer = model.model.layers[0].self_attn
    inner = layer.forward

    def leaking(hidden_states, **others):
        out, weights = inner(hidden_states=hidden_states, **others)
        return out + 1e-2 * hidden_states.cumsum(dim=1), weights

    monkeypatch.setattr(layer, "forward", leaking)
    with pytest.raises(SettingsError, match=r"varlen: .*(off by|sees the one before)"):
        set_attention(
            LogprobModel(model, find_lm_head(model)), TrainSettings(packing="on", attention="varlen"), torch.bfloat16
        )


def test_an_unavailable_attention_is_refused_by_name():
    with pytest.raises(SettingsError, match=r"train\.attention = 'flash_attention_2'"):
        readable(model_of("qwen3", torch.float32), attention="flash_attention_2")
    with pytest.raises(SettingsError, match=r"has no softcap"):
        readable(model_of("gemma2"), packing="on", attention="varlen")
    assert readable(model_of("qwen3"), attention="eager").model.config._attn_implementation == "eager"


def test_gradient_checkpointing_stores_less_and_gives_the_same_gradients(rows):
    tokens, chosen, _ = rows

    def run(read):
        kept, seen = 0, 0

        def pack(tensor):
            nonlocal kept
            kept += tensor.numel()
            return tensor

        def count(*_):
            nonlocal seen
            seen += 1

        hook = read.model.model.layers[0].mlp.register_forward_pre_hook(count)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = token_logprobs(read, tokens, chosen, temperature=1.0)
        made = gradients(read.model, result.logprobs_N.sum())
        hook.remove()
        return result.logprobs_N, made, kept, seen

    plain = run(readable(model_of("qwen3")))
    model = model_of("qwen3")
    checkpoint_layers(model)
    again = run(readable(model))
    assert not model.training
    assert torch.equal(again[0], plain[0])
    assert all(torch.equal(again[1][name], gradient) for name, gradient in plain[1].items())
    assert again[2] < plain[2] / 2
    assert (plain[3], again[3]) == (1, 2)


def test_a_model_that_does_not_support_gradient_checkpointing_is_refused():
    with pytest.raises(SettingsError, match=r"train\.gradient_checkpointing is set, but Linear has no layers"):
        checkpoint_layers(nn.Linear(2, 2))


def test_bfloat16_rounds_matrix_products_but_not_norms_rotations_and_log_probs(rows):
    model, (tokens, chosen, lengths) = model_of("qwen3", torch.float32), rows
    read, types = readable(model), {}

    def keep(name, out):
        types.setdefault(name, (out[0] if isinstance(out, tuple) else out).dtype)

    layer = model.model.layers[0]
    watched = [model.model.rotary_emb, layer.input_layernorm, layer, model.model.norm]
    for module in [*watched, layer.self_attn.q_proj, layer.mlp.down_proj]:
        module.register_forward_hook(lambda result, _, out: keep(result, out))
    with torch.autocast("cpu", torch.bfloat16):
        result = token_logprobs(read, tokens, chosen, temperature=1.0, lengths_M=lengths, entropy="value")
    exact = token_logprobs(read, tokens, chosen, temperature=1.0, lengths_M=lengths)
    assert types[layer.self_attn.q_proj] == types[layer.mlp.down_proj] == torch.bfloat16
    assert [types[module] for module in watched] == [torch.float32] * 4
    assert result.logprobs_N.dtype == result.entropy_N.dtype == torch.float32
    error = (result.logprobs_N - exact.logprobs_N).abs().max()
    assert 0 < error < 0.3
    assert math.isfinite(float(result.entropy_N.sum()))
    result.logprobs_N.sum().backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}

"""Small GGUF files, written as llama.cpp writes them: a Llama with random weights and a byte-level tokenizer."""

from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from gguf.quants import quantize
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES: Final = ("h e", "l l", "he ll", "hell o", "Ġ Ġ")
TOKENS: Final = (*SPECIAL, *bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in MERGES))
TEMPLATE: Final = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
_CONTROL, _NORMAL = 3, 1
_NAMES: Final = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def small_llama(*, tied: bool = True) -> LlamaForCausalLM:
    """Make a Llama of two layers whose rows are multiples of a block of 32 numbers."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(TOKENS),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            rope_parameters={"rope_type": "default", "rope_theta": 12345.0},
            rms_norm_eps=1e-5,
            tie_word_embeddings=tied,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    ).eval()


def write_gguf(
    file: Path,
    model: LlamaForCausalLM | None = None,
    *,
    kind: str = "F32",
    architecture: str = "llama",
    without: str = "",
    split: str = "smollm",
    **facts: Any,
) -> Path:
    """Write a GGUF file.

    Args:
        file: path to write.
        model: default: a small one.
        kind: type of the matrices, such as `Q4_1`; norms are float32.
        architecture: its name in the file.
        without: beginning of the names of tensors and fields that are left out.
        split: name of the way in which the tokenizer splits text.
        facts: further fields, `__` in a name standing for a dot.
    """
    model = model or small_llama()
    config = model.config
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    if not without.startswith("tokenizer"):
        _add_tokenizer(writer, split, has_template=without != "chat_template")
    for name, value in facts.items():
        key = name.replace("__", ".")
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, value)
    for name, tensor in _tensors(model):
        if not (without and name.startswith(without)):
            wanted = gguf.GGMLQuantizationType[kind if tensor.ndim > 1 else "F32"]
            writer.add_tensor(name, quantize(tensor, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: gguf.GGUFWriter, split: str, *, has_template: bool) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(list(TOKENS))
    writer.add_token_types([_CONTROL if token in SPECIAL else _NORMAL for token in TOKENS])
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    if has_template:
        writer.add_chat_template(TEMPLATE)


def _tensors(model: LlamaForCausalLM) -> list[tuple[str, np.ndarray]]:
    """Return the weights by llama.cpp's names, with rows of queries and keys in its order."""
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    tensors = []
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        place = name.removesuffix(".weight")
        prefix = ""
        if place.startswith("model.layers."):
            _, _, layer, place = place.split(".", 3)
            prefix = f"blk.{layer}."
        tensor, short = value.numpy(), _NAMES[place]
        if short in heads:
            count = heads[short]
            shape = (count, 2, tensor.shape[0] // count // 2, *tensor.shape[1:])
            tensor = tensor.reshape(shape).swapaxes(1, 2).reshape(tensor.shape)
        tensors.append((f"{prefix}{short}.weight", tensor))
    return tensors

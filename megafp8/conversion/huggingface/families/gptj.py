"""GPT-J and CodeGen: attention and MLP in parallel with one norm; biases in MLPs and in the output layer."""

import torch

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.families.gpt2 import gpt2_like
from megafp8.conversion.huggingface.names import Names, Rows, TensorNames, fused, in_layers
from megafp8.conversion.huggingface.rope import rotary_fraction
from megafp8.conversion.keys import Fields, HfConfig, Trait, always, check, only


def _read_rotary(hf: HfConfig) -> Fields:
    dim, width = hf.get("rotary_dim", 64), hf["n_embd"] // hf["n_head"]
    if not isinstance(dim, int) or not 0 < dim <= width:
        refuse("rotary_dim", dim, f"a number of channels of a head ({width})")
    return {"partial_rotary_factor": rotary_fraction(dim, width)}


def _check_width(hf: HfConfig) -> None:
    if hf["n_embd"] % 4:
        refuse("n_embd", hf["n_embd"], "a multiple of 4, the number of parts in which q, k and v are stored")


def _by_quarter(part: int) -> Rows:
    """Return the rows of a part, if each quarter of the queries is stored before a quarter of values and of keys."""
    return lambda mixer, n: (torch.arange(3 * n).view(4, 3, -1)[:, part].flatten(), 3 * n)


_MODEL = (
    *gpt2_like(2048, dropout=0.0), traits.UNTIED,
    always(normalization="layernorm", parallel_block="shared_norm", linear_bias="mlp", output_bias=True),
    Trait(
        ("rotary_dim",), _read_rotary,
        lambda ours: {"rotary_dim": round(ours["head_dim"] * ours["partial_rotary_factor"])},
    ),
    only(written=False, rotary=True, scale_attn_weights=True),
)  # fmt: skip


def _names(qkv: Names) -> TensorNames:
    layer = {"attention.proj": "attn.out_proj", "mlp.up": "mlp.fc_in", "mlp.down": "mlp.fc_out", "shared_norm": "ln_1"}
    ends = {"embedding.word": "transformer.wte", "final_norm": "transformer.ln_f", "output": "lm_head"}
    return TensorNames({**ends, **in_layers("transformer.h.*", qkv, layer)}, rotation="neighbors")


_QVK = ("attention.q", "attention.v", "attention.k")
FAMILIES = (
    Family("gptj", "GPTJForCausalLM", _MODEL, _names({f"attention.{x}": f"attn.{x}_proj" for x in "qkv"}),
        about="GPT-J",
    ),
    Family("codegen", "CodeGenForCausalLM", (*_MODEL, check(_check_width)),
           _names(fused("attn.qkv_proj", _by_quarter, _QVK)),
        about="CodeGen",
    ),
)  # fmt: skip

"""Peer of `temper bench step`: one SFT optimizer step of Hugging Face transformers on one GPU, full-width layers, depth cut to fit.

usage: hf_train.py 8b|30b|235b LAYERS SEQ MICRO [compile] [ckpt] [liger] [grouped] [accumN]   (N micro-batches an optimizer step)

Prints tokens/s, model TFLOP/s (6 x active parameters + causal attention, embedding look-up left out, output head included) and peak
memory: the same definitions as temper's (docs/NUMERICS.md). Needs torch, transformers 5; `liger` needs liger-kernel.
"""
import sys
import time

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

VOCAB = 151936
COMMON = dict(vocab_size=VOCAB, head_dim=128, rope_theta=1e6, tie_word_embeddings=False, max_position_embeddings=65536, use_cache=False)
EXPERTS = dict(num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, num_key_value_heads=4)


def config(arch, layers):
    common = dict(COMMON, num_hidden_layers=layers)
    if arch == "8b":
        return Qwen3Config(hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8, **common)
    if arch == "30b":
        return Qwen3MoeConfig(
            hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_attention_heads=32, **EXPERTS, **common
        )
    if arch == "235b":
        return Qwen3MoeConfig(
            hidden_size=4096, intermediate_size=12288, moe_intermediate_size=1536, num_attention_heads=64, **EXPERTS, **common
        )
    sys.exit(__doc__)


def build(c, options):
    if "liger" in options:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3, apply_liger_kernel_to_qwen3_moe

        dense = isinstance(c, Qwen3Config)
        (apply_liger_kernel_to_qwen3 if dense else apply_liger_kernel_to_qwen3_moe)(fused_linear_cross_entropy=True)
    experts = {"experts_implementation": "grouped_mm"} if "grouped" in options else {}
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(c, attn_implementation="sdpa", **experts)
    torch.set_default_dtype(torch.float32)
    model.train()
    if "ckpt" in options:
        model.gradient_checkpointing_enable()
    if "compile" in options:
        model.forward = torch.compile(model.forward)
    return model


def flops_per_token(model, c, seq):
    active = sum(p.numel() for p in model.parameters()) - VOCAB * c.hidden_size
    if isinstance(c, Qwen3MoeConfig):
        idle = c.num_experts - c.num_experts_per_tok
        active -= c.num_hidden_layers * 3 * c.hidden_size * c.moe_intermediate_size * idle
    return 6 * active + 6 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * seq


def main():
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    arch, (layers, seq, micro), options = sys.argv[1], map(int, sys.argv[2:5]), set(sys.argv[5:])
    accumulate = next((int(o[5:]) for o in options if o.startswith("accum")), 1)
    c = config(arch, layers)
    model = build(c, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(0, VOCAB, (micro, seq), device="cuda")

    def step():
        for _ in range(accumulate):
            loss = model(input_ids=ids, labels=ids).loss
            (loss / accumulate).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    for _ in range(4):
        step()
    torch.cuda.synchronize()
    times = []
    for _ in range(8):
        start = time.time()
        loss = step()
        torch.cuda.synchronize()
        times.append(time.time() - start)
    seconds, tokens = sorted(times)[4], micro * seq * accumulate
    rate = tokens / seconds
    print(
        f"RESULT {arch} layers {layers} seq {seq} micro {micro} {sorted(options)}: step {seconds * 1e3:.0f} ms, {rate:.0f} tokens/s, "
        f"{rate * flops_per_token(model, c, seq) / 1e12:.0f} model TFLOP/s, "
        f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, loss {loss.item():.2f}",
        flush=True,
    )


if __name__ == "__main__":
    try:
        main()
    except Exception as error:  # one line a configuration, whatever happens to it
        print("RESULT", *sys.argv[1:], "FAILED", repr(error)[:200], flush=True)
        sys.exit(1)

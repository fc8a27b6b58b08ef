"""Freeze the Q/K projections of a Hugging Face model, train, prove it, save it small, load it again."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import oelm


def build() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


torch.manual_seed(0)
model = build()
print(oelm.apply(model, "oelm-freeze", seed=0))

optimizer = torch.optim.AdamW(oelm.param_groups(model, lr=1e-3, weight_decay=0.1))
for _ in range(5):
    ids = torch.randint(3, 256, (4, 32))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
oelm.verify(model, optimizer)
print("every frozen weight is what it was")

with tempfile.TemporaryDirectory() as folder:
    oelm.save_compact(model, folder)  # without the frozen matrices: they are drawn again and checked by hash
    again = build()
    oelm.load_compact(again, folder)
ids = torch.arange(3, 35)[None]
assert torch.equal(model(input_ids=ids).logits, again(input_ids=ids).logits)
print("loaded again: the same logits")

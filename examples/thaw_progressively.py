"""Frozen at first, thawed from the top layer down: in a training loop of one's own."""

import torch
from torch import nn

import oelm


torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
model = nn.Sequential(nn.Embedding(100, 32), nn.TransformerEncoder(layer, 4), nn.Linear(32, 100))
oelm.apply(model, "progressive", seed=0)  # from 25 % to 75 % of the budget

steps = 20
thaw = oelm.schedule(model, total_steps=steps)
optimizer = torch.optim.AdamW(oelm.param_groups(model, lr=1e-3, weight_decay=0.01, layer_decay=0.9))
for step in range(steps):
    for name in thaw.step(step):
        print(f"step {step:2d}: {name} trains from now on")
    ids = torch.randint(0, 100, (8, 16))
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
oelm.verify(model, optimizer)

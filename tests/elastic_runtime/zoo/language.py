"""Language models: characters, transformers, recurrent networks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import elastic_runtime
from tests.elastic_runtime.zoo.parts import EPOCHS, script, texts


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("mask", torch.ones(16, 16).tril().bool())

    def forward(self, x: torch.Tensor) -> Any:
        length, mask = x.shape[1], self.mask
        assert isinstance(mask, torch.Tensor)
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(scaled_dot_product_attention(q, k, v, attn_mask=mask[:length, :length]))


class Tiny(nn.Module):
    """A transformer of one block, its output tied to its embedding."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(11, width), nn.Parameter(torch.zeros(16, width))
        self.attention, self.norm = Attention(width), nn.LayerNorm(width)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> Any:
        found = self.embedding(x) + self.position[: x.shape[1]]
        return self.head(self.norm(self.attention(found)))


def next_token(model: nn.Module, batch: torch.Tensor) -> Any:
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


@script()
def tied_transformer_with_decay_groups(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = Tiny()
    wide = [p for p in model.parameters() if p.dim() > 1]
    narrow = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "weight_decay": 0.0}], lr=0.01
    )
    model, optimizer, loader = job.prepare(model, optimizer, texts())
    for _epoch in job.epochs(EPOCHS):
        for batch in loader:
            job.backward(next_token(model, batch))
            job.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return model


@script()
def transformer_with_warm_up_and_cosine(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [4])
    model, optimizer, loader, scheduler = job.prepare(model, optimizer, texts(), scheduler)
    for _epoch in job.epochs(EPOCHS):
        for batch in loader:
            job.backward(next_token(model, batch))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return model


@script()
def masked_tokens_weighted_by_their_number(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = Tiny()
    model, optimizer, loader = job.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01), texts())
    for _epoch in job.epochs(EPOCHS):
        for batch in loader:
            hidden = batch % 3 == 0
            counted = int(hidden.sum())
            if counted == 0:
                job.skip()
            else:
                found = model(batch.masked_fill(hidden, 0))
                job.backward(cross_entropy(found[hidden], batch[hidden]), weight=counted)
            optimizer.step()
            optimizer.zero_grad()
    return model


@script()
def recurrent_network_over_whole_sequences(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = nn.ModuleDict({"in": nn.Embedding(11, 8), "lstm": nn.LSTM(8, 8, batch_first=True), "out": nn.Linear(8, 11)})
    model, optimizer, loader = job.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01), texts())
    for _epoch in job.epochs(EPOCHS):
        for batch in loader:
            found, _state = model["lstm"](model["in"](batch[:, :-1]))
            job.backward(cross_entropy(model["out"](found).flatten(0, 1), batch[:, 1:].flatten()))
            if job.applied:
                nn.utils.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return model


@script(modes=("exact",))
def half_precision_activations(**init: Any) -> Any:
    """With "fast" the rounding of bfloat16 depends on the shape of a micro-batch."""
    job = elastic_runtime.init(**init)
    model = Tiny()
    model, optimizer, loader = job.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), texts())
    for _epoch in job.epochs(EPOCHS):
        for batch in loader:
            with torch.autocast("cpu", torch.bfloat16):
                loss = next_token(model, batch)
            job.backward(loss.float())
            optimizer.step()
            optimizer.zero_grad()
    return model


@script()
def activations_computed_again(**init: Any) -> Any:
    job = elastic_runtime.init(**init)
    model = Tiny()
    model, optimizer, loader = job.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), texts())
    for _epoch in job.epochs(EPOCHS):
        for batch in loader:
            found = model.embedding(batch[:, :-1]) + model.position[:8]
            found = torch.utils.checkpoint.checkpoint(model.attention, found, use_reentrant=False)
            job.backward(cross_entropy(model.head(model.norm(found)).flatten(0, 1), batch[:, 1:].flatten()))
            optimizer.step()
            optimizer.zero_grad()
    return model


@script(refused="state from one iteration to the next")
def recurrent_state_carried_over_batches(**init: Any) -> Any:
    """Truncated backpropagation through time: the state belongs to samples that another worker has after a growth."""
    job = elastic_runtime.init(**init)
    model = nn.LSTM(8, 8, batch_first=True)
    embedding = nn.Embedding(11, 8)
    parameters = [*model.parameters(), *embedding.parameters()]
    _, optimizer, loader = job.prepare([model, embedding], torch.optim.SGD(parameters, lr=0.1), texts())
    hidden = None
    for _epoch in job.epochs(EPOCHS):
        for batch in loader:
            found, hidden = model(embedding(batch), hidden)
            hidden = tuple(part.detach() for part in hidden)
            job.backward(found.square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return model

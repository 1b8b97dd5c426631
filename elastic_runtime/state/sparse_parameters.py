"""The parameters that have sparse gradients: a property of their modules."""

from __future__ import annotations

import torch


def sparse_parameters(model: torch.nn.Module) -> frozenset[torch.nn.Parameter]:
    """Return the weights of the model's embeddings with sparse=True."""
    tables = [part for part in model.modules() if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag)]
    weights = [table.weight for table in tables if table.sparse]
    return frozenset(weight for weight in weights if isinstance(weight, torch.nn.Parameter))


def no_rows(parameter: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a sparse gradient of the parameter without a row."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    values = torch.empty((0, *parameter.shape[1:]), dtype=dtype or parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, is_coalesced=True, check_invariants=False)


def zero_gradient(parameter: torch.Tensor, sparse: frozenset[torch.nn.Parameter]) -> torch.Tensor:
    """Return a gradient of zeros; without a row if the parameter is one of the `sparse` ones."""
    return no_rows(parameter) if parameter in sparse else torch.zeros_like(parameter)

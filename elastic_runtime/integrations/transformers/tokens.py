"""Over how many tokens a loss is a mean."""

from __future__ import annotations

from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from elastic_runtime.torch_internals.modules import uncompiled

IGNORED_LABEL = -100
CAUSAL_MODELS = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


def is_causal(model: Any) -> bool:
    """Whether a model's loss shifts labels, by its name, which torch.compile and PEFT's adapters hide."""
    model = uncompiled(model)
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return type(model).__name__ in CAUSAL_MODELS


def counted_tokens(inputs: dict[str, Any], *, shifted: bool) -> int | None:
    """Tokens that the loss is a mean over, where labels are per token; None where each sample counts the same.

    `shifted`: a causal model predicts each label from those before it, so that the first counts for nothing; unless the
    batch brings labels that are shifted already.
    """
    labels = inputs.get("labels")
    if "shift_labels" in inputs:
        labels, shifted = inputs["shift_labels"], False
    if labels is None or labels.dim() < 2:
        return None
    counted = labels[..., 1:] if shifted else labels
    return max(1, int((counted != IGNORED_LABEL).sum()))

"""The loss of a Trainer: over how many tokens it is a mean, and the one that is logged."""

from __future__ import annotations

from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from elastic_runtime.torch_internals.modules import uncompiled


class MeanLoss:
    """The loss that is logged: that of this worker's iterations, weighted within a step as their gradients are."""

    def __init__(self) -> None:
        self.newest = 0.0
        """Return the loss of the last step."""
        self._step: list[tuple[float, float]] = []
        self._unlogged: list[float] = []
        self._summed, self._steps = 0.0, 0

    def note(self, loss: float, weight: float | None) -> None:
        """Record the loss of one iteration; a `weight` of None is the same for all iterations of a step."""
        self._step.append((loss, 1.0 if weight is None else weight))

    def end_step(self) -> None:
        """End a step: compute its mean loss, and add it to the sums."""
        total = sum(weight for _, weight in self._step)
        self.newest = sum(loss * weight for loss, weight in self._step) / (total or 1.0)
        self._step = []
        self._unlogged.append(self.newest)
        self._summed, self._steps = self._summed + self.newest, self._steps + 1

    def since_the_last_log(self) -> float:
        """The mean over the steps since it was last asked for."""
        found, self._unlogged = self._unlogged, []
        return sum(found) / max(1, len(found))

    @property
    def of_all(self) -> float:
        """The mean over all steps that this worker took part in."""
        return self._summed / max(1, self._steps)


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

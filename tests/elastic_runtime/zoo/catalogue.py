"""All scripts: importing this fills `parts.SCRIPTS`."""

from __future__ import annotations

from tests.elastic_runtime.zoo import adversarial, classic, contrastive, defects, generative, language, practice

__all__ = ["adversarial", "classic", "contrastive", "defects", "generative", "language", "practice"]

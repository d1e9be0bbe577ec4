"""Hugging Face causal language models on hicache. Importing it needs torch and transformers.

Doors: `CachedModel` (prompts as token ids in, tokens out) and `Unsupported` (why a model is not
served). Inside: `cached_model` runs the model; `model_namespace` names its KV.
"""

from hicache.connectors.transformers.cached_model import CachedModel, Generation
from hicache.connectors.transformers.model_namespace import Unsupported

__all__ = ["CachedModel", "Generation", "Unsupported"]

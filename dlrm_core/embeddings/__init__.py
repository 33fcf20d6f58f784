"""Embedding tables behind one interface, and the back ends that work on them."""

from dlrm_core.embeddings.backends import Update, attach
from dlrm_core.embeddings.tables import EmbeddingTables

__all__ = ["EmbeddingTables", "Update", "attach"]

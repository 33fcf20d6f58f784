"""Batches: where they come from and how they reach the training loop."""

from dlrm_core.data.batch import Batch
from dlrm_core.data.loader import PrefetchError, batches

__all__ = ["Batch", "PrefetchError", "batches"]

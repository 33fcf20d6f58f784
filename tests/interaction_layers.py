"""Layers of interactions by themselves, without a model around them."""

from dlrm_core.interactions import CrossInteraction, DotInteraction
from dlrm_core.model import InteractionLayer


def dot_layer(features: int, itself: bool) -> InteractionLayer:
    return InteractionLayer(DotInteraction(features, 1, interaction_itself=itself))


def cross_layer(features: int, dim: int, layers: int, rank: int) -> InteractionLayer:
    return InteractionLayer(CrossInteraction(features, dim, dcn_layers=layers, dcn_rank=rank))

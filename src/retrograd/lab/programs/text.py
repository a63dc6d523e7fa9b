"""Jobs of text and image recognition programs."""

from __future__ import annotations

from typing import Any

from .declared import Step
from .training import optimized

__all__ = ["transformers_bert", "transformers_gpt2"]


def _transformer(model: Any) -> Step:
    import torch

    words = torch.randint(1000, (8, 64))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    return optimized(optimizer, lambda: model(input_ids=words, labels=words).loss)


def transformers_bert() -> Step:
    """Four layers of 128 features, without dropout; nine layer norms and one in the head."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=1000,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return _transformer(BertForMaskedLM(config).train())


def transformers_gpt2() -> Step:
    """Four layers of 128 features, without dropout; nine layer norms."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=1000, n_positions=64, n_embd=128, n_layer=4, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return _transformer(GPT2LMHeadModel(config).train())

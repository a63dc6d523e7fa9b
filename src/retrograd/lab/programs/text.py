"""Jobs of text and image recognition programs."""

from __future__ import annotations

import random
from typing import Any

from .declared import Step
from .training import optimized, stub

__all__ = ["flair_language_model", "flair_tagger", "kraken_recognizer", "transformers_bert", "transformers_gpt2"]


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
        vocab_size=1000,
        n_positions=64,
        n_embd=128,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return _transformer(GPT2LMHeadModel(config).train())


def _sentences() -> list[list[str]]:
    return [[f"word{random.randrange(200)}" for _ in range(random.randrange(5, 30))] for _ in range(32)]


def flair_tagger() -> Step:
    """A tag for every word of a sentence: a bidirectional LSTM of 64 units over packed sentences, with a CRF."""
    import torch
    from flair.data import Dictionary, Sentence
    from flair.embeddings import OneHotEmbeddings
    from flair.models import SequenceTagger

    words, tags = Dictionary(), Dictionary(add_unk=False)
    sentences = [Sentence(one) for one in _sentences()]
    for sentence in sentences:
        for token in sentence:
            words.add_item(token.text)
            token.add_label("kind", f"tag{int(token.text[4:]) % 12}")
            tags.add_item(token.get_label("kind").value)
    embeddings = OneHotEmbeddings(words, embedding_length=64)
    tagger = SequenceTagger(embeddings, tags, "kind", hidden_size=64).train()

    def loss() -> Any:
        for sentence in sentences:
            sentence.clear_embeddings()
        total, count = tagger.forward_loss(sentences)
        return total / count

    return optimized(torch.optim.SGD(tagger.parameters(), 0.1), loss)


def flair_language_model() -> Step:
    """The next character of a text: an LSTM of 256 units, without dropout."""
    import torch
    from flair.data import Dictionary
    from flair.models import LanguageModel

    letters = Dictionary()
    for letter in "abcdefghijklmnopqrstuvwxyz .":
        letters.add_item(letter)
    model = LanguageModel(letters, is_forward_lm=True, hidden_size=256, nlayers=1, dropout=0.0).train()
    text = torch.randint(len(letters), (101, 16))

    def loss() -> Any:
        logits = model(text[:-1], model.init_hidden(16))[0]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[1:].flatten())

    return optimized(torch.optim.SGD(model.parameters(), 1.0), loss)


def kraken_recognizer() -> Step:
    """The text of a line's image: the default network with two bidirectional LSTM layers of 100 units, and CTC."""
    import lightning.pytorch  # noqa: F401  before the stub, which it would use
    import torch

    stub("torchvision.transforms.v2")
    from kraken.lib.vgsl import TorchVGSLModel

    net = TorchVGSLModel(
        vgsl="[1,48,0,1 Cr3,13,16 Do0.1,2 Mp2,2 Cr3,9,32 Do0.1,2 Mp2,2 S1(1x0)1,3 Lbx100 Do0.1,2 Lbx100 Do O1c40]"
    )
    net.init_weights()
    net.train()
    lines, widths = torch.rand(4, 1, 48, 400), torch.tensor([400, 360, 300, 280])
    target = torch.randint(1, 40, (4 * 20,))
    lengths = torch.full((4,), 20)

    def loss() -> Any:
        output, steps = net(lines, widths)
        return net.criterion(output.log_softmax(1).squeeze(2).permute(2, 0, 1), target, steps, lengths)

    return optimized(torch.optim.Adam(net.parameters(), 1e-3), loss)

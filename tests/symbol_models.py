"""Models over symbols: one-hot, embedded, and with the embedding tied to the output."""

from torch import nn
from torch.nn import functional as F

LAYERS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


class SymbolModel(nn.Module):
    """Symbols in, logits out; the linear encoder is applied as a look-up of its columns."""

    def __init__(self, symbols, hidden, layers=2, cell="lstm", encoder="linear"):
        super().__init__()
        linear = encoder == "linear"
        self.encoder = nn.Linear(symbols, hidden) if linear else nn.Embedding(symbols, symbols)
        self.recurrent = LAYERS[cell](hidden if linear else symbols, hidden, layers)
        self.readout = nn.Linear(hidden, symbols)

    def core(self, inputs, state):
        if isinstance(self.encoder, nn.Linear):
            encoded = F.embedding(inputs.long(), self.encoder.weight.t()) + self.encoder.bias
        else:
            encoded = self.encoder(inputs.long())
        return self.recurrent(encoded, state)

    def head(self, features):
        return self.readout(features)

    def forward(self, inputs, state=None):
        features, state = self.core(inputs, state)
        return self.head(features), state


class LanguageModel(nn.Module):
    """Embedding, recurrent layers, and an output matrix that is the embedding if `tied`."""

    def __init__(self, words, hidden, layers=1, cell="lstm", tied=True):
        super().__init__()
        self.embedding = nn.Embedding(words, hidden)
        self.recurrent = LAYERS[cell](hidden, hidden, layers)
        self.readout = nn.Linear(hidden, words)
        if tied:
            self.readout.weight = self.embedding.weight

    def core(self, inputs, state):
        return self.recurrent(self.embedding(inputs.long()), state)

    def head(self, features):
        return self.readout(features)

    def forward(self, inputs, state=None):
        features, state = self.core(inputs, state)
        return self.head(features), state


def symbol_loss(logits, targets):
    """Cross entropy, the mean over time and batch."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten().long())

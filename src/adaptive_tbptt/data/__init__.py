"""Long sequences as the library sees them: nests of tensors, segments, streams."""

from .chunks import ChunkStream
from .segment import Segment
from .stream import SequenceStream, Stream

__all__ = [
    "ChunkStream",
    "Segment",
    "SequenceStream",
    "Stream",
]

"""Long sequences as the library sees them: nests of tensors, segments, streams."""

from .chunks import ChunkStream
from .stream import Segment, SequenceStream, Stream

__all__ = [
    "ChunkStream",
    "Segment",
    "SequenceStream",
    "Stream",
]

"""Long sequences as the library sees them: nests of tensors, segments, streams."""

from .chunks import ChunkStream
from .nest import leaves, map_leaves
from .stream import Segment, SequenceStream, Stream

__all__ = [
    "ChunkStream",
    "Segment",
    "SequenceStream",
    "Stream",
    "leaves",
    "map_leaves",
]

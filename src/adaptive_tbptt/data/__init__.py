"""Long sequences as the library sees them: nests of tensors, segments, streams."""

from .chunks import ChunkStream
from .nest import leaves, map_leaves
from .padding import Padded
from .segment import Segment
from .stream import SequenceStream, Stream

__all__ = [
    "ChunkStream",
    "Padded",
    "Segment",
    "SequenceStream",
    "Stream",
    "leaves",
    "map_leaves",
]

"""Around torch itself: number formats, denormals, compilation, models left as they were."""

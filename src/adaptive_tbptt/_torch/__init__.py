"""What torch makes necessary: number formats, denormals, compilation, models left as they were."""

"""The paper's experiments, made with adaptive-tbptt."""

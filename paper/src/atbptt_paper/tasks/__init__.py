"""The paper's tasks: data, model and metrics of one task each."""

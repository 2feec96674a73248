"""The paper's experiments: configurations, single runs, whole tables, figures and findings."""

"""Scripts that made the bundled models, the experiments and the generated pages, through the public API."""

"""A project that tunes the retriever to a library, and the experiment that compares it with the base. Nothing imports it."""

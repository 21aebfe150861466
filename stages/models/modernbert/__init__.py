"""ModernBERT with projections, the encoder of ColBERT models for code."""

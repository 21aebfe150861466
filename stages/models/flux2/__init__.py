"""FLUX.2. Other folders reach it through `architecture.FLUX2` alone."""

"""Networks that look at images: EfficientNet-Lite0. Arrays in, arrays out; no stage, table or pipeline is imported here."""

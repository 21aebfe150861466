"""Tables on disk: rows in Lance, tensors in immutable Arrow shards, one writer at a time, readers that see finished runs only."""

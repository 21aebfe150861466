"""What any training of adapters needs: loop, task protocol, checkpoints, memory plans. Imports no stage, model or schema."""

"""What any LoRA run needs. Knows no table and no family."""

"""Text encoders: the chat form and tokens of a prompt (tokenisation), Qwen3's decoder, and embeddings made of both (encoder)."""

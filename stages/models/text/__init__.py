"""Text encoders: a prompt as a chat (chat), tokens (tokenisation), hidden states (decoder) and an embedding (encoder)."""

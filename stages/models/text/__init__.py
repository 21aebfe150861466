"""Text encoders. `tokenisation` makes the chat form and the tokens of a prompt. `qwen3` is Qwen3's decoder. `encoder` makes
embeddings with both.
"""

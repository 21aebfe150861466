"""Text encoders. `chat` turns a prompt into a chat, and `tokenisation` turns the chat into tokens. `decoder` computes
hidden states.

`qwen3` and `mistral3` say what is particular to each architecture. `encoder` makes embeddings with all of them.
"""

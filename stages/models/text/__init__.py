"""Text encoders. `chat` is the chat that a prompt becomes, and `tokenisation` its tokens. `decoder` computes hidden states.
`qwen3` and `mistral3` say what is particular to each architecture. `encoder` makes embeddings with all of them.
"""

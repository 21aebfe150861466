"""The pipeline retrieval: a folder of source code becomes a fine-tuned retriever with its index. One file or folder per stage.

A stage imports `stages.models`, `stages.tuner`, `schemas` and the modules here that are no stages, but no other stage.
"""

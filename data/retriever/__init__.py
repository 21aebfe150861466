"""The bundled model `retriever-micro`, a small encoder for code search, and in `training` the scripts that made it."""

"""The bundled model `micro` in the diffusers layout, and in `training` the scripts that made it. See README.md."""

"""Training of a Linear in full: y = x (W + D)^T, with D of W's shape and zero at the start.

For Linears that are small or fresh, such as a projection head. The adapter's file holds D, not W + D.
"""

from __future__ import annotations

DIFF = ".diff"  # (outputs, inputs) float32; LyCORIS' name

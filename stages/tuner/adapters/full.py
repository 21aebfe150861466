"""Training of a Linear in full: y = x (W + D)^T, where the difference D has the shape of W and starts at zero.

For Linears that are small or fresh, such as a projection head. The adapter's file holds D, not W + D, like that of any adapter.
"""

from __future__ import annotations

DIFF = ".diff"  # (outputs, inputs) float32; LyCORIS' name

"""How much memory the stage `latents` takes, from shapes alone."""

from __future__ import annotations

from stages.forecast import Forecast, Outlook
from stages.text_to_image.latents.config import LatentsConfig
from stages.text_to_image.sizes import largest_image, latent_bytes

ITEMSIZES = {"bfloat16": 2, "float32": 4}
LOWEST_RESOLUTION = 256  # pixels: no lower resolution is advised


def forecast(outlook: Outlook) -> Forecast:
    config: LatentsConfig = outlook.sections["latents"]
    width, height = largest_image(outlook)
    peak = peak_bytes(outlook, config, width, height)
    sizes = outlook.family.architecture.transformer_config(outlook.weights("transformer"), outlook.family)
    found = Forecast(peak, latent_bytes(outlook, sizes.in_channels), plan=f"images of at most {width} x {height} px")
    if peak <= outlook.budget:
        return found
    step = outlook.family.architecture.pixels_per_token
    lower = range(int((width * height) ** 0.5) // step * step - step, LOWEST_RESOLUTION - 1, -step)
    fits = (side for side in lower if peak_bytes(outlook, config, side, side) <= outlook.budget)
    side = next(fits, None)
    return Forecast(peak, found.row_bytes, plan=found.plan, remedy=f"[buckets] resolutions = [{side}]" if side else "")


def peak_bytes(outlook: Outlook, config: LatentsConfig, width: int, height: int) -> int:
    weights, item = outlook.weights("autoencoder"), ITEMSIZES[config.precision]
    architecture = outlook.family.architecture
    return sum(architecture.autoencoder_bytes(weights, outlook.family, height, width, item, True, config.exact))

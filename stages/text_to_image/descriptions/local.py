"""Captions by a vision-language model on this machine, through transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.text_to_image.descriptions.config import DescriptionsConfig

if TYPE_CHECKING:
    from PIL.Image import Image


class LocalModel:
    """Downloads nothing. Raises ValueError if the folder, a library or the vision-language model in it is missing."""

    def __init__(self, config: DescriptionsConfig, project: Path) -> None:
        folder = project / Path(config.model).expanduser()
        if not (folder / "config.json").is_file():
            raise ValueError(
                f'descriptions.model must be a folder with a vision-language model, got "{config.model}": there is no file '
                f"{folder / 'config.json'}; or set descriptions.server"
            )
        try:
            import torch
            import transformers
        except ImportError as error:
            raise ValueError(
                f"[descriptions] needs the Python package {error.name}: pip install 'latentmill[describe]'"
            ) from None
        try:
            self.processor: Any = transformers.AutoProcessor.from_pretrained(folder, local_files_only=True)
            model: Any = transformers.AutoModelForImageTextToText.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f'descriptions.model "{config.model}" holds no vision-language model: {reason}') from None
        self.torch, self.config = torch, config
        self.device = "mps" if torch.backends.mps.is_available() else "cuda" if torch.cuda.is_available() else "cpu"
        self.model = model.eval().to(self.device)
        self.name, self.version = config.model, f"transformers {transformers.__version__}"

    def describe(self, image: Image) -> str:
        content = [{"type": "image"}, {"type": "text", "text": self.config.prompt}]
        text = self.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = self.processor(images=image, text=text, return_tensors="pt").to(self.device)
        with self.torch.inference_mode():
            # Greedy, so that equal images get equal captions.
            made = self.model.generate(**inputs, max_new_tokens=self.config.most_tokens, do_sample=False)
        # What is generated begins with the prompt.
        new = made[:, inputs["input_ids"].shape[1] :]
        caption: str = self.processor.batch_decode(new, skip_special_tokens=True)[0]
        return caption

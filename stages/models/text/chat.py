"""The chat that a prompt becomes before it is tokenized, for each architecture of text encoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# The system message that FLUX.2 dev was trained with. The line break after the first "object" belongs to it.
SYSTEM_MESSAGE = (
    "You are an AI that reasons about image descriptions. You give structured responses focusing on object relationships, "
    "object\nattribution and actions without speculation."
)


@dataclass(frozen=True)
class Chat:
    """The form of the chats on which a text encoder was trained."""

    settings: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of the chat template
    system: str = ""  # system message
    removed: str = ""  # token that is taken out of prompts; without effect if there is no system message
    pads_left: bool = False  # a short prompt is padded at its start
    pad: str = ""  # named in the error message for a tokenizer without a padding token, and not used otherwise

    def messages(self, text: str) -> list[dict[str, Any]]:
        if not self.system:
            return [{"role": "user", "content": text}]
        cleaned = text.replace(self.removed, "") if self.removed else text
        turns = {"system": self.system, "user": cleaned}
        return [{"role": role, "content": [{"type": "text", "text": said}]} for role, said in turns.items()]


CHATS: Mapping[str, Chat] = {  # by the family's text_kind
    "qwen3": Chat({"add_generation_prompt": True, "enable_thinking": False}, pad="<|endoftext|>"),
    "mistral3": Chat({"add_generation_prompt": False}, SYSTEM_MESSAGE, removed="[IMG]", pads_left=True, pad="<pad>"),
}

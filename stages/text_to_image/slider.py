"""Sliders: an adapter that moves what the model draws along the difference of two prompts, forwards and, at strengths below 0,
backwards. Trained without photographs, on the model's own drawings. Gandikota et al. 2023, arXiv 2311.12092.
"""

from __future__ import annotations

from dataclasses import dataclass

from stages.settings import Section, setting

NEUTRAL, POLE = "neutral", "pole"  # values of `role` in the table captions


@dataclass(frozen=True)
class SliderConfig(Section):
    positive: str = setting(
        "", 'what strengths above 0 lead to, such as "{caption}, very old"; {caption} stands for the neutral prompt'
    )
    negative: str = setting("", 'what strengths below 0 lead to, such as "{caption}, very young"')
    neutral: tuple[str, ...] = setting(
        (), "prompts of what is to change, without the attribute itself: the model draws them, and trains on the drawings"
    )
    guidance: float = setting(
        4.0,
        "how far the target lies along the difference of the two prompts; not tried on a large model",
        unit="factor",
        bounds=(0.01, 100.0),
    )

    def check(self) -> None:
        for name in ("positive", "negative"):
            if not getattr(self, name).strip():
                raise ValueError(f'{name} must be a prompt, such as "{{caption}}, very old", got ""')
        if self.positive == self.negative:
            raise ValueError(f'negative must be another prompt than positive, got "{self.negative}" for both')
        if not self.neutral or not all(text.strip() for text in self.neutral):
            raise ValueError(f'neutral must list prompts, such as ["a person", "a portrait"], got {list(self.neutral)}')

    def poles(self, neutral: str) -> tuple[str, str]:
        """The positive and the negative prompt of a neutral one."""
        return self.positive.replace("{caption}", neutral), self.negative.replace("{caption}", neutral)

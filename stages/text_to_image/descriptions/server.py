"""Captions by an OpenAI-compatible server on this machine, such as LM Studio, Ollama, llama.cpp or mlx-vlm."""

from __future__ import annotations

import base64
import http.client
import io
import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

from stages.text_to_image.descriptions.config import DescriptionsConfig

if TYPE_CHECKING:
    from PIL.Image import Image

MOST = 1_000_000  # bytes of an answer that are read


class ServerModel:
    """No request is sent before the first `describe`. `name` and `version` are those of the last answer."""

    def __init__(self, config: DescriptionsConfig) -> None:
        self.config, self.name, self.version = config, config.model, ""
        self.address = f"{config.server.rstrip('/')}/chat/completions"

    def describe(self, image: Image) -> str:
        """Raises ValueError, in one line, if the server cannot be reached, is late, or answers no caption."""
        answer = self._ask(image)
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"{self.address} must answer choices with a message, got {json.dumps(answer)[:120]}") from None
        if not isinstance(text, str):
            raise ValueError(f"{self.address} must answer a text, got {json.dumps(text)[:120]}")
        self.name = str(answer.get("model") or self.config.model)
        self.version = str(answer.get("system_fingerprint") or "")
        return text

    def _ask(self, image: Image) -> Any:
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
        content = [{"type": "text", "text": self.config.prompt}, {"type": "image_url", "image_url": {"url": url}}]
        body = {
            "model": self.config.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self.config.most_tokens,
            "temperature": 0,
        }
        request = urllib.request.Request(self.address, json.dumps(body).encode(), {"Content-Type": "application/json"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is on this machine
        try:
            with opener.open(request, timeout=self.config.timeout) as answer:
                return json.loads(answer.read(MOST))
        except urllib.error.HTTPError as error:
            said = " ".join(error.read(200).decode("utf-8", "replace").split())
            raise ValueError(f"{self.address} answered {error.code}: {said or error.reason}") from None
        # The answer is late; a late connection arrives as URLError below.
        except TimeoutError:
            raise ValueError(self._late()) from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise ValueError(self._late()) from None
            raise ValueError(f"{self.address} cannot be reached ({error.reason}): start the server, then run again") from None
        except (OSError, http.client.HTTPException) as error:
            raise ValueError(
                f"{self.address} broke off ({error or type(error).__name__}): start the server, then run again"
            ) from None
        except ValueError:
            raise ValueError(f"{self.address} must answer JSON") from None

    def _late(self) -> str:
        return f"{self.address} did not answer within {self.config.timeout:g} seconds; raise descriptions.timeout, then run again"

"""Text to token ids and back, as the rest of milepost needs it: a thin layer over transformers' tokenizers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from milepost.errors import ConfigError, DataError, Problem

Message = Mapping[str, Any]
"""One chat message: `role`, `content`, and whatever else the chat template reads."""

_TEMPLATE_ARGS_TAKEN = frozenset({"conversation", "tokenize", "return_dict", "return_tensors"})
"""Arguments of `apply_chat_template` that would change what it returns."""


class Tokenizer:
    """A checkpoint's tokenizer with its end tokens; make one with `load_tokenizer`."""

    def __init__(self, backend: Any, end_token_ids: Sequence[int], name: str) -> None:
        self.backend = backend
        """The transformers tokenizer."""
        self.name = name
        """Where it came from, for messages."""
        self.end_token_ids = tuple(end_token_ids)
        """Tokens that end a response: those the checkpoint generates with, then the tokenizer's own."""
        self.pad_id: int = self.end_token_ids[0] if backend.pad_token_id is None else int(backend.pad_token_id)
        """Token that fills unused positions; an end token where the tokenizer has none."""
        bos = backend.bos_token_id
        self._begin = [int(bos)] if bos is not None and bos in backend.encode("") else []
        dropped = {*self.end_token_ids, self.pad_id}
        self._dropped = frozenset(dropped if bos is None else dropped | {int(bos)})

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included; a model's embedding may be padded beyond it."""
        return len(self.backend)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text exactly as it stands, with nothing added at either end."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str], *, begin: bool = False) -> list[list[int]]:
        """Return the token ids of several texts, tokenized together.

        With `begin` each gets the begin-of-text token if this tokenizer puts one before a text, unless it stands
        there already, as it does after a chat template.
        """
        if not texts:
            return []
        encoded = self.backend(list(texts), add_special_tokens=False, return_attention_mask=False)["input_ids"]
        if not (begin and self._begin):
            return [list(ids) for ids in encoded]
        return [list(ids) if ids[:1] == self._begin else [*self._begin, *ids] for ids in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without begin, end and pad tokens.

        Other special tokens are text like any other: `</think>` stays whether or not the tokenizer calls it special.
        """
        kept = [int(token) for token in ids if int(token) not in self._dropped]
        text: str = self.backend.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def apply_chat_template(self, messages: Sequence[Message], **args: Any) -> str:
        """Return the conversation as text, ready for the assistant's answer.

        `args` are passed to the template, for example `enable_thinking=True`; `add_generation_prompt` is True unless
        given.

        Raises:
            ConfigError: if the tokenizer has no chat template, or an argument would change what is returned.
            DataError: if the template refuses these messages.
        """
        from jinja2 import TemplateError  # transformers needs it for templates; a base install does not

        if self.backend.chat_template is None:
            message = (
                f"the tokenizer at {self.name} has no chat template; use one that has, or set chat_template: false"
            )
            raise ConfigError([Problem("data.chat_template", message)])
        if taken := sorted(_TEMPLATE_ARGS_TAKEN & args.keys()):
            message = f"{', '.join(taken)} cannot be set here, only variables of the template can; remove it"
            raise ConfigError([Problem("data.chat_template_args", message)])
        options = {"add_generation_prompt": True, **args}
        try:
            text: str = self.backend.apply_chat_template([dict(m) for m in messages], tokenize=False, **options)
        except TemplateError as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise DataError(f"the chat template refuses a conversation of roles [{roles}]: {error}") from error
        return text


def load_tokenizer(path: str | Path, trust_remote_code: bool = False) -> Tokenizer:
    """Load the tokenizer of a Hugging Face checkpoint folder; nothing is downloaded.

    End tokens are those of `generation_config.json` (`eos_token_id`, one or several) and the tokenizer's own.

    Raises:
        ConfigError: if the folder is missing, holds no usable tokenizer, or names no end token.
    """
    from transformers import AutoTokenizer

    folder = Path(path)
    if not folder.is_dir():
        raise _config_error(f"{path} is not a folder; give a Hugging Face checkpoint with its tokenizer files")
    try:
        backend = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise _config_error(f"no tokenizer could be loaded from {folder}: {error}") from error
    if len(backend) <= len(backend.all_special_ids):
        # transformers makes an empty tokenizer where it knows the model's kind and finds no vocabulary.
        raise _config_error(
            f"the tokenizer in {folder} has no vocabulary; expected tokenizer.json, or the files it is made from "
            "(vocab.json and merges.txt, or tokenizer.model)"
        )
    end = _generation_end_ids(folder)
    if backend.eos_token_id is not None:
        end.append(int(backend.eos_token_id))
    if not end:
        raise _config_error(
            f"no end token: neither {folder / 'generation_config.json'} (eos_token_id) nor the tokenizer (eos_token) "
            "names one, so no response could ever end; add one to either"
        )
    return Tokenizer(backend, list(dict.fromkeys(end)), str(folder))


def _generation_end_ids(folder: Path) -> list[int]:
    file = folder / "generation_config.json"
    if not file.exists():
        return []
    try:
        value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise _config_error(f"{file} is not a JSON object: {error}") from error
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
        raise _config_error(f"{file}: eos_token_id is {value!r}, expected a token id or a list of them")
    return list(ids)


def _config_error(message: str) -> ConfigError:
    return ConfigError([Problem("model.path", message)])

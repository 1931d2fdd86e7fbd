"""From the rows of a dataset to tasks: prompt, label and metadata, and the token ids a response begins from."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from milepost.config.schema import DatasetFields, DataSource, LabelField
from milepost.config.sources import read_sources
from milepost.data.rows import Row, excerpt, read_rows
from milepost.errors import ConfigError, DataError, Problem
from milepost.samples import Task
from milepost.tokenizer import Tokenizer

_BATCH = 1024
"""Prompts tokenized together."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of the rows."""

    rows: int = 0
    """Rows read."""
    duplicates: int = 0
    """Rows dropped because their prompt occurred before."""
    too_long: int = 0
    """Rows dropped because their prompt has more than max_prompt_len tokens."""

    @property
    def kept(self) -> int:
        """Rows that became tasks."""
        return self.rows - self.duplicates - self.too_long

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.rows + other.rows, self.duplicates + other.duplicates, self.too_long + other.too_long)

    def __sub__(self, other: Counts) -> Counts:
        return Counts(self.rows - other.rows, self.duplicates - other.duplicates, self.too_long - other.too_long)

    def __str__(self) -> str:
        dropped = f"{self.duplicates} duplicates and {self.too_long} too long dropped"
        return f"{self.kept} prompts of {self.rows} rows ({dropped})"


@dataclass(frozen=True, slots=True)
class Span:
    """The tasks that one source gave."""

    start: int
    stop: int
    weight: Fraction
    """How often an epoch goes over each."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """The tasks of one or several sources, one behind the other; `tasks[i].index == i`."""

    name: str
    """What was read, for messages."""
    tasks: list[Task]
    counts: Counts
    spans: tuple[Span, ...]
    fingerprint: str
    """SHA-256 over prompts and labels in order, and weights: what a resumed run must find again."""

    def __len__(self) -> int:
        return len(self.tasks)


def lookup(values: Any, path: str) -> Any:
    """Return what a dotted path leads to, through mappings by key and lists by index (`turns.0.content`).

    A key that itself holds dots wins over the path it spells.

    Raises:
        KeyError: if nothing is there.
    """
    if isinstance(values, Mapping):
        if path in values:
            return values[path]
        parts = path.split(".")
        for count in range(len(parts) - 1, 0, -1):
            head = ".".join(parts[:count])
            if head in values:
                try:
                    return lookup(values[head], ".".join(parts[count:]))
                except KeyError:
                    continue  # a shorter key may still lead there
    elif isinstance(values, list):
        head, _, rest = path.partition(".")
        if head.isdecimal() and int(head) < len(values):
            item = values[int(head)]
            return lookup(item, rest) if rest else item
    raise KeyError(path)


def load_dataset(
    path: str | Path | DataSource | Sequence[str | DataSource],
    fields: DatasetFields,
    tokenizer: Tokenizer,
    *,
    dedupe: bool = False,
    limit: int | None = None,
) -> Dataset:
    """Read prompts and make a task of every row that is neither a duplicate nor too long.

    Args:
        path: one source or several, as `data.path` has them; places are absolute or begin at the working directory.
        fields: where prompt, label and metadata stand in a row, and what is put around the prompt.
        tokenizer: makes the token ids, and applies the chat template if `fields` asks for it.
        dedupe: drop rows whose prompt text, as the model would see it, occurred before, in this or another source.
        limit: use this many rows from the start.

    Raises:
        DataError: if a source cannot be read, a row is broken (with source and row), or nothing is left of a source.
        ConfigError: if `fields` asks for a system message without a chat template, or for a template where the
            tokenizer has none; or if a package that a source needs is not installed.
    """
    loader = _Loader(_TaskMaker(fields, tokenizer), dedupe)
    sources = read_sources(path)
    spans: list[Span] = []
    for source in sources:
        before, start = loader.counts, len(loader.tasks)
        left = None if limit is None else limit - before.rows
        if left == 0:
            break
        loader.read(islice(read_rows(source), left))
        if len(loader.tasks) == start:
            counts = loader.counts - before
            long = "" if fields.max_prompt_len is None else f" (max_prompt_len is {fields.max_prompt_len})"
            raise DataError(f"{source.text}: no prompt is left: {counts}{long}; expected at least one")
        spans.append(Span(start, len(loader.tasks), source.weight))
    fingerprint = loader.fingerprint
    if any(span.weight != 1 for span in spans):
        fingerprint.update(repr([(span.start, span.stop, str(span.weight)) for span in spans]).encode())
    name = " + ".join(source.text for source in sources)
    return Dataset(name, loader.tasks, loader.counts, tuple(spans), fingerprint.hexdigest())


class _Loader:
    """Collects the tasks of several sources."""

    def __init__(self, maker: _TaskMaker, dedupe: bool) -> None:
        self.maker = maker
        self.dedupe = dedupe
        self.tasks: list[Task] = []
        self.counts = Counts()
        self.fingerprint = hashlib.sha256()
        self._seen: set[bytes] = set()

    def read(self, rows: Iterator[Row]) -> None:
        """Make tasks of rows, many at a time: that is faster to tokenize."""
        limit = self.maker.fields.max_prompt_len
        while batch := list(islice(rows, _BATCH)):
            drafts = [draft for draft in map(self.maker.draft, batch) if not self._is_duplicate(draft)]
            too_long = 0
            for draft, tokens in zip(drafts, self.maker.tokenize(drafts), strict=True):
                if limit is not None and len(tokens) > limit:
                    too_long += 1
                    continue
                self.tasks.append(Task(len(self.tasks), draft.prompt, tuple(tokens), draft.label, draft.metadata))
                identity = json.dumps([draft.prompt, draft.label], sort_keys=True, default=repr)
                self.fingerprint.update(identity.encode() + b"\n")
            self.counts += Counts(len(batch), len(batch) - len(drafts), too_long)

    def _is_duplicate(self, draft: _Draft) -> bool:
        if not self.dedupe:
            return False
        key = hashlib.sha256(draft.prompt.encode()).digest()
        known = key in self._seen
        self._seen.add(key)
        return known


class _Draft(NamedTuple):
    where: str
    prompt: str
    label: Any
    metadata: Mapping[str, Any]


class _TaskMaker:
    """Turns rows into prompts, labels and metadata as a dataset's fields say."""

    def __init__(self, fields: DatasetFields, tokenizer: Tokenizer) -> None:
        self.fields = fields
        self.tokenizer = tokenizer
        if fields.system is not None and not fields.chat_template:
            message = "a system message needs chat_template: true; set it, or use prompt_prefix"
            raise ConfigError([Problem("data.system", message)])
        label = fields.label
        self.label = LabelField(key=label) if isinstance(label, str) else label
        regex = self.label.regex if self.label is not None else None
        self.pattern = None if regex is None else re.compile(regex)

    def draft(self, row: Row) -> _Draft:
        prompt = self._prompt(row)
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            code = f"U+{ord(prompt[error.start]):04X}"
            raise DataError(
                f"{row.where}: the prompt has half of a surrogate pair ({code}), which is no character; a text was cut "
                "inside one, or \\u escapes are incomplete"
            ) from None
        return _Draft(row.where, prompt, self._label(row), self._metadata(row))

    def tokenize(self, drafts: Sequence[_Draft]) -> list[list[int]]:
        # A chat template writes the begin-of-text token itself where the model wants one.
        encoded = self.tokenizer.encode_batch([d.prompt for d in drafts], begin=not self.fields.chat_template)
        for draft, tokens in zip(drafts, encoded, strict=True):
            if not tokens:
                raise DataError(f"{draft.where}: the prompt is empty; expected at least one token to generate from")
        return encoded

    def _prompt(self, row: Row) -> str:
        fields = self.fields
        value = _find(row, fields.prompt, "prompt")
        if isinstance(value, str) and not fields.chat_template:
            return fields.prompt_prefix + value + fields.prompt_suffix
        if isinstance(value, str):
            messages = [{"role": "user", "content": value}]
        else:
            messages = _messages(row.where, fields.prompt, value)
            if not fields.chat_template:
                raise DataError(
                    f"{row.where}: {fields.prompt!r} is a list of chat messages, which need chat_template: true"
                )
        self._surround(row.where, messages)
        if fields.system is not None:
            if messages[0]["role"] == "system":
                raise DataError(f"{row.where}: the conversation brings a system message; remove it, or `system`")
            messages.insert(0, {"role": "system", "content": fields.system})
        try:
            return self.tokenizer.apply_chat_template(messages, **fields.chat_template_args)
        except DataError as error:
            raise DataError(f"{row.where}: {error}") from error

    def _surround(self, where: str, messages: list[dict[str, Any]]) -> None:
        """Put prefix and suffix around the last user message."""
        prefix, suffix = self.fields.prompt_prefix, self.fields.prompt_suffix
        if not (prefix or suffix):
            return
        for message in reversed(messages):
            if message["role"] == "user":
                message["content"] = prefix + message["content"] + suffix
                return
        raise DataError(f"{where}: no message of role 'user' to put prompt_prefix or prompt_suffix around")

    def _label(self, row: Row) -> Any:
        if self.label is None:
            return None
        value = _find(row, self.label.key, "label", "; set `label: null` for data without labels")
        if self.pattern is None:
            return value
        if not isinstance(value, str):
            raise DataError(
                f"{row.where}: {self.label.key!r} is {excerpt(value)}, expected a text to search a label in"
            )
        match = self.pattern.search(value)
        label = match and match[1 if self.pattern.groups else 0]
        if label is None:
            raise DataError(f"{row.where}: {self.pattern.pattern!r} finds no label in {excerpt(value)}")
        return label

    def _metadata(self, row: Row) -> Mapping[str, Any]:
        if self.fields.metadata is None:
            return {}
        try:
            value = lookup(row.values, self.fields.metadata)
        except KeyError:
            return {}
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise DataError(f"{row.where}: {self.fields.metadata!r} is {excerpt(value)}, expected a mapping")
        return value


def _find(row: Row, path: str, field: str, advice: str = "") -> Any:
    """Look a required field up. Raises DataError if it is absent or null."""
    try:
        value = lookup(row.values, path)
    except KeyError:
        keys = ", ".join(map(repr, row.values))
        raise DataError(f"{row.where}: expected the {field} at {path!r}; the row has the keys {keys}{advice}") from None
    if value is None:
        raise DataError(f"{row.where}: the {field} at {path!r} is null{advice}")
    return value


def _messages(where: str, path: str, value: Any) -> list[dict[str, Any]]:
    """Check chat messages and copy them, so that prefix and suffix leave the row alone."""
    expected = "expected a text, or a list of chat messages with role and content"
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: the prompt at {path!r} is {excerpt(value)}; {expected}")
    for number, message in enumerate(value):
        text = isinstance(message, dict) and isinstance(message.get("role"), str) and message.get("content")
        calls_tools = isinstance(message, dict) and message.get("role") == "assistant" and message.get("tool_calls")
        if not isinstance(text, str) and not calls_tools:
            raise DataError(f"{where}: message {number} of {path!r} is {excerpt(message)}; {expected}, both texts")
    # Columns of a table have every key in every row: what a message does not have is null there.
    return [{key: item for key, item in message.items() if item is not None or key == "content"} for message in value]

"""Prompts: from the rows of a file to tasks, and the source that hands them out batch by batch and can be resumed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from milepost.config.schema import DatasetFields, LabelField
from milepost.errors import CheckpointError, ConfigError, DataError, Problem
from milepost.samples import Task
from milepost.tokenizer import Tokenizer

PROGRESS_BYTES = 32 * 2**20
"""Files from this size on are read under a progress bar."""
_BATCH = 1024
"""Prompts tokenized together."""


class Row(NamedTuple):
    """One row of a file, and where it stands there, for messages."""

    where: str
    values: Any


Reader = Callable[[Path], Iterator[Row]]


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of a file's rows."""

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

    def __str__(self) -> str:
        dropped = f"{self.duplicates} duplicates and {self.too_long} too long dropped"
        return f"{self.kept} prompts of {self.rows} rows ({dropped})"


@dataclass(frozen=True, slots=True)
class Dataset:
    """The tasks of one file; `tasks[i].index == i`."""

    path: Path
    tasks: list[Task]
    counts: Counts
    fingerprint: str
    """SHA-256 over prompts and labels in order: what a resumed run must find again."""

    def __len__(self) -> int:
        return len(self.tasks)


def read_jsonl(path: Path) -> Iterator[Row]:
    """Yield the rows of a JSON Lines file; blank lines are skipped.

    Raises:
        DataError: with file and line, for a line that is not UTF-8 or not a JSON object.
    """
    size = path.stat().st_size
    with (
        path.open("rb") as file,
        tqdm(total=size, desc=path.name, unit="B", unit_scale=True, disable=size < PROGRESS_BYTES) as bar,
    ):
        for number, line in enumerate(file, 1):
            bar.update(len(line))
            where = f"{path}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                values = json.loads(text) if text else None
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: expected one JSON object per line: {error}") from error
            if not text:
                continue
            if not isinstance(values, dict):
                raise DataError(f"{where}: expected a JSON object, found {_excerpt(values)}")
            yield Row(where, values)


READERS: dict[str, Reader] = {".jsonl": read_jsonl}
"""Reader of each file name suffix."""


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
    path: str | Path, fields: DatasetFields, tokenizer: Tokenizer, *, dedupe: bool = False, limit: int | None = None
) -> Dataset:
    """Read a file of prompts and make a task of every row that is neither a duplicate nor too long.

    Args:
        path: the file; its suffix says how it is read.
        fields: where prompt, label and metadata stand in a row, and what is put around the prompt.
        tokenizer: makes the token ids, and applies the chat template if `fields` asks for it.
        dedupe: drop rows whose prompt text, as the model would see it, occurred before.
        limit: use this many rows from the start.

    Raises:
        DataError: if the file cannot be read, a row is broken (with file and line), or nothing is left.
        ConfigError: if `fields` asks for a system message without a chat template, or for a template where the
            tokenizer has none.
    """
    path = Path(path)
    maker = _TaskMaker(fields, tokenizer)
    duplicates = too_long = num_rows = 0
    seen: set[bytes] = set()
    tasks: list[Task] = []
    fingerprint = hashlib.sha256()
    rows = islice(_reader(path)(path), limit)
    while batch := list(islice(rows, _BATCH)):
        num_rows += len(batch)
        drafts = []
        for row in batch:
            draft = maker.draft(row)
            if dedupe:
                key = hashlib.sha256(draft.prompt.encode("utf-8", "surrogatepass")).digest()
                if key in seen:
                    duplicates += 1
                    continue
                seen.add(key)
            drafts.append(draft)
        for draft, tokens in zip(drafts, maker.tokenize(drafts), strict=True):
            if fields.max_prompt_len is not None and len(tokens) > fields.max_prompt_len:
                too_long += 1
                continue
            tasks.append(Task(len(tasks), draft.prompt, tuple(tokens), draft.label, draft.metadata))
            identity = json.dumps([draft.prompt, draft.label], sort_keys=True, default=repr)
            fingerprint.update(identity.encode() + b"\n")
    counts = Counts(num_rows, duplicates, too_long)
    if not tasks:
        long = "" if fields.max_prompt_len is None else f" (max_prompt_len is {fields.max_prompt_len})"
        raise DataError(f"{path}: no prompt is left: {counts}{long}; expected at least one")
    return Dataset(path, tasks, counts, fingerprint.hexdigest())


def _reader(path: Path) -> Reader:
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(f"{path} {found}; expected a file with one row per prompt")
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path}: cannot read {path.suffix or 'files without a suffix'}; expected {', '.join(READERS)}")
    return reader


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
        return _Draft(row.where, self._prompt(row), self._label(row), self._metadata(row))

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
                f"{row.where}: {self.label.key!r} is {_excerpt(value)}, expected a text to search a label in"
            )
        match = self.pattern.search(value)
        label = match and match[1 if self.pattern.groups else 0]
        if label is None:
            raise DataError(f"{row.where}: {self.pattern.pattern!r} finds no label in {_excerpt(value)}")
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
            raise DataError(f"{row.where}: {self.fields.metadata!r} is {_excerpt(value)}, expected a mapping")
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
        raise DataError(f"{where}: the prompt at {path!r} is {_excerpt(value)}; {expected}")
    for number, message in enumerate(value):
        text = isinstance(message, dict) and isinstance(message.get("role"), str) and message.get("content")
        calls_tools = isinstance(message, dict) and message.get("role") == "assistant" and message.get("tool_calls")
        if not isinstance(text, str) and not calls_tools:
            raise DataError(f"{where}: message {number} of {path!r} is {_excerpt(message)}; {expected}, both texts")
    return [dict(message) for message in value]


def _excerpt(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class PromptSource:
    """Hands a dataset's tasks out in batches, epoch after epoch, and remembers where it stands.

    An epoch's order depends on the seed and the epoch's number alone. A batch may run across the end of an epoch:
    every task comes up once per epoch and none is dropped.
    """

    def __init__(self, dataset: Dataset, batch_size: int, shuffle: bool, seed: int) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        """Epoch the next task belongs to."""
        self.position = 0
        """Tasks of this epoch already handed out."""
        self._order = self._epoch_order(0)

    def next_batch(self) -> list[Task]:
        """Return the next `batch_size` tasks."""
        return self.take(self.batch_size)

    def take(self, count: int) -> list[Task]:
        """Return the next `count` tasks, for a batch of another size."""
        tasks: list[Task] = []
        while len(tasks) < count:
            chosen = self._order[self.position : self.position + count - len(tasks)]
            tasks += [self.dataset.tasks[i] for i in chosen]
            self.position += len(chosen)
            if self.position == len(self.dataset):
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._epoch_order(self.epoch)
        return tasks

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what it is a position in, as plain JSON data."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "fingerprint": self.dataset.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved position; the batch size may be another.

        Raises:
            CheckpointError: if the data or its order is not what the position was saved in.
        """
        if state["fingerprint"] != self.dataset.fingerprint:
            raise CheckpointError(
                f"{self.dataset.path} has other prompts or labels than when the checkpoint was made; restore the "
                "file (and the data settings), or start a new run with checkpoint.init_from"
            )
        saved = (state["shuffle"], state["seed"] if state["shuffle"] else self.seed)
        if saved != (self.shuffle, self.seed):
            raise CheckpointError(
                f"the checkpoint was made with data.shuffle {state['shuffle']} and run.seed {state['seed']}, now they "
                f"are {self.shuffle} and {self.seed}; go on with the saved ones, or start a new run with "
                "checkpoint.init_from"
            )
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._epoch_order(self.epoch)

    def _epoch_order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.dataset)))
        # The bit generator is named: numpy may change what default_rng uses, and a resumed run must see this order.
        rng = np.random.Generator(np.random.PCG64((self.seed, epoch)))
        return [int(i) for i in rng.permutation(len(self.dataset))]

"""Pre- and postprocessing of a tenant's plain route: built-in handlers, and a tenant's own class.

A handler turns a JSON payload into input arrays and output arrays into a JSON-able answer, on the
replica's event loop: it must not block for long. Rules: one tenant's handler that cannot be loaded
or that raises fails that tenant alone; nothing of torch is imported here, and `tokenizers` only by
the text handler. A tenant's own class has `preprocess(payload) -> dict[str, np.ndarray]` and
`postprocess(outputs) -> JSON-able`, plain or async; a `ValueError` of `preprocess` is the client's
fault (400, with its text), anything else the handler's (500, naming it).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import re
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, Protocol

import msgspec
import numpy as np
from pydantic import Field, ValidationError

from coissue.deployments.channel.checking import show
from coissue.deployments.channel.frames import printable
from coissue.deployments.http.errors import HttpError, malformed
from coissue.deployments.imports import import_anew
from coissue.deployments.settings import HandlerSettings, Settings, TenantSettings

log = logging.getLogger("coissue.handlers")

Arrays = Mapping[str, np.ndarray]
#: Of what a tenant's code says, so much is told.
SAID_CHARS: Final = 2000
#: Of one tenant: the one that is served, the one to come, and one to go back to.
HANDLERS_KEPT: Final = 3


class Handler(Protocol):
    #: Its arrays are the client's own: what is wrong with them is the client's mistake.
    passes_on: bool = False

    async def preprocess(self, payload: Any) -> Arrays: ...

    async def postprocess(self, outputs: Arrays, payload: Any) -> Any: ...


class Text(Handler):
    """`{"text": "..."}` -> `{"label": ..., "scores": {label: p}}`; `{"texts": [...]}` -> a list of
    these under `results`.

    `tokenizer` is the path of a tokenizer.json. `inputs` names the model's inputs for the token
    ids, the attention mask and the token types (null: the model has no such input). Without
    `labels` the first output is answered as it is. Texts of one request are padded to its longest.
    """

    def __init__(
        self,
        tokenizer: str,
        max_tokens: int = 128,
        labels: Sequence[str] | None = None,
        inputs: Mapping[str, str | None] | None = None,
        output: str | None = None,
        max_chars: int = 100_000,
    ) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tokenizers import Tokenizer

        if not os.path.isfile(tokenizer):
            raise ValueError(f"no tokenizer file {tokenizer!r}")
        self._tokenizer = Tokenizer.from_file(tokenizer)
        pad = self._tokenizer.padding or {}
        self._tokenizer.enable_padding(
            pad_id=pad.get("pad_id", 0), pad_token=pad.get("pad_token", "[PAD]")
        )
        self._tokenizer.enable_truncation(max_tokens)
        self._labels = labels
        self._output = output
        self._max_chars = max_chars
        self._names = {"ids": "input_ids", "mask": "attention_mask", **(inputs or {})}
        for key in self._names:
            if key not in ("ids", "mask", "types"):
                raise ValueError(f"inputs.{key}: not one of ids, mask, types")

    async def preprocess(self, payload: Any) -> Arrays:
        encodings = self._tokenizer.encode_batch(self._texts(payload))
        columns = {"ids": "ids", "mask": "attention_mask", "types": "type_ids"}
        return {
            name: np.array([getattr(encoding, columns[key]) for encoding in encodings], np.int64)
            for key, name in self._names.items()
            if name is not None
        }

    def _texts(self, payload: Any) -> list[str]:
        if not isinstance(payload, dict) or ("text" in payload) == ("texts" in payload):
            raise malformed('body: either {"text": "..."} or {"texts": ["...", ...]} is needed')
        texts = [payload["text"]] if "text" in payload else payload["texts"]
        field = "text" if "text" in payload else "texts"
        if not isinstance(texts, list) or not texts:
            raise malformed("texts: a list of at least one string is needed")
        if not all(isinstance(text, str) for text in texts):
            raise malformed(f"{field}: only strings are texts")
        if sum(map(len, texts)) > self._max_chars:
            raise HttpError("too_large", f"{field}: longer than {self._max_chars} characters")
        return texts

    async def postprocess(self, outputs: Arrays, payload: Any) -> Any:
        values = _choose(outputs, self._output)
        if self._labels is None:
            return {"outputs": values[0] if "text" in payload else values}
        results = [
            {"label": label, "scores": scores} for label, scores in classify(values, self._labels)
        ]
        return results[0] if "text" in payload else {"results": results}


class Classes(Handler):
    """`{"inputs": {name: lists}}` -> `{"labels": [...], "probabilities": [{label: p}, ...]}`, one
    of each per row. With `input`, `{"inputs": lists}` is taken as that input."""

    passes_on = True

    def __init__(
        self, labels: Sequence[str], input: str | None = None, output: str | None = None
    ) -> None:
        self._labels = labels
        self._input = input
        self._output = output

    async def preprocess(self, payload: Any) -> Arrays:
        inputs = payload.get("inputs") if isinstance(payload, dict) else None
        if isinstance(inputs, list) and self._input is not None:
            inputs = {self._input: inputs}
        if not isinstance(inputs, dict):
            raise malformed('body: {"inputs": {name: lists}} is needed')
        return {name: _read_array(name, value) for name, value in inputs.items()}

    async def postprocess(self, outputs: Arrays, payload: Any) -> Any:
        rows = classify(_choose(outputs, self._output), self._labels)
        return {"labels": [row[0] for row in rows], "probabilities": [row[1] for row in rows]}


class TextKwargs(Settings):
    """Of `Text`."""

    tokenizer: str = Field(min_length=1)
    max_tokens: int = Field(default=128, ge=1, le=131_072)
    #: Not strict: a YAML has lists only.
    labels: tuple[str, ...] | None = Field(default=None, strict=False)
    inputs: dict[Literal["ids", "mask", "types"], str | None] | None = None
    output: str | None = None
    max_chars: int = Field(default=100_000, ge=1, le=100_000_000)


class ClassesKwargs(Settings):
    """Of `Classes`."""

    labels: tuple[str, ...] = Field(strict=False)
    input: str | None = None
    output: str | None = None


class Builtin(Handler):
    """A handler of ours, with its exceptions turned into answers that name it."""

    def __init__(self, use: str, kwargs: Mapping[str, Any]) -> None:
        self._use = use
        self._handler = BUILTIN[use](**kwargs)
        self.passes_on = self._handler.passes_on

    async def preprocess(self, payload: Any) -> Arrays:
        with naming(self._use, "preprocess"):
            return await self._handler.preprocess(payload)

    async def postprocess(self, outputs: Arrays, payload: Any) -> Any:
        with naming(self._use, "postprocess"):
            return await self._handler.postprocess(outputs, payload)


@contextmanager
def naming(use: str, verb: str) -> Iterator[None]:
    try:
        yield
    except HttpError:
        raise
    except BaseException as error:  # also `sys.exit`: it must end neither replica nor request
        if is_cancelled(error):
            raise  # the client is gone; else the handler's own task was cancelled
        log.exception("handler=%s failed in=%s", use, verb)
        sentence = f"handler {use} failed in {verb}: {name_of(error)}"
        raise HttpError("handler_failed", sentence) from error


def is_cancelled(error: BaseException) -> bool:
    """The running task is cancelled itself, not one that it waited for."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def say(error: BaseException, otherwise: str = "") -> str:
    """What an exception of a tenant's says, as a plain string: it may raise while it says so, and
    what it makes may be a string of a class of its own, which must go nowhere."""
    try:
        said = str.__str__(str(error))
    except BaseException:
        said = ""
    return printable(said[:SAID_CHARS]) or otherwise or name_of(error)


def name_of(error: BaseException) -> str:
    return printable(str.__str__(type.__dict__["__name__"].__get__(type(error))))


class Own(Handler):
    """A tenant's own class, with its exceptions turned into answers."""

    def __init__(self, use: str, kwargs: Mapping[str, Any]) -> None:
        module, _, name = use.partition(":")
        self._use = use
        self._own = getattr(import_anew(module), name)(**kwargs)
        for verb in ("preprocess", "postprocess"):
            if not callable(getattr(self._own, verb, None)):
                raise TypeError(f"{use} has no method {verb}")

    async def preprocess(self, payload: Any) -> Arrays:
        with naming(self._use, "preprocess"):
            try:
                arrays = await _settle(self._own.preprocess(payload))
            except (HttpError, ValueError) as error:
                said = say(error, f"rejected by handler {self._use}")
                raise HttpError("handler_rejected", said) from error
            if not isinstance(arrays, Mapping):
                raise TypeError(f"preprocess returned {type(arrays).__name__}, not a dict")
        return arrays

    async def postprocess(self, outputs: Arrays, payload: Any) -> Any:
        with naming(self._use, "postprocess"):
            return await _settle(self._own.postprocess(outputs))


class Broken(Handler):
    """Stands for a handler that could not be loaded: its tenant's plain route says why."""

    def __init__(self, message: str) -> None:
        self.message = message

    async def preprocess(self, payload: Any) -> Arrays:
        raise HttpError("failed", self.message)

    async def postprocess(self, outputs: Arrays, payload: Any) -> Any:
        raise HttpError("failed", self.message)


BUILTIN: Final[dict[str, type[Text | Classes]]] = {"text": Text, "classes": Classes}
KWARGS: Final[dict[str, type[Settings]]] = {"text": TextKwargs, "classes": ClassesKwargs}


def check_handler(settings: HandlerSettings) -> str | None:
    """What is wrong with the settings, with the field first; the handler is not loaded."""
    if not settings.is_builtin:
        return None
    if settings.use not in BUILTIN:
        names = ", ".join(sorted(BUILTIN))
        return f"use: no handler {settings.use!r}, there are: {names}, or pkg.mod:Class"
    try:
        KWARGS[settings.use].model_validate(settings.kwargs)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(map(str, first["loc"]))
        given = "" if first["type"] == "missing" else f", not {show(str(first['input']))}"
        return f"kwargs.{path}: {in_words_of_yaml(first['msg'])}{given}"
    return None


def in_words_of_yaml(said: str) -> str:
    said = said.replace("a valid tuple", "a list")
    return re.sub(r"a valid dictionary( or instance of \w+)?", "a mapping", said)


def load_handler(settings: HandlerSettings) -> Handler:
    wrong = check_handler(settings)
    if wrong is not None:
        return Broken(f"handler.{wrong}")
    try:
        if settings.is_builtin:
            return Builtin(settings.use, settings.kwargs)
        return Own(settings.use, settings.kwargs)
    except BaseException as error:
        log.exception("handler=%s cannot be loaded", settings.use)
        name, said = name_of(error), say(error)
        if not settings.is_builtin and said != name:
            said = f"{name}: {said}"
        return Broken(f"handler {settings.use} cannot be loaded: {said}")


class LoadedHandlers:
    """Handlers by tenant and settings. A changed one is there beside the one that is served."""

    def __init__(self) -> None:
        #: Tenant -> settings as JSON -> handler; the newest last.
        self._loaded: dict[str, dict[str, Handler]] = {}

    def expect(self, tenants: Iterable[TenantSettings]) -> None:
        """Load what these need; forget tenants that are not among them."""
        handlers = {t.name: t.handler.model_dump_json() for t in tenants if t.handler}
        self._loaded = {n: found for n, found in self._loaded.items() if n in handlers}
        for name, settings in handlers.items():
            self.find(name, settings)

    def find(self, name: str, settings: str) -> Handler:
        """`settings`: the JSON of a `HandlerSettings`."""
        own = self._loaded.setdefault(name, {})
        found = own.get(settings)
        if found is None:
            found = load_handler(HandlerSettings.model_validate_json(settings))
            if isinstance(found, Broken):
                return found  # what it lacks may come
            own[settings] = found
            while len(own) > HANDLERS_KEPT:
                del own[next(iter(own))]
        return found


# --- between a tenant's own deployment and the pool -----------------------------------------------


class _Packed(msgspec.Struct, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


_PACKED: Final = msgspec.msgpack.Decoder(list[_Packed])


def pack_arrays(arrays: Arrays) -> bytes:
    """Raises `TypeError` for what is not numbers by name."""
    packed = []
    for name, value in arrays.items():
        array = np.asarray(value)
        if not isinstance(name, str) or array.dtype.kind not in "fiub":
            raise TypeError(f"{name!r} is {type(value).__name__} of {array.dtype}, not numbers")
        packed.append(_Packed(name, array.dtype.str, array.shape, array.tobytes()))
    return msgspec.msgpack.encode(packed)


def unpack_arrays(data: bytes) -> dict[str, np.ndarray]:
    return {
        one.name: np.frombuffer(one.data, one.dtype).reshape(one.shape)
        for one in _PACKED.decode(data)
    }


def classify(logits: np.ndarray, labels: Sequence[str]) -> list[tuple[str, dict[str, float]]]:
    """(label, {label: probability}) per row of `logits`: (R, classes), by softmax."""
    if logits.ndim != 2 or logits.shape[1] != len(labels):
        raise HttpError(
            "handler_failed", f"the model gives {list(logits.shape)}, handler.labels {len(labels)}"
        )
    powers = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    shares = (powers / powers.sum(axis=1, keepdims=True)).round(6)
    best = logits.argmax(axis=1)
    return [
        (labels[index], dict(zip(labels, row, strict=True)))
        for index, row in zip(best.tolist(), shares.tolist(), strict=True)
    ]


def _choose(outputs: Arrays, name: str | None) -> np.ndarray:
    if name is None:
        return next(iter(outputs.values()))
    if name not in outputs:
        raise HttpError(
            "handler_failed", f"handler.output: no {name!r}, there are: {', '.join(outputs)}"
        )
    return outputs[name]


def _read_array(name: str, value: Any) -> np.ndarray:
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):
        raise malformed(f"inputs.{name}: lists of different lengths at one depth") from None
    if array.dtype.kind == "O" and all(isinstance(item, int) for item in array.flat):
        raise malformed(f"inputs.{name}: whole numbers of at most 64 bits are possible")
    if array.dtype.kind not in "fiub":
        raise malformed(f"inputs.{name}: only numbers are possible")
    return array


async def _settle(value: Any | Awaitable[Any]) -> Any:
    return await value if inspect.isawaitable(value) else value

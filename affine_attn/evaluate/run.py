"""``affine-attn eval``: what is measured, each taken up where a call before has finished it."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from affine_attn.data.needles import Stream
from affine_attn.data.shards import MANIFEST, read_manifest
from affine_attn.data.texts import JoinedTexts, encode, joined_shards
from affine_attn.data.tokenizer import require_same_tokens
from affine_attn.errors import UserError
from affine_attn.evaluate.long_context import (
    DEPTHS,
    HAYSTACKS,
    loss_by_position,
    needle_retrieval,
)
from affine_attn.evaluate.perplexity import shard_perplexity, text_perplexity
from affine_attn.evaluate.results import TABLE_1, average, measured_once, samples_file
from affine_attn.evaluate.score import REQUESTS, Pair, Score, read_scores, write_lines
from affine_attn.models.load import ModelHandle
from affine_attn.runs.files import sha256
from affine_attn.runs.layout import EVALUATION, beside

# Of windows where none is given and none known of the model's training, as in the paper's; less where a model has less.
LENGTH = 2048


class Measure(NamedTuple):
    """Something to measure: its name, what decides its result, and how."""

    name: str
    identity: dict[str, Any]
    compute: Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Request:
    """What to evaluate on. Without tasks, texts and shards: the six tasks."""

    tasks: Sequence[str] = ()
    data: Sequence[str] = ()
    texts: Sequence[Path] = ()
    shards: Sequence[Path] = ()
    lengths: Sequence[int] = ()
    stride: int | None = None
    by_position: bool = False
    needle: bool = False
    depths: Sequence[float] = ()
    seed: int = 0
    limit: int | None = None
    batch_size: int | None = None
    log_samples: bool = False

    def __post_init__(self) -> None:
        if self.log_samples and (self.texts or self.shards) and not self.tasks:
            raise UserError("--log-samples is for tasks: --text and --shards have no items")
        if (self.by_position or self.needle or self.lengths or self.stride) and not (self.texts or self.shards):
            raise UserError("--length, --stride, --by-position and --needle are for --text and --shards")
        if self.stride and (self.shards or self.by_position or self.needle):
            raise UserError("--stride is for --text: packed and joined sequences do not overlap")
        if self.depths and not self.needle:
            raise UserError("--depth is where the needle of --needle lies")

    @property
    def kinds(self) -> list[str]:
        """What is measured on texts and shards; the results are named after it."""
        asked = {"positions": self.by_position, "needle": self.needle}
        return [kind for kind, wanted in asked.items() if wanted] or ["perplexity"]

    def settings(self, kind: str, length: int) -> dict[str, Any]:
        """What decides a result, beside the data, the length and the model."""
        if kind == "needle":
            return {"depths": list(self.depths or DEPTHS), "haystacks": self.limit or HAYSTACKS, "seed": self.seed}
        return {"stride": self.stride or length, "limit": self.limit}


def evaluate(
    handle: ModelHandle, request: Request, output: Path | None = None, scores: Path | None = None
) -> dict[str, Any]:
    """The results, from files of calls before where there are any. ``scores``: of the tasks, computed elsewhere."""
    if scores is None:
        measures = [*_task_measures(handle, request), *_text_measures(handle, request)]
    elif request.texts or request.shards:
        raise UserError("--import-scores is for tasks: --text and --shards need the model itself")
    else:
        measures = list(_imported_measures(handle, request, scores))
    folder, results = output or beside(handle.path, EVALUATION), []
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output {folder} is a file: give a folder")
    if (request.texts or request.shards) and not request.lengths:
        print(_about_length(handle), file=sys.stderr)
    for measure in measures:
        of_task = request.log_samples and "task" in measure.identity
        result, path, was_there = measured_once(folder, *measure, log_samples=of_task)
        print(f"{measure.name}: {'measured before, ' if was_there else ''}{path}", file=sys.stderr)
        if of_task:
            print(f"{measure.name}: its items are in {samples_file(path)}", file=sys.stderr)
        results.append(result)
    return {"model": handle.path, "results": results, "average": average({r["name"]: r for r in results})}


def export_requests(handle: ModelHandle, request: Request, file: Path) -> int:
    """Write what the harness would ask the model, each question once; returns how many."""
    if request.texts or request.shards:
        raise UserError("--export-requests is for tasks: --text and --shards need no harness, score them there")
    tasks = _tasks(request)
    from affine_attn.evaluate.harness import ElsewhereLM, run_task

    asked: dict[Pair, None] = {}

    def note(pair: Pair) -> Score:
        asked[pair] = None
        return Score(0.0, False)

    lm = ElsewhereLM(handle.config, handle.tokenizer, note)
    for task in tasks:
        run_task(lm, task.load(), request.limit)
    write_lines(file, {"format": REQUESTS, "max_length": lm.max_length}, asked)
    return len(asked)


def _tasks(request: Request) -> list[Any]:
    # Before the harness itself: where it is not installed, this says so.
    from affine_attn.evaluate.tasks import LocalData, find_tasks

    default = () if request.texts or request.shards else TABLE_1
    return find_tasks(request.tasks or default, LocalData.parse(request.data))


def _task_measures(handle: ModelHandle, request: Request) -> Iterator[Measure]:
    if not request.tasks and (request.texts or request.shards):
        return
    tasks = _tasks(request)
    from affine_attn.evaluate.harness import BatchedLM, run_task

    def compute(task: Any) -> dict[str, Any]:
        # Before the model, which takes longer to load.
        loaded = task.load()
        lm = BatchedLM(handle.model, handle.tokenizer, request.batch_size)
        return {"limit": request.limit, **run_task(lm, loaded, request.limit), "model": handle.about()}

    for task in tasks:
        identity = {**task.identity(), "limit": request.limit, "model": handle.identity}
        yield Measure(task.name, identity, lambda task=task: compute(task))


def _imported_measures(handle: ModelHandle, request: Request, scores: Path) -> Iterator[Measure]:
    """The model of these results is the one that was scored; here are its configuration and tokenizer."""
    tasks = _tasks(request)
    from affine_attn.evaluate.harness import ElsewhereLM, run_task

    scored, answers = read_scores(scores)
    compared = _compared(handle, scored, scores)

    def answer(pair: Pair) -> Score:
        if pair not in answers:
            raise UserError(
                f"{scores} lacks a request of these tasks: export and import with the same tasks, --data and --limit"
            )
        return answers[pair]

    def compute(task: Any) -> dict[str, Any]:
        lm = ElsewhereLM(handle.config, handle.tokenizer, answer)
        measured = run_task(lm, task.load(), request.limit)
        return {"limit": request.limit, **measured, "model": scored, "compared_with_weights": compared}

    for task in tasks:
        which = {key: scored[key] for key in ("fingerprint", "dtype")}
        identity = {**task.identity(), "limit": request.limit, "model": which}
        yield Measure(task.name, identity, lambda task=task: compute(task))


def _compared(handle: ModelHandle, scored: dict[str, Any], scores: Path) -> bool:
    """Refuse scores of another model; False if its weights, which decide, are not here."""
    from affine_attn.evaluate.harness import skeleton

    refusal = f"{scores} has the scores of another model than {handle.path}, of {scored['path']}"
    if handle.can_be_compared(scored["fingerprint"]):
        if scored["fingerprint"] != handle.fingerprint:
            raise UserError(f"{refusal}: weights, configuration or tokenizer differ")
        return True
    config = handle.config
    here = {
        "model_type": config.model_type,
        "attention": json.loads(json.dumps(config.to_dict().get("attention"))),
        "parameters": skeleton(config).num_parameters(),
    }
    for name, value in here.items():
        if scored[name] != value:
            raise UserError(f"{refusal}: {name} is {scored[name]!r} there, {value!r} here")
    print(
        f"{scores} was computed with {scored['path']}; the weights of {handle.path} are not here, so whether they are "
        "the same was not checked",
        file=sys.stderr,
    )
    return False


def _text_measures(handle: ModelHandle, request: Request) -> Iterator[Measure]:
    lengths = request.lengths or (_default_length(handle),)
    for place in (*request.texts, *request.shards):
        is_shards = place in request.shards
        if is_shards:
            # What is missing, unfinished or another model's is said before anything is computed.
            _require_vocabulary(place, read_manifest(place)["vocab_size"], handle)
        content = sha256(place / MANIFEST if is_shards else place)
        for kind, length in product(request.kinds, lengths):
            settings = request.settings(kind, length)
            identity = {"measure": kind, "data": content, "length": length, **settings, "model": handle.identity}
            compute = partial(_measure_text, handle, place, is_shards, kind, length, settings, request.batch_size)
            yield Measure(f"{kind}-{place.name.split('.')[0]}-{length}", identity, compute)


def _default_length(handle: ModelHandle) -> int:
    """That of the model's training, where it is known."""
    return min(handle.training_length or LENGTH, handle.config.max_position_embeddings)


def _about_length(handle: ModelHandle) -> str:
    length, trained = _default_length(handle), handle.training_length
    why = "as in the model's training" if length == trained else "as many as the model has positions"
    if length == LENGTH != trained:
        why = "what the model was trained on is not known"
    return f"sequences of {length} tokens, {why}; --length gives others"


def _measure_text(
    handle: ModelHandle,
    place: Path,
    is_shards: bool,
    kind: str,
    length: int,
    settings: dict[str, Any],
    batch_size: int | None,
) -> dict[str, Any]:
    model = handle.model

    def joined() -> Stream:
        return joined_shards(place) if is_shards else JoinedTexts(handle.tokenizer, place)

    if kind == "needle":
        found = needle_retrieval(model, joined(), partial(encode, handle.tokenizer), length, **settings)
    elif kind == "positions":
        found = loss_by_position(model, joined(), length, settings["limit"])
    elif is_shards:
        as_trained = handle.trained_on(length, apart=True)
        found = shard_perplexity(model, place, length, limit=settings["limit"], as_trained=as_trained)
    else:
        found = text_perplexity(model, handle.tokenizer, place, length, batch_size=batch_size, **settings)
    return {"data": str(place), "limit": settings.get("limit"), **found, "model": handle.about()}


def _require_vocabulary(place: Path, needed: int, handle: ModelHandle) -> None:
    if needed > handle.config.vocab_size:
        raise UserError(
            f"{place} has tokens up to {needed - 1}, {handle.path} knows {handle.config.vocab_size}: "
            f"prepare it with --tokenizer {handle.path}"
        )
    require_same_tokens(place, handle.path)

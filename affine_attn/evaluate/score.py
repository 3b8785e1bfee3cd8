"""Log-likelihoods of continuations: what every measure of this package is made of. Needs torch and transformers alone.

``affine-attn eval --export-requests`` writes the harness's requests as token ids; ``affine-attn eval-score`` scores
them on a machine that has neither the harness nor its data; ``affine-attn eval --import-scores`` makes metrics of that.
"""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel

from affine_attn.errors import UserError
from affine_attn.models.configuration import AffineAttnConfig
from affine_attn.runs.files import written

REQUESTS, SCORES = "affine-attn requests 1", "affine-attn scores 1"
# Logits and their logarithms, both in fp32, of a batch.
_BATCH_BYTES = 512 * 2**20
_BYTES_PER_LOGIT = 8
# Beyond it a batch of short requests is no faster, and activations begin to count.
_MOST_ROWS = 256


class Pair(NamedTuple):
    """Token ids: the continuation is scored, given the context."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


class Score(NamedTuple):
    """The log-likelihood in nats, and whether greedy decoding would have given the continuation."""

    log_likelihood: float
    greedy: bool


def batch_rows(length: int, vocabulary: int, device: torch.device) -> int:
    """How many sequences of a length go through the model at once."""
    budget = _BATCH_BYTES
    if device.type == "cuda":
        budget = torch.cuda.mem_get_info(device)[0] // 4
    return max(1, min(_MOST_ROWS, budget // (_BYTES_PER_LOGIT * length * vocabulary)))


def depends_on_padding(config: PreTrainedConfig) -> bool:
    """Return True if rows of a batch change with its length: N = "keys of the call" counts keys that only pad."""
    if not isinstance(config, AffineAttnConfig):
        return False
    affines = (config.spec(layer).affine for layer in range(config.num_hidden_layers))
    return any(affine is not None and affine.length == "keys" for affine in affines)


def checked_batch_size(config: PreTrainedConfig, batch_size: int | None) -> int | None:
    """The batch size asked for (None: by length), or 1 for a model whose rows do not stand alone in a batch."""
    if not depends_on_padding(config):
        return batch_size
    if batch_size not in (None, 1):
        raise UserError(
            f'length="keys" counts padding, so this model is scored one by one; got a batch of {batch_size}'
        )
    return 1


@torch.inference_mode()
def score(
    model: PreTrainedModel, pairs: Sequence[Pair], batch_size: int | None = None, progress: str = "Scoring"
) -> list[Score]:
    """Score every pair, the longest first; rows of like length share a batch, padded on the right. Pairs share a row
    where they differ in their last token alone, such as choices of one token after the same context."""
    batch_size = checked_batch_size(model.config, batch_size)
    # What the model reads -> those it is read for.
    asked: dict[tuple[int, ...], list[int]] = {}
    for number, pair in enumerate(pairs):
        if not pair.context or not pair.continuation:
            raise UserError("a request needs at least one token of context and one of continuation")
        asked.setdefault((pair.context + pair.continuation)[:-1], []).append(number)
    order = sorted(asked, key=len, reverse=True)
    scores: list[Score | None] = [None] * len(pairs)
    with tqdm(total=len(pairs), desc=progress) as bar:
        while order:
            size = batch_size or batch_rows(len(order[0]), model.config.vocab_size, model.device)
            rows, order = order[:size], order[size:]
            chosen = [(place, number) for place, row in enumerate(rows) for number in asked[row]]
            results = _score_batch(model, rows, [(place, pairs[number]) for place, number in chosen])
            for (_, number), result in zip(chosen, results, strict=True):
                scores[number] = result
            bar.update(len(chosen))
    return cast(list[Score], scores)


def _score_batch(model: PreTrainedModel, rows: list[tuple[int, ...]], pairs: list[tuple[int, Pair]]) -> list[Score]:
    """Pairs by the place of their row."""
    # Causal attention does not look at what pads the right.
    inputs = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(model.device)
    network: Any = model
    logits: Tensor = network(inputs, use_cache=False).logits
    scored = [
        _score_row(torch.tensor(pair.context + pair.continuation), len(pair.continuation), logits[place])
        for place, pair in pairs
    ]
    # The host waits once for all rows.
    log_likelihoods, greedy = (torch.stack(column).tolist() for column in zip(*scored, strict=True))
    return [Score(*row) for row in zip(log_likelihoods, greedy, strict=True)]


def _score_row(tokens: Tensor, scored: int, logits: Tensor) -> tuple[Tensor, Tensor]:
    last = len(tokens) - 1
    log_probs = logits[last - scored : last].float().log_softmax(-1)
    labels = tokens[-scored:].to(logits.device, non_blocking=True)
    return log_probs.gather(1, labels[:, None]).sum(), (log_probs.argmax(-1) == labels).all()


def score_file(
    model: PreTrainedModel, about: dict[str, Any], requests: Path, scores: Path, batch_size: int | None = None
) -> int:
    """Score a file of requests into a file of scores, whose first line is ``about`` the model; returns how many."""
    pairs = read_requests(requests, model.config)

    def answered() -> Iterator[tuple[Pair, Score]]:
        # Scored when the file is open: one that cannot be written is noticed before.
        yield from zip(pairs, score(model, pairs, batch_size), strict=True)

    write_lines(scores, {"format": SCORES, "requests": digest(pairs), "model": about}, answered())
    return len(pairs)


def read_requests(requests: Path, config: PreTrainedConfig) -> list[Pair]:
    """The requests of a file, which a model with this configuration must be able to answer."""
    header, rows = read_lines(requests, REQUESTS, max_length=int)
    pairs = [_pair(row, requests, number) for number, row in enumerate(rows, start=2)]
    largest = max((token for pair in pairs for tokens in pair for token in tokens), default=0)
    longest = header["max_length"]
    if largest >= config.vocab_size or longest > config.max_position_embeddings:
        raise UserError(
            f"{requests} was exported for another model: it has tokens up to {largest} and lengths up to {longest}, "
            f"this one {config.vocab_size} tokens and {config.max_position_embeddings} positions"
        )
    return pairs


def read_scores(scores: Path) -> tuple[dict[str, Any], dict[Pair, Score]]:
    """What a file of scores says of its model, and the score of every request."""
    header, rows = read_lines(scores, SCORES, requests=str, model=dict)
    if lacking := {"path", "fingerprint", "dtype", "model_type", "attention", "parameters"} - header["model"].keys():
        raise UserError(f"{scores} does not say the {', '.join(sorted(lacking))} of the model that was scored")
    answers: dict[Pair, Score] = {}
    for number, row in enumerate(rows, start=2):
        match row:
            case [asked, [int() | float() as log_likelihood, bool(greedy)]] if not isinstance(log_likelihood, bool):
                answers[_pair(asked, scores, number)] = Score(log_likelihood, greedy)
            case _:
                raise UserError(
                    f"{scores}, line {number}, is not a request with its log-likelihood and true or false: "
                    f"{_shown(row)}"
                )
    if digest(answers) != header["requests"]:
        raise UserError(f"{scores} is damaged: its requests are not those that were scored")
    return header["model"], answers


def _pair(row: Any, path: Path, number: int) -> Pair:
    match row:
        case [[_, *_] as context, [_, *_] as continuation] if all(
            type(token) is int and token >= 0 for token in (*context, *continuation)
        ):
            return Pair(tuple(context), tuple(continuation))
    raise UserError(
        f"{path}, line {number}, is not a request, two lists of token ids with at least one in each: {_shown(row)}"
    )


def _shown(row: Any) -> str:
    text = json.dumps(row)
    return text if len(text) <= 60 else f"{text[:60]}..."


def digest(pairs: Iterable[Pair]) -> str:
    """Return a hash of a file's requests in its order: scores that were cut or mixed up have another."""
    total = hashlib.sha256()
    for pair in pairs:
        total.update(json.dumps(pair).encode())
    return total.hexdigest()


def write_lines(path: Path, header: dict[str, Any], rows: Iterable[Any]) -> None:
    """JSON lines, the header first; all of it or nothing. Compressed where the name ends in .gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        written(path) as file,
        gzip.GzipFile(fileobj=file, mode="wb") if path.suffix == ".gz" else nullcontext(file) as lines,
    ):
        for content in (header, *rows):
            lines.write(f"{json.dumps(content)}\n".encode())


def read_lines(path: Path, expected: str, **fields: type) -> tuple[dict[str, Any], list[Any]]:
    """The header and the rows of a file; ``fields`` are what its header must have."""
    if not path.exists():
        raise UserError(f"there is no file {path}")
    try:
        with (
            path.open("rb") as file,
            gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else nullcontext(file) as lines,
        ):
            header, *rows = map(json.loads, lines)
        found = header["format"]
    except (ValueError, TypeError, KeyError, EOFError, RecursionError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is not a file of {expected}, or cut short") from error
    if found != expected:
        raise UserError(f"{path} is a file of {found}, not of {expected}")
    for name, kind in fields.items():
        if not isinstance(header.get(name), kind):
            raise UserError(f"{path} is damaged: its first line has no {name}")
    return header, rows

"""Models as lm-evaluation-harness calls them, and the metrics it computes from their answers."""

import contextlib
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from affine_attn.errors import UserError
from affine_attn.evaluate.perplexity import bits, perplexity
from affine_attn.evaluate.score import Pair, Score, batch_rows, checked_batch_size
from affine_attn.evaluate.tasks import quiet

# For which the harness has no standard error.
_PER_UNIT = {"word_perplexity": perplexity, "byte_perplexity": perplexity, "bits_per_byte": bits}

# Its registration in the harness hides its type.
_HFLM: Any = HFLM


class BatchedLM(_HFLM):
    """HFLM around a loaded model, with batches as large as their logits allow: no trial runs, which on a CPU take long.

    ``batch_size`` None is by length. Log-probabilities are fp32 for any dtype of the model.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int | None = None):
        if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
            raise UserError("the tokenizer has neither a begin nor an end token, which an empty context needs")
        batch_size = checked_batch_size(model.config, batch_size)
        with quiet("lm_eval.models.huggingface"):
            super().__init__(
                pretrained=model,
                tokenizer=tokenizer,
                batch_size=batch_size or "auto",
                softmax_dtype="float32",
            )
        self._rows, self._next_batch = 0, 0

    def _batch_scheduler(self, pos: int, n_reordered_requests: Sequence[Any]) -> int:
        """Called for every request, sorted from long to short: the first of a batch decides how many it holds."""
        if pos in (0, self._next_batch):
            _, context, continuation = n_reordered_requests[pos]
            self._rows = self._rows_for(min(len(context) + len(continuation) - 1, self.max_length))
            self._next_batch = pos + self._rows
        return self._rows

    def _detect_batch_size(self, requests: Sequence[Any] | None = None, pos: int = 0) -> int:
        """Return the batch size for generation, whose contexts may be as long as the model allows."""
        return self._rows_for(self.max_length)

    def _rows_for(self, length: int) -> int:
        return batch_rows(length, self.model.config.vocab_size, self.device)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **options: Any) -> list[Any]:
        longest = max((len(continuation) for _, _, continuation in requests), default=0)
        if longest > self.max_length:
            raise UserError(
                f"a continuation has {longest} tokens, more than the {self.max_length} positions of the model"
            )
        return self._scores(requests, **options)

    def _scores(self, requests: Sequence[Any], **options: Any) -> list[Any]:
        return super()._loglikelihood_tokens(requests, **options)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """HFLM's windows, but those of all documents sorted and batched together."""
        documents = [self.windows(request.args[0]) for request in requests]
        scores = iter(self._loglikelihood_tokens([(None, *window) for windows in documents for window in windows]))
        return [sum(next(scores)[0] for _ in windows) for windows in documents]

    def windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        """Context and continuation of every stretch of a text; together the continuations are its tokens."""
        stretches = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
        return [make_disjoint_window(stretch) for stretch in stretches]


class ElsewhereLM(BatchedLM):
    """A model that is not here: its configuration and tokenizer decide the requests, ``answer`` gives the scores."""

    def __init__(
        self,
        config: PreTrainedConfig,
        tokenizer: PreTrainedTokenizerBase,
        answer: Callable[[Pair], Score],
    ):
        super().__init__(skeleton(config), tokenizer, batch_size=1)
        self._answer = answer

    def _scores(self, requests: Sequence[Any], **_: Any) -> list[Any]:
        return [self._answer(self._seen(context, continuation)) for _, context, continuation in requests]

    def _seen(self, context: list[int], continuation: list[int]) -> Pair:
        """Cut what is too long from the left, as HFLM does."""
        tokens = (context + continuation)[-(self.max_length + 1) :]
        return Pair(tuple(tokens[: -len(continuation)]), tuple(continuation))

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        raise UserError(f"{requests[0].task_name} generates text; only log-likelihoods can be computed elsewhere")


def skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """A model without numbers."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def run_task(lm: BatchedLM, loaded: Any, limit: int | None) -> dict[str, Any]:
    """The metrics of a task of the harness, each with its standard error where there is one, and what it was."""
    name = loaded.config.task
    # As the harness's own entry point does: zero-shot unless the task says otherwise, and its seed.
    if loaded.get_config("num_fewshot") is None:
        loaded.set_config("num_fewshot", 0)
    loaded.set_fewshot_seed(DEFAULT_OTHER_SEED)
    # The harness prints; what this process prints is the result alone.
    with contextlib.redirect_stdout(sys.stderr):
        results: Any = evaluate(lm=lm, task_dict={"tasks": {name: loaded}}, limit=limit, log_samples=True)
    metrics = _metrics(results["results"][name])
    samples = results["samples"][name]
    if loaded.OUTPUT_TYPE == "loglikelihood_rolling":
        metrics |= _rolling_metrics(lm, metrics, samples)
    return {
        "metrics": metrics,
        "documents": results["n-samples"][name]["effective"],
        "shots": results["n-shot"][name],
        "task_version": results["versions"][name],
        "samples": [_item(sample, loaded.OUTPUT_TYPE) for sample in samples],
    }


def _item(sample: dict[str, Any], kind: str) -> dict[str, Any]:
    """A document of a task with what was asked about it and what the model answered, and its own metrics."""
    answers = []
    for asked, (answer, *_) in zip(sample["arguments"], sample["resps"], strict=True):
        if kind == "generate_until":
            answers.append({"context": asked[0], "generated": answer})
        elif kind == "loglikelihood_rolling":
            answers.append({"text": asked[0], "log_likelihood": answer})
        else:
            log_likelihood, greedy = answer
            answers.append(
                {"context": asked[0], "continuation": asked[1], "log_likelihood": log_likelihood, "greedy": greedy}
            )
    about = {"id": sample["doc_id"], "filter": sample["filter"], "doc": sample["doc"], "target": sample["target"]}
    return about | {"choices": answers} | {metric: sample[metric] for metric in sample["metrics"]}


def _metrics(given: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """Sort the harness's flat "acc,none" and "acc_stderr,none" by metric; another filter stays in the name."""
    metrics = {}
    for key, value in given.items():
        name, comma, chosen_filter = key.partition(",")
        if not comma or name.endswith("_stderr"):
            continue
        error = given.get(f"{name}_stderr,{chosen_filter}")
        error = error if isinstance(error, float) and math.isfinite(error) else None
        metrics[name if chosen_filter == "none" else key] = {"value": value, "stderr": error}
    return metrics


def _rolling_metrics(lm: BatchedLM, metrics: dict[str, Any], samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Perplexity per token, and standard errors for the harness's own, over documents."""
    texts = [sample["arguments"][0][0] for sample in samples]
    losses = [-sample["filtered_resps"][0] for sample in samples]
    counts = [sum(len(continuation) for _, continuation in lm.windows(text)) for text in texts]
    added: dict[str, Any] = {"token_perplexity": perplexity(losses, counts)}
    for name in _PER_UNIT.keys() & metrics.keys():
        # The harness keeps (log-likelihood, units) per document.
        units = [sample[name][1] for sample in samples]
        added[name] = {"value": metrics[name]["value"], "stderr": _PER_UNIT[name](losses, units)["stderr"]}
    return added

"""A teacher to be asked: frozen, its targets whole or cut to the largest entries, and what tells it from others."""

import hashlib
import json
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from affine_attn.distill.losses import CHUNK_BYTES, Logits, Teacher, TopK, chunk_size
from affine_attn.errors import UserError


class Largest(NamedTuple):
    """A teacher's k largest logits [..., k] in its own dtype, their entries ``ids``, largest first, and the
    log-sum-exp [...] (fp32) of all its logits.

    The target they stand for (``target``) is the teacher's distribution cut to these entries: zero elsewhere, and
    renormalised over the k, softmax(log_probs / T) (see ``TopK``). What is left out has no bucket of its own. Which of
    several equal logits is the k-th is left to torch.topk.
    """

    ids: Tensor
    logits: Tensor
    log_sum_exp: Tensor

    @property
    def target(self) -> TopK:
        return TopK(self.ids, self.logits.float() - self.log_sum_exp[..., None])

    @property
    def mass(self) -> Tensor:
        """The probability [...] that the k entries hold before they are renormalised."""
        return self.target.log_probs.exp().sum(-1)


@torch.no_grad()
def frozen(teacher: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Ready to be asked. Heads with more than a product (biases, caps, scales) would silently be another teacher."""
    teacher = teacher.to(device).eval().requires_grad_(False)  # pyright: ignore[reportArgumentType]
    ids = torch.arange(4, device=device)[None]
    hidden, head = ask(teacher, {"input_ids": ids})
    product = hidden @ head.T
    if not torch.allclose(
        teacher(input_ids=ids, use_cache=False).logits.float(), product.float(), rtol=1e-2, atol=1e-2
    ):
        raise UserError(
            f"{type(teacher).__name__}: its logits are not the product of its last hidden states and its head, "
            "which is what the loss computes"
        )
    return teacher


@torch.no_grad()
def ask(teacher: PreTrainedModel, context: dict[str, Tensor]) -> Teacher:
    """Its targets for ``input_ids`` (and ``position_ids``), in its own dtype: autocast would be another teacher."""
    with torch.autocast(context["input_ids"].device.type, enabled=False):
        hidden = teacher.base_model(**context, use_cache=False).last_hidden_state
    return Teacher(hidden, teacher.get_output_embeddings().weight)


@torch.no_grad()
def logits(teacher: Teacher, instead_of: Logits | None = None) -> Logits:
    """All of them at once, for several students; in the memory of ``instead_of``, where it is given."""
    out = None if instead_of is None else instead_of.logits.flatten(0, -2)
    with torch.autocast(teacher.hidden.device.type, enabled=False):
        product = torch.mm(teacher.hidden.flatten(0, -2), teacher.weight.T, out=out)
    return Logits(product.view(*teacher.hidden.shape[:-1], -1))


@torch.no_grad()
def largest(teacher: Teacher, k: int, shared: int | None = None, chunk_bytes: int = CHUNK_BYTES) -> Largest:
    """Return the k largest logits of the first ``shared`` entries (default all), a chunk of tokens at a time."""
    rows, head = teacher.hidden.flatten(0, -2), teacher.weight[:shared]
    if not 1 <= k <= head.shape[0]:
        raise UserError(f"top_k must be between 1 and the teacher's {head.shape[0]} vocabulary entries, got {k}")
    ids = torch.empty(rows.shape[0], k, dtype=torch.int32, device=rows.device)
    logits = torch.empty(rows.shape[0], k, dtype=rows.dtype, device=rows.device)
    log_sum_exp = torch.empty(rows.shape[0], dtype=torch.float32, device=rows.device)
    # The chunk is there in the teacher's dtype and, for its log-sum-exp, in fp32.
    size = chunk_size(rows.shape[0], head.shape[0], rows.dtype.itemsize + 4, chunk_bytes)
    with torch.autocast(rows.device.type, enabled=False):
        for start in range(0, rows.shape[0], size):
            part = slice(start, start + size)
            of_all = rows[part] @ head.T
            logits[part], ids[part] = of_all.topk(k)
            log_sum_exp[part] = of_all.float().logsumexp(-1)
    shape = teacher.hidden.shape[:-1]
    return Largest(ids.view(*shape, k), logits.view(*shape, k), log_sum_exp.view(shape))


def fingerprint(teacher: PreTrainedModel) -> str:
    """sha256 of the configuration and of every weight, wherever they were loaded from."""
    config = teacher.config.to_dict()
    told = {key: value for key, value in config.items() if key not in ("_name_or_path", "transformers_version")}
    digest = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode())
    for name, tensor in sorted(teacher.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()

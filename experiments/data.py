"""Shards of corpora that have a split of their own: whole books and articles are held out, not pieces of them."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from affine_attn.data import shards
from affine_attn.data.prepare import prepare
from affine_attn.runs.files import write_json

# Small files: each travels where one large one would not.
SHARD_TOKENS = 1 << 23


def prepare_split(
    out: Path, train: Sequence[str], valid: Sequence[str], tokenizer: str, end_token: str, shard_tokens: int
) -> dict[str, Any]:
    """Do as ``affine-attn prepare``, with the files of each split given; stopped at any moment, it goes on."""
    options: dict[str, Any] = {"tokenizer": tokenizer, "end_token": end_token, "shard_tokens": shard_tokens}
    manifest = prepare(out, train, valid=0.0, **options)
    if manifest["shards"]["valid"]:
        return manifest
    beside = out.with_name(f"{out.name}-valid")
    held_out = prepare(beside, valid, valid=0.0, **options)
    renamed = []
    for number, entry in enumerate(held_out["shards"]["train"]):
        name = f"valid-{number:05d}"
        for suffix in ("bin", "idx"):
            shutil.copyfile(beside / f"{entry['name']}.{suffix}", out / f"{name}.{suffix}")
        renamed.append(entry | {"name": name})
    manifest["shards"]["valid"] = renamed
    for unit in ("tokens", "documents"):
        manifest[unit]["valid"] = held_out[unit]["train"]
    manifest["valid_sources"] = held_out["settings"]["sources"]
    write_json(out / shards.MANIFEST, manifest)
    shutil.rmtree(beside)
    return manifest

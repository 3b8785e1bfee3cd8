"""What lies beside the weights in a saved folder: the code that loads them, and the model card."""

import json
from pathlib import Path
from typing import Any

from affine_attn import __version__
from affine_attn.core.spec import AttentionSpec
from affine_attn.core.variants import VARIANTS, name_of
from affine_attn.runs.files import write_text

CARD = "README.md"
# What commands that write a folder say.
HOW_TO_LOAD = (
    "transformers loads it after `import affine_attn.models`, or with trust_remote_code=True (see its README.md)"
)
# transformers looks for this import before it runs the file, and names the package where it is missing.
_LOADER = '''"""The code of this model is the package affine-attn: pip install 'affine-attn[models]'."""

from affine_attn.models import {names}  # noqa: F401
'''
_LOAD = """
```python
import affine_attn.models  # pip install 'affine-attn[models]'
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{folder}")
```

In a program that does not import `affine_attn.models`, give `trust_remote_code=True`: transformers then runs
`modeling_affine_attn.py` of this folder, {code}.
"""
_SERVE = """
    affine-attn generate {folder} "Once upon a time"
    lm_eval --model hf --model_args pretrained={folder},trust_remote_code=True --tasks ...

In Python `pipeline("text-generation", "{folder}", trust_remote_code=True)` and `model.generate(...)` run it. {server}
"""
_CITE = """
Cite the papers of the attention above and the software:

```bibtex
@software{{affine_attn, title = {{affine-attn}}, version = {{{version}}}, author = {{The affine-attn contributors}}}}
```
"""


def write_beside(config: Any, folder: Path) -> None:
    """Write what every saved folder has; a model card that is there already stays."""
    classes = [place.split(".") for place in type(config).auto_map.values()]
    write_text(folder / f"{classes[0][0]}.py", _LOADER.format(names=", ".join(name for _, name in classes)))
    if not (folder / CARD).exists():
        write_text(folder / CARD, model_card(config, folder.name))


def model_card(config: Any, name: str, training: str = "", own_code: bool = False) -> str:
    """README.md of a model's folder; ``training``: how the weights came about, in Markdown."""
    layers = [config.spec(layer) for layer in range(config.num_hidden_layers)]
    softmax = all(spec == AttentionSpec() for spec in layers)
    code = "which needs torch and transformers alone" if own_code else "which imports the installed package"
    server = (
        "For a server: `affine-attn convert FOLDER NEW --to-plain`, which gives a model in transformers' own classes."
        if softmax
        else "Servers that have no class for it cannot run it: the weights alone are another model."
    )
    sizes = (
        f"{config.num_hidden_layers} layers, width {config.hidden_size}, {config.num_attention_heads} query and "
        f"{config.num_key_value_heads} key heads of {config.head_dim}, vocabulary {config.vocab_size}"
    )
    about = f"\nA Llama-like decoder, model type `affine_attn`: {sizes}. Written by affine-attn {__version__}.\n"
    parts = {
        f"# {name}": about,
        "## Attention": _attention(config, layers),
        "## Load": _LOAD.format(folder=name, code=code),
        "## Run": _SERVE.format(folder=name, server=server),
        "## Training": training,
        "## Citation": _CITE.format(version=__version__),
    }
    head = "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- affine-attn\n---\n\n"
    return head + "\n".join(f"{title}\n{text}" for title, text in parts.items() if text)


def _attention(config: Any, layers: list[AttentionSpec]) -> str:
    rows = ["", "| layers | variant | output | source | window |", "|---|---|---|---|---|"]
    kinds: dict[tuple[AttentionSpec, int | None], list[str]] = {}
    for layer, spec in enumerate(layers):
        kinds.setdefault((spec, config.layer_window(layer)), []).append(str(layer))
    for (spec, window), places in kinds.items():
        which = "all" if len(kinds) == 1 else ", ".join(places)
        named = name_of(spec)
        about = f"`{named}` | {VARIANTS[named].formula} | {VARIANTS[named].source}" if named else "its own | |"
        rows.append(f"| {which} | {about} | {window or 'none'} |")
    specs = "\n".join(dict.fromkeys(f"    {json.dumps(spec.to_dict())}" for spec in layers))
    modules = sorted(set().union(*(spec.modules for spec in layers)))
    own = (
        f"\nDefined in {', '.join(f'`{name}`' for name in modules)}, which has to be imported first.\n"
        if modules
        else ""
    )
    return "\n".join(rows) + f"\n\n{specs}\n{own}"

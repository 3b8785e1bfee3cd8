"""The tokenizer of a prepared corpus: found, or trained on it, and kept as a folder beside the shards."""

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from affine_attn.errors import MissingPackage, UserError
from affine_attn.runs.files import read_object, write_copy, write_json

try:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
except ModuleNotFoundError as error:
    raise MissingPackage("preparing data needs tokenizers: pip install 'affine-attn[models]'") from error

from affine_attn.data.shards import TOKENIZER

# Of trained tokenizers; a given one has its own.
END_OF_DOCUMENT = "<|endoftext|>"
FILE = "tokenizer.json"
COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
# Longer texts are encoded in pieces of about so many characters: the tokenizers library holds 150 bytes for each.
PIECE_CHARACTERS = 1 << 17
# What is looked at on either side of a cut. Further than half of it no pre-tokeniser looks to decide where it splits.
_CONTEXT = 1 << 10
_WHITESPACE_ENDS = re.compile(r"(?<=\S)(?=\s)|(?<=\s)(?=\S)")
# Places of a kind that are tried for a cut.
_MOST_TRIED = 8


def find_tokenizer(name: str) -> Path:
    """The tokenizer.json of a folder, of a hub id, or the file itself."""
    path = Path(name)
    if path.is_dir() and (path / FILE).exists():
        return path / FILE
    if path.is_file():
        return path
    if path.exists() or path.is_absolute() or name.startswith("."):
        raise UserError(f"{name} is neither a tokenizer.json nor a folder with one")
    from transformers.utils.hub import cached_file

    from affine_attn.runs.places import named_place

    with named_place(name):
        found = [
            cached_file(name, file, _raise_exceptions_for_missing_entries=file == FILE) for file in (FILE, *COMPANIONS)
        ]
    return Path(str(found[0]))


def tokenizer_hash(name: str | Path) -> str:
    """sha256 of a tokenizer.json, as the manifest has it."""
    return hashlib.sha256(find_tokenizer(str(name)).read_bytes()).hexdigest()


def require_regular_files(folder: Path) -> list[Path]:
    """The files of a data folder's tokenizer, of which every model that is trained on the data gets a copy.

    Links are refused: what they lead to, anywhere on this machine, would be given away with the model.
    """
    if folder.is_symlink():
        raise UserError(f"{folder} is a link: replace it by the folder it leads to")
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    for file in files:
        if file.is_symlink() or not file.is_file():
            raise UserError(f"{file} is no regular file: replace a link by what it leads to, or remove it")
    return files


def copy_files(folder: Path, model: Path) -> None:
    """Put a data folder's tokenizer, if there is one, beside the weights of a model."""
    for file in require_regular_files(folder):
        write_copy(file, model / file.name)


def require_same_tokens(data: Path, model: str) -> None:
    """Refuse shards of another tokenizer than the model's: where its vocabulary is large enough, nothing else would.

    Ordinary tokens are compared, since related models differ in special ones; a side without a tokenizer.json is not.
    """
    from transformers.utils.hub import cached_file

    beside = Path(model) / FILE
    at_hand = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    file = beside if Path(model).is_dir() else cached_file(model, FILE, **at_hand)
    if file is None or not Path(file).exists() or not (data / TOKENIZER / FILE).exists():
        return
    theirs = _ordinary_tokens(Path(file))
    for i, token in sorted(_ordinary_tokens(data / TOKENIZER / FILE).items()):
        if theirs.get(i, token) != token:
            raise UserError(
                f"{data} was made with another tokenizer than that of {model}: token {i} is {token!r} there, "
                f"{theirs[i]!r} here; prepare it with --tokenizer {model}"
            )


def _ordinary_tokens(file: Path) -> dict[int, str]:
    tokenizer = load_tokenizer(file)
    added = tokenizer.get_added_tokens_decoder()
    return {i: token for token, i in tokenizer.get_vocab(with_added_tokens=False).items() if i not in added}


def load_tokenizer(file: Path) -> Tokenizer:
    """Load a tokenizer for whole documents: neither cut nor padded, and text that spells a special token stays text."""
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower class
        raise UserError(f"{file} is not a tokenizer.json of the tokenizers library: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


class Pieces:
    """A text that comes in parts, cut into pieces whose tokens, one after the other, are the tokens of the whole.

    A cut is made where whitespace begins or ends and the tokenizer's pre-tokeniser splits. Where it does not, the text
    stays in one piece however long it is.
    """

    def __init__(self, encoder: Tokenizer):
        self._encoder, self._near = encoder, PIECE_CHARACTERS
        # What was added and is in no piece yet.
        self.rest = ""

    def add(self, text: str) -> Iterator[str]:
        self.rest += text
        while self._near + _CONTEXT <= len(self.rest):
            at = _safe_cut(self._encoder, self.rest[self._near - _CONTEXT : self._near + _CONTEXT])
            if at is None:
                self._near += PIECE_CHARACTERS
                continue
            at += self._near - _CONTEXT
            yield self.rest[:at]
            self.rest, self._near = self.rest[at:], PIECE_CHARACTERS


def _safe_cut(encoder: Tokenizer, text: str) -> int | None:
    """Return a place where both sides of the text have the tokens that they have in it and share no word, or None."""
    whole = encoder.encode(text, add_special_tokens=False)
    middle = range(len(text) // 4, len(text) * 3 // 4)
    places = [found.start() for found in _WHITESPACE_ENDS.finditer(text) if found.start() in middle]
    # Some pre-tokenisers split at the ends of lines alone, others nowhere but before spaces.
    kinds = [[at for at in places if ("\n" in text[at - 1 : at + 1]) is line_end] for line_end in (True, False)]
    for at in (at for kind in kinds for at in kind[:_MOST_TRIED]):
        left, right = (encoder.encode(side, add_special_tokens=False).ids for side in (text[:at], text[at:]))
        words = whole.word_ids[max(0, len(left) - 1) : len(left) + 1]
        if left + right == whole.ids and len(set(words)) == 2:
            return at
    return None


def end_of_document(file: Path, token: str | None = None) -> str:
    """The token put after every document: the one asked for, else the tokenizer's end-of-sequence token."""
    if token is None:
        config = file.parent / COMPANIONS[0]
        given = read_object(config).get("eos_token") if config.exists() else None
        token = given.get("content") if isinstance(given, dict) else given
    encoder = load_tokenizer(file)
    if not isinstance(token, str):
        raise UserError(f"{file} does not say which token ends a document: give --end-of-document")
    if encoder.token_to_id(token) is None:
        raise UserError(f"{token!r} is not a token of {file}, so it cannot end documents")
    return token


def copy_tokenizer(file: Path, folder: Path, eos_token: str) -> None:
    """tokenizer.json as it is, byte for byte, in a folder that AutoTokenizer loads."""
    folder.mkdir(parents=True)
    write_copy(file, folder / FILE)
    for name in COMPANIONS:
        if (file.parent / name).exists():
            write_copy(file.parent / name, folder / name)
    if not (folder / COMPANIONS[0]).exists():
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos_token}
        write_json(folder / COMPANIONS[0], config)


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> None:
    """Byte-level BPE, the same for the same texts, as a folder that AutoTokenizer loads."""
    alphabet = _alphabet()
    if vocab_size <= len(alphabet):
        raise UserError(f"--vocab-size must be above {len(alphabet)} (every byte and the end), got {vocab_size}")
    from transformers import PreTrainedTokenizerFast

    tokenizer = bytes_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_DOCUMENT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_DOCUMENT).save_pretrained(str(folder))


def bytes_tokenizer() -> Tokenizer:
    """A tokenizer of single bytes: what ``train_tokenizer`` begins with, and what cuts its texts."""
    tokenizer = Tokenizer(models.BPE({byte: number for number, byte in enumerate(_alphabet())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


def _alphabet() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())

"""The byte tokenizer: token ids are the text's UTF-8 bytes; no BOS, no EOS."""

import codecs
import os
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import StreamingDetokenizer, TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_directory
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from .config import ModelArgs
from .container import TinyGPTError, show


class ByteDetokenizer(StreamingDetokenizer):
    """Streams bytes as text: an incomplete character is held back until it is whole.

    Bytes that are no UTF-8 become U+FFFD, at the latest at `finalize`.
    """

    def __init__(self, tokenizer: Any):
        self.reset()

    def reset(self) -> None:
        self.offset = 0  # pieces that `last_segment` has given
        self.tokens: list[int] = []
        self._pieces: list[str] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add_token(self, token: int) -> None:
        self.tokens.append(token)
        self._pieces.append(self._decoder.decode(bytes((token,))))

    def finalize(self) -> None:
        self._pieces.append(self._decoder.decode(b"", final=True))

    @property
    def text(self) -> str:  # type: ignore[override]  # a property in mlx_lm's too
        """All that is whole so far."""
        return "".join(self._pieces)

    @property
    def last_segment(self) -> str:
        """What has become whole since the last look, in time that does not grow with the text."""
        fresh = self._pieces[self.offset :]
        self.offset = len(self._pieces)
        return "".join(fresh)


def byte_tokenizer() -> TokenizerWrapper:
    """The byte tokenizer as mlx-lm's commands want it."""
    # The byte-level alphabet of GPT-2: a printable character for each byte, here without merges.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    vocab = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    vocab.update((chr(256 + i), byte) for i, byte in enumerate(others))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # In a sequence of one, because mlx-lm strips a text's leading space for a bare ByteLevel.
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    return TokenizerWrapper(fast, ByteDetokenizer, eos_token_ids=[])


def load_tokenizer(
    args: ModelArgs, source: str | os.PathLike[str], directory: str | os.PathLike[str] | None
) -> TokenizerWrapper:
    """The tokenizer in `directory`, or the byte tokenizer where the model is byte-level.

    The file's own `tokenizerSource` is a path in an untrusted file: it is named in the error,
    never opened.

    Raises:
        TinyGPTError: a directory is needed and not given, holds no tokenizer, or one with more
            tokens than the model.
    """
    if directory is None:
        if args.tokenizerSource is not None:
            problem = f"the model wants the tokenizer of {show(args.tokenizerSource)}; "
        elif args.vocabSize != 256:
            problem = f"expected 256 for a byte-level model, got {args.vocabSize}; "
        else:
            return byte_tokenizer()
        field = "vocabSize" if args.tokenizerSource is None else "tokenizerSource"
        problem += (
            "say which directory to take it from (--tinygpt-tokenizer DIR, convert-tinygpt's "
            "--tokenizer-dir DIR, tokenizer_dir=)"
        )
        raise TinyGPTError(source, f"config.{field}", problem)
    if not Path(directory).is_dir():
        raise TinyGPTError(directory, "tokenizer directory", "expected a directory")
    try:
        tokenizer = load_directory(Path(directory), {"trust_remote_code": False})
    except Exception as error:  # a third party's file in a third party's reader
        lines = str(error).strip().splitlines() or [type(error).__name__]
        problem = f"expected a tokenizer ({lines[0].rstrip(': ')})"
        raise TinyGPTError(directory, "tokenizer directory", problem) from error
    size = len(tokenizer.get_vocab())
    if size > args.vocabSize:
        problem = f"expected at most the model's {args.vocabSize} tokens, got {size}"
        raise TinyGPTError(directory, "tokenizer directory", problem)
    return tokenizer

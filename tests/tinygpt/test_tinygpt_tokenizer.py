"""The byte tokenizer, bare and as mlx-lm's wrapper drives it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_kivi import tinygpt
from mlx_kivi.tinygpt import TinyGPTError, byte_tokenizer

TOKENIZER = byte_tokenizer()
STORY = "A é € 😀 \u0301e\ufffd\n\0  z"


def stream(data):
    """The segments, one a byte, and the last one after finalize."""
    detokenizer = TOKENIZER.detokenizer
    segments = []
    for byte in data:
        detokenizer.add_token(byte)
        segments.append(detokenizer.last_segment)
    detokenizer.finalize()
    segments.append(detokenizer.last_segment)
    assert detokenizer.tokens == list(data)
    assert detokenizer.text == "".join(segments)
    return segments


@given(st.text())
def test_ids_are_the_utf8_bytes(text):
    ids = TOKENIZER.encode(text)
    assert ids == list(text.encode())
    assert TOKENIZER.encode(text, add_special_tokens=False) == ids
    assert TOKENIZER.decode(ids) == text


@given(st.binary(max_size=40))
def test_any_bytes_stream_to_what_decode_gives(data):
    segments = stream(data)
    assert "".join(segments) == data.decode("utf-8", "replace")
    assert TOKENIZER.decode(list(data)) == data.decode("utf-8", "replace")


def test_streamed_text_never_shows_half_a_character():
    shown = ""
    data = STORY.encode()
    for count, segment in enumerate(stream(data)[:-1], 1):
        shown += segment
        whole = data[:count].decode("utf-8", "ignore")  # what is complete so far
        assert shown == whole
    assert shown == STORY


@pytest.mark.parametrize("character", ["é", "€", "😀"])
def test_a_character_cut_at_any_byte_is_replaced_at_the_end(character):
    encoded = character.encode()
    for cut in range(1, len(encoded)):
        segments = stream(b"a" + encoded[:cut])
        assert segments[:-1] == ["a"] + [""] * cut
        assert segments[-1] == "\ufffd"


def test_all_256_ids_have_tokens_and_none_is_special():
    assert TOKENIZER.vocab_size == 256
    assert sorted(TOKENIZER.get_vocab().values()) == list(range(256))
    assert TOKENIZER.encode("\n") + list(TOKENIZER.eos_token_ids) == [10]
    assert (TOKENIZER.bos_token, TOKENIZER.eos_token_id) == (None, None)
    assert not TOKENIZER.has_chat_template and TOKENIZER.chat_template is None
    assert not TOKENIZER.has_thinking and not TOKENIZER.has_tool_calling
    assert TOKENIZER.convert_ids_to_tokens([65, 66]) == ["A", "B"]


def test_a_stop_byte_can_be_added():
    tokenizer = byte_tokenizer()
    tokenizer.add_eos_token("10")
    assert tokenizer.eos_token_ids == {10}
    assert TOKENIZER.eos_token_ids == set()


def test_detokenizers_are_independent():
    first, second = TOKENIZER.detokenizer, TOKENIZER.detokenizer
    first.add_token("é".encode()[0])
    second.add_token(ord("b"))
    first.add_token("é".encode()[1])
    assert (first.text, second.text) == ("é", "b")
    first.reset()
    assert (first.text, first.tokens, first.last_segment) == ("", [], "")


def test_the_files_own_tokenizer_path_is_named_and_never_opened(make_file, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    byte_tokenizer().save_pretrained(elsewhere)
    config = {"layers": 1, "dModel": 8, "ctx": 8, "heads": 2, "dMlp": 8}
    path = make_file({**config, "tokenizerSource": str(elsewhere)})
    with pytest.raises(TinyGPTError, match="config.tokenizerSource.*elsewhere.*tokenizer_dir"):
        tinygpt.load(path)
    _, tokenizer, _ = tinygpt.load(path, tokenizer_dir=elsewhere)
    assert isinstance(tokenizer, TokenizerWrapper)
    assert tokenizer.encode("hé") == list("hé".encode())


def test_a_tokenizer_directory_must_fit_the_model(make_file, tmp_path):
    config = {"layers": 1, "dModel": 8, "ctx": 8, "heads": 2, "dMlp": 8}
    odd = make_file({**config, "vocabSize": 100}, name="odd.tinygpt")
    with pytest.raises(TinyGPTError, match="config.vocabSize: expected 256.*tokenizer_dir"):
        tinygpt.load(odd)
    directory = tmp_path / "tokenizer"
    with pytest.raises(TinyGPTError, match="tokenizer directory: expected a directory"):
        tinygpt.load(odd, tokenizer_dir=directory)
    directory.mkdir()
    with pytest.raises(TinyGPTError) as error:
        tinygpt.load(odd, tokenizer_dir=directory)
    assert "\n" not in str(error.value)
    byte_tokenizer().save_pretrained(directory)
    with pytest.raises(TinyGPTError, match="at most the model's 100 tokens, got 256"):
        tinygpt.load(odd, tokenizer_dir=directory)

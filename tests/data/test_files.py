"""Write errors of every library become an OSError that names the file; checksums are verified."""

import errno

import pytest
import torch
from conftest import largest_file
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from neobert_hf.data.files import saving, sealed, unsealed

TENSORS = {"a": torch.zeros(9999)}
VOCABULARY = {f"w{number}": number for number in range(999)}
SAVES = {
    "plain": (lambda file: file.write_bytes(bytes(9999)), errno.EFBIG),
    "safetensors": (lambda file: save_file(TENSORS, file), errno.EFBIG),
    "torch": (lambda file: torch.save(TENSORS, file), errno.EIO),  # torch.save does not report the reason
    "tokenizers": (lambda file: Tokenizer(models.WordLevel(VOCABULARY, "w0")).save(str(file)), errno.EFBIG),
}


@pytest.mark.parametrize("library", SAVES)
def test_a_file_that_cannot_be_written_is_an_os_error_that_names_it(tmp_path, library):
    save, number = SAVES[library]
    message = "model could not be written; earlier ones are complete"
    saves = saving(tmp_path / "model", "earlier ones are complete")
    with pytest.raises(OSError, match=message) as found, largest_file(1000), saves:
        save(tmp_path / "file")
    assert found.value.errno == number and found.value.filename == str(tmp_path / "model")


@pytest.mark.parametrize("error", [RuntimeError("a bug"), torch.OutOfMemoryError("no memory"), ValueError("a value")])
def test_other_errors_pass_unchanged(tmp_path, error):
    with pytest.raises(type(error)) as found, saving(tmp_path):
        raise error
    assert found.value is error


def test_content_without_a_checksum_is_accepted_only_if_it_need_not_be_sealed():
    content = {"a": 1}
    assert unsealed(sealed(content), must_be_sealed=True) == unsealed(content) == content
    for without in (content, content | {"checksum": None}):
        with pytest.raises(ValueError, match="it has no checksum"):
            unsealed(without, must_be_sealed=True)

"""Files of PyTorch's old form, read without PyTorch."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from stages.models.vision import torchfile


def saved(path: Path, content: object) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=False)
    return path


def test_every_tensor_comes_back_as_it_was_saved(tmp_path):
    whole = torch.arange(24.0).reshape(4, 6)
    tensors = {"whole": whole, "turned": whole.T, "part": whole[1:3, ::2], "one": torch.tensor(7), "half": torch.ones(3).half()}
    found = torchfile.read(saved(tmp_path / "a.pth", tensors))
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.numpy().dtype
        assert np.array_equal(found[name], tensor.numpy()), name


class Harmful:
    def __reduce__(self):
        return (print, ("this must not run",))


def test_a_file_that_names_any_other_function_is_refused_and_runs_nothing(tmp_path, capsys):
    file = saved(tmp_path / "a.pth", {"a": Harmful()})
    with pytest.raises(ValueError, match=r"names __builtin__\.print"):
        torchfile.read(file)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.99])
def test_a_file_cut_short_is_refused(tmp_path, share):
    file = saved(tmp_path / "a.pth", {"a": torch.ones(100), "b": torch.ones(50)})
    data = file.read_bytes()
    file.write_bytes(data[: int(share * len(data))])
    with pytest.raises(ValueError, match=r"a\.pth"):
        torchfile.read(file)


def test_another_file_is_refused(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "new.pth")
    (tmp_path / "other.pth").write_bytes(pickle.dumps({"a": 1}) * 5)
    for name in ("new.pth", "other.pth"):
        with pytest.raises(ValueError, match=name):
            torchfile.read(tmp_path / name)

"""The plugin for vLLM, without vLLM: what it refuses before it changes a model, and how it detects that."""

import hashlib
import json
import logging
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest
import torch
from penstock_vllm import BACKEND, TESTED_VLLM_VERSION, register
from penstock_vllm.errors import FAILED, REFUSED, FailedError, RefusedError
from penstock_vllm.tensor_probe import tensor_probe
from penstock_vllm.vllm_internals import find_internals
from penstock_vllm.weight_download import download
from penstock_vllm.weight_files import check_update, find_files, iter_tensors, read_shapes
from safetensors.torch import save_file

from workers.engine_api.wire import WEIGHT_TRANSFER_BACKEND as ASKED_FOR

SHAPES = {"embed": (7, 3), "norm": (3,)}


def save(file: Path, shapes) -> Path:
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, file)
    return file


def everything(_name, _shape) -> bool:
    return True


def test_penstock_requests_the_backend_that_the_plugin_registers():
    assert BACKEND == ASKED_FOR


def test_names_and_shapes_are_read_from_one_file_or_several(tmp_path):
    one = save(tmp_path / "model.safetensors", SHAPES)
    assert read_shapes(find_files(tmp_path)) == read_shapes(find_files(one)) == SHAPES
    parts = tmp_path / "parts"
    parts.mkdir()
    for name, shape in SHAPES.items():
        save(parts / f"{name}.safetensors", {name: shape})
    index = {"weight_map": {name: f"{name}.safetensors" for name in SHAPES}}
    (parts / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_shapes(find_files(parts)) == SHAPES
    (parts / "norm.safetensors").unlink()
    with pytest.raises(RefusedError, match=r"has no norm\.safetensors; the old weights stay"):
        find_files(parts)


@pytest.mark.parametrize("cut", [1, 50, 100, 10_000])
def test_an_incomplete_file_is_refused(tmp_path, cut):
    file = save(tmp_path / "model.safetensors", SHAPES)
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(RefusedError, match="no whole safetensors file"):
        read_shapes([file])


@pytest.mark.parametrize(
    "changes", [{"dtype": "F99"}, {"shape": [7, 4]}, {"data_offsets": [4, 84]}, {"shape": "[7, 3]"}], ids=str
)
def test_a_file_without_readable_tensors_is_refused_before_the_model_changes(tmp_path, changes):
    entry = {"dtype": "F32", "shape": [7, 3], "data_offsets": [0, 84]} | changes
    header = json.dumps({"embed": entry}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(84))
    with pytest.raises(RefusedError, match=f"{file} is no whole safetensors file"):
        read_shapes([file])


def test_a_file_that_changed_after_its_check_is_named(tmp_path):
    file = save(tmp_path / "model.safetensors", SHAPES)
    assert {name: tuple(tensor.shape) for name, tensor in iter_tensors([file])} == SHAPES
    file.write_bytes(b"something else")
    with pytest.raises(OSError, match=f"{file} cannot be read any more"):
        list(iter_tensors([file]))


def test_a_missing_folder_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(RefusedError, match="over http"):
        find_files(tmp_path / "gone")


@pytest.mark.parametrize(
    ("update", "words"),
    [
        ({"embed": (7, 3)}, "missing: norm"),
        (SHAPES | {"more": (1,)}, "unexpected: more"),
        (SHAPES | {"norm": (4,)}, r"of another shape: norm \(4,\) instead of \(3,\)"),
        ({}, "missing: embed, norm"),
    ],
)
def test_weights_of_another_model_are_refused(update, words):
    with pytest.raises(RefusedError, match=words) as caught:
        check_update(update, SHAPES, everything)
    assert str(caught.value).startswith(REFUSED)


def test_weights_that_the_model_does_not_load_are_optional():
    check_update(SHAPES | {"lm_head": (7, 3)}, SHAPES, lambda name, _: name != "lm_head")
    check_update(SHAPES, SHAPES | {"mtp": (7, 3)}, lambda name, _: name != "mtp")


class Model(torch.nn.Module):
    """Like a vLLM model: fused parameters with custom loaders, and names that it skips."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        self.plain = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        self.qkv.weight_loader = lambda parameter, loaded, shard: parameter[shard].copy_(loaded)

    def load_weights(self, weights):
        for name, loaded in weights:
            if name in {"q", "k"}:
                self.qkv.weight_loader(self.qkv, loaded, "qk".index(name))
            elif name == "plain":
                getattr(self.plain, "weight_loader", lambda p, w: p.copy_(w))(self.plain, loaded)
            elif name != "passed_over":
                raise ValueError(name)


def test_the_weights_that_a_model_takes_are_found_without_changing_it():
    model = Model()
    loader = model.qkv.weight_loader
    with tensor_probe(model) as takes:
        asked = {name: takes(name, (1,)) for name in ("q", "k", "plain", "passed_over", "unheard_of")}
    assert asked == {"q": True, "k": True, "plain": True, "passed_over": False, "unheard_of": True}
    assert model.qkv.weight_loader is loader
    assert not hasattr(model.plain, "weight_loader")
    assert not model.qkv.any()


@contextmanager
def files_server(files: dict[str, bytes], status: int = 200):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = files.get(self.path.removeprefix("/secret/"))
            self.send_response(404 if body is None else status)
            self.send_header("content-length", str(len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/secret/"
        finally:
            server.shutdown()
            thread.join()


def entry(name: str, content: bytes):
    return {"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder for downloaded files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_downloaded_files_are_removed_after_reading(temporary):
    files = {"a": b"x" * 3_000_000, "b": b""}
    with files_server(files) as url:
        folder = download(url, [entry(name, content) for name, content in files.items()])
    assert {file.name: file.read_bytes() for file in Path(folder.name).iterdir()} == files
    folder.cleanup()
    assert not list(temporary.iterdir())


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"sha256": "0" * 64}, FailedError, "instead of 0000"),
        ({"size": 4}, FailedError, "3 bytes instead of 4"),
        ({"size": 2}, FailedError, "3 bytes and more instead of 2"),
        ({"name": "other"}, RefusedError, "answers 404"),
        ({"name": "../a"}, RefusedError, "plain name"),
        ({"name": ".."}, RefusedError, "plain name"),
        ({"size": "3"}, RefusedError, "plain name and a size"),
    ],
)
def test_a_download_that_differs_from_its_announcement_is_removed(temporary, change, kind, words):
    with files_server({"a": b"abc"}) as url, pytest.raises(kind, match=words):
        download(url, [entry("a", b"abc") | change])
    assert not list(temporary.iterdir())


def test_a_server_error_or_a_missing_server_is_a_retryable_failure(temporary):
    with files_server({"a": b"abc"}, status=503) as url, pytest.raises(FailedError, match="answers 503"):
        download(url, [entry("a", b"abc")])
    with pytest.raises(FailedError, match="did not come over HTTP") as caught:
        download(url, [entry("a", b"abc")])
    assert str(caught.value).startswith(FAILED)
    assert not list(temporary.iterdir())


@pytest.mark.parametrize(("url", "files"), [("file:///etc/", [{}]), ("http://h/no-slash", [{}]), ("http://h/", [])])
def test_an_invalid_file_list_is_refused(url, files):
    with pytest.raises(RefusedError):
        download(url, files)


def fake(monkeypatch, name: str, **members) -> None:
    """Install a fake vLLM module with only these members."""
    parts = name.split(".")
    for upto in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:upto]), ModuleType(".".join(parts[:upto])))
    vars(sys.modules[name]).update(members)


def test_an_unsupported_vllm_is_refused_with_the_tested_version(monkeypatch):
    fake(monkeypatch, "vllm.model_executor.model_loader.reload", initialize_layerwise_reload=print)
    sys.modules["vllm"].__version__ = "0.99"
    with pytest.raises(
        RuntimeError, match=f"finalize_layerwise_reload.*0.99.*known to work: vLLM {TESTED_VLLM_VERSION}"
    ):
        find_internals()


def test_registering_twice_has_no_effect_and_vllm_starts_without_weight_transfer(monkeypatch):
    result, warned = {}, []

    class Factory:
        @staticmethod
        def register_engine(name, module, cls):
            if name in result:
                raise ValueError(name)
            result[name] = (module, cls)

    with monkeypatch.context() as patched:
        fake(patched, "vllm.distributed.weight_transfer.factory", WeightTransferEngineFactory=Factory)
        register()
        register()
    assert result == {BACKEND: ("penstock_vllm.weight_updates", "CheckpointTransfer")}
    with monkeypatch.context() as patched:
        patched.setattr(logging.getLogger("penstock_vllm"), "handle", warned.append)
        patched.setitem(sys.modules, "vllm", None)
        register()
    (record,) = warned
    assert record.levelno == logging.WARNING
    assert TESTED_VLLM_VERSION in record.getMessage()
